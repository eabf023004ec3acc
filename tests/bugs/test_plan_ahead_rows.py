"""Planning ahead: rows S1–S6 of the known bugs, and their siblings.

Stage is admit and plan, promote is launch, cancel is abort.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvstate.errors import Refused
from kvstate.ops import Plan
from kvstate.refusals import AlreadyLaunched, LeaseEnded, NotLaunched, OutOfOrder, StalePlan
from kvstate.state import Lease
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.types import LabelFork, RetentionPolicy, Segment


def refused(kv: Any, plan: Plan) -> Any:
    """Launch a plan that cannot be launched; return why."""
    with pytest.raises(Refused) as error, kv.manager.launch(plan):
        pytest.fail("the model must not run")
    return error.value.refusal


# -- S1


def test_S1_a_second_batch_runs_on_its_own_pages(kv: Any) -> None:
    kv.ingest("a", "b")
    staged, staged_plan = kv.staged(Segment("a", span=3))
    other, other_plan = kv.staged(Segment("b", span=3))

    assert not set(staged_plan.in_step_order[0].pages) & set(other_plan.in_step_order[0].pages)
    assert other_plan.in_step_order[0].request == "b"
    kv.launch(other_plan)
    kv.launch(staged_plan)
    kv.commit(other)
    kv.commit(staged)
    assert kv.tokens("a")[0].startswith("a/main@0") and kv.tokens("b")[0].startswith("b/main@0")


def test_S1_sibling_a_plan_is_of_its_own_lease_whichever_was_staged_last(kv: Any) -> None:
    kv.ingest("a", "b")
    first = kv.admit(Segment("a"))
    second = kv.admit(Segment("b"))

    assert [kv.plan(lease).in_step_order[0].request for lease in (first, second, first)] == ["a", "b", "a"]


def test_S1_sibling_a_staged_step_starts_where_the_one_below_ends(kv: Any) -> None:
    kv.ingest("r")
    below, plan_below = kv.staged(Segment("r", span=3))
    above, plan_above = kv.staged(Segment("r", span=2))

    [low], [high] = plan_below.in_step_order, plan_above.in_step_order
    assert (low.start, low.length, high.start, high.length) == (0, 3, 3, 5)
    assert high.pages[:2] == low.pages
    assert refused(kv, plan_above) == OutOfOrder(request="r", label="main")
    [context_below], [context_above] = kv.launch(plan_below), kv.launch(plan_above)
    kv.commit(below)
    assert (context_below, context_above) == ([], kv.tokens("r"))
    kv.commit(above)
    assert len(kv.tokens("r")) == 5


def test_S1_sibling_steps_of_one_stream_commit_in_the_order_of_their_admission(kv: Any) -> None:
    kv.ingest("r", "s")
    below, above = kv.launched(Segment("r", span=3)), kv.launched(Segment("r"), Segment("s"))
    before = kv.manager.view()

    assert kv.commit(above) == OutOfOrder(request="r", label="main")
    assert kv.manager.view() == before
    kv.commit(below)
    assert kv.commit(above).dropped == ()
    assert (len(kv.tokens("r")), len(kv.tokens("s"))) == (4, 1)


# -- S2


def test_S2_a_cancelled_step_leaves_no_label_and_no_page(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.manager.view().unordered()
    lease, _ = kv.staged(Segment("r", span=3), Segment("r", "new", 2), post_forks=(LabelFork("main", "copy"),))
    assert kv.device_free < 6
    kv.abort(lease)

    assert kv.manager.view().unordered() == before


@pytest.mark.parametrize("cut", ["main", "new"])
def test_S2_sibling_cancelled_over_and_over_from_the_top(kv: Any, cut: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=1))
    before = kv.manager.view().unordered()
    leases = [kv.staged(Segment("r", span=1), Segment("r", "new", 1))[0] for _ in range(4)]
    leases.append(kv.staged(Segment("r", cut, 0))[0])
    for lease in reversed(leases):
        kv.abort(lease)

    assert kv.manager.view().unordered() == before


def test_S2_sibling_cancelled_from_the_bottom(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=1))
    before = kv.manager.view().unordered()
    leases = [kv.staged(Segment("r", span=1), Segment("r", "new", 1))[0] for _ in range(4)]
    for lease in leases:
        kv.abort(lease)

    after = kv.manager.view().unordered()
    assert (after.streams, after.leases) == (before.streams, before.leases)
    assert [(pool.free, pool.owners) for pool in after.device] == [(pool.free, pool.owners) for pool in before.device]


def test_S2_sibling_a_label_stays_while_another_step_opens_it(kv: Any) -> None:
    kv.ingest("r")
    first = kv.launched(Segment("r", "new", 1))
    second = kv.admit(Segment("r", "new", 1))
    kv.abort(second)
    kv.commit(first)

    assert len(kv.tokens("r", "new")) == 1


# -- S3


def test_S3_a_step_that_another_thread_cancelled_does_not_run(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    lease, plan = kv.staged(Segment("r", span=2))
    other = threading.Thread(target=kv.abort, args=(lease,))
    other.start()
    other.join()

    assert kv.plan(lease) == StalePlan(request="r", label="main", ended=True)
    assert refused(kv, plan) == StalePlan(request="r", label="main", ended=True)
    assert kv.commit(lease) == kv.abort(lease) == LeaseEnded(request="r", label="main")
    assert (kv.tokens("r"), kv.device_free) == (before, 6)


def test_S3_sibling_a_step_cancelled_inside_its_launch_ends_at_its_exit(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    lease, plan = kv.staged(Segment("r", span=2))
    with kv.manager.launch(plan):
        other = threading.Thread(target=kv.manager.abort, args=(lease,))
        other.start()
        other.join()
        assert kv.device_free == 5, "its kernels may still be submitted"
        kv.compute(plan)
    assert kv.commit(lease) == LeaseEnded(request="r", label="main")
    assert (kv.tokens("r"), kv.device_free) == (before, 6)


def test_S3_sibling_a_lease_has_one_life(kv: Any) -> None:
    kv.ingest("r")
    lease, plan = kv.staged(Segment("r"))
    assert kv.commit(lease) == NotLaunched(request="r", label="main")
    kv.launch(plan)
    assert refused(kv, plan) == AlreadyLaunched(request="r", label="main")
    assert kv.plan(lease) == AlreadyLaunched(request="r", label="main")
    kv.commit(lease)
    assert kv.commit(lease) == kv.abort(lease) == LeaseEnded(request="r", label="main")
    assert refused(kv, plan) == StalePlan(request="r", label="main", ended=True)
    assert len(kv.tokens("r")) == 1


# -- S4


def test_S4_cancelling_the_second_of_two_leaves_the_first(kv: Any) -> None:
    kv.ingest("r", "s")
    first, plan = kv.staged(Segment("r", span=3))
    second, _ = kv.staged(Segment("r", span=2), Segment("s"))
    kv.abort(second)

    kv.launch(plan)
    assert kv.commit(first).dropped == ()
    assert (len(kv.tokens("r")), kv.device_free) == (3, 6)


def test_S4_cancelling_the_first_of_two_undoes_its_marks_and_voids_what_stood_on_it(kv: Any) -> None:
    kv.ingest("r", "s")
    first, _ = kv.staged(Segment("r", span=3))
    second, plan = kv.staged(Segment("r", span=2), Segment("s"))
    kv.abort(first)

    assert refused(kv, plan) == StalePlan(request="r", label="main", void=(0,))
    kv.launch(kv.plan(second))
    assert kv.commit(second).dropped == (0,)
    assert (kv.tokens("r"), len(kv.tokens("s")), kv.device_free) == ([], 1, 7)
    assert kv.offload("r") == Offloaded("r", 0), "no mark of the first is left"


def test_S4_sibling_fewer_accepted_tokens_void_what_stood_on_all_of_them(kv: Any) -> None:
    kv.ingest("r")
    below = kv.launched(Segment("r", span=3))
    above = kv.launched(Segment("r", span=2))
    kv.commit(below, (2,))
    kept = kv.tokens("r")

    assert kv.commit(above).dropped == (0,)
    assert kv.tokens("r") == kept and len(kept) == 2
    again, plan = kv.staged(Segment("r", span=1))
    assert plan.in_step_order[0].start == 2
    assert kv.launch(plan) == [kept]
    kv.commit(again)


def test_S4_sibling_a_base_that_turns_out_as_assumed_changes_nothing(kv: Any) -> None:
    kv.ingest("r")
    keep = {"main": RetentionPolicy(context_budget=2)}
    below = kv.launched(Segment("r", span=5), retention=keep)
    above, plan = kv.staged(Segment("r", span=1))
    assert (plan.in_step_order[0].start, plan.in_step_order[0].position) == (3, 5)
    kv.commit(below)
    assert kv.stream("r").length == 3

    assert kv.launch(plan) == [kv.tokens("r")]
    assert kv.commit(above).dropped == ()


# -- S5


@pytest.mark.parametrize("verb", ["remove", "reset"])
def test_S5_a_request_that_left_a_staged_step_addresses_no_freed_page(kv: Any, verb: str) -> None:
    kv.ingest("r", "s", "t")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    lease, plan = kv.staged(Segment("r"), Segment("s"))
    getattr(kv, verb)("r")
    kv.run(Segment("t", span=2 * kv.device_free))
    t = kv.tokens("t")

    assert refused(kv, plan) == StalePlan(request="r", label="main", void=(0,))
    plan = kv.plan(lease)
    assert isinstance(plan, Plan)
    assert plan.in_step_order[0].sink and plan.in_step_order[0].pages == (8,)
    kv.launch(plan)
    assert kv.commit(lease).dropped == (0,)
    assert (kv.tokens("t"), len(kv.tokens("s"))) == (t, 4)


def test_S5_sibling_a_staged_step_whose_request_is_ingested_anew_is_not_its_step(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    lease, plan = kv.staged(Segment("r"))
    kv.remove("r")
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    new = kv.tokens("r")

    assert isinstance(refused(kv, plan), StalePlan)
    kv.launch(kv.plan(lease))
    assert kv.commit(lease).dropped == (0,)
    assert kv.tokens("r") == new


def test_S5_sibling_the_staged_step_above_drops_it_too(kv: Any) -> None:
    kv.ingest("r", "s")
    first, plan_first = kv.staged(Segment("r"), Segment("s"))
    second, plan_second = kv.staged(Segment("r"), Segment("s"))
    kv.launch(plan_first)
    kv.remove("r")
    kv.commit(first)

    assert isinstance(refused(kv, plan_second), StalePlan)
    kv.launch(kv.plan(second))
    assert kv.commit(second).dropped == (0,)
    assert len(kv.tokens("s")) == 2


# -- S6


def test_S6_a_cancel_between_claim_and_commit_rewinds_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    lease, _ = kv.staged(Segment("r", span=2))
    claim = kv.claim_offload("r", discard_in_flight=True)
    generation = kv.stream("r").generation
    kv.abort(lease)

    assert kv.stream("r").generation == generation
    assert kv.commit_claim(claim) == Offloaded("r", 2)
    assert kv.stream("r").generation > generation
    assert (kv.tokens("r"), kv.device_free) == (before, 8)


def test_S6_a_claim_does_not_survive_a_reset_whatever_is_cancelled_after_it(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    staged, _ = kv.staged(Segment("r", span=1))
    generation = kv.stream("r").generation
    claim = kv.claim_offload("r", discard_in_flight=True)
    kv.reset("r")
    again = kv.admit(Segment("r", span=3))
    assert isinstance(again, Lease)
    kv.abort(staged)
    kv.abort(again)

    assert kv.stream("r").generation > generation
    assert kv.commit_claim(claim) == Abandoned("r", orphaned=True)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == ([], 8, 8)


def test_S6_sibling_generations_only_rise(kv: Any) -> None:
    kv.ingest("r")
    seen = [kv.stream("r").generation]

    def note() -> None:
        seen.append(kv.stream("r").generation)

    for program in (
        lambda: kv.run(Segment("r", span=3)),
        lambda: kv.abort(kv.admit(Segment("r"))),
        lambda: kv.abort(kv.launched(Segment("r"))),
        lambda: kv.abandon(kv.claim_offload("r")),
        lambda: kv.offload("r"),
        lambda: kv.abandon(kv.claim_reload("r")),
        lambda: kv.reload("r"),
        lambda: kv.reset("r", False),
        lambda: kv.run(Segment("r", span=1), commit=False),
    ):
        program()
        note()
    assert seen == sorted(seen) and seen[-1] > seen[0]
