"""The edge judge finds a conflict exactly where a slow judge of the whole history finds one."""

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvstate.ops import (
    Access,
    CopyIn,
    CopyOut,
    FetchBegin,
    FetchEnd,
    ForkCopy,
    Op,
    Plan,
    PlanView,
    StepBegin,
    StepEnd,
    Tier,
)
from kvstate.ordering import NOTHING, Clock, Queue, covers
from kvstate.state import Lease, Request, Row, Stream, Table
from kvstate.testing.judge import EdgeJudge
from kvstate.types import Geometry, Group, Record, RequestConfig, Segment, Step

SIZE = 4
RECORD = Record(0, 0, SIZE, (), False, "other", 1, 0)

Views = list[tuple[list[int], int, int]]
"""Segments of a step: (pages, tokens stored in front, tokens computed)."""


def plan_of(views: Views, size: int = SIZE) -> Plan:
    segments = [Segment(f"r{place}", span=span) for place, (_, _, span) in enumerate(views)]
    lease = Lease(1, Step(segments))
    for place, (pages, start, span) in enumerate(views):
        stream = Stream(Request(f"r{place}", 1, RequestConfig()), "main", 1)
        lease.rows.append(Row(stream, lease, start, start + span, 0, (Table(pages, len(pages)),), 0, 0))
    return Plan(lease, size, (99,), frozenset(), 0, 1)


def begin(number: int, after: Clock = NOTHING) -> StepBegin:
    return StepBegin(number, after, "lease")


def end(number: int, begun: int, *views: tuple[list[int], int, int]) -> StepEnd:
    plan = plan_of(list(views))
    return StepEnd(number, NOTHING, plan.lease, begun, plan)


def copy_out(number: int, *copies: tuple[int, int, int], after: Clock = NOTHING) -> CopyOut:
    return CopyOut(number, after, "offload", (list(copies),))


def copy_in(number: int, *copies: tuple[int, int, int], after: Clock = NOTHING) -> CopyIn:
    return CopyIn(number, after, "reload", (list(copies),))


def fork(number: int, *copies: tuple[int, int, int], after: Clock = NOTHING) -> ForkCopy:
    return ForkCopy(number, after, "lease", (list(copies),))


