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
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import attrs

from kvstate.ops import FetchBegin, FetchEnd, Op, StepBegin, StepEnd, Tier
from kvstate.ordering import NOTHING, Clock, Queue, at, elsewhere, merge

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
    """Two ops on tokens ``start … stop`` of one page that nothing orders. `missing` is the edge, in words."""

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

    def __str__(self) -> str:
        did = "writes" if self.second_writes else "reads"
        had = "writes" if self.first_writes else "reads"
        return (
            f"{self.second} {did} what {self.first} {had}: {self.tier.value} page {self.page} of group {self.group}, "
            f"tokens {self.start} … {self.stop}; missing edge: {self.missing}"
        )


@attrs.frozen
class BadEdge:
    """An op that names what cannot be followed."""

    op: OpName
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}"


class _Reach:
    """What op `number` follows: a clock, and fetches that ended before `issue`, those up to `floor` for certain."""

    __slots__ = ("clock", "floor", "issue", "number")

    def __init__(self, number: int, clock: Clock, floor: int) -> None:
        self.number = self.issue = number
        self.clock = clock
        self.floor = floor


class _Pool:
    """Accesses of one group in one tier, by page; a page has a tuple with an op number per token, 0 is none.

    `top` has the newest write per page and writer (queue or fetch), `written` and `read` the newest of all pages: they
    only decide whether a page must be looked at. For op `judged` everything `written` is known to be ordered when
    `writes_calm`, everything `read` when `reads_calm`.
    """

    __slots__ = (
        "group", "judged", "read", "reads", "reads_calm", "size", "tier", "top", "writes", "writes_calm", "written",
    )  # fmt: skip

    def __init__(self, tier: Tier, group: int, size: int) -> None:
        self.tier = tier
        self.group = group
        self.size = size
        self.writes: list[tuple[int, ...]] = []
        self.reads: tuple[list[tuple[int, ...]], ...] = ([], [], [])
        self.top: tuple[list[int], ...] = ([], [], [], [])
        self.written = [0, 0, 0, 0]
        self.read = [0, 0, 0]
        self.judged = 0
        self.writes_calm = self.reads_calm = True

    def grow(self, page: int) -> None:
        """Make place for pages up to `page`."""
        more = page + 1 - len(self.writes)
        none = (0,) * self.size
        for slots in (self.writes, *self.reads):
            slots.extend([none] * more)
        for numbers in self.top:
            numbers.extend([0] * more)

    def judge(self, reach: _Reach) -> None:
        """Note, before its first access, what the op of `reach` need not be compared with."""
        self.judged = reach.number
        (c, o, i), written, read = reach.clock, self.written, self.read
        self.writes_calm = written[0] <= c and written[1] <= o and written[2] <= i and written[3] <= reach.floor
        self.reads_calm = read[0] <= c and read[1] <= o and read[2] <= i

    def suspect(self, page: int, reach: _Reach) -> bool:
        """Tell whether `page` has a write that the op may not follow."""
        compute, copy_out, copy_in, fetch = self.top
        c, o, i = reach.clock
        return compute[page] > c or copy_out[page] > o or copy_in[page] > i or fetch[page] > reach.floor

    def suspects(self, table: Sequence[int], reach: _Reach) -> list[int]:
        """Return the pages of `table` with a write that the op may not follow."""
        for top, newest, limit in zip(self.top, self.written, (*reach.clock, reach.floor), strict=True):
            if newest > limit and max(map(top.__getitem__, table)) > limit:
                return [page for page in table if self.suspect(page, reach)]
        return []

    def numbers(self) -> set[int]:
        """Return every op number that is kept."""
        numbers: set[int] = set()
        for slots in (self.writes, *self.reads):
            # Pages read by one op share a tuple.
            for own in {id(own): own for own in slots}.values():
                numbers.update(own)
        return numbers


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

    Attributes
    ----------
    violations
        What was found, in the order it was found: no false alarm, and the first conflict of every token.
    """

    def __init__(
        self, page_size: int, sinks: Mapping[tuple[Tier, int], int] | None = None, prune_every: int = 4096
    ) -> None:
        self.page_size = page_size
        self.sinks = dict(sinks or {})
        self.violations: list[Conflict | BadEdge] = []
        self._pools: dict[tuple[Tier, int], _Pool] = {}
        self._names: dict[int, OpName] = {}
        self._newest = 0
        self._last = [0, 0, 0]
        # What the newest op of each queue follows, itself included; and what everything emitted from now on follows.
        self._queues = [NOTHING, NOTHING, NOTHING]
        self._host = NOTHING
        # Per queue: from which number on it followed which part of the other queues.
        self._points: list[tuple[list[int], list[Clock]]] = [([0], [NOTHING]) for _ in Queue]
        self._steps: dict[int, _Reach] = {}
        # Open fetches and what they follow, None if one was skipped; and the FetchEnd of those that ended.
        self._fetches: dict[int, Clock | None] = {}
        self._ended: dict[int, int] = {}
        self._prune_every = self._left = prune_every

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
        reach = _Reach(number, clock, next(iter(self._fetches), number + 1) - 1)
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

    def _precedes(self, first: OpName, reach: _Reach) -> bool:
        if first.queue is None:
            return self._ended.get(first.number, reach.issue) < reach.issue
        return reach.clock[first.queue] >= first.number

    # -- accesses

    def _pool(self, tier: Tier, group: int, reach: _Reach) -> _Pool:
        pool = self._pools.get((tier, group))
        if pool is None:
            pool = self._pools[tier, group] = _Pool(tier, group, self.page_size)
        if pool.judged != reach.number:
            pool.judge(reach)
        return pool

    def _access(self, op: Op, reach: _Reach) -> None:
        """Judge any op by its ``writes()`` and ``reads()``."""
        # Writes first: an op's own reads must not cover what its writes are to be compared with.
        for tier, group, page, start, stop in op.writes():
            if start < stop:
                self._write(self._pool(tier, group, reach), page, start, stop, reach, op.queue)
        for tier, group, page, start, stop in op.reads():
            if start < stop:
                assert op.queue is not None, "a fetch only writes"
                self._read(self._pool(tier, group, reach), page, start, stop, reach, op.queue)

    def _access_step(self, op: StepEnd, reach: _Reach) -> None:
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
                if whole:
                    self._read_whole(pool, table[:whole], full, reach)

    def _read_whole(self, pool: _Pool, table: tuple[int, ...], full: tuple[int, ...], reach: _Reach) -> None:
        """Judge a step's reads of full pages: its only cost that grows with what it reads."""
        last = max(table)
        if last >= len(pool.writes):
            pool.grow(last)
        if not pool.writes_calm:
            for page in pool.suspects(table, reach):
                self._compare(pool, page, pool.writes[page], 0, pool.size, reach, True, False)
        reads = pool.reads[Queue.COMPUTE]
        for page in table:
            reads[page] = full
        pool.read[Queue.COMPUTE] = reach.number

    def _read(self, pool: _Pool, page: int, start: int, stop: int, reach: _Reach, queue: Queue) -> None:
        if page >= len(pool.writes):
            pool.grow(page)
        if not pool.writes_calm and pool.suspect(page, reach):
            self._compare(pool, page, pool.writes[page], start, stop, reach, True, False)
        reads = pool.reads[queue]
        reads[page] = _painted(reads[page], start, stop, reach.number)
        pool.read[queue] = reach.number

    def _write(self, pool: _Pool, page: int, start: int, stop: int, reach: _Reach, queue: Queue | None) -> None:
        if page >= len(pool.writes):
            pool.grow(page)
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

    def _compare(
        self, pool: _Pool, page: int, numbers: tuple[int, ...], start: int, stop: int, reach: _Reach,
        first_writes: bool, second_writes: bool,
    ) -> None:  # fmt: skip
        """Compare one access with the ops `numbers` per token of its page; report those that are not ordered."""
        if self.sinks.get((pool.tier, pool.group)) == page:
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
            if number:
                first = self._names[number]
                if not self._precedes(first, reach):
                    second = self._names[own]
                    missing = _missing(first, second, self._ended.get(number))
                    self.violations.append(
                        Conflict(
                            first, second, pool.tier, pool.group, page, start, end, missing, first_writes, second_writes
                        )
                    )
            start = end

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
