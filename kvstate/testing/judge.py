"""The edge judge: do the edges of submitted ops cover every conflict? Vector clocks over op records, blind to contents.

Two ops conflict when they touch the same tokens of a page, at least one writes, and neither happens before the other::

    queue      an op follows what was submitted to its queue before it
    step       runs somewhere between its StepBegin and its StepEnd: what the compute queue gets in between is not
               ordered with it; it follows what its StepBegin follows, and is over at its StepEnd
    after      an op follows every op that its clock names or covers, and all that those follow
    fetch      follows its FetchBegin's `after`; only ops numbered after its FetchEnd follow it

Kept per page and token: the last write, and the newest read per queue. That is enough to name the first conflict on
every token (Flanagan and Freund, FastTrack, PLDI 2009). An older write is covered by the newer one that follows it:
who follows the newer follows both, who does not conflicts with the newer already. A queue's older reads are covered by
its newest in the same way, since whoever follows a number on a queue follows all smaller ones.

Groups that share sectors conflict by bytes: page p of group g lies at byte ``p % per_sector[g] × page_bytes[g]`` of its
sector. Tokens are strided inside a page, so every token of a page conflicts with every token of a page of another group
that overlaps it. While a sector is used by one group, what others left there stays as it is: it is summed up once, when
the sector changes hands, and looked at in detail only by an op that does not follow all of that sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Self

import attrs

from kvstate.ops import FetchBegin, FetchEnd, Op, StepBegin, StepEnd, Tier
from kvstate.ordering import NOTHING, Clock, Queue, at, elsewhere, merge
from kvstate.testing.accesses import Pool, Reach, Sectors
from kvstate.types import Geometry

_FETCHES = 3
"""The place of fetches behind the queues."""


@attrs.frozen
class OpName:
    """What a report says of an op. A step is one op, from its StepBegin `begin` to its StepEnd `number`."""

    number: int
    kind: str
    queue: Queue | None
    owner: str
    begin: int

    @property
    def where(self) -> str:
        """The queue in words."""
        return self.queue.name.lower() if self.queue is not None else "transport"

    def __str__(self) -> str:
        number = f"#{self.number}" if self.begin == self.number else f"#{self.begin}…#{self.number}"
        return f"{number} {self.kind} ({self.where}, {self.owner})"


@attrs.frozen
class Conflict:
    """Two ops on tokens ``start … stop`` of one page that nothing orders. `missing` is the edge, in words.

    `over` is the page of another group, as (group, page), that the first op touched in the same bytes; None when both
    touched the same page.
    """

    first: OpName
    second: OpName
    tier: Tier
    group: int
    page: int
    start: int
    stop: int
    missing: str
    first_writes: bool
    second_writes: bool
    over: tuple[int, int] | None = None

    def __str__(self) -> str:
        did = "writes" if self.second_writes else "reads"
        had = "writes" if self.first_writes else "reads"
        over = ""
        if self.over is not None:
            over = f", over the bytes of page {self.over[1]} of group {self.over[0]}"
        return (
            f"{self.second} {did} what {self.first} {had}: {self.tier.value} page {self.page} of group {self.group}, "
            f"tokens {self.start} … {self.stop}{over}; missing edge: {self.missing}"
        )


@attrs.frozen
class BadEdge:
    """An op that names what cannot be followed."""

    op: OpName
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}"


class EdgeJudge:
    """Judges ops as they are submitted.

    Parameters
    ----------
    page_size
        Tokens per page.
    sinks
        The sink page per (tier, group): exempt.
    prune_every
        Ops between two prunings, at least; pruning changes no verdict.
    geometry
        Needed when groups share sectors, which the pages of different groups overlap in; see `of`.

    Attributes
    ----------
    violations
        What was found, in the order it was found: no false alarm, and the first conflict of every token. Where groups
        share sectors, the first conflict of every sector.
    """

    def __init__(
        self,
        page_size: int,
        sinks: Mapping[tuple[Tier, int], int] | None = None,
        prune_every: int = 4096,
        geometry: Geometry | None = None,
    ) -> None:
        self.page_size = page_size
        self.sinks = dict(sinks or {})
        self._sectors: dict[Tier, Sectors] = {}
        if geometry is not None and len(geometry.groups) > 1:
            self._sectors = {tier: Sectors(geometry) for tier in Tier}
        self.violations: list[Conflict | BadEdge] = []
        self._pools: dict[tuple[Tier, int], Pool] = {}
        self._names: dict[int, OpName] = {}
        self._newest = 0
        self._last = [0, 0, 0]
        # What the newest op of each queue follows, itself included; and what everything emitted from now on follows.
        self._queues = [NOTHING, NOTHING, NOTHING]
        self._host = NOTHING
        # Per queue: from which number on it followed which part of the other queues.
        self._points: list[tuple[list[int], list[Clock]]] = [([0], [NOTHING]) for _ in Queue]
        self._steps: dict[int, Reach] = {}
        # Open fetches and what they follow, None if one was skipped; and the FetchEnd of those that ended.
        self._fetches: dict[int, Clock | None] = {}
        self._ended: dict[int, int] = {}
        self._prune_every = self._left = prune_every

    @classmethod
    def of(cls, geometry: Geometry, prune_every: int = 4096) -> Self:
        """Return the judge of a cache of this geometry."""
        pages = ((Tier.DEVICE, geometry.group_pages), (Tier.HOST, geometry.host_group_pages))
        sinks = {(tier, group): sink for tier, counts in pages for group, sink in enumerate(counts)}
        return cls(geometry.page_size, sinks, prune_every, geometry)

    @property
    def conflicts(self) -> list[Conflict]:
        """The violations that are conflicts."""
        return [found for found in self.violations if isinstance(found, Conflict)]

    @property
    def bad_edges(self) -> list[BadEdge]:
        """The violations that are bad edges."""
        return [found for found in self.violations if isinstance(found, BadEdge)]

    @property
    def entries(self) -> int:
        """Return what is kept besides the pages' own numbers; bounded by those."""
        return len(self._names) + len(self._ended) + sum(len(numbers) for numbers, _ in self._points)

    def observe(self, op: Op) -> None:
        """Judge the next op, in number order."""
        self._take(op, True)

    def skip(self, op: Op) -> None:
        """Note an op that failed at submit: it follows what it names and touches nothing.

        A StepEnd touches all the same: its kernels were submitted before it. A FetchBegin may have been observed before
        its transport refused it; then nobody waited for what it follows.
        """
        if op.number in self._fetches:
            self._fetches[op.number] = None
        else:
            self._take(op, False)

    # -- order

    def _take(self, op: Op, runs: bool) -> None:
        number = op.number
        if number <= self._newest:
            self._bad(op, f"comes after #{self._newest}; submit ops in number order")
            return
        self._newest = number
        self._left -= 1
        if not self._left:
            self._prune()
        queue = op.queue
        clock = self._follow(op, self._host if queue is None else merge(self._host, self._queues[queue]))
        if isinstance(op, StepEnd):
            # The wait was at StepBegin: the `after` of a StepEnd orders nothing.
            self._advance(Queue.COMPUTE, number, merge(self._host, self._queues[Queue.COMPUTE]))
            begun = self._steps.pop(op.begin, None)
            if begun is None:
                self._bad(op, f"ends a step whose StepBegin #{op.begin} was not submitted, or ended already")
                return
            begun.number = number
            self._names[number] = OpName(number, "Step", queue, repr(op.owner), op.begin)
            self._access_step(op, begun)
            return
        if isinstance(op, FetchEnd):
            self._end_fetch(op)
            return
        if queue is not None:
            clock = self._advance(queue, number, clock)
        reach = Reach(number, clock, next(iter(self._fetches), number + 1) - 1)
        if isinstance(op, StepBegin):
            self._steps[number] = reach
            return
        if isinstance(op, FetchBegin):
            self._fetches[number] = clock if runs else None
        if runs:
            self._names[number] = _name(op)
            self._access(op, reach)

    def _follow(self, op: Op, clock: Clock) -> Clock:
        """Return `clock` and all that ``op.after`` brings."""
        for queue, named in enumerate(op.after):
            if named <= clock[queue]:
                continue
            if named > self._last[queue]:
                self._bad(op, f"follows #{named} of {Queue(queue).name.lower()}, which was not submitted before it")
                continue
            numbers, clocks = self._points[queue]
            clock = merge(clock, merge(clocks[bisect_right(numbers, named) - 1], at(Queue(queue), named)))
        return clock

    def _advance(self, queue: Queue, number: int, clock: Clock) -> Clock:
        """Put an op that follows `clock` at the end of its queue; return what follows from following it."""
        clock = merge(clock, at(queue, number))
        self._queues[queue] = clock
        self._last[queue] = number
        numbers, clocks = self._points[queue]
        others = elsewhere(clock, queue)
        if others != clocks[-1]:
            numbers.append(number)
            clocks.append(others)
        return clock

    def _end_fetch(self, op: FetchEnd) -> None:
        if op.begin not in self._fetches:
            self._bad(op, f"ends a fetch whose FetchBegin #{op.begin} was not submitted, or ended already")
            return
        clock = self._fetches.pop(op.begin)
        self._ended[op.begin] = op.number
        if clock is not None:
            self._host = merge(self._host, clock)

    def _precedes(self, first: OpName, reach: Reach) -> bool:
        if first.queue is None:
            return self._ended.get(first.number, reach.issue) < reach.issue
        return reach.clock[first.queue] >= first.number

    # -- accesses

    def _pool(self, tier: Tier, group: int, reach: Reach) -> Pool:
        pool = self._pools.get((tier, group))
        if pool is None:
            sectors = self._sectors.get(tier)
            pool = self._pools[tier, group] = Pool(tier, group, self.page_size, self.sinks.get((tier, group)), sectors)
            if sectors is not None:
                sectors.pools[group] = pool
        if pool.judged != reach.number:
            pool.judge(reach)
        return pool

    def _access(self, op: Op, reach: Reach) -> None:
        """Judge any op by its ``writes()`` and ``reads()``."""
        # Writes first: an op's own reads must not cover what its writes are to be compared with.
        for tier, group, page, start, stop in op.writes():
            if start < stop:
                self._write(self._pool(tier, group, reach), page, start, stop, reach, op.queue)
        for tier, group, page, start, stop in op.reads():
            if start < stop:
                assert op.queue is not None, "a fetch only writes"
                self._read(self._pool(tier, group, reach), page, start, stop, reach, op.queue)

    def _access_step(self, op: StepEnd, reach: Reach) -> None:
        """Judge a step: what ``_access`` does, a table at a time."""
        size = self.page_size
        views = [view for view in op.plan.in_step_order if not view.sink]
        for view in views:
            start, length = view.start, view.length
            for group, table in enumerate(view.tables):
                pool = self._pool(Tier.DEVICE, group, reach)
                for place in range(start // size, -(-length // size)):
                    first = place * size
                    low, high = max(start - first, 0), min(length - first, size)
                    if low < high:
                        self._write(pool, table[place], low, high, reach, Queue.COMPUTE)
        full = (op.number,) * size
        for view in views:
            whole, rest = divmod(view.length, size)
            for group, table in enumerate(view.tables):
                pool = self._pool(Tier.DEVICE, group, reach)
                if rest:
                    self._read(pool, table[whole], 0, rest, reach, Queue.COMPUTE)
                skipped = view.skipped[group]
                if whole > skipped:
                    self._read_whole(pool, table[skipped:whole], full, reach)

    def _read_whole(self, pool: Pool, table: tuple[int, ...], full: tuple[int, ...], reach: Reach) -> None:
        """Judge a step's reads of full pages: its only cost that grows with what it reads."""
        last = max(table)
        if last >= len(pool.writes):
            pool.grow(last)
        sectors = pool.sectors
        if sectors is not None:
            user, count = sectors.user, sectors.per_sector[pool.group]
            if not pool.left_calm or {user[page // count] for page in table} != {pool.group}:
                for page in table:
                    self._overlap(pool, sectors, page, 0, pool.size, reach, Queue.COMPUTE, False)
        if not pool.writes_calm:
            for page in pool.suspects(table, reach):
                self._compare(pool, page, pool.writes[page], 0, pool.size, reach, True, False)
        reads = pool.reads[Queue.COMPUTE]
        for page in table:
            reads[page] = full
        pool.read[Queue.COMPUTE] = reach.number

    def _read(self, pool: Pool, page: int, start: int, stop: int, reach: Reach, queue: Queue) -> None:
        if page >= len(pool.writes):
            pool.grow(page)
        if pool.sectors is not None:
            self._overlap(pool, pool.sectors, page, start, stop, reach, queue, False)
        if not pool.writes_calm and pool.suspect(page, reach):
            self._compare(pool, page, pool.writes[page], start, stop, reach, True, False)
        reads = pool.reads[queue]
        reads[page] = _painted(reads[page], start, stop, reach.number)
        pool.read[queue] = reach.number

    def _write(self, pool: Pool, page: int, start: int, stop: int, reach: Reach, queue: Queue | None) -> None:
        if page >= len(pool.writes):
            pool.grow(page)
        if pool.sectors is not None:
            self._overlap(pool, pool.sectors, page, start, stop, reach, queue, True)
        writes = pool.writes[page]
        if not pool.writes_calm and pool.suspect(page, reach):
            self._compare(pool, page, writes, start, stop, reach, True, True)
        if not pool.reads_calm:
            for reader, newest in enumerate(pool.read):
                limit = reach.clock[reader]
                if newest > limit:
                    numbers = pool.reads[reader][page]
                    if max(numbers[start:stop]) > limit:
                        self._compare(pool, page, numbers, start, stop, reach, False, True)
        writer = _FETCHES if queue is None else queue
        pool.writes[page] = _painted(writes, start, stop, reach.number)
        pool.top[writer][page] = pool.written[writer] = reach.number

    def _overlap(
        self, pool: Pool, sectors: Sectors, page: int, start: int, stop: int, reach: Reach, queue: Queue | None,
        writes: bool,
    ) -> None:  # fmt: skip
        """Compare one access with what other groups did in the same bytes."""
        if page == pool.sink:
            return
        sector = page // sectors.per_sector[pool.group]
        if sectors.user[sector] != pool.group:
            sectors.enter(sector, pool.group)
            pool.left_calm = pool.left_calm and reach.covers(sectors.left[sector])
        if pool.left_calm or reach.covers(sectors.left[sector]):
            return
        own = reach.number
        seen = [pool.writes[page]] if queue is None or writes else [pool.writes[page], pool.reads[queue][page]]
        if any(own in numbers for numbers in seen):
            # Any token of the page stands for all of them: what this op did there before was compared already.
            return
        for other, index in sectors.overlapping(pool.group, page):
            wrote = set(other.writes[index])
            read = set().union(*(reads[index] for reads in other.reads)) - wrote if writes else set()
            for numbers, first_writes in ((wrote, True), (read, False)):
                for number in sorted(numbers - {0, own}):
                    if not self._precedes(self._names[number], reach):
                        self._conflict(
                            pool, page, start, stop, reach, number, first_writes, writes, (other.group, index)
                        )

    def _compare(
        self, pool: Pool, page: int, numbers: tuple[int, ...], start: int, stop: int, reach: Reach,
        first_writes: bool, second_writes: bool,
    ) -> None:  # fmt: skip
        """Compare one access with the ops `numbers` per token of its page; report those that are not ordered."""
        if page == pool.sink:
            return
        # A token of an op that touches it several times is compared once, and with another op's write rather than read.
        own = reach.number
        seen = zip(numbers, pool.writes[page], *(reads[page] for reads in pool.reads), strict=True)
        numbers = tuple(
            0 if own in (writer, *readers) or (not first_writes and writer == number) else number
            for number, writer, *readers in seen
        )
        while start < stop:
            number = numbers[start]
            end = start + 1
            while end < stop and numbers[end] == number:
                end += 1
            if number and not self._precedes(self._names[number], reach):
                self._conflict(pool, page, start, end, reach, number, first_writes, second_writes)
            start = end

    def _conflict(
        self, pool: Pool, page: int, start: int, stop: int, reach: Reach, number: int,
        first_writes: bool, second_writes: bool, over: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        first, second = self._names[number], self._names[reach.number]
        missing = _missing(first, second, self._ended.get(number))
        self.violations.append(
            Conflict(
                first, second, pool.tier, pool.group, page, start, stop, missing, first_writes, second_writes, over
            )
        )

    # -- reports and pruning

    def _bad(self, op: Op, reason: str) -> None:
        self.violations.append(BadEdge(_name(op), reason))

    def _prune(self) -> None:
        """Forget names of ops that no token remembers, and points that tell no two remembered ops apart."""
        live: set[int] = set()
        for pool in self._pools.values():
            live |= pool.numbers()
        self._names = {number: name for number, name in self._names.items() if number in live}
        self._ended = {number: end for number, end in self._ended.items() if number in live}
        kept: list[list[int]] = [[0], [0], [0]]
        for number, name in self._names.items():
            if name.queue is not None:
                kept[name.queue].append(number)
        for queue, (numbers, clocks) in enumerate(self._points):
            points: tuple[list[int], list[Clock]] = ([], [])
            for number, clock in zip(numbers, clocks, strict=True):
                # A clock is only ever compared with remembered and with future numbers.
                c, o, i = (kept[other][bisect_right(kept[other], entry) - 1] for other, entry in enumerate(clock))
                if not points[0] or points[1][-1] != (c, o, i):
                    points[0].append(number)
                    points[1].append((c, o, i))
            self._points[queue] = points
        self._left = max(self._prune_every, self.entries)


def _name(op: Op) -> OpName:
    return OpName(op.number, type(op).__name__, op.queue, repr(op.owner), op.number)


def _painted(numbers: tuple[int, ...], start: int, stop: int, number: int) -> tuple[int, ...]:
    if not 0 <= start < stop <= len(numbers):
        raise ValueError(f"op #{number} touches tokens {start} … {stop} of a page of {len(numbers)}")
    return numbers[:start] + (number,) * (stop - start) + numbers[stop:]


def _missing(first: OpName, second: OpName, ended: int | None) -> str:
    """Say which edge would have ordered the two."""
    if first.begin > second.begin:
        return (
            f"none can be added, #{first.begin} was emitted while the step was running; emit it before StepBegin "
            f"#{second.begin}, or after StepEnd #{second.number}"
        )
    if first.queue is None:
        state = f"at #{ended}" if ended is not None else "not at all"
        return f"#{second.begin} must be numbered after the FetchEnd of #{first.number}, which came {state}"
    if first.number > second.begin:
        return f"#{second.begin} {second.where} must come after StepEnd #{first.number}"
    return f"#{second.begin} {second.where} must follow #{first.number} {first.where}"
