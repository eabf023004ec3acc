"""The reference does what each numbered sentence of spec/README.md says, and random walks of it keep its own books."""

import random
from typing import Any

import attrs
import pytest

from kvstate.prefix import page_keys
from kvstate.refusals import (
    AlreadyLaunched,
    ClaimEnded,
    ConfigConflict,
    CopyFailed,
    FetchFailed,
    FetchPending,
    ForkPending,
    HostExhausted,
    LayoutMismatch,
    LeaseEnded,
    NoHostPool,
    NotEmpty,
    NotLaunched,
    NotOnHost,
    NotStored,
    OnRemoteHost,
    OutOfOrder,
    PagesExhausted,
    PrefixLost,
    Refusal,
    StalePlan,
    StreamBusy,
    StreamNotOnDevice,
    TooLarge,
    UnknownRequest,
    WorldSizeMismatch,
)
from kvstate.types import (
    Group,
    LabelFork,
    Publication,
    Record,
    RequestConfig,
    RetentionPolicy,
    Segment,
    Step,
    StreamFork,
    StreamId,
)
from kvstate.view import ClaimView, LeaseView, PartView, PoolView, StateView, StreamView
from kvstate_spec.reference import Abstract, agrees
from kvstate_spec.refinement import abstract_view, difference
from tests.spec.sectors import FULL, WINDOW, Driver, driver, of_one_group, span, step


def published(length: int, *, label: str = "main", world_size: int = 1, rank: int = 0, **changes: Any) -> Publication:
    record = Record(length, 0, 4, ((),), False, "elsewhere", 1, 1)
    return Publication("a", world_size, {rank: {label: attrs.evolve(record, **changes)}})


# ---------------------------------------------------------------------------------------------------------------------
# 1 – 4


def test_ingest_joins_a_live_request_and_refuses_another_config() -> None:
    d = driver("a")
    d.stored(step(span(3)))
    before = d.abstract()
    assert d.ingest("a") is None
    assert d.ingest("a", RequestConfig()) is None
    assert agrees(ConfigConflict(request="a"), d.ingest("a", RequestConfig(offload_priority=1))) is None
    assert d.abstract() == before


def test_a_label_exists_from_the_commit_that_opens_it_and_a_span_of_zero_opens_nothing() -> None:
    d = driver()
    lease = d.launched(step(span(0, label="x"), span(1, label="y")))
    assert ("a", "y") not in d.contents()
    d.commit(lease)
    assert set(d.contents()) == {("a", "main"), ("a", "y")}
    assert set(d.ref.requests["a"].streams) == {"main", "y"}


# ---------------------------------------------------------------------------------------------------------------------
# 5 – 7, 11, 12


def test_a_stream_needs_the_pages_of_its_in_step_length_and_uses_surplus_first() -> None:
    d = driver()
    d.stored(step(span(10)), accepted=[3])
    assert d.stream() == of_one_group(3, "OnDevice", 1, 2, (0,))
    free = d.device_free
    d.stored(step(span(9)))
    assert (d.stream().content_pages, d.stream().surplus_pages, d.device_free) == ((3,), (0,), free)


def test_several_segments_on_one_stream_add_up() -> None:
    d = driver()
    d.stored(step(span(3), span(4)))
    assert d.contents()["a", "main"] == tuple(range(7))
    assert d.device_free == 14


def test_admission_starts_from_what_the_lease_beneath_will_leave() -> None:
    d = driver(pages=2)
    first = d.launched(step(span(4)))
    second = d.launched(step(span(4)))
    assert d.device_free == 0
    d.commit(first)
    d.commit(second)
    assert d.length() == 8


def test_checks_come_before_pages_and_stream_by_stream() -> None:
    d = driver("a", pages=1)
    assert d.admit(step(span(100), span(1, "gone"))) == UnknownRequest(request="gone")
    assert isinstance(d.admit(step(span(1, "gone"), span(100))), UnknownRequest)


def test_short_is_wanted_minus_free_and_names_where_the_free_pages_run_out() -> None:
    d = driver("a", "b", "c", pages=4)
    refusal = d.admit(step(span(12), span(5, "b"), span(4, "c")))
    assert refusal == PagesExhausted(request="b", label="main", short=(2,))


def test_too_large_counts_distinct_pages_in_step_and_post_fork_pages() -> None:
    d = driver("a", "b", pages=4)
    assert d.admit(step(span(1, "b"), span(17))) == TooLarge(request="a", label="main", wanted=5, capacity=4)
    d.stored(step(span(8), post_forks=(LabelFork("main", "x"),)), accepted=[8])
    assert d.device_free == 2
    # Three labels share 2 pages and each asks for 1 of its own.
    forks = (LabelFork("main", "y"),)
    wanted = step(span(4), span(4, label="x"), span(4, label="y"), pre_forks=forks)
    assert d.admit(wanted) == TooLarge(request="a", label="main", wanted=5, capacity=4)


def test_a_request_that_asks_for_too_much_without_sharing_is_admitted_when_it_fits() -> None:
    d = driver(pages=3)
    d.stored(step(span(8)))
    d.stored(step(pre_forks=(StreamFork(StreamId("a"), StreamId("a", "x")),)))
    assert d.admit(step(span(0), span(4, label="x")), handle=d.handle()) is None


def test_a_refused_admission_changes_nothing() -> None:
    d = driver(pages=1)
    before = d.abstract()
    assert isinstance(d.admit(step(span(8), span(1, label="x"))), TooLarge)
    assert (d.abstract(), set(d.ref.requests["a"].streams)) == (before, {"main"})