def fetch(number: int, pages: list[int], start: int, stop: int, after: Clock = NOTHING) -> FetchBegin:
    return FetchBegin(number, after, "fetch", object(), RECORD, (tuple(pages),), (start // SIZE,), start, stop, SIZE)


def fetch_end(number: int, begun: int) -> FetchEnd:
    return FetchEnd(number, NOTHING, "fetch", begun)


def judged(*ops: Op) -> EdgeJudge:
    judge = EdgeJudge(SIZE)
    for op in ops:
        judge.observe(op)
    return judge


def pairs(judge: EdgeJudge) -> list[tuple[int, int]]:
    assert not judge.bad_edges, judge.bad_edges
    return sorted({(found.first.number, found.second.number) for found in judge.conflicts})


# -- one missing edge at a time


def test_a_copy_follows_the_step_that_wrote_what_it_reads() -> None:
    step = (begin(1), end(2, 1, ([0], 0, 3)))
    assert pairs(judged(*step, copy_out(3, (0, 0, 3), after=(2, 0, 0)))) == []
    assert pairs(judged(*step, copy_out(3, (0, 0, 3)))) == [(2, 3)]


def test_naming_a_step_begin_follows_nothing_of_the_step() -> None:
    assert pairs(judged(begin(1), end(2, 1, ([0], 0, 3)), copy_out(3, (0, 0, 3), after=(1, 0, 0)))) == [(2, 3)]


def test_a_step_that_writes_a_reused_page_follows_the_copy_that_still_reads_it() -> None:
    ops = (begin(1), end(2, 1, ([0], 0, 3)), copy_out(3, (0, 0, 3), after=(2, 0, 0)))
    assert pairs(judged(*ops, begin(4, (0, 3, 0)), end(5, 4, ([0], 0, 1)))) == []
    assert pairs(judged(*ops, begin(4), end(5, 4, ([0], 0, 1)))) == [(3, 5)]


def test_reads_need_no_edge_between_them() -> None:
    ops = (begin(1), end(2, 1, ([0], 0, 3)), copy_out(3, (0, 0, 3), after=(2, 0, 0)))
    assert pairs(judged(*ops, begin(4), end(5, 4, ([0], 3, 1)))) == []


def test_an_offload_of_committed_tokens_may_overlap_the_step_that_writes_the_next_slot_of_the_page() -> None:
    committed = (begin(1), end(2, 1, ([0], 0, 3)))
    in_flight = (begin(3), end(4, 3, ([0], 3, 1)))
    assert pairs(judged(*committed, *in_flight, copy_out(5, (0, 0, 3), after=(2, 0, 0)))) == []
    assert pairs(judged(*committed, *in_flight, copy_out(5, (0, 0, 4), after=(2, 0, 0)))) == [(4, 5)]


def test_what_is_emitted_during_a_step_is_not_ordered_with_it_on_their_common_queue() -> None:
    during = judged(begin(1), fork(2, (0, 1, 2)), end(3, 1, ([1], 0, 1)))
    assert pairs(during) == [(2, 3)]
    assert "#2 was emitted while the step was running" in during.conflicts[0].missing
    assert pairs(judged(fork(1, (0, 1, 2)), begin(2), end(3, 2, ([1], 0, 1)))) == []
    assert pairs(judged(begin(1), end(2, 1, ([1], 0, 1)), fork(3, (0, 1, 2)))) == []


def test_steps_whose_launches_overlap_are_not_ordered() -> None:
    assert pairs(judged(begin(1), begin(2), end(3, 1, ([0], 0, 1)), end(4, 2, ([0], 0, 1)))) == [(3, 4)]
    assert pairs(judged(begin(1), end(2, 1, ([0], 0, 1)), begin(3), end(4, 3, ([0], 0, 1)))) == []


def test_a_wait_that_comes_during_a_step_orders_nothing_of_it() -> None:
    host = copy_in(2, (0, 0, 4))
    assert pairs(judged(begin(1), host, fork(3, (5, 6, 1), after=(0, 0, 2)), end(4, 1, ([0], 0, 1)))) == [(2, 4)]
    assert (
        pairs(judged(copy_in(1, (0, 0, 4)), fork(2, (5, 6, 1), after=(0, 0, 1)), begin(3), end(4, 3, ([0], 0, 1))))
        == []
    )


def test_edges_are_transitive_over_queues() -> None:
    ops = (begin(1), end(2, 1, ([0], 0, 4)), copy_out(3, (0, 0, 4), after=(2, 0, 0)))
    assert pairs(judged(*ops, copy_in(4, (0, 7, 4), after=(0, 3, 0)), copy_in(5, (0, 0, 4)))) == []
    assert pairs(judged(*ops, copy_in(4, (1, 0, 4)))) == [(2, 4), (3, 4)]


def test_an_older_number_brings_only_what_the_queue_followed_up_to_it() -> None:
    ops = (copy_in(1, (0, 0, 4)), fork(2, (5, 6, 1)), fork(3, (5, 6, 1), after=(0, 0, 1)))
    assert pairs(judged(*ops, copy_out(4, (0, 0, 4), after=(3, 0, 0)))) == []
    assert pairs(judged(*ops, copy_out(4, (0, 0, 4), after=(2, 0, 0)))) == [(1, 4)]


def test_a_fetch_follows_its_after_and_is_followed_only_once_it_has_ended() -> None:
    step = (begin(1), end(2, 1, ([0], 0, 4)))
    assert pairs(judged(*step, fetch(3, [0], 0, 4, after=(2, 0, 0)))) == []
    assert pairs(judged(*step, fetch(3, [0], 0, 4))) == [(2, 3)]
    running = (fetch(1, [0, 1], 0, 6), begin(2), end(3, 2, ([0, 1], 6, 1)))
    assert pairs(judged(*running)) == [(1, 3)]
    late = judged(fetch(1, [0], 0, 4), begin(2), fetch_end(3, 1), end(4, 2, ([0], 0, 1)))
    assert pairs(late) == [(1, 4)]
    assert late.conflicts[0].missing == "#2 must be numbered after the FetchEnd of #1, which came at #3"
    assert pairs(judged(fetch(1, [0], 0, 4), fetch_end(2, 1), begin(3), end(4, 3, ([0], 0, 1)))) == []


def test_a_fetch_writes_behind_a_streams_own_tokens_in_its_last_page() -> None:
    reader = (begin(1), end(2, 1, ([0], 0, 3)), fetch(3, [0, 1], 3, 6))
    assert pairs(judged(*reader, copy_out(4, (0, 0, 3), after=(2, 0, 0)))) == []
    assert pairs(judged(*reader, copy_out(4, (0, 0, 4), after=(2, 0, 0)))) == [(3, 4)]


def test_what_comes_after_an_ended_fetch_follows_what_the_fetch_followed() -> None:
    ops = (copy_out(1, (0, 0, 4)), fetch(2, [0], 0, 2, after=(0, 1, 0)), fetch_end(3, 2))
    assert pairs(judged(*ops, begin(4), end(5, 4, ([0], 2, 1)))) == []


def test_a_refused_fetch_waited_for_nothing() -> None:
    for told_before in (False, True):
        judge = judged(copy_out(1, (0, 0, 4)))
        refused = fetch(2, [0], 0, 2, after=(0, 1, 0))
        if told_before:
            judge.observe(refused)
        judge.skip(refused)
        for op in (fetch_end(3, 2), begin(4), end(5, 4, ([0], 2, 1))):
            judge.observe(op)
        assert pairs(judge) == [(1, 5)]


def test_host_pages_are_judged_too() -> None:
    assert pairs(judged(copy_out(1, (0, 0, 4)), copy_in(2, (0, 1, 4), after=(0, 1, 0)))) == []
    assert pairs(judged(copy_out(1, (0, 0, 4)), copy_in(2, (0, 1, 4)))) == [(1, 2)]


def test_a_skipped_op_orders_but_touches_nothing() -> None:
    judge = EdgeJudge(SIZE)
    judge.observe(copy_in(1, (0, 0, 4)))
    judge.skip(fork(2, (3, 0, 4), after=(0, 0, 1)))
    judge.observe(copy_out(3, (0, 0, 4), after=(2, 0, 0)))
    assert pairs(judge) == []


def test_kernels_whose_step_end_was_skipped_count() -> None:
    judge = judged(begin(1))
    judge.skip(end(2, 1, ([0], 0, 1)))
    judge.observe(copy_in(3, (0, 0, 4)))
    assert pairs(judge) == [(2, 3)]


def test_the_sink_is_exempt() -> None:
    judge = EdgeJudge(SIZE, sinks={(Tier.DEVICE, 0): 9})
    judge.observe(copy_in(1, (0, 9, 4)))
    judge.observe(fork(2, (8, 9, 4)))
    assert judge.violations == []
    judge.observe(copy_out(3, (9, 9, 4)))
    assert judge.violations == []


def test_an_edge_to_what_was_not_submitted_is_a_violation_by_itself() -> None:
    judge = judged(fork(1, (0, 1, 1)), copy_out(2, (5, 5, 1), after=(7, 0, 0)), copy_out(3, (6, 6, 1), after=(0, 0, 3)))
    assert judge.conflicts == []
    assert [str(bad) for bad in judge.bad_edges] == [
        "#2 CopyOut (copy_out, 'offload'): follows #7 of compute, which was not submitted before it",
        "#3 CopyOut (copy_out, 'offload'): follows #3 of copy_in, which was not submitted before it",
    ]


def test_ops_out_of_order_and_ends_without_a_begin_are_violations() -> None:
    judge = judged(fork(2, (0, 1, 1)), fork(1, (0, 1, 1)), end(3, 1, ([0], 0, 1)), fetch_end(4, 2))
    assert [bad.op.number for bad in judge.bad_edges] == [1, 3, 4]
    assert judge.conflicts == []


def test_a_touch_outside_the_page_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens 0 … 5 of a page of 4"):
        judged(copy_out(1, (0, 0, 5)))


def test_a_report_names_both_ops_the_tokens_and_the_edge() -> None:
    judge = judged(begin(1), end(2, 1, ([7], 1, 2)), copy_in(3, (0, 7, 3)))
    written, read = sorted(judge.conflicts, key=lambda found: not found.first_writes)
    assert str(written) == (
        "#3 CopyIn (copy_in, 'reload') writes what #1…#2 Step (compute, <lease 1 admitted>) writes: device page 7 of "
        "group 0, tokens 1 … 3; missing edge: #3 copy_in must follow #2 compute"
    )
    assert (read.start, read.stop, read.first_writes, read.second_writes) == (0, 1, False, True)
    assert attrs.evolve(read, page=1) != read


def test_what_is_kept_does_not_grow_with_history() -> None:
    judge = EdgeJudge(SIZE, prune_every=64)
    number, out = 0, 0
    most = 0
    for turn in range(2_000):
        page = turn % 5
        number += 2
        judge.observe(begin(number - 1, (0, out, 0)))
        judge.observe(end(number, number - 1, ([page], 0, 4)))
        number += 1
        out = number
        judge.observe(copy_out(out, (page, page, 4), after=(number - 1, 0, 0)))
        most = max(most, judge.entries)
    assert judge.violations == []
    assert most < 256


# -- against a judge of the whole history


@attrs.define
class Slow:
    """Happens-before as a graph over the whole history, and every pair of ops compared.

    A node is (number, "point") where an op stands in its queue, or (number, "work") for a step's kernels.
    """

    sinks: dict[tuple[Tier, int], int]
    history: list[tuple[Op, bool]] = attrs.field(factory=list)
    before: dict[tuple[int, str], frozenset[tuple[int, str]]] = attrs.field(factory=dict)

    def take(self, op: Op, runs: bool) -> None:
        point = (op.number, "point")
        earlier = [other for other, _ in self.history]
        parents: set[tuple[int, str]] = {(other.number, "point") for other in earlier if isinstance(other, FetchEnd)}
        for queue in Queue:
            on_queue = [other.number for other in earlier if other.queue == queue]
            if op.queue == queue:
                parents |= {(number, "point") for number in on_queue}
            elif not on_queue or op.after[queue] > max(on_queue):
                continue
            if not isinstance(op, StepEnd):
                parents |= {(number, "point") for number in on_queue if number <= op.after[queue]}
        if isinstance(op, StepEnd):
            work = (op.number, "work")
            self._add(work, {(op.begin, "point")})
            parents.add(work)
        if isinstance(op, FetchEnd):
            ran = [other for other, did in self.history if other.number == op.begin and did]
            parents |= {(other.number, "point") for other in ran}
        self._add(point, parents)
        self.history.append((op, runs))

    def _add(self, node: tuple[int, str], parents: set[tuple[int, str]]) -> None:
        self.before[node] = frozenset(parents).union(*(self.before[parent] for parent in parents))

    def slots(self, op: Op) -> Iterator[tuple[tuple[Tier, int, int, int], bool]]:
        for accesses, writes in ((op.reads(), False), (op.writes(), True)):
            for access in accesses:
                tier, group, page, start, stop = Access(*access)
                if self.sinks.get((tier, group)) != page:
                    for slot in range(start, stop):
                        yield (tier, group, page, slot), writes

    def conflicts(self) -> dict[tuple[Tier, int, int, int], list[tuple[int, int]]]:
        """Return the conflicting pairs per token slot, in the order of the second op."""
        found: dict[tuple[Tier, int, int, int], list[tuple[int, int]]] = {}
        ran = [(op, dict.fromkeys(self.slots(op))) for op, runs in self.history if runs]
        for place, (second, twos) in enumerate(ran):
            for first, ones in ran[:place]:
                if self._work(first) in self.before[self._work(second)]:
                    continue
                for slot, writes in twos:
                    if (slot, True) in ones or (writes and (slot, False) in ones):
                        rows = found.setdefault(slot, [])
                        if (first.number, second.number) not in rows:
                            rows.append((first.number, second.number))
        return found

    def _work(self, op: Op) -> tuple[int, str]:
        return (op.number, "work" if isinstance(op, StepEnd) else "point")


PAGES = 4
SINKS = {(Tier.DEVICE, 0): 3, (Tier.HOST, 0): 3}
kinds = st.sampled_from(["begin", "end", "fork", "out", "in", "fetch", "landed"])
page = st.integers(0, PAGES - 1)
tables = st.lists(page, min_size=1, max_size=2, unique=True)
page_copies = st.lists(st.tuples(page, page, st.integers(1, SIZE)), min_size=1, max_size=2)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Op, bool]]:
    """Ops in number order with edges that are often, not always, enough; rarely one that names the future."""
    ops: list[tuple[Op, bool]] = []
    emitted: list[list[int]] = [[], [], []]
    begun: list[int] = []
    fetching: list[int] = []
    number = 0
    for kind in draw(st.lists(kinds, max_size=24)):
        number += draw(st.integers(1, 2))
        choice = [draw(st.sampled_from(["newest", "newest", "any", "none"])) for _ in Queue]
        c, o, i = (
            0 if how == "none" or not known else known[-1] if how == "newest" else draw(st.integers(1, known[-1]))
            for how, known in zip(choice, emitted, strict=True)
        )
        after = (number + 3 if draw(st.integers(0, 60)) == 60 else c, o, i)
        op: Op
        runs = draw(st.integers(0, 9)) > 0
        if kind == "begin":
            op = begin(number, after)
            begun.append(number)
        elif kind == "end":
            if not begun:
                continue
            views = []
            for pages in draw(st.lists(tables, min_size=1, max_size=2)):
                length = draw(st.integers((len(pages) - 1) * SIZE + 1, len(pages) * SIZE))
                start = draw(st.integers(0, length))
                views.append((pages, start, length - start))
            op = end(number, begun.pop(draw(st.integers(0, len(begun) - 1))), *views)
            runs = True
        elif kind in ("fork", "out", "in"):
            made = {"fork": fork, "out": copy_out, "in": copy_in}[kind]
            op = made(number, *draw(page_copies), after=after)
            if draw(st.booleans()):
                op = attrs.evolve(op, copies=([], op.copies[0]))
        elif kind == "fetch":
            pages = draw(tables)
            start = draw(st.integers(0, SIZE - 1))
            op = fetch(number, pages, start, draw(st.integers(start + 1, len(pages) * SIZE)), after=after)
            fetching.append(number)
        else:
            if not fetching:
                continue
            op = fetch_end(number, fetching.pop(draw(st.integers(0, len(fetching) - 1))))
            runs = True
        if op.queue is not None:
            emitted[op.queue].append(number)
        ops.append((op, runs))
    return ops


