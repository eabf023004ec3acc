"""The model of a drive: it computes stamps from what it reads in the pages, and compares that with the script."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvstate.ops import Plan, PlanView
from kvstate.scheduler.batch import Batch, Entry
from kvstate.scheduler.loop import Sampled
from kvstate.scheduler.reasons import Reason
from kvstate.testing.backends import StampedBackend
from kvstate.testing.drive.chain import GENESIS, Script, chain, draw
from kvstate.types import Geometry

ERRORS_NAMED = 20
"""Content errors spelled out; the rest is counted."""
SAMPLED_EVERY = 16
"""Where reads are sampled, of so many tokens that a request decodes one compares its whole context."""
BATCHES_KEPT = 16
"""Batches whose tokens the model remembers, for the one behind that is fed with them."""


@attrs.frozen(eq=False)
class Job:
    """A batch as it was when it was handed to the model, which may compute it on another thread.

    `restored` are the places of those that came back from the host in this step.
    """

    serial: int
    previous: int | None
    entries: tuple[Entry, ...]
    keys: tuple[str, ...]
    scripts: tuple[Script, ...]
    restored: frozenset[int]


@attrs.define(eq=False)
class Row:
    """One segment that counts. `whole`: all that it can read is compared, else its last page's last token only."""

    place: int
    key: str
    entry: Entry
    view: PlanView
    script: Script
    whole: bool