# ---------------------------------------------------------------------------------------------------------------------
# 8 – 10


def test_a_pre_fork_is_seen_by_the_segments_and_copies_a_partly_filled_page() -> None:
    d = driver()
    d.stored(step(span(6)))
    d.stored(step(span(1, label="x"), pre_forks=(LabelFork("main", "x"),)))
    assert d.contents()["a", "x"] == (0, 1, 2, 3, 4, 5, 6)
    assert (d.stream().device, d.stream(label="x").device) == (((0, 1),), ((0, 2),))


def test_a_pre_fork_from_nothing_does_nothing_unless_its_source_grows_in_this_step() -> None:
    d = driver()
    d.stored(step(span(2), pre_forks=(LabelFork("nothing", "main"),)))
    assert d.length() == 2
    d.stored(step(span(1, label="x"), span(0), pre_forks=(LabelFork("x", "main"),)))
    assert (d.length(), d.length(label="x")) == (0, 1)


def test_a_fork_targets_content_leaves_and_its_surplus_stays_and_serves() -> None:
    d = driver("a", "b")
    d.stored(step(span(8, "b"), span(3)), accepted=[4, 3])
    assert (d.stream("b").content_pages, d.stream("b").surplus_pages, d.device_free) == ((1,), (1,), 13)
    d.stored(step(pre_forks=(StreamFork(StreamId("a"), StreamId("b")),)))
    assert (d.stream("b").length, d.stream("b").surplus_pages, d.device_free) == (3, (0,), 14)


def test_a_post_fork_copies_what_is_stored_after_acceptance_and_retention() -> None:
    d = driver()
    policy = {"main": RetentionPolicy(4)}
    d.stored(step(span(12), post_forks=(LabelFork("main", "x"),), retention=policy), accepted=[10])
    assert d.contents()["a", "x"] == d.contents()["a", "main"] == tuple(range(4, 10))
    assert d.stream(label="x").released == 4


def test_a_post_forks_unused_page_returns() -> None:
    d = driver()
    lease = d.launched(step(span(4), post_forks=(LabelFork("main", "x"),)))
    assert d.device_free == 14
    d.commit(lease)
    assert d.device_free == 15


@pytest.mark.parametrize(("page_size", "reserved"), [(1, 0), (4, 1)])
def test_a_post_fork_reserves_a_page_whenever_some_count_could_need_it(page_size: int, reserved: int) -> None:
    d = driver(page_size=page_size)
    d.admitted(step(span(page_size), post_forks=(LabelFork("main", "x"),)))
    assert d.device_free == 16 - 1 - reserved


def test_chained_post_forks_pass_on_what_the_first_source_stored() -> None:
    d = driver()
    d.stored(step(span(5), post_forks=(LabelFork("main", "x"), LabelFork("x", "y"))), accepted=[3])
    assert d.contents()["a", "y"] == (0, 1, 2)
    assert d.device_free == 16 - 3 - 1  # three copies of one page, and one rejected page


def test_nobody_names_a_post_forks_target_before_its_step_ended_or_its_row_went_void() -> None:
    d = driver("a", "b")
    d.stored(step(span(1), span(1, "b")))
    fork = (StreamFork(StreamId("a"), StreamId("b")),)
    d.admitted(step(post_forks=fork))
    assert d.admit(step(span(1, "b"))) == ForkPending(request="b", label="main")
    assert d.admit(step(span(1)), handle=d.handle()) is None
    d.reset("b")
    assert d.admit(step(span(1, "b")), handle=d.handle()) is None


def test_a_post_fork_that_does_nothing_leaves_its_target_free() -> None:
    d = driver()
    d.admitted(step(span(0), post_forks=(LabelFork("nothing", "x"),)))
    assert d.admit(step(span(1, label="x")), handle=d.handle()) is None


# ---------------------------------------------------------------------------------------------------------------------
# 13 – 15


def test_fewer_accepted_tokens_make_the_rows_above_void() -> None:
    d = driver()
    first, second = d.launched(step(span(4))), d.launched(step(span(4)))
    assert d.commit(first, [3]) == ()
    assert d.commit(second) == (0,)
    assert (d.length(), d.stream().surplus_pages, d.device_free) == (3, (0,), 15)


def test_rows_admitted_over_a_void_row_count() -> None:
    d = driver()
    first, second = d.admitted(step(span(4))), d.admitted(step(span(4)))
    d.abort(first)
    third = d.launched(step(span(2)))
    assert d.commit(third) == ()
    assert d.abstract().leases == {second: ("admitted", (0,))}
    assert d.length() == 2


def test_a_void_source_makes_its_pre_fork_target_void_and_not_the_other_way_round() -> None:
    d = driver("a", "b")
    forks = (StreamFork(StreamId("a"), StreamId("b")),)
    lease = d.launched(step(span(1), span(1, "b"), pre_forks=forks))
    d.reset("b")
    assert d.commit(lease) == (1,)
    lease = d.launched(step(span(1), span(1, "b"), pre_forks=forks))
    d.reset("a")
    assert d.commit(lease) == (0, 1)


def test_the_owner_of_void_rows_hears_of_them_once() -> None:
    d = driver("a", "b")
    lease = d.admitted(step(span(1), span(1, "b")))
    plan = d.handle()
    assert d.plan(lease, handle=plan) is None
    d.reset("b")
    assert d.launch_enter(lease, plan=plan) == StalePlan(void=(1,))
    assert d.launch_enter(lease, plan=plan) == StalePlan(void=(1,))
    d.launch(lease)
    d.commit(lease)
    other = d.admitted(step(span(1)))
    d.reset("a")
    assert d.plan(other, handle=d.handle()) == StalePlan(void=(0,))
    assert d.plan(other, handle=d.handle()) is None