@settings(max_examples=400, deadline=None)
@given(programs(), st.sampled_from([1, 3, 4096]))
def test_the_first_conflict_of_every_token_is_found_and_nothing_else_is_reported(
    program: list[tuple[Op, bool]], prune_every: int
) -> None:
    judge, slow = EdgeJudge(SIZE, SINKS, prune_every), Slow(SINKS)
    for op, runs in program:
        (judge.observe if runs else judge.skip)(op)
        slow.take(op, runs)
    expected = slow.conflicts()
    found: dict[tuple[Tier, int, int, int], list[tuple[int, int]]] = {}
    for conflict in judge.conflicts:
        for slot in range(conflict.start, conflict.stop):
            key = (conflict.tier, conflict.group, conflict.page, slot)
            found.setdefault(key, []).append((conflict.first.number, conflict.second.number))
    event("conflicts" if expected else "clean")
    assert found.keys() == expected.keys()
    for key, rows in found.items():
        assert rows[0][1] == expected[key][0][1]
        assert set(rows) <= set(expected[key])
        assert len(rows) == len(set(rows))


@settings(max_examples=200, deadline=None)
@given(programs())
def test_pruning_changes_no_verdict(program: list[tuple[Op, bool]]) -> None:
    judges = [EdgeJudge(SIZE, SINKS, prune_every) for prune_every in (1, 4096)]
    for judge in judges:
        for op, runs in program:
            (judge.observe if runs else judge.skip)(op)
    assert judges[0].violations == judges[1].violations


