"""A backend in memory: pages of token stamps in both tiers. No device: every op has run when ``submit`` returns.

Stamps are any values; what must not be believed is `Undefined`, so a content oracle meets it wherever a real device
would hold garbage. Several groups share sectors of bytes: whoever writes into a sector spoils what other groups had in
it, all of it, although a real device would spoil the overwritten bytes only. A sector belongs to one group at a time.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstate.errors import Poisoned, SubmitError
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, Tier
from kvstate.ordering import NOTHING, Clock, at, covers, merge
from kvstate.testing.judge import EdgeJudge
from kvstate.types import Geometry
from kvstate.view import PoolView, StateView

Freed = list[tuple[Tier, int, list[int]]]
"""Pages per tier and group."""


class Undefined(enum.Enum):
    """Token slots that hold nothing to be relied on."""

    POISON = "poison"
    GARBAGE = "garbage of a fetch that failed"

    def __repr__(self) -> str:
        return self.name


POISON = Undefined.POISON
GARBAGE = Undefined.GARBAGE


def nobodys(now: StateView) -> Freed:
    """Return the pages that nobody owns and no key finds, whose bytes no other group has been lent.

    Pages of a sector that nobody has been lent are there for every group: the harness may spoil them all.
    """
    found: Freed = []
    for tier, pools, lent in ((Tier.DEVICE, now.device, now.device_lent), (Tier.HOST, now.host, now.host_lent)):
        for group, (pool, per_sector) in enumerate(zip(pools, now.pages_per_sector, strict=True)):
            found.append((tier, group, _nobodys(pool, group, lent, per_sector)))
    return found


def given_back(before: StateView, now: StateView) -> Freed:
    """Return the pages that `nobodys` names now and did not name before; groups without any are left out."""
    if before.device == now.device and before.host == now.host:
        return []
    freed: Freed = []
    for (tier, group, pages), (_, _, old) in zip(nobodys(now), nobodys(before), strict=True):
        known = set(old)
        more = [page for page in pages if page not in known]
        if more:
            freed.append((tier, group, more))
    return freed


def _nobodys(pool: PoolView, group: int, lent: tuple[int | None, ...], per_sector: int) -> list[int]:
    if not lent:
        return sorted(pool.free)
    cached = set(pool.cached)
    return [
        page
        for page, owners in enumerate(pool.owners)
        if not owners and page not in cached and lent[page // per_sector] in (None, group)
    ]


class MemoryBackend:
    """Runs ops on lists of stamps.

    ``submit`` and ``skip`` are called one at a time; ``write`` from several threads at once, on disjoint pages.

    Parameters
    ----------
    geometry
        Sizes.
    judge
        Is shown every op.
    record
        Keep every op in `ops`.
    fail
        Asked for each op; True makes its submit fail.

    Attributes
    ----------
    device, host
        Stamps per group, ``(group_pages + 1) * page_size`` of them: the last page is the sink.
    ops, skipped
        With `record`: every op in order, those skipped included, until the close; and the numbers of the skipped ones.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        judge: EdgeJudge | None = None,
        record: bool = False,
        fail: Callable[[Op], bool] | None = None,
    ) -> None:
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.judge = judge
        self.record = record
        self.fail = fail
        size = self.page_size
        self.device: list[list[Any]] = [[POISON] * ((pages + 1) * size) for pages in geometry.group_pages]
        self.host: list[list[Any]] = [[POISON] * ((pages + 1) * size) for pages in geometry.host_group_pages]
        # Per tier, the group that wrote into each sector last, the sinks' sector included; None with one group.
        self._wrote: dict[Tier, list[int]] | None = None
        if len(geometry.groups) > 1:
            self._wrote = {Tier.DEVICE: [0] * (geometry.pages + 1), Tier.HOST: [0] * (geometry.host_pages + 1)}
        self.ops: list[Op] = []
        self.skipped: set[int] = set()
        self._failing: list[tuple[type[Op] | None, bool]] = []
        self._lost: str | None = None
        self._closed = False
        self._completed = NOTHING
        # Guards `_completed` and `_lost` for those who wait; never held while an op runs.
        self._done = threading.Condition()

    @staticmethod
    def sinks_of(geometry: Geometry) -> dict[tuple[Tier, int], int]:
        """Return the sink page per (tier, group), as an EdgeJudge wants to know them."""
        device = {(Tier.DEVICE, group): pages for group, pages in enumerate(geometry.group_pages)}
        return device | {(Tier.HOST, group): pages for group, pages in enumerate(geometry.host_group_pages)}

    # -- the Backend protocol

    def submit(self, op: Op) -> None:
        """Run one op."""
        if self._lost is not None:
            raise Poisoned(self._lost)
        if not self._closed:
            self._maybe_fail(op)
            if self.judge is not None:
                self.judge.observe(op)
            if isinstance(op, (ForkCopy, CopyOut, CopyIn)):
                self._copy(op)
            if self.record:
                self.ops.append(op)
        self._complete(op)

    def skip(self, op: Op) -> None:
        """Keep the place of an op that failed at submit."""
        if self.judge is not None:
            self.judge.skip(op)
        if self.record:
            self.skipped.add(op.number)
            if not self.ops or self.ops[-1] is not op:
                self.ops.append(op)
        self._complete(op)

    def completed(self) -> Clock:
        """Return the newest op submitted per queue."""
        return self._completed

    def wait(self, clock: Clock) -> None:
        """Block until everything that `clock` names was submitted."""
        with self._done:
            while not covers(self._completed, clock):
                if self._lost is not None:
                    raise Poisoned(self._lost)
                self._done.wait()

    def close(self) -> None:
        """Ops from now on do nothing and complete. The pages stay: a launch that is running may still write."""
        self._closed = True

    # -- failures on demand

    def fail_next(self, kind: type[Op] | None = None, *, fatal: bool = False) -> None:
        """Make the next submit of a `kind` (None: any) fail; `fatal`: everything after it fails too."""
        self._failing.append((kind, fatal))

    def fail_none(self) -> int:
        """Forget the failures asked for by ``fail_next`` that did not happen yet; return how many those were."""
        waiting = len(self._failing)
        self._failing.clear()
        return waiting

    def _maybe_fail(self, op: Op) -> None:
        for place, (kind, fatal) in enumerate(self._failing):
            if kind is None or isinstance(op, kind):
                del self._failing[place]
                if fatal:
                    self.lose(f"the device was lost at #{op.number}, as asked for")
                    raise Poisoned(self._lost)
                raise SubmitError(f"#{op.number} {type(op).__name__} was made to fail")
        if self.fail is not None and self.fail(op):
            raise SubmitError(f"#{op.number} {type(op).__name__} was made to fail")

    # -- stamps

    def write(self, plan: Plan, place: int, stamps: Sequence[Any]) -> None:
        """Write what segment `place` of the step computes, one stamp per token, to every group.

        Raises
        ------
        ValueError
            When there is not one stamp per token of the segment's span.
        """
        view = plan.in_step_order[place]
        if len(stamps) != view.span:
            raise ValueError(f"segment {place} computes {view.span} tokens, got {len(stamps)} stamps")
        for group, table in enumerate(view.tables):
            self.store(group, table, view.start, stamps)

    def read(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the device stamps of tokens ``0 … length`` of a page table."""
        return self.load(group, table, 0, length)

    def read_many(self, tables: Sequence[Sequence[int]], lengths: Sequence[int], group: int = 0) -> list[list[Any]]:
        """Return what `read` gives of each table."""
        return [self.read(table, length, group) for table, length in zip(tables, lengths, strict=True)]

    def read_host(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the host stamps of tokens ``0 … length`` of a page table."""
        return self.load(group, table, 0, length, Tier.HOST)

    def load(self, group: int, table: Sequence[int], start: int, stop: int, tier: Tier = Tier.DEVICE) -> list[Any]:
        """Return the stamps of tokens ``start … stop``; token 0 is the first of ``table[0]``.

        Raises
        ------
        IndexError
            When the table ends before `stop`.
        """
        size, pages = self.page_size, self._tier(tier)[group]
        if stop > len(table) * size:
            raise IndexError(f"{len(table)} pages of {size} tokens do not hold token {stop - 1}")
        stamps: list[Any] = []
        first = start // size
        for page in table[first : -(-stop // size)]:
            stamps += pages[page * size : (page + 1) * size]
        del stamps[stop - first * size :]
        return stamps[start - first * size :] if start > first * size else stamps

    def store(self, group: int, table: Sequence[int], start: int, stamps: Sequence[Any]) -> None:
        """Write device stamps from token `start` on; token 0 is the first of ``table[0]``."""
        size, pages = self.page_size, self.device[group]
        stop = start + len(stamps)
        if self._wrote is not None:
            self._take(Tier.DEVICE, group, table[start // size : -(-stop // size)])
        token = start
        while token < stop:
            place, slot = divmod(token, size)
            count = min(size - slot, stop - token)
            base = table[place] * size + slot
            pages[base : base + count] = stamps[token - start : token - start + count]
            token += count

    def poison(self, tier: Tier, group: int, pages: Iterable[int]) -> None:
        """Spoil `pages`: the harness calls this for those that became free."""
        pages = list(pages)
        if self._wrote is not None:
            self._take(tier, group, pages)
        self._spoil(self._tier(tier)[group], pages)

    def _tier(self, tier: Tier) -> list[list[Any]]:
        return self.device if tier is Tier.DEVICE else self.host

    def _spoil(self, slots: list[Any], pages: Iterable[int]) -> None:
        size = self.page_size
        spoiled = [POISON] * size
        for page in pages:
            slots[page * size : (page + 1) * size] = spoiled

    def _take(self, tier: Tier, group: int, pages: Iterable[int]) -> None:
        """Spoil what other groups have in the sectors of `pages`, which `group` is about to write into."""
        assert self._wrote is not None
        per_sector, wrote = self.geometry.pages_per_sector, self._wrote[tier]
        sink = len(wrote) - 1
        for sector in dict.fromkeys(page // per_sector[group] for page in pages):
            if wrote[sector] != group:
                for other, (count, slots) in enumerate(zip(per_sector, self._tier(tier), strict=True)):
                    if other != group:
                        self._spoil(slots, range(sector * count, sector * count + (1 if sector == sink else count)))
                wrote[sector] = group

    def _copy(self, op: ForkCopy | CopyOut | CopyIn) -> None:
        """Copy what the op says and spoil the rest of each target page: bytes beyond an op's tokens are undefined."""
        size, sources, targets = self.page_size, self._tier(op.source_tier), self._tier(op.target_tier)
        # All reads before all writes: one kernel moves the pages, in no order that another page could count on.
        moved = [
            [source[page * size : page * size + tokens] for page, _, tokens in copies]
            for source, copies in zip(sources, op.copies, strict=False)
        ]
        for group, (copies, pages) in enumerate(zip(op.copies, moved, strict=True)):
            if self._wrote is not None:
                self._take(op.target_tier, group, [page for _, page, _ in copies])
            target = targets[group]
            for (_, page, tokens), stamps in zip(copies, pages, strict=True):
                target[page * size : (page + 1) * size] = stamps + [POISON] * (size - tokens)

    # -- completion

    def _complete(self, op: Op) -> None:
        if op.queue is not None:
            with self._done:
                self._completed = merge(self._completed, at(op.queue, op.number))
                self._done.notify_all()

    def lose(self, why: str) -> None:
        """Refuse everything from now on, and wake whoever waits."""
        with self._done:
            self._lost = self._lost or why
            self._done.notify_all()