def test_a_replaced_plan_or_one_of_an_ended_lease_is_stale() -> None:
    d = driver()
    lease = d.admitted(step(span(1)))
    old, new = d.handle(), d.handle()
    d.plan(lease, handle=old)
    d.plan(lease, handle=new)
    assert d.launch_enter(lease, plan=old) == StalePlan(ended=True)
    assert d.launch_enter(lease, plan=new) is None
    assert d.launch_enter(lease, plan=new) == AlreadyLaunched()
    d.launch_exit(lease)
    d.commit(lease)
    assert d.launch_enter(lease, plan=new) == StalePlan(ended=True)
    assert d.plan(lease, handle=d.handle()) == StalePlan(ended=True)


def test_launches_come_in_order_and_skip_void_rows_that_are_not_inside_theirs() -> None:
    d = driver()
    first, second = d.admitted(step(span(1))), d.admitted(step(span(1)))
    assert d.enter(second) == OutOfOrder(request="a", label="main")
    assert d.enter(first) is None
    d.reset("a")
    third = d.admitted(step(span(1)))
    assert d.enter(third) == OutOfOrder(request="a", label="main")
    d.launch_exit(first)
    assert d.enter(third) is None


# ---------------------------------------------------------------------------------------------------------------------
# 16 – 20


def test_commit_follows_launch_and_commits_come_in_order_and_once() -> None:
    d = driver()
    first, second = d.admitted(step(span(1))), d.admitted(step(span(1)))
    assert d.commit(first) == NotLaunched()
    d.launch(first)
    d.launch(second)
    assert d.commit(second) == OutOfOrder(request="a", label="main")
    assert d.commit(first) == ()
    assert d.commit(first) == LeaseEnded()


def test_a_void_row_waits_for_no_older_row_at_commit() -> None:
    d = driver("a", "b")
    d.admitted(step(span(1)))
    lease = d.admitted(step(span(1, "b"), pre_forks=(StreamFork(StreamId("b"), StreamId("a")),)))
    d.reset("b")
    assert d.plan(lease, handle=d.handle()) == StalePlan(void=(0,))
    d.launch(lease)
    assert d.commit(lease) == (0,)


def test_without_commit_no_length_moves_but_forks_apply() -> None:
    d = driver()
    d.stored(step(span(3)))
    forks = {"pre_forks": (LabelFork("main", "x"),), "post_forks": (LabelFork("main", "y"),)}
    d.stored(step(span(9), span(9, label="x"), commit=False, **forks))
    assert d.contents()["a", "x"] == d.contents()["a", "y"] == d.contents()["a", "main"] == (0, 1, 2)
    assert d.device_free == 13


def test_an_uncommitted_span_gives_surplus_back() -> None:
    d = driver()
    d.stored(step(span(8)), accepted=[1])
    d.stored(step(span(8), commit=False))
    assert (d.stream().surplus_pages, d.device_free) == ((1,), 14)


def test_a_post_fork_with_a_void_source_is_dropped_and_so_are_those_that_copy_its_target() -> None:
    d = driver("a", "b", "c")
    d.stored(step(span(1, "b"), span(1, "c")))
    before = d.contents()
    forks = (StreamFork(StreamId("a"), StreamId("b")), StreamFork(StreamId("b"), StreamId("c")))
    lease = d.launched(step(span(4), post_forks=forks))
    d.reset("a")
    d.commit(lease)
    assert d.contents()["b", "main"] == before["b", "main"]
    assert d.contents()["c", "main"] == before["c", "main"]


def test_abort_inside_a_launch_takes_effect_at_its_exit() -> None:
    d = driver()
    lease = d.admitted(step(span(4)))
    d.enter(lease)
    assert d.abort(lease) is None
    assert d.device_free == 15
    assert d.commit(lease) == NotLaunched()
    d.launch_exit(lease)
    assert (d.device_free, d.abort(lease)) == (16, LeaseEnded())


def test_a_failed_launch_aborts() -> None:
    d = driver()
    lease = d.admitted(step(span(4)))
    d.enter(lease)
    d.launch_exit(lease, failed=True)
    assert d.device_free == 16


def test_retention_drops_whole_pages_behind_the_protected_ones() -> None:
    d = Driver()
    d.ingest("a", RequestConfig(retention={"main": RetentionPolicy(context_budget=5, protected_prefix=3)}))
    d.stored(step(span(18)))
    # (18 - 5) // 4 - 1 = 2 pages leave from page 1 on.
    assert d.contents()["a", "main"] == (0, 1, 2, 3, *range(12, 18))
    assert (d.stream().released, d.stream().content_pages, d.device_free) == (8, (3,), 13)


def test_retention_of_the_step_replaces_that_of_the_config() -> None:
    d = Driver()
    d.ingest("a", RequestConfig(retention={"main": RetentionPolicy(1)}))
    d.stored(step(span(8), retention={"main": RetentionPolicy(100)}))
    assert d.length() == 8
    d.stored(step(span(0)))
    assert d.length() == 8
    d.stored(step(span(1)))
    assert d.length() == 1


def test_retention_is_assumed_by_the_row_above() -> None:
    d = Driver()
    d.ingest("a", RequestConfig(retention={"main": RetentionPolicy(4)}))
    first, second = d.launched(step(span(12))), d.launched(step(span(1)))
    assert d.commit(first) == d.commit(second) == ()
    assert (d.length(), d.stream().released) == (5, 8)