@settings(max_examples=100, deadline=None)
@given(programs())
def test_following_everything_leaves_no_conflict_but_with_what_is_running(program: list[tuple[Op, bool]]) -> None:
    judge = EdgeJudge(SIZE, SINKS)
    newest = [0, 0, 0]
    steps: list[int] = []
    fetches: list[int] = []
    for op, runs in program:
        op = attrs.evolve(op, after=(newest[0], newest[1], newest[2]))
        assert covers((newest[0], newest[1], newest[2]), op.after)
        (judge.observe if runs else judge.skip)(op)
        if op.queue is not None:
            newest[op.queue] = op.number
        steps += [op.begin] if isinstance(op, StepEnd) else []
        fetches += [op.number] if isinstance(op, FetchBegin) else []
    assert judge.bad_edges == []
    for found in judge.conflicts:
        overlapping = found.first.number > found.second.begin
        assert overlapping or found.first.number in fetches


# -- groups that share sectors

SHARED = Geometry(pages=3, page_size=SIZE, host_pages=3, groups=(Group("full", 384), Group("window", 256, window=3)))
"""Sectors of 768 bytes: two pages of the first group, three of the second; pages 0 and 1 overlap, 0 and 2 do not."""


def of_group(group: int, op: CopyOut | CopyIn | ForkCopy) -> Op:
    """Move the copies of an op to `group`."""
    return attrs.evolve(op, copies=(*([],) * group, *op.copies))