class ChainModel:
    """A Model over a backend with stamps.

    What it writes chains what it reads in front of it with what it is fed, and what it samples follows from what it
    reads back at the end: a wrong page changes all that is generated behind it.

    Parameters
    ----------
    scripts
        By sample, of everybody that may be launched.
    every
        Of so many tokens decoded, one compares the whole context; 1: each does. Prefills, the first step after a
        restore and the first one after a fork always do.

    Attributes
    ----------
    errors, error_count
        The first content errors, and how many there were.
    stamps_compared
        Tokens that were read and compared, over all groups.
    model_s, verification_s
        CPU seconds: writing and sampling; reading and comparing.
    """

    def __init__(
        self, backend: StampedBackend, geometry: Geometry, scripts: Mapping[str, Script], every: int = 1
    ) -> None:
        self.backend = backend
        self.page_size = geometry.page_size
        self.groups = len(geometry.groups)
        self.scripts = scripts
        self.every = every
        self.errors: list[str] = []
        self.error_count = 0
        self.stamps_compared = 0
        self.model_s = 0.0
        self.verification_s = 0.0
        self._sampled: dict[int, list[int]] = {}
        # How far each sample had come when it was last seen: who goes on from there was compared up to there.
        self._reached: dict[str, int] = {}

    # -- a Model

    def launch(self, batch: Batch, plan: Plan) -> None:
        """Compute a batch inside its launch."""
        self.compute(self.job(batch), plan)

    def job(self, batch: Batch) -> Job:
        """Return what there is to know of a batch. Called on the scheduler's thread."""
        keys = tuple(work.key for work in batch.works)
        return Job(
            batch.serial,
            batch.previous.serial if batch.previous is not None else None,
            batch.entries,
            keys,
            tuple(self.scripts[key] for key in keys),
            frozenset(place for place, one in enumerate(batch.drafts or ()) if one.reason is Reason.RESTORED),
        )

    def result(self, batch: Batch) -> Sampled:
        """Return what a batch sampled."""
        return Sampled(self._sampled[batch.serial])

    def compute(self, job: Job, plan: Plan) -> list[int]:
        """Write the stamps of all that is fed, read the contexts back, compare them, sample; return the tokens."""
        began = time.thread_time()
        rows = self._rows(job, plan)
        self._write(job, plan, rows)
        written = time.thread_time()
        last = self._read(rows)
        read = time.thread_time()
        tokens: list[int] = []
        for place, entry in enumerate(job.entries):
            # Void rows draw too, and nobody listens. A fork's other samples are drawn in order behind its own.
            stamps = last.get(place, ())
            tokens += [draw(stamps, entry.sample + drawn) for drawn in range(entry.draws)]
        self._sampled[job.serial] = tokens
        if len(self._sampled) > BATCHES_KEPT:
            del self._sampled[min(self._sampled)]
        self.verification_s += read - written
        self.model_s += time.thread_time() - began - (read - written)
        return tokens

    def forget(self, key: str) -> None:
        """Forget a sample that has ended."""
        self._reached.pop(key, None)

    # -- one step

    def _rows(self, job: Job, plan: Plan) -> list[Row]:
        rows = []
        for place, (entry, view) in enumerate(zip(job.entries, plan.in_step_order, strict=True)):
            if not view.sink:
                key = job.keys[place]
                script = job.scripts[place]
                whole = (
                    entry.span > 1
                    or not entry.draws
                    or (view.length + script.index) % self.every == 0
                    or place in job.restored
                    or self._reached.get(key) != view.start
                )
                self._reached[key] = view.length
                rows.append(Row(place, key, entry, view, script, whole))
        return rows

    def _write(self, job: Job, plan: Plan, rows: Sequence[Row]) -> None:
        """Chain what is fed to the token stored in front of it, as the pages have that."""
        before = self._sampled.get(job.previous, ()) if job.previous is not None else ()
        fronts = self._ends(0, [(row.view, row.view.start) for row in rows if row.view.start])
        front = iter(fronts)
        for row in rows:
            view = row.view
            stamps = chain(_number(next(front)) if view.start else GENESIS, _fed(row.entry, before))
            wanted = row.script.stamps[view.start : view.length]
            # Equal numbers may be one object: lists of the same objects compare several times as fast.
            self.backend.write(plan, row.place, wanted if stamps == wanted else stamps)

    def _ends(self, group: int, ends: Sequence[tuple[PlanView, int]]) -> list[Any]:
        """Return the stamp of the last token of each ``view[:stop]`` in one group."""
        size = self.page_size
        pages = [(view.tables[group][(stop - 1) // size],) for view, stop in ends]
        found = self.backend.read_many(pages, [(stop - 1) % size + 1 for _, stop in ends], group)
        return [stamps[-1] for stamps in found]

    def _read(self, rows: Sequence[Row]) -> dict[int, tuple[int, ...]]:
        """Read every group back, compare what is to be compared; return the last stamps per group, by place."""
        size = self.page_size
        last: dict[int, list[int]] = {row.place: [] for row in rows}
        for group in range(self.groups):
            tables: list[tuple[int, ...]] = []
            firsts: list[int] = []
            for row in rows:
                table, length = row.view.tables[group], row.view.length
                skip = row.view.skipped[group] if row.whole else (length - 1) // size
                tables.append(table[skip:] if skip else table)
                firsts.append(skip * size)
            lengths = [row.view.length - first for row, first in zip(rows, firsts, strict=True)]
            found = self.backend.read_many(tables, lengths, group)
            for row, first, stamps in zip(rows, firsts, found, strict=True):
                wanted = row.script.stamps[first : row.view.length]
                if stamps != wanted:
                    self._mismatch(row, group, first, stamps, wanted)
                last[row.place].append(_number(stamps[-1]))
            self.stamps_compared += sum(lengths)
        return {place: tuple(stamps) for place, stamps in last.items()}

    # -- words

    def _mismatch(self, row: Row, group: int, first: int, found: Sequence[Any], wanted: Sequence[int]) -> None:
        self.error_count += 1
        if self.error_count > ERRORS_NAMED:
            return
        place = next(place for place, (got, want) in enumerate(zip(found, wanted, strict=True)) if got != want)
        found_is = self._whose(found[place])
        self.errors.append(
            f"{row.key}, token {first + place} of group {group}: expected its own stamp, found {found_is}"
        )

    def _whose(self, stamp: Any) -> str:
        """Say what a stamp stands for."""
        if not isinstance(stamp, int):
            return repr(stamp)
        for key, script in list(self.scripts.items()):
            if stamp in script.stamps:
                return f"that of token {script.stamps.index(stamp)} of {key}"
        return f"{stamp}, which is nobody's"


def _fed(entry: Entry, before: Sequence[int]) -> Iterable[int]:
    """Return the tokens fed to a segment. One that nobody has seen yet is the last: the batch `before` drew it."""
    known = [token for token in entry.tokens if token is not None]
    return known if entry.feeds is None else [*known, before[entry.feeds]]


def _number(stamp: Any) -> int:
    """Return a stamp to compute with; what is none becomes one that nobody expects."""
    return stamp if isinstance(stamp, int) else -1