def test_pages_that_leave_stay_taken_until_the_leases_open_then_have_ended() -> None:
    d = driver()
    d.stored(step(span(8)))
    leases = [d.admitted(step(span(0))), d.admitted(step(span(0)))]
    d.reset("a")
    later = d.admitted(step(span(0)))
    d.abort(leases[1])
    assert d.device_free == 14
    d.abort(leases[0])
    assert d.device_free == 16
    d.abort(later)


def test_what_an_aborted_lease_was_granted_waits_for_the_rows_above_that_may_use_it() -> None:
    d = driver()
    first = d.admitted(step(span(4)))
    above = d.admitted(step(span(1)))
    d.abort(first)
    assert d.device_free == 14
    d.abort(above)
    assert d.device_free == 16


# ---------------------------------------------------------------------------------------------------------------------
# 21 – 25


def test_offload_moves_content_and_reload_brings_it_back_with_its_sharing() -> None:
    d = driver(host_pages=8)
    d.stored(step(span(7), post_forks=(LabelFork("main", "x"),)))
    device, contents = {k: s.device for k, s in d.abstract().streams.items()}, d.contents()
    assert set(device.values()) == {((0, 1),), ((0, 2),)}
    d.offloaded("a")
    assert (d.device_free, d.host_free) == (16, 5)
    assert {k: s.host for k, s in d.abstract().streams.items()} == device
    claim = d.handle()
    assert d.claim_reload("a", handle=claim) is None
    assert d.commit_reload(claim) is None
    assert (d.device_free, d.host_free, d.contents()) == (13, 8, contents)
    assert {k: s.device for k, s in d.abstract().streams.items()} == device


def test_offload_is_refused_in_the_order_of_its_checks() -> None:
    d = driver()
    assert d.claim_offload("gone") == UnknownRequest(request="gone")
    assert d.claim_offload("a") == NoHostPool(request="a")
    d = driver(host_pages=1)
    d.stored(step(span(8)))
    assert d.claim_offload("a") == HostExhausted(request="a", short=(1,))
    lease = d.admitted(step(span(1, label="x")))
    assert d.claim_offload("a") == StreamBusy(request="a", label="x")
    d.claim_retrieve("a", published(9), ["main"], handles={"main": d.handle()})
    assert d.claim_offload("a") == FetchPending(request="a", label="main")
    d.abort(lease)


def test_discard_in_flight_makes_rows_void_and_void_rows_do_not_hold_off_a_claim() -> None:
    d = driver(host_pages=4)
    lease = d.launched(step(span(1)))
    assert d.claim_offload("a", True, handle=d.handle()) is None
    assert d.commit(lease) == (0,)
    assert d.claim_offload("a") == StreamNotOnDevice(request="a", label="main", residency="Offloading")
    assert d.admit(step(span(1, label="new"))) == StreamNotOnDevice(request="a", label="new", residency="Offloading")


def test_an_abandoned_offload_puts_everything_back() -> None:
    d = driver(host_pages=4)
    d.stored(step(span(8)), accepted=[2])
    before, claim = d.abstract(), d.handle()
    d.claim_offload("a", handle=claim)
    assert (d.stream().residency, d.host_free) == ("Offloading", 3)
    assert d.abandon_offload(claim) is None
    assert d.abstract() == before
    assert d.abandon_offload(claim) == ClaimEnded()


def test_reload_takes_the_extra_pages_with_it() -> None:
    d = driver("a", "b", host_pages=4)
    d.stored(step(span(7)))
    d.offloaded("a")
    assert d.claim_reload("b") == NotOnHost(request="b", label="main", residency="OnDevice")
    extra = step(span(2), span(1, label="x"), span(99, "b"), pre_forks=(LabelFork("main", "y"),))
    claim = d.handle()
    assert d.claim_reload("a", extra, handle=claim) is None
    # 2 pages of content, 1 for the ninth token, 1 for x, 1 for y's partly filled page.
    assert d.device_free == 11
    d.commit_reload(claim)
    assert (d.stream().surplus_pages, d.device_free) == ((1,), 11)
    lease = d.admitted(extra_without_b := step(*extra.segments[:2], pre_forks=extra.pre_forks))
    assert d.device_free == 11, extra_without_b
    d.abort(lease)


def test_an_abandoned_reload_leaves_it_on_the_host() -> None:
    d = driver(host_pages=4)
    d.stored(step(span(7)))
    d.offloaded("a")
    before, claim = d.abstract(), d.handle()
    d.claim_reload("a", step(span(9, label="x")), handle=claim)
    assert d.abandon_reload(claim) is None
    assert d.abstract() == before
    assert set(d.ref.requests["a"].streams) == {"main"}


def test_reload_is_short_or_can_never_fit() -> None:
    d = driver("a", "b", pages=4, host_pages=4)
    d.stored(step(span(8)))
    d.offloaded("a")
    d.stored(step(span(9, "b")))
    assert agrees(PagesExhausted(request="a", short=(1,)), d.claim_reload("a")) is None
    assert agrees(TooLarge(request="a", wanted=5, capacity=4), d.claim_reload("a", step(span(9)))) is None


def test_a_claim_whose_copy_failed_can_only_be_abandoned() -> None:
    d = driver(host_pages=4)
    d.stored(step(span(1)))
    claim = d.handle()
    d.claim_offload("a", handle=claim)
    d.op_failed(claim, "broken")
    assert d.commit_offload(claim) == CopyFailed(error="broken")
    assert d.abandon_offload(claim) is None
    assert d.stream().residency == "OnDevice"