def step_over(number: int, begun: int, *views: tuple[list[int], list[int], int, int, int]) -> StepEnd:
    """Return a step of views (table of each group, tokens in front, tokens computed, pages skipped by the second)."""
    made = end(number, begun, *([([0], 0, 1)] * len(views)))
    made.plan.in_step_order = tuple(
        PlanView(
            f"r{place}", "main", (tuple(one), tuple(two)), start, start + span, span, start, 0, False, (0, skipped)
        )
        for place, (one, two, start, span, skipped) in enumerate(views)
    )
    return made


def judged_over(*ops: Op) -> EdgeJudge:
    judge = EdgeJudge.of(SHARED)
    for op in ops:
        judge.observe(op)
    return judge


def test_a_sector_that_changes_its_group_needs_the_edge() -> None:
    out = of_group(0, copy_out(1, (1, 0, 4)))
    assert pairs(judged_over(out, of_group(1, copy_in(2, (8, 2, 4), after=(0, 1, 0))))) == []
    missing = judged_over(out, of_group(1, copy_in(2, (8, 2, 1))))
    assert pairs(missing) == [(1, 2)]
    [conflict] = missing.conflicts
    assert (conflict.group, conflict.page, conflict.over) == (1, 2, (0, 1))
    assert str(conflict) == (
        "#2 CopyIn (copy_in, 'reload') writes what #1 CopyOut (copy_out, 'offload') reads: device page 2 of group 1, "
        "tokens 0 … 1, over the bytes of page 1 of group 0; missing edge: #2 copy_in must follow #1 copy_out"
    )


