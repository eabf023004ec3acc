"""Page tables on the device: one row per stream, in the table of every group, kept from step to step.

A launch uploads what its tables have beyond what their rows hold. What a row holds is the table (a value of the core)
that was uploaded into it last, not what some plan expected it to hold: a plan that is cancelled, or a launch that
fails, leaves nothing to undo.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
import torch

from gpu_backend.queues import Queues, Staging
from kvstate.errors import SubmitError
from kvstate.ops import PlanView
from kvstate.ordering import Queue

SINK_ROW = 0
"""The row whose every entry is the sink: of padding, of void segments, and of the unused tail of static buffers."""


class Table(Protocol):
    """What a page table of the core offers (``PlanView.sources``): an immutable list of pages that knows its origin."""

    @property
    def count(self) -> int:
        """Pages, those included that a window has left."""

    @property
    def skip(self) -> int:
        """How many leading ones those are: nobody reads them."""

    def extends(self, older: Any) -> bool:
        """Tell, without looking at pages, that this begins with all of `older`; False decides nothing."""

    def part(self, start: int, stop: int) -> list[int]:
        """Return pages ``start … stop``, without those that a window has left."""


@attrs.define(eq=False)
class _Row:
    """What a row holds, per group. `readers` counts the launches that are running on it; `used` orders by last use."""

    stream: tuple[str | None, str] | None = None
    tables: tuple[Table, ...] | None = None
    readers: int = 0
    used: int = 0


Changed = dict[tuple[int, int], tuple[int, Table]]
"""(group, row) → from which place on the row must be uploaded, and the table."""


class PageTables:
    """Rows of page numbers, each kept for one stream for as long as there are enough.

    Parameters
    ----------
    rows
        Streams that can be on the device at once; the sink's row comes on top.
    width
        Pages of the longest sequence.
    sinks
        The sink page of each group.
    queues, staging
        Of the device; rows change on the compute queue, behind the steps that read them.

    Attributes
    ----------
    tensors
        ``(rows + 1, width)`` per group, int32, never moved; a stream has the same row in all of them. Row 0 is all
        sink. Behind the pages of its table a row holds pages of earlier tables, or the sink: no page number is out of
        range.
    uploaded
        Page numbers uploaded so far.

    Notes
    -----
    A row that a running launch reads is extended, but never rewritten: its stream gets another row then. That happens
    when a request is removed and ingested again while its step runs.
    """

    def __init__(self, rows: int, width: int, sinks: Sequence[int], queues: Queues, staging: Staging) -> None:
        self.groups = range(len(sinks))
        if rows < 1 or (rows + 1) * width * len(sinks) >= 1 << 31:
            raise ValueError(f"{rows} page-table rows of {width} pages cannot be addressed; use fewer, at least 1")
        self.width = width
        self.uploaded = 0
        self._queues = queues
        self._staging = staging
        self._memory = torch.empty(len(sinks), rows + 1, width, dtype=torch.int32, device=queues.device)
        self.tensors = self._memory.unbind()
        for tensor, sink in zip(self.tensors, sinks, strict=True):
            tensor.fill_(sink)
        self._rows = [_Row() for _ in range(rows + 1)]
        self._of: dict[tuple[str | None, str], int] = {}
        self._free = list(range(rows, 0, -1))
        self._clock = 0

    def enter(self, views: Sequence[PlanView]) -> tuple[int, ...]:
        """Bring the rows of `views` up to date and return them; they stay until `leave`. Called at launch entry.

        Raises
        ------
        SubmitError
            When a sequence is longer than a row, or running launches hold every row; nothing was uploaded.
        """
        self._clock += 1
        entered: list[int] = []
        changed: Changed = {}
        try:
            for view in views:
                entered.append(self._enter(view, changed))
            self._upload(changed)
        except BaseException:
            # Nothing is known of a row whose upload did not happen.
            for _, place in changed:
                self._rows[place].tables = None
            self.leave(entered)
            raise
        return tuple(entered)

    def leave(self, rows: Sequence[int]) -> None:
        """End the stay of a launch on the rows that `enter` returned. Called once its kernels were submitted."""
        for place in rows:
            row = self._rows[place]
            row.readers -= 1
            if not row.readers and row.stream is None and place != SINK_ROW:
                row.tables = None
                self._free.append(place)

    def _enter(self, view: PlanView, changed: Changed) -> int:
        """Return the row of one view; note in `changed` what must be uploaded of it."""
        if view.sink or not view.sources:
            place = SINK_ROW
        else:
            # Tables are as long in one group as in another: a window leaves places behind, it does not close them.
            count = len(view.tables[0])
            if count > self.width:
                raise SubmitError(
                    f"{view.request}/{view.label} has {view.length} tokens in {count} pages, "
                    f"and a page table holds {self.width}; raise max_seq_len"
                )
            place = self._row_of(view, changed)
        row = self._rows[place]
        row.readers += 1
        row.used = self._clock
        return place

    def _row_of(self, view: PlanView, changed: Changed) -> int:
        stream = (view.request, view.label)
        place = self._of.get(stream)
        if place is not None:
            row = self._rows[place]
            if row.tables is view.sources or (
                row.tables and self._extend(place, row, row.tables, view.sources, changed)
            ):
                return place
        if place is None or self._rows[place].readers:
            taken = self._take()
            if place is not None:
                # Someone is reading the old row: it becomes free when they left.
                self._rows[place].stream = None
            place = taken
            self._rows[place].stream = stream
            self._of[stream] = place
        self._rows[place].tables = view.sources
        for group, table in enumerate(view.sources):
            changed[group, place] = (0, table)
        return place

    def _extend(
        self, place: int, row: _Row, held: tuple[Table, ...], tables: tuple[Table, ...], changed: Changed
    ) -> bool:
        """Note what `tables` have beyond a row that holds the beginning of each; tell whether it does."""
        grown = []
        for group, table in enumerate(tables):
            older = held[group]
            if older is table:
                continue
            # A row has nothing at places that its table had left when it was uploaded.
            if older.skip > table.skip:
                return False
            if older.extends(table):
                continue
            if not table.extends(older):
                return False
            grown.append(group)
        if grown:
            for group in grown:
                start = changed[group, place][0] if (group, place) in changed else held[group].count
                changed[group, place] = (start, tables[group])
            row.tables = tuple(table if group in grown else held[group] for group, table in enumerate(tables))
        return True

    def _take(self) -> int:
        """Return a free row, or the one used longest ago."""
        if self._free:
            return self._free.pop()
        idle = [place for place, row in enumerate(self._rows) if place != SINK_ROW and not row.readers]
        if not idle:
            raise SubmitError(
                f"running launches hold all {len(self._rows) - 1} page-table rows; raise `rows`, one for each stream "
                "of the steps that run at once"
            )
        place = min(idle, key=lambda at: self._rows[at].used)
        stream = self._rows[place].stream
        if stream is not None:
            del self._of[stream]
        return place

    def _upload(self, changed: Changed) -> None:
        """Write the new entries of all rows by one upload and one scatter."""
        places, pages = array("i"), array("i")
        for (group, place), (start, table) in changed.items():
            start = max(start, table.skip)
            fresh = table.part(start, min(table.count, self.width))
            base = (group * len(self._rows) + place) * self.width
            places.extend(range(base + start, base + start + len(fresh)))
            pages.extend(fresh)
        count = len(pages)
        if not count:
            return
        both = self._staging.upload(torch.frombuffer(places + pages, dtype=torch.int32))
        with self._queues.on(Queue.COMPUTE):
            self._memory.view(-1).index_put_((both[:count],), both[count:])
        self.uploaded += count

    def streams(self) -> Iterator[tuple[int, str]]:
        """Yield (row, stream) for every row that is kept, for tests and messages."""
        for (request, label), place in self._of.items():
            yield place, f"{request}/{label}"
