"""Ordering on the device: rows D1–D15 of the known bugs.

The copies of the memory backend run at once, so contents alone prove no order. Each test names the edge that must be
there, and that the judge would see a conflict without it.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from kvstate.errors import Refused
from kvstate.ops import CopyIn, CopyOut, FetchBegin, FetchEnd, ForkCopy, StepBegin
from kvstate.ordering import NOTHING, Queue, at, covers
from kvstate.refusals import PagesExhausted, Refusal, StalePlan
from kvstate.transitions import offload, step
from kvstate.transitions.offload import Offloaded
from kvstate.types import LabelFork, Publication, Record, RetentionPolicy, Segment, Step, StreamFork, StreamId

FORK = (LabelFork("main", "cfg"),)
PARENT, CHILD = StreamId("parent"), StreamId("child")


def follows(later: Any, earlier: Any) -> bool:
    """Tell whether an op names another one, or something newer on its queue."""
    return covers(later.after, at(earlier.queue, earlier.number))


def claim_fetch(kv: Any, request: str, length: int) -> Any:
    """Start a fetch from a publisher that nobody reaches; return what the claim says."""
    record = Record(length, 0, kv.geometry.page_size, (tuple(range(length)),), False, "elsewhere", 1, 0)
    return kv.claim_retrieve(request, Publication(request, 1, {0: {"main": record}}))


def fill(kv: Any, request: str) -> Any:
    """Run a step of `request` that takes every free page; return its lease."""
    kv.ingest(request)
    lease = kv.launched(Segment(request, span=kv.device_free * kv.geometry.page_size))
    kv.commit(lease)
    return lease


# -- D1


def test_D1_a_copy_out_follows_the_step_that_wrote_the_pages(kv: Any) -> None:
    kv.ingest("r")
    lease = kv.launched(Segment("r", span=3))
    kv.commit(lease)
    kv.offload("r")

    copy = kv.last(CopyOut)
    assert copy.after == at(Queue.COMPUTE, lease.number)
    assert kv.conflicts_without_the_edges_of(copy)


def test_D1_sibling_a_copy_out_of_a_forked_page_follows_its_copy(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=3), post_forks=[StreamFork(PARENT, CHILD)])
    kv.offload("child")

    assert follows(kv.last(CopyOut), kv.last(ForkCopy))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyOut))


def test_D1_sibling_a_copy_out_of_what_came_back_follows_the_copy_in(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    kv.offload("r")
    kv.reload("r")
    kv.offload("r")

    assert follows(kv.last(CopyOut), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyOut))


# -- D2


def test_D2_a_copy_in_follows_the_step_that_read_its_pages(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    kv.run(Segment("s", span=3))
    reader = kv.launched(Segment("s"))
    kv.commit(reader)
    kv.remove("s")
    kv.reload("r")

    copy = kv.last(CopyIn)
    assert follows(copy, kv.step_of(reader))
    assert kv.conflicts_without_the_edges_of(copy)


def test_D2_sibling_a_copy_in_follows_a_step_that_was_aborted_after_its_launch(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    aborted = kv.launched(Segment("s", span=3))
    kv.abort(aborted)
    kv.reload("r")

    assert follows(kv.last(CopyIn), kv.step_of(aborted))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyIn))


def test_D2_sibling_a_copy_in_follows_a_step_that_stores_nothing(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    scratch = kv.launched(Segment("s", span=3), commit=False)
    kv.commit(scratch)
    assert kv.device_free == 8
    kv.reload("r")

    assert follows(kv.last(CopyIn), kv.step_of(scratch))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyIn))


def test_D2_sibling_a_fetch_follows_the_step_that_read_its_pages(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("s", span=15))
    reader = kv.launched(Segment("s"))
    kv.commit(reader)
    kv.remove("s")
    claim_fetch(kv, "r", 3)

    assert follows(kv.last(FetchBegin), kv.step_of(reader))
    assert kv.conflicts_without_the_edges_of(kv.last(FetchBegin))


# -- D3


def test_D3_the_next_owner_of_a_page_follows_the_copy_out_of_it(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=16))
    before = kv.tokens("r")
    assert kv.offload("r") == Offloaded("r", 8)
    next_owner = fill(kv, "s")

    assert follows(kv.step_of(next_owner), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.step_of(next_owner))
    assert kv.tokens("r") == before


def test_D3_sibling_a_fork_copy_into_a_released_page_follows_the_copy_out(kv: Any) -> None:
    kv.ingest("r", "parent", "child")
    kv.run(Segment("parent", span=1))
    kv.run(Segment("r", span=14))
    kv.offload("r")
    kv.run(Segment("parent", span=0), post_forks=[StreamFork(PARENT, CHILD)])

    assert follows(kv.last(ForkCopy), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.last(ForkCopy))


def test_D3_sibling_a_copy_in_to_a_released_page_follows_the_copy_out(machines: Any) -> None:
    kv = machines(host_pages=12)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    kv.offload("r")
    kv.run(Segment("s", span=16))
    kv.offload("s")
    kv.reload("r")

    assert follows(kv.last(CopyIn), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyIn))


# -- D4


def test_D4_the_next_owner_of_a_host_page_follows_the_copy_in_from_it(machines: Any) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    before = kv.tokens("r")
    kv.offload("r")
    kv.reload("r")
    kv.offload("s")

    assert follows(kv.last(CopyOut), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyOut))
    assert kv.tokens("r") == before


def test_D4_sibling_an_abandoned_reload_leaves_its_use_on_the_host_pages(machines: Any) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    kv.offload("r")
    kv.abandon(kv.claim_reload("r"))
    kv.reset("r")
    kv.offload("s")

    assert follows(kv.last(CopyOut), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyOut))


# -- D5


def test_D5_a_step_follows_the_copy_in_of_what_it_reads(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    kv.offload("r")
    kv.reload("r")
    lease, plan = kv.staged(Segment("r"))

    assert kv.launch(plan) == [before]
    assert follows(kv.step_of(lease), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))


def test_D5_sibling_another_thread_launches_right_after_the_reload(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    kv.offload("r")
    claim = kv.claim_reload("r")
    seen: list[Any] = []

    def other() -> None:
        lease, plan = kv.staged(Segment("r"))
        seen.append((kv.launch(plan), lease))

    assert isinstance(kv.admit(Segment("r")), Refusal), "not before the reload is committed"
    kv.commit_claim(claim)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    [(contexts, lease)] = seen
    assert contexts == [before]
    assert follows(kv.step_of(lease), kv.last(CopyIn))


def test_D5_sibling_a_child_that_shares_reloaded_pages_follows_the_copy_in(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=4))
    kv.offload("parent")
    kv.reload("parent")
    kv.run(Segment("parent", span=0), post_forks=[StreamFork(PARENT, CHILD)])
    kv.remove("parent")
    lease = kv.launched(Segment("child"))

    assert follows(kv.step_of(lease), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.last(StepBegin, lease)) == []
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease)) == [], "the fork's step waited already"


# -- D6


@pytest.mark.parametrize("end", ["commit_claim", "abandon"])
def test_D6_pages_of_a_copy_in_under_way_wait_for_it(kv: Any, end: str) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    claim = kv.claim_reload("r")
    kv.remove("r")

    assert isinstance(kv.admit(Segment("s")), PagesExhausted), "the claim still owns them"
    getattr(kv, end)(claim)
    lease = fill(kv, "t")
    assert follows(kv.step_of(lease), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))


def test_D6_sibling_pages_of_a_fetch_under_way_wait_for_its_end(kv: Any) -> None:
    kv.ingest("r", "s")
    [fetch] = claim_fetch(kv, "r", 16).fetches
    kv.remove("r")

    assert isinstance(kv.admit(Segment("s")), PagesExhausted)
    kv.transport.fail(fetch, "late")
    kv.poll()
    lease = fill(kv, "t")
    assert kv.last(FetchEnd).number < kv.last(StepBegin, lease).number


def test_D6_sibling_pages_of_an_abandoned_reload_wait_for_its_copy(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=16))
    before = kv.tokens("r")
    kv.offload("r")
    kv.abandon(kv.claim_reload("r"))
    lease = fill(kv, "s")

    assert follows(kv.step_of(lease), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))
    assert kv.tokens("r") == before


# -- D7


def test_D7_a_plan_shows_what_it_showed_after_the_next_one_was_made(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=1))
    first, plan_first = kv.staged(Segment("r", span=2), Segment("s"))
    shown = plan_first.in_step_order
    second, plan_second = kv.staged(Segment("s", span=2), Segment("r", span=3))

    assert plan_first.in_step_order == shown == plan_first.views["main"]
    assert [seen.length for seen in shown] == [5, 2]
    assert [seen.length for seen in plan_second.in_step_order] == [4, 8]
    kv.launch(plan_first)
    kv.launch(plan_second)
    assert plan_first.in_step_order == shown
    kv.commit(first)
    kv.commit(second)
    assert (len(kv.tokens("r")), len(kv.tokens("s"))) == (8, 4)


def test_D7_sibling_a_plan_first_read_after_the_next_step_ended_shows_its_own_pages(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3))
    _, plan = kv.staged(Segment("r", span=3))
    pages = kv.pages("r")
    kv.remove("r")
    fill(kv, "s")

    [seen] = plan.in_step_order
    assert (seen.pages[:2], seen.start, seen.length) == (pages, 3, 6)


# -- D8


def test_D8_an_offload_moves_the_committed_tokens_of_a_page_that_a_step_writes(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    kv.run(Segment("r", span=0))
    in_flight = kv.launched(Segment("r", span=1))
    claim = kv.claim_offload("r", discard_in_flight=True)

    assert [tokens for _, _, tokens in claim.op.copies[0]] == [2, 1], "the token in flight is none of its business"
    assert not follows(claim.op, kv.step_of(in_flight))
    kv.commit_claim(claim)
    assert kv.commit(in_flight).dropped == (0,)
    assert kv.tokens("r") == before
    kv.reload("r")
    assert kv.tokens("r") == before


def test_D8_sibling_a_fork_copies_the_committed_tokens_of_a_page_that_the_next_step_writes(
    machines: Any,
) -> None:
    kv = machines(page_size=4)
    kv.ingest("parent", "child")
    first = kv.launched(Segment("parent", span=2), post_forks=[StreamFork(PARENT, CHILD)])
    second = kv.launched(Segment("parent", span=1))
    kv.commit(first)
    kv.commit(second)

    assert kv.last(ForkCopy).copies[0][0][2] == 2
    assert kv.tokens("child") == kv.tokens("parent")[:2]


def test_D8_sibling_a_fetch_writes_behind_the_tokens_that_an_abandoned_offload_reads(machines: Any) -> None:
    kv = machines(page_size=4)
    kv.ingest("r")
    kv.run(Segment("r", span=2))
    before = kv.tokens("r")
    kv.abandon(kv.claim_offload("r"))
    [fetch] = claim_fetch(kv, "r", 4).fetches

    kv.transport.fail(fetch, "lost")
    kv.poll()
    assert kv.tokens("r") == before
    kv.reset("r")


# -- D9


def test_D9_two_threads_that_make_the_first_copy_use_one_order(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8), Segment("s", span=8))
    before = {"r": kv.tokens("r"), "s": kv.tokens("s")}
    start = threading.Barrier(2)
    done: dict[str, Any] = {}

    def mover(request: str) -> None:
        start.wait()
        done[request] = kv.manager.offload(request)

    threads = [threading.Thread(target=mover, args=(request,)) for request in ("r", "s")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert done == {"r": Offloaded("r", 4), "s": Offloaded("s", 4)}
    copies = [op for op in kv.backend.ops if isinstance(op, CopyOut)]
    assert [op.number for op in copies] == sorted({op.number for op in copies}) and len(copies) == 2
    lease = fill(kv, "t")
    assert all(follows(kv.step_of(lease), copy) for copy in copies)
    assert {"r": kv.tokens("r"), "s": kv.tokens("s")} == before


# -- D10


def share(kv: Any, span: int = 16) -> None:
    """Give parent and child the same sealed pages."""
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=span))
    kv.run(Segment("parent", span=0), post_forks=[StreamFork(PARENT, CHILD)])
    assert kv.pages("parent") == kv.pages("child")


def test_D10_the_next_owner_of_a_shared_page_follows_the_use_of_every_past_owner(kv: Any) -> None:
    share(kv)
    assert kv.offload("parent") == Offloaded("parent", 0)
    before = kv.tokens("parent")
    kv.remove("child")
    lease = fill(kv, "s")

    assert follows(kv.step_of(lease), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))
    assert kv.tokens("parent") == before


def test_D10_sibling_the_copy_out_of_a_fork_child(kv: Any) -> None:
    share(kv)
    assert kv.offload("child") == Offloaded("child", 0)
    kv.remove("parent")
    lease = fill(kv, "s")

    assert follows(kv.step_of(lease), kv.last(CopyOut))


def test_D10_sibling_the_copy_out_of_an_orphaned_claim(kv: Any) -> None:
    share(kv)
    claim = kv.claim_offload("child")
    kv.remove("child")
    kv.abandon(claim)
    kv.remove("parent")
    lease = fill(kv, "s")

    assert follows(kv.step_of(lease), kv.last(CopyOut))


def test_D10_sibling_a_step_of_the_child_that_was_aborted(machines: Any) -> None:
    kv = machines(pages=9)
    kv.ingest("parent", "child", "back")
    kv.run(Segment("back", span=18))
    kv.offload("back") if kv.geometry.host_pages >= 9 else kv.remove("back")
    kv.run(Segment("parent", span=4))
    aborted = kv.launched(Segment("child"), pre_forks=[StreamFork(PARENT, CHILD)])
    kv.abort(aborted)
    kv.remove("parent")
    kv.ingest("fetcher")
    claim_fetch(kv, "fetcher", 18)

    assert follows(kv.last(FetchBegin), kv.step_of(aborted))


def test_D10_sibling_the_host_copy_that_two_labels_share(machines: Any) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4), post_forks=FORK)
    kv.run(Segment("s", span=4))
    kv.offload("r")
    assert kv.host_free == 0
    kv.reload("r")
    kv.offload("s")

    assert follows(kv.last(CopyOut), kv.last(CopyIn))
    assert kv.conflicts_without_the_edges_of(kv.last(CopyOut))


@pytest.mark.parametrize("phase", ["pre_forks", "post_forks"])
def test_D10_sibling_the_copy_that_a_fork_made_of_a_last_page(kv: Any, phase: str) -> None:
    kv.ingest("parent", "child", "fetcher")
    kv.run(Segment("parent", span=3))
    kv.run(Segment("child", span=0), **{phase: [StreamFork(PARENT, CHILD)]})
    kv.remove("parent")
    claim_fetch(kv, "fetcher", 2 * kv.device_free)

    assert follows(kv.last(FetchBegin), kv.last(ForkCopy))
    assert kv.conflicts_without_the_edges_of(kv.last(FetchBegin))


def test_D10_sibling_the_use_of_a_stream_that_let_pages_go_by_retention(kv: Any) -> None:
    share(kv, 8)
    keep = {"main": RetentionPolicy(context_budget=2)}
    reader = kv.launched(Segment("child"), retention=keep)
    kv.commit(reader)
    assert kv.stream("child").length < 8
    kv.remove("parent")
    kv.ingest("fetcher")
    claim_fetch(kv, "fetcher", 2 * kv.device_free)

    assert follows(kv.last(FetchBegin), kv.step_of(reader))
    assert kv.conflicts_without_the_edges_of(kv.last(FetchBegin))


def test_D10_sibling_the_use_of_a_stream_that_was_reset_but_keeps_its_own_pages(kv: Any) -> None:
    share(kv, 8)
    kv.run(Segment("child"))
    reader = kv.launched(Segment("child"))
    kv.commit(reader)
    assert kv.reset("child", free=False).pages_kept == 1
    kv.remove("parent")
    kv.ingest("fetcher")
    claim_fetch(kv, "fetcher", 2 * kv.device_free)

    assert follows(kv.last(FetchBegin), kv.step_of(reader))


def test_D10_sibling_pages_kept_by_a_reset_are_entered_like_granted_ones(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    kv.abandon(kv.claim_offload("r"))
    kv.reset("r", free=False)
    lease = kv.launched(Segment("r", span=3))

    assert follows(kv.step_of(lease), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))


# -- D11


def test_D11_a_grant_whose_copy_failed_gives_its_fences_back(machines: Any) -> None:
    kv = machines(host_pages=12)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    kv.offload("r")
    kv.run(Segment("s", span=16))
    kv.offload("s")
    kv.backend.fail_next(CopyIn)
    kv.reload("r")
    lease = fill(kv, "t")

    assert follows(kv.step_of(lease), kv.last(CopyOut))
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease))


@pytest.mark.parametrize("how_far", ["admitted", "planned"])
def test_D11_a_grant_whose_step_never_ran_gives_its_fences_back(kv: Any, how_far: str) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    fences = kv.manager.view().device[0].fences
    lease = kv.admit(Segment("s", span=16))
    if how_far == "planned":
        kv.plan(lease)
    kv.abort(lease)

    assert kv.manager.view().device[0].fences == fences
    lease = fill(kv, "t")
    assert follows(kv.step_of(lease), kv.last(CopyOut))


def test_D11_sibling_grants_of_steps_that_never_ran_and_were_cancelled_from_the_bottom(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=2))
    fences = kv.manager.view().device[0].fences
    staged = [kv.admit(Segment("r", span=2)) for _ in range(3)]
    for lease in staged:
        kv.abort(lease)

    assert kv.manager.view().device[0].fences == fences, "nobody has used them"


def test_D11_sibling_host_pages_of_a_copy_that_failed(machines: Any) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    kv.offload("r")
    kv.reload("r")
    kv.backend.fail_next(CopyOut)
    assert isinstance(kv.offload("s"), Refusal)
    kv.offload("s")

    # The empty op in the place of the failed copy waits too, so the judge could not tell: the edge itself counts.
    assert follows(kv.last(CopyOut), kv.last(CopyIn))


def test_D11_sibling_pages_of_a_fetch_that_was_refused(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=16))
    kv.offload("r")
    kv.transport.refuse = lambda op: True
    claim_fetch(kv, "s", 16)
    assert kv.device_free == 8
    lease = fill(kv, "t")

    assert follows(kv.step_of(lease), kv.last(CopyOut))


# -- D12


def test_D12_a_planned_step_does_not_run_on_pages_that_a_reset_kept(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    old, old_plan = kv.staged(Segment("r"))
    kv.reset("r", free=False)
    kv.run(Segment("r", span=4))
    new = kv.tokens("r")

    with pytest.raises(Refused) as refused:
        kv.launch(old_plan)
    assert isinstance(refused.value.refusal, StalePlan)
    assert kv.tokens("r") == new
    kv.launch(kv.plan(old))
    assert kv.commit(old).dropped == (0,)
    assert kv.tokens("r") == new


def test_D12_sibling_a_planned_step_does_not_run_after_an_eviction_that_was_abandoned(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    _, old_plan = kv.staged(Segment("r"))
    kv.abandon(kv.claim_offload("r", discard_in_flight=True))
    kv.run(Segment("r"))
    new = kv.tokens("r")

    with pytest.raises(Refused):
        kv.launch(old_plan)
    assert kv.tokens("r") == new


def test_D12_sibling_a_step_in_its_launch_keeps_the_next_one_out(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    old, old_plan = kv.staged(Segment("r"))
    with kv.manager.launch(old_plan):
        kv.reset("r", free=False)
        new, new_plan = kv.staged(Segment("r", span=4))
        with pytest.raises(Refused):
            kv.launch(new_plan)
        kv.compute(old_plan)
    assert kv.commit(old).dropped == (0,)
    kv.launch(new_plan)
    kv.commit(new)
    assert len(kv.tokens("r")) == 4


def test_D12_sibling_a_plan_is_stale_after_the_next_plan_of_its_lease(kv: Any) -> None:
    kv.ingest("r")
    lease, first = kv.staged(Segment("r"))
    second = kv.plan(lease)
    with pytest.raises(Refused) as refused:
        kv.launch(first)
    assert refused.value.refusal == StalePlan(request="r", label="main", ended=True)
    kv.launch(second)


# -- D13


def test_D13_pages_under_two_leases_stay_until_both_have_ended(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    n = kv.launched(Segment("r"))
    m = kv.admit(Segment("r", span=2))
    kv.remove("r")
    used = 8 - kv.device_free

    kv.abort(m)
    assert kv.device_free == 8 - used + 1, "only what m had been granted"
    assert kv.commit(n).dropped == (0,)
    assert kv.device_free == 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("verb", ["remove", "reset", "offload"])
def test_D13_sibling_three_leases_end_in_any_order(kv: Any, verb: str, order: tuple[int, ...]) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    pages = kv.pages("r")
    leases = [kv.launched(Segment("r")) for _ in range(3)]
    kv.offload("r", discard_in_flight=True) if verb == "offload" else getattr(kv, verb)("r")

    for place in order:
        assert not set(pages) & set(kv.manager.view().device[0].free), "a launched step may still read them"
        kv.abort(leases[place])
    assert kv.device_free == 8


def test_D13_sibling_pages_that_retention_lets_go_stay_for_the_step_above(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=6))
    first = kv.pages("r")[0]
    below = kv.launched(Segment("r"), retention={"main": RetentionPolicy(context_budget=2)})
    above = kv.launched(Segment("r"))
    kv.commit(below)
    kv.run(Segment.padding(1))

    free = kv.manager.view().device[0].free
    assert first not in free, "held for the step above"
    kv.commit(above)
    assert first in kv.manager.view().device[0].free


def test_D13_sibling_pages_that_a_fork_replaces_stay_for_the_void_step(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=4), Segment("child", span=4))
    old = kv.pages("child")
    below = kv.launched(Segment("child"))
    above = kv.launched(Segment("child"))
    kv.commit(below, (0,))
    kv.run(Segment("parent"), pre_forks=[StreamFork(PARENT, CHILD)])

    assert not set(old) & set(kv.manager.view().device[0].free)
    assert kv.commit(above).dropped == (0,)
    assert set(old) <= set(kv.manager.view().device[0].free)


# -- D14


def test_D14_a_step_takes_its_number_when_its_launch_is_left(bare: Any) -> None:
    bare.ingest("r", "s")
    bare.run(Segment("r", span=3))
    lease = step.admit(bare.state, Step([Segment("s", span=3)]))
    plan = step.plan(bare.state, lease)
    offload.commit_offload(bare.state, offload.claim_offload(bare.state, "r"))
    begin = step.launch_enter(bare.state, plan)
    bare.ingest("t")
    end = step.launch_exit(bare.state, lease)
    bare.drain()

    copy = next(op for op in bare.backend.ops if isinstance(op, CopyOut))
    assert copy.number < begin.number < end.number
    assert [op.number for op in bare.backend.ops] == sorted(op.number for op in bare.backend.ops)


def test_D14_every_edge_names_what_was_submitted_before(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    lease, plan = kv.staged(Segment("s", span=8))
    with kv.manager.launch(plan):
        kv.compute(plan)
        kv.offload("r")
        kv.reload("r")
    kv.commit(lease)
    kv.offload("s")
    kv.run(Segment("r"))

    newest = NOTHING
    for op in kv.backend.ops:
        assert covers(newest, op.after), f"#{op.number} waits for what nobody has submitted"
        if op.queue is not None:
            newest = tuple(max(pair) for pair in zip(newest, at(op.queue, op.number), strict=True))
    assert kv.step_of(lease).number > kv.last(CopyIn).number


def test_D14_sibling_an_offload_does_not_wait_for_a_step_inside_its_launch(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4), Segment("s", span=1))
    lease, plan = kv.staged(Segment("s"))
    with kv.manager.launch(plan):
        kv.compute(plan)
        mover = threading.Thread(target=kv.manager.offload, args=("r",))
        mover.start()
        mover.join()
        assert kv.stream("r").residency == "OnHost"
    kv.commit(lease)


# -- D15


def test_D15_the_plan_after_a_cancelled_one_shows_the_tables_that_are(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3))
    cancelled, plan = kv.staged(Segment("r", span=4))
    assert len(plan.in_step_order[0].pages) == 4
    kv.abort(cancelled)
    kv.run(Segment("s", span=2))

    _, plan = kv.staged(Segment("r", span=4))
    [seen] = plan.in_step_order
    assert seen.pages[:2] == kv.pages("r") and len(seen.pages) == 4
    assert not set(seen.pages) & set(kv.pages("s"))
    assert kv.launch(plan) == [kv.tokens("r")]


def test_D15_sibling_a_cancelled_step_leaves_no_page_in_a_table_it_shared(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    table = kv.pages("r")
    for span in (2, 5, 1):
        lease = kv.admit(Segment("r", span=span))
        kv.abort(lease)
        assert kv.pages("r") == table
    kv.run(Segment("r", span=5))
    assert kv.pages("r")[:2] == table and len(set(kv.pages("r"))) == 4