def test_pages_of_a_sector_that_share_no_byte_need_no_edge() -> None:
    out = of_group(0, copy_out(1, (0, 0, 4)))
    assert pairs(judged_over(out, of_group(1, copy_in(2, (8, 2, 4))))) == []
    assert pairs(judged_over(out, of_group(1, copy_in(2, (8, 1, 4))))) == [(1, 2)]
    assert pairs(judged_over(out, of_group(1, copy_in(2, (8, 3, 4))))) == []


def test_every_token_of_a_page_stands_for_all_of_them_to_another_group() -> None:
    """Tokens are strided inside a page: no token of another group's page can be told to be clear of them."""
    first = of_group(0, fork(1, (5, 0, 1)))
    late = of_group(1, copy_in(2, (8, 0, 4)))
    assert [(found.start, found.stop) for found in judged_over(first, late).conflicts] == [(0, 4)]


def test_reads_of_two_groups_in_the_same_bytes_need_no_edge() -> None:
    assert pairs(judged_over(of_group(0, copy_out(1, (0, 3, 4))), of_group(1, fork(2, (0, 8, 4))))) == []


def test_host_sectors_change_hands_too() -> None:
    ops = (of_group(1, copy_out(1, (8, 4, 4))), of_group(0, copy_in(2, (3, 0, 4))))
    found = judged_over(*ops).conflicts
    assert [(c.tier, c.group, c.page, c.over) for c in found] == [(Tier.HOST, 0, 3, (1, 4))]