@pytest.mark.parametrize("gone", ["reset", "remove", "ingest anew"])
def test_an_orphaned_claim_returns_its_own_pages_only(gone: str) -> None:
    d = driver(host_pages=4)
    d.stored(step(span(5)))
    claim = d.handle()
    d.claim_offload("a", handle=claim)
    d.reset("a") if gone == "reset" else d.remove("a")
    if gone == "ingest anew":
        d.ingest("a")
    assert (d.device_free, d.host_free) == (14, 2)
    before = d.abstract().streams
    assert d.commit_offload(claim) is None
    assert (d.abstract().streams, d.device_free, d.host_free) == (before, 16, 4)


# ---------------------------------------------------------------------------------------------------------------------
# 26 – 28


def test_publish_describes_every_opened_stream_that_no_fetch_holds() -> None:
    d = driver(host_pages=4)
    d.stored(step(span(2), span(3, label="x")))
    d.claim_retrieve("a", published(9), ["main"], handles={"main": (fetch := d.handle())})
    assert d.publishable("a") == {"x": (3, 0, False)}
    d.cancelled(fetch)
    d.offloaded("a")
    assert d.publishable("a") == {"main": (2, 0, True), "x": (3, 0, True)}
    assert d.publishable("gone") is None


def test_retrieve_skips_what_is_not_longer_not_published_or_its_own() -> None:
    d = driver(address="here")
    d.stored(step(span(5)))
    before = d.abstract()
    for publication in (published(5), published(9, label="x"), published(9, address="here")):
        assert d.claim_retrieve("a", publication, ["main"], handles={}) == ()
    assert d.abstract() == before
    assert d.readiness("a", ["main"]) == "ready"


def test_retrieve_is_refused_for_what_it_cannot_continue() -> None:
    d = driver(pages=4)
    d.stored(step(span(5)))
    ask = [
        (published(9, world_size=2), WorldSizeMismatch(request="a", published=2, expected=1)),
        (published(9, on_host=True), OnRemoteHost(request="a", label="main")),
        (published(9, page_size=8), LayoutMismatch(request="a", label="main")),
        (published(9, released=4), LayoutMismatch(request="a", label="main")),
        (published(17), TooLarge(request="a", wanted=5, capacity=4)),
    ]
    for publication, refusal in ask:
        assert agrees(refusal, d.claim_retrieve("a", publication, ["main"], handles={})) is None
    lease = d.admitted(step(span(8, label="x")))
    refused = d.claim_retrieve("a", published(12), ["main"], handles={})
    assert agrees(PagesExhausted(request="a", short=(1,)), refused) is None
    assert d.claim_retrieve("a", published(9, label="x"), ["x"], handles={}) == StreamBusy(request="a", label="x")
    d.abort(lease)


def test_a_landed_fetch_continues_the_own_tokens() -> None:
    d = driver()
    d.stored(step(span(5)))
    fetch = d.handle()
    assert d.claim_retrieve("a", published(9), ["main"], handles={"main": fetch}) == ("main",)
    assert (d.length(), d.device_free, d.readiness("a", ["main"])) == (5, 13, "pending")
    assert d.admit(step(span(1))) == FetchPending(request="a", label="main")
    assert d.landed(fetch, [50, 51, 52, 53]) is None
    assert d.contents()["a", "main"] == (0, 1, 2, 3, 4, 50, 51, 52, 53)
    assert d.landed(fetch, []) == ClaimEnded()


def test_a_failed_fetch_latches_its_error_until_reset() -> None:
    d = driver()
    d.stored(step(span(5)))
    d.claim_retrieve("a", published(9), ["main"], handles={"main": (fetch := d.handle())})
    d.failed(fetch, "torn")
    assert (d.contents()["a", "main"], d.device_free) == ((0, 1, 2, 3, 4), 14)
    assert d.admit(step(span(1))) == FetchFailed(request="a", label="main", error="torn")
    assert d.readiness("a", ["x", "main"]) == "failed"
    d.reset("a")
    assert d.readiness("a", ["main"]) == "ready"


def test_a_cancelled_fetch_leaves_all_as_before_once_it_is_confirmed() -> None:
    d = driver()
    d.stored(step(span(5)))
    before = d.abstract()
    d.claim_retrieve("a", published(9, label="x"), ["x"], handles={"x": (fetch := d.handle())})
    assert d.cancel_retrieve("a") == (fetch,)
    assert d.device_free == 16 - 2 - 3
    assert d.cancelled(fetch) is None
    assert d.abstract() == before
    assert set(d.ref.requests["a"].streams) == {"main"}


def test_a_fetch_keeps_its_pages_and_the_partly_filled_one_after_remove() -> None:
    d = driver()
    d.stored(step(span(5)))
    d.claim_retrieve("a", published(9), ["main"], handles={"main": (fetch := d.handle())})
    d.remove("a")
    assert d.device_free == 14
    assert d.landed(fetch, []) is None
    assert d.device_free == 16


# ---------------------------------------------------------------------------------------------------------------------
# 29, 30, and questions


def test_reset_without_freeing_keeps_the_pages_that_have_no_other_owner() -> None:
    d = driver("a", "b")
    d.stored(step(span(7), post_forks=(StreamFork(StreamId("a"), StreamId("b")),)))
    d.reset("a", free=False)
    assert d.stream() == of_one_group(0, "OnDevice", 0, 1)
    assert d.device_free == 13


