"""A plan in tensors: per plan label, which pages its views read and where each computed token goes.

Views are packed in the order of ``plan.views``; their tokens likewise::

    view              0          1        2
    query_indptr    0 ──────── 3 ────── 4 ──── 6        tokens computed:  3, 1, 2
    page_indptr     0 ── 2 ────────── 5 ── 6            pages read:       2, 3, 1
    token           0  1  2      3     4  5
    token_page      where its K and V go
    token_slot      … and the slot there

What is per view is made on the host and uploaded by one transfer, of all groups. What is per page or per token is
gathered from the page-table rows on the device, except where every view computes one token (decode): then the page and
slot of each are in that transfer too. Groups differ in which pages there are, and in nothing else.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from gpu_backend.layout import CacheLayout
from gpu_backend.page_tables import SINK_ROW, PageTables
from gpu_backend.queues import Queues, Staging
from kvstate.errors import KVStateError
from kvstate.ops import Plan, PlanView
from kvstate.ordering import Queue


class CaptureLengthError(KVStateError, ValueError):
    """A plan does not fit into the static buffers of its slot, or a registration came too late. Nothing was changed."""


@attrs.frozen(eq=False, kw_only=True)
class PlanTensors:
    """One plan label of one plan, in one group. All tensors are int32, on the device.

    Parameters
    ----------
    label
        The plan label.
    window
        Tokens that a token sees in this group, itself included; None: all before it.
    tokens, views
        Computed tokens, and views, that count.
    bucket
        Rows of the tensors: in static buffers the captured length, with rows ``tokens … bucket`` at the sink; else
        `tokens`.
    decode
        True when every view computes one token.
    span_max, length_max
        Most tokens computed by one view, and most tokens read by one.
    query_indptr, page_indptr
        ``(views + 1,)`` Where each view's tokens, and pages, begin. In static buffers there are `bucket` views: behind
        those that count come views of one sink token each, then empty ones.
    page_indices
        ``(pages,)`` The pages that the views read, view by view, without those that the window has left. In static
        buffers, longer.
    skipped
        ``(views,)`` How many pages that are, per view: its first page here holds token ``skipped × page_size``.
    last_page_lengths
        ``(views,)`` Tokens in each view's last page; 0 where it has none.
    rows, lengths
        ``(views,)`` Each view's row in ``PageTables.tensors``, and the tokens it has, those skipped included. A row has
        them too, as pages that nobody may read.
    token_page, token_slot
        ``(bucket,)`` Where each computed token is stored.
    token_position
        ``(bucket,)`` Its position in the history of its request, which retention does not shrink; 0 in the tail.
    """

    label: str
    window: int | None
    tokens: int
    views: int
    bucket: int
    decode: bool
    span_max: int
    length_max: int
    query_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    skipped: Tensor
    last_page_lengths: Tensor
    rows: Tensor
    lengths: Tensor
    token_page: Tensor
    token_slot: Tensor
    token_position: Tensor


@attrs.frozen(eq=False)
class _Pages:
    """What is uploaded for one group."""

    page_indptr: Tensor
    skipped: Tensor
    token_page: Tensor


@attrs.frozen(eq=False)
class _Columns:
    """What is uploaded, in one block: per view, and per token where the host knows that too."""

    query_indptr: Tensor
    last_page_lengths: Tensor
    rows: Tensor
    lengths: Tensor
    starts: Tensor
    positions: Tensor
    token_slot: Tensor
    token_position: Tensor
    groups: tuple[_Pages, ...]

    @classmethod
    def of(cls, block: Tensor, views: int, tokens: int, groups: int) -> _Columns:
        """Divide a block into its columns."""
        sizes = [views + 1] + [views] * 5 + [tokens] * 2 + [views + 1, views, tokens] * groups
        query_indptr, last, rows, lengths, starts, positions, slots, position, *own = torch.split(block, sizes)
        pages = tuple(_Pages(*own[at : at + 3]) for at in range(0, len(own), 3))
        return cls(query_indptr, last, rows, lengths, starts, positions, slots, position, pages)

    @staticmethod
    def size(views: int, tokens: int, groups: int) -> int:
        """Return the length of a block."""
        return 6 * views + 1 + 2 * tokens + groups * (2 * views + 1 + tokens)


@attrs.frozen(eq=False)
class _Static:
    """Buffers of one (slot, label): made once, never moved. `room` is the largest captured length."""

    room: int
    block: Tensor
    page_indices: tuple[Tensor, ...]


class Addressing:
    """Makes the tensors of plans.

    Parameters
    ----------
    tables
        Rows that a plan's views have been entered into.
    queues, staging
        Of the device.
    layout
        Of the cache.
    """

    def __init__(self, tables: PageTables, queues: Queues, staging: Staging, layout: CacheLayout) -> None:
        self._tables = tables
        self._queues = queues
        self._staging = staging
        self._page_size = layout.page_size
        self._sinks = layout.sinks
        self._windows = [group.window for group in layout.groups]
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._static: dict[tuple[str, str], _Static] = {}
        # Guards the two dicts. The buffers of a slot belong to one thread at a time.
        self._lock = threading.Lock()

    def register(self, slot: str, length: int) -> None:
        """Announce that a graph for `length` rows (tokens) is going to be captured in `slot`.

        Raises
        ------
        CaptureLengthError
            When the slot's buffers exist and are shorter: captured graphs hold their addresses.
        """
        if length < 1:
            raise CaptureLengthError(f"a capture length is at least 1, got {length}")
        with self._lock:
            made = [static.room for (name, _), static in self._static.items() if name == slot]
            if made and length > min(made):
                raise CaptureLengthError(
                    f"slot {slot!r} has buffers for {min(made)} rows, and graphs captured on them; register {length} "
                    "before the slot's first plan"
                )
            self._lengths[slot] = tuple(sorted({*self._lengths.get(slot, ()), length}))

    def make(
        self,
        plan: Plan,
        rows: Sequence[int],
        slot: str | None = None,
        bucket: int | None = None,
        *,
        packed: bool = False,
    ) -> dict[str, tuple[PlanTensors, ...]]:
        """Return the tensors of every plan label of a plan, per group.

        Parameters
        ----------
        plan
            Its launch has been entered.
        rows
            Page-table row per segment, in the step's order.
        slot
            Take the static buffers of this slot; None: fresh tensors.
        bucket
            Rows in static buffers, one of the registered lengths; None: the smallest that fits.
        packed
            Address decode from packed lengths too. The result is the same.

        Raises
        ------
        CaptureLengthError
            When a label does not fit into the slot; no buffer was changed.
        """
        row_of = {id(view): row for view, row in zip(plan.in_step_order, rows, strict=True)}
        sizes = {label: (sum(view.span for view in views), views) for label, views in plan.views.items()}
        buckets = {label: self._bucket(slot, label, tokens, views, bucket) for label, (tokens, views) in sizes.items()}
        return {
            label: self._label(label, views, [row_of[id(view)] for view in views], slot, buckets[label], packed)
            for label, views in plan.views.items()
        }

    def _bucket(
        self, slot: str | None, label: str, tokens: int, views: Sequence[PlanView], wanted: int | None
    ) -> int | None:
        """Return the rows of one label in its slot's static buffers; None without a slot."""
        if slot is None:
            return None
        with self._lock:
            lengths = self._lengths.get(slot, ())
        if not lengths:
            raise CaptureLengthError(f"slot {slot!r} has no capture length; register one before its first plan")
        if len(views) > tokens:
            raise CaptureLengthError(
                f"plan label {label!r} has a view without tokens, which a captured step cannot have"
            )
        if wanted is None:
            wanted = next((length for length in lengths if length >= tokens), lengths[-1])
        if wanted not in lengths or wanted < tokens:
            raise CaptureLengthError(
                f"plan label {label!r} has {tokens} tokens, and {wanted} rows were asked for in slot {slot!r}; "
                f"it has graphs for {', '.join(map(str, lengths))} rows"
            )
        return wanted

    def _label(
        self, label: str, views: Sequence[PlanView], rows: list[int], slot: str | None, bucket: int | None, packed: bool
    ) -> tuple[PlanTensors, ...]:
        spans = [view.span for view in views]
        tokens = sum(spans)
        decode = all(span == 1 for span in spans)
        direct = decode and not packed
        if slot is None or bucket is None:
            static, bucket, count = None, tokens, len(views)
            room = (count, tokens if direct else 0)
        else:
            static, count = self._static_of(slot, label), bucket
            room = (static.room, static.room)
        values, pages = self._values(views, rows, bucket - tokens, room, direct)
        uploaded = self._staging.upload(
            torch.frombuffer(values, dtype=torch.int32), None if static is None else static.block
        )
        columns = _Columns.of(uploaded, *room, len(self._sinks))
        token_pages = [own.token_page[:bucket] for own in columns.groups]
        slots, position = columns.token_slot[:bucket], columns.token_position[:bucket]
        with self._queues.on(Queue.COMPUTE):
            page_indices = [
                self._page_indices(columns, group, count, pages[group], static) for group in self._tables.groups
            ]
            if not direct:
                gathered = self._token_addresses(columns, count, bucket)
                if static is not None:
                    for column, found in zip((*token_pages, slots, position), gathered, strict=True):
                        column[:] = found
                else:
                    *token_pages, slots, position = gathered
        return tuple(
            PlanTensors(
                label=label,
                window=window,
                tokens=tokens,
                views=len(views),
                bucket=bucket,
                decode=decode,
                span_max=max(spans),
                length_max=max(view.length for view in views),
                query_indptr=columns.query_indptr[: count + 1],
                page_indptr=own.page_indptr[: count + 1],
                page_indices=indices,
                skipped=own.skipped[:count],
                last_page_lengths=columns.last_page_lengths[:count],
                rows=columns.rows[:count],
                lengths=columns.lengths[:count],
                token_page=page,
                token_slot=slots,
                token_position=position,
            )
            for window, own, indices, page in zip(self._windows, columns.groups, page_indices, token_pages, strict=True)
        )

    def _values(
        self, views: Sequence[PlanView], rows: list[int], tail: int, room: tuple[int, int], direct: bool
    ) -> tuple[array[int], list[int]]:
        """Return a block's numbers, and per group the pages that its views read.

        Behind the views that count come `tail` views of one token at the sink, then empty ones.
        """
        size = self._page_size
        idle = room[0] - len(views)
        ones = [1] * tail + [0] * (idle - tail)
        zeros = [0] * idle
        lengths = [view.length for view in views]
        counts = [-(-length // size) for length in lengths]
        values = array("i", accumulate([*(view.span for view in views), *ones], initial=0))
        values.extend([length and (length - 1) % size + 1 for length in lengths] + ones)
        values.extend(rows + [SINK_ROW] * idle)
        values.extend(lengths + ones)
        values.extend([view.start for view in views] + zeros)
        values.extend([view.position for view in views] + zeros)
        if direct:
            values.extend([view.start % size for view in views] + zeros)
            values.extend([view.position for view in views] + zeros)
        else:
            values.extend([0] * (2 * room[1]))
        pages = []
        for group, (window, sink) in enumerate(zip(self._windows, self._sinks, strict=True)):
            held, skipped = counts, [0] * len(views)
            if window is not None:
                skipped = [view.skipped[group] for view in views]
                held = [count - left for count, left in zip(counts, skipped, strict=True)]
            values.extend(accumulate([*held, *ones], initial=0))
            values.extend(skipped + zeros)
            if direct:
                values.extend([view.tables[group][-1] for view in views] + [sink] * idle)
            else:
                values.extend([sink] * room[1])
            pages.append(sum(held) + tail)
        return values, pages

    def _page_indices(self, columns: _Columns, group: int, count: int, pages: int, static: _Static | None) -> Tensor:
        """Gather the pages that the first `count` views read in a group."""
        own = columns.groups[group]
        view, place = _packed(own.page_indptr[: count + 1], pages)
        if self._windows[group] is not None:
            place = own.skipped[view] + place
        found = self._tables.tensors[group][columns.rows[view], place]
        if static is None:
            return found
        static.page_indices[group][:pages] = found
        return static.page_indices[group]

    def _token_addresses(self, columns: _Columns, count: int, tokens: int) -> list[Tensor]:
        """Gather the page of every token per group, its slot and its position, from packed lengths: its view, and its
        place in that.
        """
        view, place = _packed(columns.query_indptr[: count + 1], tokens)
        token = columns.starts[view] + place
        row, column = columns.rows[view], token // self._page_size
        pages = [table[row, column] for table in self._tables.tensors]
        return [*pages, token % self._page_size, columns.positions[view] + place]

    def _static_of(self, slot: str, label: str) -> _Static:
        """Return the static buffers of (slot, label), made at the largest registered length when first asked for."""
        with self._lock:
            static = self._static.get((slot, label))
            if static is None:
                room = self._lengths[slot][-1]
                static = self._static[slot, label] = self._new_static(room)
        return static

    def _new_static(self, room: int) -> _Static:
        def filled(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=self._queues.device)

        with self._queues.on(Queue.COMPUTE):
            return _Static(
                room,
                filled(_Columns.size(room, room, len(self._sinks)), 0),
                tuple(filled(room * self._tables.width, sink) for sink in self._sinks),
            )


def _packed(indptr: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return, for each of `count` packed items, its part and its place in it.

    >>> part, place = _packed(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5)
    >>> part.tolist(), place.tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    """
    part = torch.repeat_interleave(indptr.diff(), output_size=count)
    return part, torch.arange(count, dtype=torch.int32, device=indptr.device) - indptr[part]
