"""Offload, reload, removal: rows O1–O15 of the known bugs, one schedule each, and their siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstate.errors import AcceptedMismatch, Refused, SubmitError
from kvstate.ops import CopyIn, CopyOut, ForkCopy
from kvstate.refusals import (
    ClaimEnded,
    CopyFailed,
    HostExhausted,
    LeaseEnded,
    NoHostPool,
    NotOnHost,
    PagesExhausted,
    StalePlan,
    StreamBusy,
    StreamNotOnDevice,
    UnknownRequest,
)
from kvstate.state import Lease, OffloadClaim, ReloadClaim
from kvstate.transitions import lifecycle, offload
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import Geometry, LabelFork, Publication, Record, Segment, Step, StreamFork, StreamId

FORK = (LabelFork("main", "cfg"),)


def fetch(kv: Any, request: str, length: int) -> Any:
    """Start a fetch of `length` tokens from a publisher that nobody reaches; return it."""
    record = Record(length, 0, kv.geometry.page_size, (tuple(range(length)),), False, "elsewhere", 1, 0)
    return kv.claim_retrieve(request, Publication(request, 1, {0: {"main": record}})).fetches[0]


# -- O1


def test_O1_a_reload_inside_an_offload_gets_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    claim = kv.claim_offload("r")
    inside = kv.manager.view()

    assert kv.reload("r") == NotOnHost(request="r", label="main", residency="Offloading")
    assert kv.manager.view() == inside
    assert kv.commit_claim(claim) == Offloaded("r", 2)
    assert kv.tokens("r") == before
    assert kv.reload("r") == Reloaded("r", 2)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == (before, 6, 8)


def test_O1_sibling_an_offload_inside_a_reload_gets_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    kv.offload("r")
    claim = kv.claim_reload("r")

    assert kv.claim_offload("r") == StreamNotOnDevice(request="r", label="main", residency="Reloading")
    assert kv.commit_claim(claim) == Reloaded("r", 2)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == (before, 6, 8)


def test_O1_sibling_one_request_has_one_claim_and_no_step_until_it_ends(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    claim = kv.claim_offload("r")

    for away in (kv.claim_offload("r"), kv.admit(Segment("r")), kv.admit(Segment("r", "new", 1))):
        assert isinstance(away, StreamNotOnDevice) and away.residency == "Offloading"
    assert kv.abandon(claim) == Abandoned("r", orphaned=False)
    assert isinstance(kv.admit(Segment("r")), Lease)


# -- O2


def make_the_namesake(kv: Any, generation: int) -> list[str]:
    """Remove r, ingest it anew, and step until the new stream has the old one's generation."""
    kv.remove("r")
    kv.ingest("r")
    while kv.stream("r").generation < generation:
        kv.run(Segment("r"))
    assert kv.stream("r").generation == generation
    return kv.tokens("r")


def test_O2_a_late_offload_commit_does_not_touch_the_namesake(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=2))
    kv.run(Segment("r", span=1))
    generation = kv.stream("r").generation
    claim = kv.claim_offload("r")
    new = make_the_namesake(kv, generation)

    assert kv.commit_claim(claim) == Abandoned("r", orphaned=True)
    assert kv.tokens("r") == new and kv.stream("r").residency == "OnDevice"
    assert (kv.device_free, kv.host_free) == (7, 8)
    assert kv.commit_claim(claim) == kv.abandon(claim) == ClaimEnded(request="r")


@pytest.mark.parametrize("end", ["commit_claim", "abandon"])
def test_O2_sibling_a_late_reload_does_not_touch_the_namesake(kv: Any, end: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=2))
    kv.run(Segment("r", span=1))
    kv.offload("r")
    generation = kv.stream("r").generation
    claim = kv.claim_reload("r")
    new = make_the_namesake(kv, generation)

    assert getattr(kv, end)(claim) == Abandoned("r", orphaned=True)
    assert kv.tokens("r") == new
    assert (kv.device_free, kv.host_free) == (8 - len(kv.pages("r")), 8)