def test_a_step_reads_nothing_of_the_pages_that_its_window_has_left() -> None:
    others = of_group(0, copy_in(1, (0, 0, 4)))
    reads = judged_over(others, begin(2), step_over(3, 2, ([2, 3], [0, 8], 5, 1, 0)))
    assert [(c.group, c.page, c.over, c.second_writes) for c in reads.conflicts] == [(1, 0, (0, 0), False)]
    sink = SHARED.group_pages[1]
    assert pairs(judged_over(others, begin(2), step_over(3, 2, ([2, 3], [sink, 8], 5, 1, 1)))) == []


def test_a_step_that_touches_many_pages_is_compared_page_by_page() -> None:
    step = (begin(1), step_over(2, 1, ([0, 1, 2], [6, 7, 8], 0, 12, 0)))
    assert pairs(judged_over(*step, of_group(1, copy_in(3, (0, 3, 4), (1, 5, 4))))) == [(2, 3)]
    found = judged_over(*step, of_group(1, copy_in(3, (0, 3, 4), (1, 5, 4)))).conflicts
    assert [(c.page, c.over, c.first_writes) for c in found] == [(3, (0, 2), True)]


def test_an_op_that_touches_a_page_twice_is_reported_once() -> None:
    twice = of_group(1, copy_in(2, (8, 2, 1), (7, 2, 4)))
    assert len(judged_over(of_group(0, fork(1, (5, 1, 4))), twice).conflicts) == 1


def test_sinks_of_all_groups_are_exempt_although_they_share_bytes() -> None:
    one, two = SHARED.group_pages
    assert judged_over(of_group(0, copy_in(1, (0, one, 4))), of_group(1, fork(2, (0, two, 4)))).violations == []


def test_an_op_does_not_conflict_with_itself_over_groups() -> None:
    both = attrs.evolve(fork(1, (5, 0, 4)), copies=([(5, 0, 4)], [(0, 8, 4), (0, 1, 4)]))
    assert judged_over(both).violations == []