def test_removed_content_lives_on_in_what_was_forked_from_it() -> None:
    d = driver("a", "b")
    d.stored(step(span(7), post_forks=(StreamFork(StreamId("a"), StreamId("b")),)))
    d.remove("a")
    assert d.contents() == {("b", "main"): tuple(range(7))}
    assert d.device_free == 14
    assert d.remove("a") == d.reset("a") == UnknownRequest(request="a")


def test_reclaimable_counts_pages_of_this_request_only_and_nothing_while_it_is_busy() -> None:
    d = driver("a", "b", host_pages=4)
    d.stored(step(span(7), post_forks=(StreamFork(StreamId("a"), StreamId("b")),)))
    assert (d.reclaimable("a"), d.reclaimable("b"), d.reclaimable("gone")) == (1, 1, 0)
    lease = d.admitted(step(span(1)))
    assert d.reclaimable("a") == 0
    d.abort(lease)
    d.claim_retrieve("a", published(9, label="x"), ["x"], handles={"x": d.handle()})
    assert d.reclaimable("a") == 0


def test_agreement_is_about_class_and_payload_and_skips_what_no_sentence_fixes() -> None:
    assert agrees(None, 7) is None
    assert agrees(ClaimEnded(), ClaimEnded(request="a")) is None
    assert "expected no refusal" in str(agrees(None, ClaimEnded()))
    assert "got None" in str(agrees(ClaimEnded(), None))
    assert "LeaseEnded" in str(agrees(ClaimEnded(), LeaseEnded()))
    assert "short (1,)" in str(agrees(PagesExhausted(short=(1,)), PagesExhausted(short=(2,))))
    assert "label 'x'" in str(agrees(StreamBusy(label="x"), StreamBusy(label="y")))


# ---------------------------------------------------------------------------------------------------------------------
# Refinement


def stream_view(label: str, **changes: Any) -> StreamView:
    nothing: Any = ()
    blank = StreamView(
        request="a",
        label=label,
        incarnation=1,
        opened=True,
        residency="OnDevice",
        length=5,
        released=0,
        generation=0,
        epoch=0,
        device=((),),
        host=((),),
        holder=0,
        error="",
        rows=(),
        voided=(),
        held=(),
        fork_pending=False,
        written=nothing,
        used=nothing,
        skipped=(0,),
        keyed=0,
        stale=False,
    )
    return attrs.evolve(blank, **changes)


def state_view(*streams: StreamView, leases: Any = (), claims: Any = ()) -> StateView:
    found = ((72, "aa"), (98, "bb"), (99, "cc"))
    pool = PoolView(free=(1, 2, 3), owners=(0, 2, 0), sealed=(), fences=(), cached=(99, 98), keys=found)
    return StateView(
        page_size=4,
        device=(pool,),
        host=(attrs.evolve(pool, cached=(), keys=()),),
        requests=(("a", 1),),
        streams=streams,
        detached=(),
        leases=leases,
        claims=claims,
        key_epoch=3,
    )


def test_the_view_of_a_machine_means_what_the_reference_says() -> None:
    shared = state_view(
        stream_view("y", device=((70, 72, 90),)),
        stream_view("main", device=((70, 71),)),
        stream_view("unopened", opened=False, length=0, device=((80,),)),
        leases=(LeaseView(4, "planned", 0, False, (), (1,)),),
    )
    assert abstract_view(shared) == Abstract(
        (1,),
        (1,),
        {
            ("a", "main"): of_one_group(5, "OnDevice", 2, 0, (0, 1)),
            ("a", "y"): of_one_group(5, "OnDevice", 2, 1, (0, 2)),
        },
        {4: ("planned", (1,))},
        {},
        {(0, "aa"): 2, (0, "bb"): None, (0, "cc"): None},
        (("cc", "bb"),),
        3,
    )


@pytest.mark.parametrize("with_claim", [True, False])
def test_pages_of_a_moving_stream_count_as_its_own_wherever_they_stand(with_claim: bool) -> None:
    for residency, device, host in (("Offloading", (0, 1), ()), ("Reloading", (), (0, 1))):
        tables = {"device": ((7, 8, 9),), "host": ((3, 4),)}
        part = PartView("main", **tables)
        moving = stream_view("main", residency=residency, holder=6, **({} if with_claim else tables))
        view = state_view(moving, claims=(ClaimView(6, "move", "a", 1, (part,), ""),))
        surplus = 1 if residency == "Offloading" else 0
        expected = of_one_group(5, residency, len(device), surplus, device, host)
        assert abstract_view(view).streams == {("a", "main"): expected}


def test_a_difference_is_named_by_its_first_field() -> None:
    stream = of_one_group(5, "OnDevice", 2, 0, (0, 1))
    one = Abstract((3,), (3,), {("a", "main"): stream}, {4: ("planned", ())}, {})
    assert difference(one, one) is None
    assert difference(one, attrs.evolve(one, host_owned=(2,))) == "host_owned: the machine has (3,), the reference (2,)"
    other = attrs.evolve(one, streams={("a", "main"): attrs.evolve(stream, length=6)})
    assert difference(one, other) == "streams[('a', 'main')].length: the machine has 5, the reference 6"
    assert difference(one, attrs.evolve(one, leases={})) == "leases[4]: only the machine has it"
    assert "('planned', ())" in str(difference(one, attrs.evolve(one, leases={4: ("launched", ())})))


# ---------------------------------------------------------------------------------------------------------------------
# Random walks