def test_O2_sibling_a_late_abandon_does_not_bring_pages_to_the_namesake(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    claim = kv.claim_offload("r")
    new = make_the_namesake(kv, kv.stream("r").generation + 1)

    assert kv.abandon(claim) == Abandoned("r", orphaned=True)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == (new, 7, 8)


def test_O2_sibling_a_late_landing_does_not_touch_the_namesake(kv: Any) -> None:
    kv.ingest("r")
    old = fetch(kv, "r", 4)
    new = make_the_namesake(kv, 1)

    kv.transport.fail(old, "too late")
    kv.poll()
    assert (kv.tokens("r"), kv.device_free) == (new, 7)
    assert isinstance(kv.admit(Segment("r")), Lease)


@pytest.mark.parametrize("end", ["commit_claim", "abandon"])
def test_O2_sibling_a_claim_orphaned_by_reset_returns_its_own_pages_only(kv: Any, end: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    claim = kv.claim_offload("r")
    kv.reset("r")
    kv.run(Segment("r", span=1))
    lease, plan = kv.staged(Segment("r"))
    new = kv.tokens("r")

    assert getattr(kv, end)(claim) == Abandoned("r", orphaned=True)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == (new, 7, 8)
    kv.launch(plan)
    assert kv.commit(lease).dropped == ()


# -- O3


def test_O3_a_copy_submitted_after_remove_leaks_no_host_page(bare: Any) -> None:
    bare.ingest("r")
    bare.run(Segment("r", span=3))
    old = offload.claim_offload(bare.state, "r")
    lifecycle.remove(bare.state, "r")
    bare.drain()
    bare.ingest("r")
    bare.run(Segment("r", span=2))
    new = offload.claim_offload(bare.state, "r")
    bare.drain()

    assert offload.commit_offload(bare.state, new) == Offloaded("r", 1)
    assert offload.commit_offload(bare.state, old) == Abandoned("r", orphaned=True)
    assert bare.state.host.free() == (7,)
    assert [token.split("#")[0] for token in bare.tokens("r")] == ["r/main@0", "r/main@1"]


def test_O3_sibling_a_failed_copy_of_a_removed_request_leaks_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    kv.backend.fail_next(CopyOut)
    claim = kv.claim_offload("r")
    kv.remove("r")

    assert isinstance(kv.commit_claim(claim), CopyFailed)
    assert kv.abandon(claim) == Abandoned("r", orphaned=True)
    assert (kv.device_free, kv.host_free) == (8, 8)


# -- O4


def test_O4_remove_inside_the_offload_of_two_labels_leaves_a_scheduler_with_a_value(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    claim = kv.claim_offload("r")
    kv.remove("r")

    assert kv.reload("r") == UnknownRequest(request="r")
    assert kv.commit_claim(claim) == Abandoned("r", orphaned=True)
    assert kv.reload("r") == UnknownRequest(request="r")
    assert (kv.device_free, kv.host_free) == (8, 8)


def test_O4_sibling_remove_inside_the_reload_of_two_labels(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    kv.offload("r")
    claim = kv.claim_reload("r")
    kv.remove("r")

    assert (kv.device_free, kv.host_free) == (5, 5)
    assert kv.commit_claim(claim) == Abandoned("r", orphaned=True)
    assert (kv.device_free, kv.host_free) == (8, 8)


def test_O4_sibling_every_verb_on_a_request_already_gone_says_so(kv: Any) -> None:
    kv.ingest("r")
    kv.remove("r")
    gone = kv.manager.view()

    for said in (kv.offload("r"), kv.reload("r"), kv.reset("r"), kv.remove("r"), kv.cancel_retrieve("r")):
        assert isinstance(said, UnknownRequest)
    assert (kv.reclaimable("r"), kv.publish("r")) == (0, None)
    assert kv.manager.view() == gone


# -- O5


@pytest.mark.parametrize("free", [True, False])
def test_O5_a_reset_erases_the_host_copy_too(kv: Any, free: bool) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    kv.offload("r")
    kv.reset("r", free)

    assert kv.reload("r") == NotOnHost(request="r", label="main", residency="OnDevice")
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == ([], [])
    assert (kv.device_free, kv.host_free) == (8, 8)


def test_O5_sibling_a_reset_inside_an_offload_erases_the_copy_under_way(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    claim = kv.claim_offload("r")
    kv.reset("r")
    kv.commit_claim(claim)

    assert isinstance(kv.reload("r"), NotOnHost)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == ([], 8, 8)


@pytest.mark.parametrize("end", ["commit_claim", "abandon"])
def test_O5_sibling_a_reset_inside_a_reload_erases_what_comes_back(kv: Any, end: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    kv.offload("r")
    claim = kv.claim_reload("r")
    kv.reset("r")
    getattr(kv, end)(claim)

    assert isinstance(kv.reload("r"), NotOnHost)
    assert (kv.tokens("r"), kv.device_free, kv.host_free) == ([], 8, 8)


# -- O6


def test_O6_a_forward_that_raises_does_not_pin_the_request(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    lease, plan = kv.staged(Segment("r", span=2))

    with pytest.raises(ZeroDivisionError), kv.manager.launch(plan):
        raise ZeroDivisionError
    assert kv.commit(lease) == kv.abort(lease) == LeaseEnded(request="r", label="main")
    assert kv.device_free == 6
    assert kv.reclaimable("r") == 2
    assert kv.offload("r") == Offloaded("r", 2)
    assert kv.tokens("r") == before


@pytest.mark.parametrize("how_far", ["admitted", "planned", "launched"])
def test_O6_sibling_abort_ends_a_lease_wherever_it_is(kv: Any, how_far: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.manager.view().unordered()
    lease = kv.admit(Segment("r", span=2))
    if how_far != "admitted":
        plan = kv.plan(lease)
    if how_far == "launched":
        kv.launch(plan)

    assert kv.offload("r") == StreamBusy(request="r", label="main")
    kv.abort(lease)
    after = kv.manager.view().unordered()
    assert [s.device for s in after.streams] == [s.device for s in before.streams]
    assert after.device[0].free == before.device[0].free
    assert kv.offload("r") == Offloaded("r", 2)


def test_O6_sibling_a_fork_copy_that_cannot_be_submitted_ends_its_lease(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    _, plan = kv.staged(Segment("r", "cfg"), pre_forks=FORK)
    kv.backend.fail_next(ForkCopy)

    with pytest.raises(SubmitError), kv.manager.launch(plan):
        pytest.fail("the model must not run")
    assert kv.stream("r", "cfg") is None
    assert kv.offload("r") == Offloaded("r", 2)


# -- O7


def test_O7_an_offload_waits_for_every_open_lease(kv: Any) -> None:
    kv.ingest("r", "other")
    kv.run(Segment("r", span=1))
    first, plan_first = kv.staged(Segment("r", span=1))
    second, plan_second = kv.staged(Segment("r", span=2))
    kv.launch(plan_first)
    kv.commit(first)

    assert kv.offload("r") == StreamBusy(request="r", label="main")
    assert kv.reclaimable("r") == 0
    kv.run(Segment("other", span=10))
    assert kv.launch(plan_second) == [kv.tokens("r")]
    kv.commit(second)
    before = kv.tokens("r")
    assert len(before) == 4
    assert kv.offload("r") == Offloaded("r", 2)
    assert kv.tokens("r") == before


@pytest.mark.parametrize(
    "step",
    [
        Step([Segment("r", span=0)]),
        Step([Segment("r", span=1)], commit=False),
        Step([Segment("s")], pre_forks=[StreamFork(StreamId("r"), StreamId("s"))]),
        Step([Segment("s")], pre_forks=[StreamFork(StreamId("s"), StreamId("r"))]),
        Step([Segment("s")], post_forks=[StreamFork(StreamId("r"), StreamId("s", "copy"))]),
        Step([Segment("s")], post_forks=[StreamFork(StreamId("s"), StreamId("r", "copy"))]),
    ],
    ids=["zero span", "no commit", "pre-fork source", "pre-fork target", "post-fork source", "post-fork target"],
)
def test_O7_sibling_whatever_a_step_names_holds_off_an_offload(kv: Any, step: Step) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    lease = kv.manager.admit(step)

    assert isinstance(kv.offload("r"), StreamBusy)
    assert kv.reclaimable("r") == 0
    kv.launch(kv.plan(lease))
    assert isinstance(kv.offload("r"), StreamBusy)
    kv.commit(lease)
    assert isinstance(kv.offload("r"), Offloaded)


def test_O7_sibling_three_planned_steps_end_one_by_one(kv: Any) -> None:
    kv.ingest("r")
    staged = [kv.staged(Segment("r")) for _ in range(3)]
    for lease, plan in staged:
        assert isinstance(kv.offload("r"), StreamBusy)
        kv.launch(plan)
        kv.commit(lease)
    assert kv.offload("r") == Offloaded("r", 2)


# -- O8


@pytest.mark.parametrize("verb", ["reset", "remove"])
def test_O8_what_empties_a_request_drops_its_segment_and_nothing_else(kv: Any, verb: str) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=1))
    lease, plan = kv.staged(Segment("r", span=2), Segment("s", span=2))
    getattr(kv, verb)("r")

    with pytest.raises(Refused) as refused:
        kv.launch(plan)
    assert refused.value.refusal == StalePlan(request="r", label="main", void=(0,))
    plan = kv.plan(lease)
    assert [seen.sink for seen in plan.in_step_order] == [True, False]
    kv.launch(plan)
    done = kv.commit(lease)
    assert [(s.request, s.stored, s.dropped) for s in done.segments] == [("r", 0, True), ("s", 2, False)]
    assert kv.tokens("s")[0].startswith("s/main@0") and len(kv.tokens("s")) == 3
    assert kv.stream("r") is None if verb == "remove" else kv.tokens("r") == []
    assert kv.device_free == 6


@pytest.mark.parametrize("verb", ["reset", "remove"])
def test_O8_sibling_a_step_in_flight_keeps_the_pages_it_may_touch(kv: Any, verb: str) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3))
    lease = kv.launched(Segment("r", span=2), Segment("s"))
    free = kv.device_free

    assert getattr(kv, verb)("r").pages_released == 0
    assert kv.device_free == free
    assert kv.commit(lease).dropped == (0,)
    assert kv.device_free == 7


def test_O8_sibling_an_eviction_with_discard_in_flight_drops_the_segment(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3))
    before = kv.tokens("r")
    lease = kv.launched(Segment("r", span=2), Segment("s"))

    assert kv.offload("r", discard_in_flight=True) == Offloaded("r", 0)
    assert kv.commit(lease).dropped == (0,)
    assert (kv.tokens("r"), kv.device_free) == (before, 7)


def test_O8_sibling_a_planned_step_above_an_aborted_one_is_dropped(kv: Any) -> None:
    kv.ingest("r", "s")
    below = kv.admit(Segment("r", span=3))
    above, plan = kv.staged(Segment("r", span=1), Segment("s"))
    kv.abort(below)

    with pytest.raises(Refused):
        kv.launch(plan)
    kv.launch(kv.plan(above))
    assert kv.commit(above).dropped == (0,)
    assert (kv.tokens("r"), len(kv.tokens("s")), kv.device_free) == ([], 1, 7)


# -- O9


def test_O9_a_host_pool_that_fits_one_of_two_labels_takes_none(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=3)
    kv.ingest("r")
    kv.run(Segment("r", span=4), Segment("r", "cfg", 4))
    before = kv.manager.view()

    assert kv.offload("r") == HostExhausted(request="r", short=(1,))
    assert kv.manager.view() == before
    assert isinstance(kv.admit(Segment("r"), Segment("r", "cfg")), Lease)


def test_O9_sibling_shared_pages_count_and_move_once(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=3)
    kv.ingest("r")
    kv.run(Segment("r", span=3), post_forks=FORK)
    tokens = kv.tokens("r"), kv.tokens("r", "cfg")

    assert kv.offload("r") == Offloaded("r", 3)
    assert (kv.host_free, len(kv.last(CopyOut).copies[0])) == (0, 3)
    assert kv.reload("r") == Reloaded("r", 4)
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == tokens
    assert kv.device_free == 5, "sharing inside the request is kept"


def test_O9_sibling_a_device_that_fits_one_of_two_labels_takes_none(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4), Segment("r", "cfg", 4))
    tokens = kv.tokens("r"), kv.tokens("r", "cfg")
    kv.offload("r")
    kv.run(Segment("s", span=10))
    before = kv.manager.view()

    assert kv.reload("r") == PagesExhausted(request="r", short=(1,))
    assert kv.manager.view() == before
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == tokens


def test_O9_sibling_no_label_of_a_request_runs_while_another_is_away(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=4), Segment("r", "cfg", 4))
    kv.offload("r")

    for label in ("main", "cfg", "never opened"):
        assert kv.admit(Segment("r", label)) == StreamNotOnDevice(request="r", label=label, residency="OnHost")


def test_O9_sibling_a_reload_holds_pages_for_the_next_step_or_takes_nothing(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4))
    kv.offload("r")
    kv.run(Segment("s", span=12))
    step = Step([Segment("r", span=1), Segment("r", "cfg", 1)])

    assert kv.reload("r", step) == PagesExhausted(request="r", short=(2,))
    kv.reset("s")
    assert kv.reload("r", step) == Reloaded("r", 4)
    kv.run(Segment("s", span=8))
    assert kv.device_free == 0
    assert isinstance(kv.manager.admit(step), Lease), "the pages were held for it"


# -- O10


def test_O10_a_copy_out_that_fails_leaves_everything_on_the_device(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    tokens = kv.tokens("r"), kv.tokens("r", "cfg")
    kv.backend.fail_next(CopyOut)

    assert isinstance(kv.offload("r"), CopyFailed)
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == tokens
    assert (kv.device_free, kv.host_free, kv.claims()) == (5, 8, ())
    assert kv.run(Segment("r")).dropped == ()
    assert kv.offload("r") == Offloaded("r", 3)


def test_O10_a_copy_in_that_fails_leaves_everything_on_the_host(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    tokens = kv.tokens("r"), kv.tokens("r", "cfg")
    kv.offload("r")
    kv.backend.fail_next(CopyIn)

    assert isinstance(kv.reload("r"), CopyFailed)
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == tokens
    assert (kv.device_free, kv.host_free, kv.claims()) == (8, 5, ())
    assert isinstance(kv.admit(Segment("r")), StreamNotOnDevice)
    assert isinstance(kv.reload("r"), Reloaded)
    assert (kv.tokens("r"), kv.tokens("r", "cfg")) == tokens


def test_O10_sibling_a_failed_copy_cannot_be_committed_only_abandoned(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    for copy, claim in ((CopyOut, kv.claim_offload), (CopyIn, kv.claim_reload)):
        kv.backend.fail_next(copy)
        failed = claim("r")
        assert isinstance(failed, OffloadClaim | ReloadClaim)
        assert isinstance(kv.commit_claim(failed), CopyFailed)
        assert kv.abandon(failed) == Abandoned("r", orphaned=False)
        kv.offload("r")
    assert len(kv.tokens("r")) == 3


def test_O10_sibling_a_failed_fork_copy_after_commit_empties_only_its_own_target(kv: Any) -> None:
    kv.ingest("a", "b", "c", "d")
    kv.run(Segment("a", span=3), Segment("b", span=3), Segment("c", span=2))
    b = kv.tokens("b")
    lease = kv.launched(
        Segment("a"),
        Segment("c"),
        post_forks=[StreamFork(StreamId("a"), StreamId("b")), StreamFork(StreamId("c"), StreamId("d"))],
    )
    kv.reset("a")
    kv.backend.fail_next(ForkCopy)
    kv.commit(lease)

    assert kv.tokens("d") == [], "its last page was never copied"
    assert kv.tokens("b") == b, "its fork was dropped, nothing was to be copied"
    assert len(kv.tokens("c")) == 3


# -- O11


def test_O11_a_batch_does_not_fail_because_one_request_left(kv: Any) -> None:
    kv.ingest("a", "b", "c")
    lease = kv.launched(Segment("a"), Segment("b"), Segment("c"))
    kv.remove("b")

    done = kv.commit(lease)
    assert [(s.request, s.stored, s.dropped) for s in done.segments] == [
        ("a", 1, False),
        ("b", 0, True),
        ("c", 1, False),
    ]
    again = kv.run(Segment("a"), Segment("c"))
    assert again.dropped == () and len(kv.tokens("a")) == len(kv.tokens("c")) == 2
    assert isinstance(kv.offload("c"), Offloaded)


@pytest.mark.parametrize("accepted", [(1,), (1, 3, 1), (1, -1, 1), (1, True, 1), (1, 1, 1, 1)])
def test_O11_sibling_a_commit_that_cannot_be_commits_nothing(kv: Any, accepted: tuple[int, ...]) -> None:
    kv.ingest("a", "b", "c")
    lease = kv.launched(Segment("a"), Segment("b", span=2), Segment("c"))
    before = kv.manager.view()

    with pytest.raises(AcceptedMismatch):
        kv.manager.commit(lease, accepted)
    assert kv.manager.view() == before
    assert kv.commit(lease, (1, 1, 1)).dropped == ()


# -- O12


def test_O12_a_full_host_pool_costs_no_device_page(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    tokens = kv.tokens("s")
    assert kv.offload("r") == Offloaded("r", 2)

    assert kv.offload("s") == HostExhausted(request="s", short=(2,))
    assert (kv.tokens("s"), kv.device_free) == (tokens, 6)


def test_O12_sibling_without_a_host_pool_nothing_moves(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=0)
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    tokens = kv.tokens("r")

    assert kv.offload("r") == NoHostPool(request="r")
    assert (kv.tokens("r"), kv.manager.supports_offload) == (tokens, False)


# -- O13


def test_O13_a_victim_under_a_lease_promises_and_gives_nothing(kv: Any) -> None:
    kv.ingest("v1", "v2", "v3")
    for victim in ("v1", "v2", "v3"):
        kv.run(Segment(victim, span=3))
    lease = kv.launched(Segment("v1"), Segment("v2"), Segment("v3"))

    assert [kv.reclaimable(victim) for victim in ("v1", "v2", "v3")] == [0, 0, 0]
    assert kv.manager.offload_order() == ()
    assert [kv.offload(v, discard_in_flight=True).pages_released for v in ("v1", "v2")] == [0, 0]
    assert kv.device_free == 2
    kv.commit(lease)
    assert kv.device_free == 6, "what was evicted came free with the step's end, and no page earlier"


def test_O13_sibling_pages_that_others_share_are_no_gain(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=5), post_forks=[StreamFork(StreamId("parent"), StreamId("child"))])

    assert (kv.reclaimable("parent"), kv.reclaimable("child")) == (1, 1)
    assert kv.offload("parent") == Offloaded("parent", 1)
    assert kv.reclaimable("child") == 3, "now they are its alone"
    assert kv.offload("child") == Offloaded("child", 3)


def test_O13_sibling_a_request_being_moved_is_no_victim(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    claim = kv.claim_offload("r")
    assert (kv.reclaimable("r"), kv.manager.offload_order()) == (0, ("s",))
    kv.commit_claim(claim)
    assert kv.reclaimable("r") == 0
    claim = kv.claim_reload("r")
    assert kv.reclaimable("r") == 0
    kv.commit_claim(claim)
    assert kv.reclaimable("r") == 2


def test_O13_sibling_a_pending_fetch_makes_no_victim(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    pending = fetch(kv, "r", 5)

    assert (kv.reclaimable("r"), kv.manager.offload_order()) == (0, ())
    kv.transport.fail(pending, "gone")
    assert kv.reclaimable("r") == 0, "a failed fetch is reset, not offloaded"
    kv.reset("r")


def test_O13_sibling_what_reclaimable_says_is_what_an_offload_gives(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    below = kv.admit(Segment("r", "cfg", 2))
    kv.admit(Segment("r", "cfg", 1))
    kv.abort(below)

    promised = kv.reclaimable("r")
    assert kv.offload("r") == Offloaded("r", promised)


# -- O14


def test_O14_host_pages_under_a_copy_go_to_nobody_else(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=3), Segment("s", span=3))
    claim = kv.claim_offload("r")

    assert kv.offload("s") == HostExhausted(request="s", short=(2,))
    kv.remove("r")
    assert kv.offload("s") == HostExhausted(request="s", short=(2,)), "the copy still runs"
    kv.commit_claim(claim)
    tokens = kv.tokens("s")
    assert kv.offload("s") == Offloaded("s", 2)
    assert kv.tokens("s") == tokens


def test_O14_sibling_device_pages_under_a_copy_go_to_nobody_else(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    kv.offload("r")
    claim = kv.claim_reload("r")
    kv.remove("r")

    assert kv.admit(Segment("s", span=9)) == PagesExhausted(request="s", label="main", short=(1,))
    kv.abandon(claim)
    assert isinstance(kv.admit(Segment("s", span=9)), Lease)


# -- O15


def test_O15_an_offload_keeps_what_it_moves_until_its_commit(kv: Any) -> None:
    kv.ingest("r", "s")
    kv.run(Segment("r", span=12))
    tokens = kv.tokens("r")
    claim = kv.claim_offload("r")

    assert isinstance(kv.admit(Segment("s", span=5)), PagesExhausted)
    kv.commit_claim(claim)
    kv.run(Segment("s", span=5))
    assert kv.tokens("r") == tokens


def test_O15_sibling_a_reload_makes_no_room_from_what_it_moves(machines: Callable[..., Any]) -> None:
    kv = machines(pages=4, host_pages=2)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4))
    tokens = kv.tokens("r")
    kv.offload("r")
    kv.run(Segment("s", span=2))
    claim = kv.claim_reload("r", Step([Segment("r", span=1)]))

    assert (kv.device_free, kv.host_free) == (0, 0)
    assert isinstance(kv.offload("s"), HostExhausted), "the host pages are the reload's input"
    kv.commit_claim(claim)
    assert kv.tokens("r") == tokens


def test_O15_sibling_a_fork_makes_no_room_from_its_target(machines: Callable[..., Any]) -> None:
    kv = machines(pages=4)
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=4), Segment("child", span=4))
    before = kv.manager.view()

    refused = kv.admit(Segment("child"), pre_forks=[StreamFork(StreamId("parent"), StreamId("child"))])
    assert refused == PagesExhausted(request="child", label="main", short=(1,))
    assert kv.manager.view() == before, "the child's own pages leave at commit, and not before"


def test_O15_sibling_geometry_without_a_page_for_the_sink_still_has_one(machines: Callable[..., Any]) -> None:
    kv = machines(pages=1, host_pages=0)
    kv.ingest("r")
    kv.run(Segment("r", span=2), Segment.padding(3))
    assert (len(kv.tokens("r")), kv.device_free) == (2, 0)
    assert kv.geometry == Geometry(pages=1, page_size=2)