@attrs.define
class SlowSectors(Slow):
    """The whole history again, over bytes: two accesses meet where their pages are the same, or have common bytes."""

    geometry: Geometry = SHARED

    def bytes_of(self, group: int, page: int) -> set[int]:
        size = self.geometry.groups[group].page_bytes
        sector, place = divmod(page, self.geometry.pages_per_sector[group])
        base = sector * self.geometry.sector_bytes + place * size
        return set(range(base, base + size, 64))

    def meet(self, one: tuple[Tier, int, int, int], two: tuple[Tier, int, int, int]) -> bool:
        if one[0] is not two[0]:
            return False
        if one[1] == two[1]:
            return one == two
        return bool(self.bytes_of(*one[1:3]) & self.bytes_of(*two[1:3]))

    def sector(self, slot: tuple[Tier, int, int, int]) -> tuple[Tier, int]:
        return slot[0], slot[2] // self.geometry.pages_per_sector[slot[1]]

    def pairs(self) -> dict[tuple[Tier, int], list[tuple[int, int]]]:
        """Return the conflicting pairs per sector, in the order of the second op."""
        found: dict[tuple[Tier, int], list[tuple[int, int]]] = {}
        ran = [(op, dict.fromkeys(self.slots(op))) for op, runs in self.history if runs]
        for place, (second, twos) in enumerate(ran):
            for first, ones in ran[:place]:
                if self._work(first) not in self.before[self._work(second)]:
                    for two, writes in twos:
                        if any((wrote or writes) and self.meet(one, two) for one, wrote in ones):
                            rows = found.setdefault(self.sector(two), [])
                            if (first.number, second.number) not in rows:
                                rows.append((first.number, second.number))
        return found


def over_groups(op: Op, group: int, rest: list[tuple[int, int, int]]) -> Op:
    """Let copies be of `group`, and the rest of the other one; let a step or fetch touch both groups.

    The table of the second group lacks its first page where `group` says so and it is not written.
    """
    if isinstance(op, (ForkCopy, CopyOut, CopyIn)):
        return attrs.evolve(op, copies=(op.copies[-1], rest) if not group else (rest, op.copies[-1]))
    if isinstance(op, StepEnd):
        views = []
        for view in op.plan.in_step_order:
            two = tuple((page + len(rest)) % 6 for page in view.tables[0])
            skipped = min(group, view.start // SIZE)
            views.append(attrs.evolve(view, tables=(view.tables[0], two), skipped=(0, skipped)))
        op.plan.in_step_order = tuple(views)
    if isinstance(op, FetchBegin):
        late = min(group, (op.stop - 1) // SIZE)
        two = tuple((page + 3) % 6 for page in op.tables[0])[late:]
        return attrs.evolve(op, tables=(op.tables[0], two), firsts=(op.firsts[0], op.firsts[0] + late))
    return op


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4096]))
def test_the_first_conflict_of_every_sector_is_found_and_nothing_else_is_reported(
    data: st.DataObject, prune_every: int
) -> None:
    judge = EdgeJudge.of(SHARED, prune_every)
    slow = SlowSectors(judge.sinks)
    for op, runs in data.draw(programs()):
        group = data.draw(st.integers(0, 1))
        op = over_groups(op, group, data.draw(page_copies) if data.draw(st.booleans()) else [])
        (judge.observe if runs else judge.skip)(op)
        slow.take(op, runs)
    expected = slow.pairs()
    found: dict[tuple[Tier, int], list[tuple[int, int]]] = {}
    for conflict in judge.conflicts:
        slot = (conflict.tier, conflict.group, conflict.page, 0)
        found.setdefault(slow.sector(slot), []).append((conflict.first.number, conflict.second.number))
        if conflict.over is not None:
            event("over groups")
    event("conflicts" if expected else "clean")
    assert found.keys() == expected.keys()
    for key, rows in found.items():
        assert rows[0][1] == expected[key][0][1]
        assert set(rows) <= set(expected[key])


def test_a_geometry_of_one_group_is_judged_as_before() -> None:
    judge = EdgeJudge.of(Geometry(pages=4, page_size=SIZE))
    judge.observe(copy_in(1, (0, 0, 4)))
    judge.observe(fork(2, (0, 1, 4)))
    judge.observe(fork(3, (4, 4, 4)))
    assert pairs(judge) == [(1, 2)]