# The more often a verb is named, the more often it is tried. "advance" does what a lease's owner would do next.
VERBS = (
    *["advance"] * 32,
    *["admit"] * 12,
    *("ingest", "ingest", "ingest", "ingest", "plan", "launch", "exit", "commit", "abort", "reset", "remove"),
    *(
        "offload",
        "offload",
        "reload",
        "reload",
        "reload",
        "end",
        "end",
        "end",
        "end",
        "op_failed",
        "op_failed",
        "op_failed",
    ),
    *("retrieve", "retrieve", "landed", "landed", "landed"),
    *["key"] * 14,
    *("remove", "remove", "remove", "reset", *["ingest"] * 8),
)
FORGET = 0.005
"""How often the weights change."""

GROUPS = ((Group(),), (Group(),), (Group(window=3),), (FULL, WINDOW), (Group("half", 128), FULL))
PROMPT = list(range(1000, 1040))

NEXT = {"admitted": "plan", "planned": "launch", "launching": "exit", "launched": "commit"}


class Walk(Driver):
    """Takes random actions and looks after each whether the books still balance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        groups = self.random.choice(GROUPS)
        super().__init__(
            pages=self.random.choice([8, 12, 24] if len(groups) > 1 else [4, 12, 24, 48]),
            page_size=self.random.choice([1, 2, 4]),
            host_pages=self.random.choice([0, 1, 12]),
            groups=groups,
        )
        self.plans: dict[int, int] = {}
        for request in "abc":
            self.ingest(request)
        self.seen: set[str] = set()

    def some(self, many: Any) -> Any:
        return self.random.choice(list(many))

    def name(self) -> StreamId:
        return StreamId(self.some("abc"), self.some(["main", "x", "y"]))

    def forks(self) -> tuple[StreamFork | LabelFork, ...]:
        found: dict[StreamId, StreamFork] = {}
        while self.random.random() < 0.35:
            source, target = self.name(), self.name()
            if source != target:
                found[target] = StreamFork(source, target)
        return tuple(found.values())

    def step(self) -> Step:
        named = [self.name() for _ in range(self.random.randint(0, 3))]
        retention = {"main": RetentionPolicy(self.random.randint(1, 6), self.random.randint(0, 4))}
        commit = self.random.random() < 0.85
        return Step(
            [self.segment(n, commit and n not in named[:i]) for i, n in enumerate(named)] + [Segment.padding(2)],
            self.forks(),
            self.forks(),
            commit=commit,
            retention=retention if self.random.random() < 0.3 else {},
        )

    def segment(self, name: StreamId, first: bool) -> Segment:
        """Return a segment, mostly with the prefix that a lookup finds where it can have one."""
        found = page_keys(PROMPT, self.ref.geometry.page_size)
        count = self.ref.match(found) if self.random.random() < 0.9 else self.random.randint(0, 3)
        span = self.random.randint(0, 7)
        return Segment(name.request, name.label, span, found[:count] if first and span and count < 6 else ())

    def tokens(self, lease: int) -> list[list[int]]:
        """Return the tokens of each segment: those of the prompt where a stream is inside it."""
        if lease not in self.ref.leases:
            return []
        made = []
        for segment in self.ref.leases[lease].step.segments:
            found = [s for s in self.ref.streams() if (s.id.request, s.id.label) == (segment.request, segment.label)]
            start = len(found[0].image.tokens) + len(segment.prefix) * self.ref.geometry.page_size if found else 99
            made.append((PROMPT[start:] + list(range(self.token, self.token + 99)))[: segment.span])
            self.token += segment.span
        return made

    def keyable(self) -> object:
        """Key what a stream holds of the prompt."""
        stream = self.some([s for s in self.ref.streams() if s.image.opened] or [None])
        if stream is None:
            return None
        keyed = len(stream.image.keys) * self.ref.geometry.page_size
        rest = stream.image.tokens[keyed:]
        if not all(isinstance(token, int) for token in stream.image.tokens):
            return None
        return self.key(stream.id.request, rest + [0] * (self.random.random() < 0.1), stream.id.label)

    def accepted(self, lease: int) -> list[int]:
        segments, counts, closed = self.ref.leases[lease].step.segments, [], set()
        for segment in segments:
            stream = (segment.request, segment.label)
            full = self.random.random() < 0.7
            counts.append(0 if stream in closed else segment.span if full else self.random.randint(0, segment.span))
            if counts[-1] < segment.span:
                closed.add(stream)
        return counts

    def act(self) -> object:
        ref, handle = self.ref, self.handle()
        if self.random.random() < FORGET:
            self.seen.add("weights changed")
            return self.reset_prefix_cache()
        leases, claims = [*ref.leases, -5], [*ref.claims, -5]
        lease, claim, request = self.some(leases[:2] or leases), self.some(claims[:2]), self.some("aabbccd")
        held, open_claim = ref.leases.get(lease), ref.claims.get(claim)
        verb = self.some(VERBS)
        if verb == "advance":
            verb = NEXT[held.status] if held is not None else "admit"
        if verb == "admit":
            before, order = ref.abstract(), [list(r.streams) for r in ref.requests.values()]
            wanted = self.step()
            asked = self.probe(wanted)
            outcome = self.admit(wanted, handle=handle)
            assert asked == outcome
            if outcome is None:
                self.seen |= {"prefix" for s in wanted.segments if s.prefix}
            if outcome is None and self.random.random() < 0.3:
                self.abort(handle)
            if handle not in ref.leases:
                now = ref.abstract()
                # What was granted and returned may have cost cached pages.
                if outcome is None:
                    assert set(now.findable) <= set(before.findable)
                    now = attrs.evolve(now, findable=before.findable, cached=before.cached)
                assert now == before
                assert [list(r.streams) for r in ref.requests.values()] == order
            return outcome
        if verb == "plan":
            outcome = self.plan(lease, handle=handle)
            if outcome is None:
                self.plans[lease] = handle
            return outcome
        if verb == "launch":
            return self.launch_enter(lease, plan=self.plans.get(lease, 0))
        if verb == "exit" and held is not None and held.status == "launching":
            return self.launch_exit(lease, failed=self.random.random() < 0.1)
        if verb == "commit":
            return self.commit(lease, self.accepted(lease) if held is not None else None)
        if verb == "abort":
            return self.abort(lease)
        if verb == "offload":
            return self.claim_offload(request, self.random.random() < 0.3, handle=handle)
        if verb == "reload":
            return self.claim_reload(request, self.step() if self.random.random() < 0.5 else None, handle=handle)
        if verb == "end" and (open_claim is None or open_claim.kind != "retrieve"):
            return self.commit_offload(claim) if self.random.random() < 0.7 else self.abandon_reload(claim)
        if verb == "op_failed":
            return self.op_failed(claim, "broken")
        if verb == "retrieve":
            labels = self.some([["main"], ["x", "main"]])
            size = ref.geometry.page_size
            found = {label: published(self.random.randint(0, 12), page_size=size).ranks[0]["main"] for label in labels}
            handles = {label: self.handle() for label in labels}
            return self.claim_retrieve(request, Publication("a", 1, {0: found}), labels, handles=handles)
        if verb == "landed" and open_claim is not None and open_claim.kind == "retrieve":
            if self.random.random() < 0.4:
                return self.some([lambda: self.failed(claim, "torn"), lambda: self.cancelled(claim)])()
            assert open_claim.record is not None
            stored = 0 if open_claim.orphaned else len(open_claim.request.streams[open_claim.label].image.tokens)
            return self.landed(claim, ["fetched"] * (open_claim.record.length - stored))
        if verb == "key":
            return self.keyable()
        if verb in ("reset", "remove"):
            return self.reset(request, self.random.random() < 0.5) if verb == "reset" else self.remove(request)
        return self.ingest(self.some("abc"))

    def check(self) -> None:
        ref, size = self.ref, self.ref.geometry.page_size
        for tier in ref.pages_available() if len(ref.geometry.groups) == 1 else {}:
            assert ref.pages_available()[tier][0] >= 0
        found = [entry.page for entry in ref.findable.values()]
        assert len(found) == len(set(found)), "a page has one key"
        assert {page for page, _ in ref.cached} == set(found) - ref._owned(), "cached is what only a key keeps"
        self.seen |= {"cached" for _ in ref.cached}
        tails: list[Any] = []
        for s in ref.streams():
            tables = s.host if s.residency in ("OnHost", "Reloading") else s.image.content
            assert [len(table) for table in tables] == [-(-len(s.image.tokens) // size)] * len(tables), s.id
            for group, table in enumerate(s.image.content):
                passed = ref.geometry.skipped(group, len(s.image.tokens))
                assert None not in table[passed:] or s.image.released, "a window holds what it needs"
                assert table[:passed] == [None] * len(table[:passed]), "a window holds no more than it needs"
                self.seen |= {"window" for page in table if page is None}
                tails += s.image.surplus[group] + (table[-1:] if len(s.image.tokens) % size else [])
            self.seen.add(s.residency)
        assert len(tails) == len(set(tails)), "two streams would write one page"
        for request in ref.requests.values():
            away = {s.residency for s in request.streams.values()} - {"Fetching", "FetchFailed"}
            assert len(away) <= 1, "streams of a request move together"

    def end(self) -> None:
        for lease, held in list(self.ref.leases.items()):
            if held.status == "launching":
                self.launch_exit(lease, failed=True)
            else:
                self.abort(lease)
            self.check()
        for request in list(self.ref.requests):
            self.remove(request)
        for claim, held_claim in list(self.ref.claims.items()):
            self.cancelled(claim) if held_claim.kind == "retrieve" else self.abandon_offload(claim)
        assert not self.ref._owned()
        assert not self.ref._owned_on_host()


def walked(seeds: range, actions: int) -> set[str]:
    seen: set[str] = set()
    for seed in seeds:
        walk = Walk(seed)
        for _ in range(actions):
            refs = (walk.ref.abstract(), walk.ref.contents())
            outcome = walk.act()
            if isinstance(outcome, Refusal):
                assert (walk.ref.abstract(), walk.ref.contents()) == refs, outcome
                walk.seen.add(type(outcome).__name__)
            walk.check()
        walk.end()
        seen |= walk.seen
    return seen


def test_random_walks_keep_the_books_and_reach_what_they_claim_to() -> None:
    seen = walked(range(50), 120)
    assert seen >= {"OnDevice", "Offloading", "OnHost", "Reloading", "Fetching", "FetchFailed"}
    assert seen >= {"prefix", "cached", "window", "weights changed"}
    refusals = (
        *(AlreadyLaunched, ClaimEnded, CopyFailed, FetchFailed, FetchPending, ForkPending, HostExhausted, LeaseEnded),
        *(NoHostPool, NotLaunched, NotOnHost, OutOfOrder, PagesExhausted, StalePlan, StreamBusy, StreamNotOnDevice),
        *(TooLarge, UnknownRequest, PrefixLost, NotEmpty, NotStored),
    )
    assert seen >= {refusal.__name__ for refusal in refusals}


@pytest.mark.nightly
def test_long_random_walks_keep_the_books() -> None:
    walked(range(1000, 4000), 200)
