"""Every promise can be broken: for each there are views, changed by hand from real ones, that break it and no other."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvstate import invariants
from kvstate.errors import PromiseBroken
from kvstate.invariants import PROMISES
from kvstate.ops import Plan
from kvstate.ordering import NOTHING
from kvstate.state import Lease, OffloadClaim, ReloadClaim, State
from kvstate.transitions import lifecycle, offload, reload, retrieve, step
from kvstate.transitions.retrieve import Retrieval, Snapshot
from kvstate.transitions.step import Committed
from kvstate.types import Geometry, Group, Segment, Step
from kvstate.view import ClaimView, LeaseView, PoolView, RowView, StateView, StreamView, view

Broken = tuple[StateView, StateView, str]
"""(before, now, verb)"""

BREAKS: list[tuple[str, str, Callable[[], Broken]]] = []
"""(promise, what was changed, the views)"""


def breaks(promise: str) -> Callable[[Callable[[], StateView | Broken]], Callable[[], StateView | Broken]]:
    """Register a view, or (before, now, verb), that breaks `promise` and no other."""

    def add(make: Callable[[], StateView | Broken]) -> Callable[[], StateView | Broken]:
        def made() -> Broken:
            views = make()
            return (views, views, "test") if isinstance(views, StateView) else views

        BREAKS.append((promise, make.__name__, made))
        return make

    return add


class Machine:
    """A state in a few words; 8 pages of 2 tokens per tier unless said otherwise."""

    def __init__(self, *requests: str, address: str = "a", **sizes: Any) -> None:
        self.state = State(Geometry(**{"pages": 8, "page_size": 2, "host_pages": 8, **sizes}), address)
        for request in requests:
            lifecycle.ingest(self.state, request)

    def view(self) -> StateView:
        return view(self.state)

    def admit(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease = step.admit(self.state, Step(segments, **kwargs))
        assert isinstance(lease, Lease)
        return lease

    def launch(self, lease: Lease) -> Lease:
        plan = step.plan(self.state, lease)
        assert isinstance(plan, Plan)
        step.launch_enter(self.state, plan)
        step.launch_exit(self.state, lease)
        return lease

    def run(self, *segments: Segment, **kwargs: Any) -> None:
        assert isinstance(step.commit(self.state, self.launch(self.admit(*segments, **kwargs))), Committed)

    def offload(self, request: str) -> OffloadClaim:
        claim = offload.claim_offload(self.state, request)
        assert isinstance(claim, OffloadClaim)
        return claim

    def offloaded(self, request: str) -> None:
        offload.commit_offload(self.state, self.offload(request))

    def reload(self, request: str) -> ReloadClaim:
        claim = reload.claim_reload(self.state, request)
        assert isinstance(claim, ReloadClaim)
        return claim

    def fetch(self, request: str, tokens: int) -> Retrieval:
        """Start fetching the first `tokens` tokens of what another machine publishes."""
        other = Machine("r", address="b")
        other.run(Segment("r", span=tokens))
        noted = retrieve.snapshot(other.state, "r")
        assert isinstance(noted, Snapshot)
        started = retrieve.claim_retrieve(self.state, request, retrieve.publish(other.state, noted))
        assert isinstance(started, Retrieval) and started.fetches
        return started


# -- changing views


def stream_of(now: StateView, request: str, label: str = "main") -> StreamView:
    [found] = [s for s in now.streams if (s.request, s.label) == (request, label)]
    return found


def with_stream(now: StateView, request: str, **changes: Any) -> StateView:
    old = stream_of(now, request)
    return attrs.evolve(now, streams=tuple(attrs.evolve(s, **changes) if s is old else s for s in now.streams))


def with_row(now: StateView, lease: Lease, **changes: Any) -> StateView:
    """Change the only row of a lease."""

    def changed(seen: LeaseView) -> LeaseView:
        if seen.serial != lease.serial:
            return seen
        [row] = seen.rows
        return attrs.evolve(seen, rows=(attrs.evolve(row, **changes),))

    return attrs.evolve(now, leases=tuple(map(changed, now.leases)))


def row_of(now: StateView, lease: Lease) -> RowView:
    [row] = [row for seen in now.leases if seen.serial == lease.serial for row in seen.rows]
    return row


def claim_of(now: StateView, kind: str, request: str) -> ClaimView:
    [found] = [claim for claim in now.claims if (claim.kind, claim.request) == (kind, request)]
    return found


def with_pool(now: StateView, tier: str = "device", **changes: Any) -> StateView:
    [pool] = getattr(now, tier)
    return attrs.evolve(now, **{tier: (attrs.evolve(pool, **changes),)})


def put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def recounted(now: StateView) -> StateView:
    """Count the owners of every page anew, so that pages are conserved whatever else was changed."""
    device: Counter[int] = Counter()
    host: Counter[int] = Counter()
    for stream in (*now.streams, *now.detached):
        for page in [*sum(stream.device, ()), *(p for _, held in stream.held for p in held[0])]:
            device[page] += 1
        host.update(sum(stream.host, ()))
    for lease in now.leases:
        for row in lease.rows:
            device.update([*row.takes[0], *row.temps[0]])
    for claim in now.claims:
        device.update(claim.device(0))
        host.update(claim.host(0))

    def pool(old: PoolView, listed: Counter[int]) -> PoolView:
        pages = range(len(old.owners))
        free = [page for page in old.free if not listed[page]]
        free += [page for page in pages if not listed[page] and page not in free]
        return attrs.evolve(old, owners=tuple(listed[page] for page in pages), free=tuple(free))

    return attrs.evolve(now, device=(pool(now.device[0], device),), host=(pool(now.host[0], host),))


def sealed_where_full(now: StateView) -> StateView:
    """Seal the pages that the view's streams have filled, and no other: a change elsewhere may have moved them."""
    [pool] = now.device
    full = {
        page
        for stream in now.streams
        if stream.residency in ("OnDevice", "Fetching", "FetchFailed")
        for page in stream.device[0][: stream.length // now.page_size]
    }
    return with_pool(now, sealed=tuple(page in full for page in range(len(pool.sealed))))


def free_page(now: StateView) -> int:
    return now.device[0].free[0]


# -- what breaks each promise


@breaks("pages_conserve")
def an_owned_page_is_in_the_free_list() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    now = machine.view()
    return with_pool(now, free=(*now.device[0].free, *stream_of(now, "r").device[0][:1]))


@breaks("pages_conserve")
def a_page_is_lost() -> StateView:
    now = Machine("r").view()
    return with_pool(now, free=now.device[0].free[1:])


@breaks("pages_conserve")
def a_page_is_free_twice() -> StateView:
    now = Machine("r").view()
    return with_pool(now, free=(*now.device[0].free, now.device[0].free[0]))


@breaks("pages_conserve")
def an_owner_is_counted_twice() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    now = machine.view()
    [page, *_] = stream_of(now, "r").device[0]
    return with_pool(now, owners=put(now.device[0].owners, page, 2))


@breaks("pages_conserve")
def a_page_granted_to_a_lease_has_an_owner_too_many() -> StateView:
    machine = Machine("r")
    lease = machine.admit(Segment("r", span=3))
    now = machine.view()
    [page, *_] = row_of(now, lease).takes[0]
    return with_pool(now, owners=put(now.device[0].owners, page, 2))


@breaks("pages_conserve")
def a_host_page_is_lost() -> StateView:
    now = Machine("r").view()
    return with_pool(now, "host", free=now.host[0].free[1:])


@breaks("pages_conserve")
def the_sink_can_be_granted() -> StateView:
    now = Machine("r").view()
    return with_pool(now, free=(*now.device[0].free, len(now.device[0].owners)))


@breaks("pages_conserve")
def a_stream_has_a_page_that_no_pool_has() -> StateView:
    now = Machine("r").view()
    return with_stream(now, "r", device=((len(now.device[0].owners),),))


@breaks("one_page_one_writer")
def two_steps_write_one_page() -> StateView:
    machine = Machine("r", "s")
    one, two = machine.admit(Segment("r")), machine.admit(Segment("s"))
    now = machine.view()
    return with_row(now, two, reads=row_of(now, one).reads)


@breaks("one_page_one_writer")
def two_reloads_fill_one_page() -> StateView:
    machine = Machine("r", "s")
    for request in ("r", "s"):
        machine.run(Segment(request, span=2))
        machine.offloaded(request)
    machine.reload("r"), machine.reload("s")
    now = machine.view()
    one, two = claim_of(now, "reload", "r"), claim_of(now, "reload", "s")
    [part] = two.parts
    same = attrs.evolve(two, parts=(attrs.evolve(part, device=one.parts[0].device),), fills=one.fills)
    return recounted(attrs.evolve(now, claims=(one, same)))


@breaks("nothing_writes_a_sealed_or_shared_page")
def a_step_writes_a_sealed_page() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r"))
    lease = machine.admit(Segment("r"))
    now = machine.view()
    [page] = row_of(now, lease).reads[0]
    return with_pool(now, sealed=put(now.device[0].sealed, page, True))


@breaks("nothing_writes_a_sealed_or_shared_page")
def a_step_writes_a_page_that_another_stream_has() -> StateView:
    machine = Machine("r", "s")
    lease = machine.admit(Segment("r"))
    now = machine.view()
    return recounted(with_stream(now, "s", device=row_of(now, lease).reads))


@breaks("full_pages_are_sealed")
def a_full_page_is_not_sealed() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    now = machine.view()
    return with_pool(now, sealed=put(now.device[0].sealed, stream_of(now, "r").device[0][0], False))


@breaks("full_pages_are_sealed")
def a_free_page_is_sealed() -> StateView:
    now = Machine("r").view()
    return with_pool(now, sealed=put(now.device[0].sealed, free_page(now), True))


@breaks("keys_find_sealed_pages")
def a_page_has_two_keys() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    now = machine.view()
    [page] = stream_of(now, "r").device[0]
    return with_pool(now, keys=((page, "aa"), (page, "bb")))


@breaks("keys_find_sealed_pages")
def a_page_that_is_still_written_has_a_key() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=1))
    now = machine.view()
    return with_pool(now, keys=((stream_of(now, "r").device[0][0], "aa"),))


@breaks("keys_find_sealed_pages")
def a_page_is_cached_and_nothing_finds_it() -> StateView:
    now = Machine("r").view()
    page = free_page(now)
    pool = now.device[0]
    free = tuple(other for other in pool.free if other != page)
    return with_pool(now, free=free, cached=(page,), sealed=put(pool.sealed, page, True))


@breaks("keys_find_sealed_pages")
def a_host_page_has_a_key() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    machine.offloaded("r")
    now = machine.view()
    [page] = stream_of(now, "r").host[0]
    return attrs.evolve(now, host=(attrs.evolve(now.host[0], keys=((page, "aa"),)),))


MIXED = (Group("full", 256), Group("window", 128, window=3))


@breaks("a_sector_is_one_groups")
def an_empty_sector_stays_lent() -> StateView:
    now = Machine("r", groups=MIXED).view()
    full, window = now.device
    lent = put(now.device_lent, 3, 1)
    return attrs.evolve(now, device=(full, attrs.evolve(window, free=(6, 7))), device_lent=lent)


@breaks("a_sector_is_one_groups")
def a_page_of_one_group_lies_in_a_sector_of_another() -> StateView:
    machine = Machine("r", groups=MIXED)
    machine.run(Segment("r", span=2))
    now = machine.view()
    full, window = now.device
    [[first], [page]] = stream_of(now, "r").device
    lost = put(put(window.owners, page, 0), 2 * first, 1)
    seals = put(put(window.sealed, page, False), 2 * first, True)
    sector = now.device_lent.index(1)
    moved = attrs.evolve(window, owners=lost, sealed=seals, free=())
    now = attrs.evolve(now, device=(full, moved), device_lent=put(now.device_lent, sector, None))
    return with_stream(now, "r", device=((first,), (2 * first,)))


@breaks("windows_have_left_what_they_passed")
def a_window_keeps_a_page_that_no_token_attends_to() -> StateView:
    machine = Machine("r", groups=(Group(window=3),))
    machine.run(Segment("r", span=3))
    machine.run(Segment("r", span=3))
    now = machine.view()
    stream = stream_of(now, "r")
    assert stream.skipped == (2,)
    page = free_page(now)
    pool = now.device[0]
    free = tuple(other for other in pool.free if other != page)
    now = with_pool(now, free=free, owners=put(pool.owners, page, 1), sealed=put(pool.sealed, page, True))
    return with_stream(now, "r", device=((page, *stream.device[0]),), skipped=(1,))


@breaks("windows_have_left_what_they_passed")
def a_full_group_has_left_a_page() -> StateView:
    return with_stream(Machine("r").view(), "r", skipped=(1,))


@breaks("windows_have_left_what_they_passed")
def a_step_writes_in_front_of_what_it_holds() -> StateView:
    machine = Machine("r", groups=(Group(window=3),))
    machine.run(Segment("r", span=3))
    lease = machine.admit(Segment("r", span=3))
    now = machine.view()
    [pages] = row_of(now, lease).reads
    return with_row(now, lease, skipped=(2,), reads=(pages[2:],))


@breaks("keys_are_of_stored_pages")
def a_stream_has_more_keys_than_full_pages() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    return with_stream(machine.view(), "r", keyed=2)


@breaks("keys_are_of_stored_pages")
def a_stale_stream_has_keys() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    return with_stream(machine.view(), "r", keyed=1, stale=True)


@breaks("tables_cover_lengths")
def a_stream_stores_more_than_its_table_holds() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    return with_stream(machine.view(), "r", length=5)


@breaks("tables_cover_lengths")
def an_offloaded_stream_stores_more_than_its_host_table_holds() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    machine.offloaded("r")
    return with_stream(machine.view(), "r", length=5)


@breaks("tables_cover_lengths")
def a_step_reaches_behind_its_table() -> StateView:
    machine = Machine("r")
    lease = machine.admit(Segment("r"))
    return with_row(machine.view(), lease, stop=3)


@breaks("residency_agrees")
def a_stream_waits_for_a_claim_that_is_not_there() -> StateView:
    machine = Machine("r")
    return with_stream(machine.view(), "r", residency="Offloading", holder=99)


@breaks("residency_agrees")
def a_stream_waits_for_a_claim_of_another_kind() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    claim = machine.offload("r")
    return with_stream(machine.view(), "r", residency="Reloading", holder=claim.serial)


@breaks("residency_agrees")
def a_stream_waits_for_a_claim_of_an_earlier_life() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    claim = machine.offload("r")
    lifecycle.remove(machine.state, "r")
    lifecycle.ingest(machine.state, "r")
    return with_stream(machine.view(), "r", residency="Offloading", holder=claim.serial)


@breaks("residency_agrees")
def a_stream_on_the_device_has_host_pages() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    now = machine.view()
    return recounted(with_stream(now, "r", host=((now.host[0].free[0],),)))


@breaks("residency_agrees")
def an_offloaded_stream_has_no_host_pages() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    machine.offloaded("r")
    return recounted(with_stream(machine.view(), "r", host=()))


@breaks("residency_agrees")
def an_offloaded_stream_has_device_pages() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    machine.offloaded("r")
    now = machine.view()
    return recounted(with_stream(now, "r", device=((free_page(now),),)))


@breaks("residency_agrees")
def a_removed_stream_is_listed() -> StateView:
    return with_stream(Machine("r").view(), "r", residency="Gone")


@breaks("residency_agrees")
def one_label_is_on_the_host_and_the_other_is_not() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2), Segment("r", "cfg"))
    now = machine.view()
    pages = now.host[0].free[:1]
    return recounted(with_stream(now, "r", residency="OnHost", device=(), host=(pages,)))


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_reads_a_free_page() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    lease = machine.admit(Segment("r"))
    now = machine.view()
    [[_, written]] = row_of(now, lease).reads
    return with_row(now, lease, reads=((free_page(now), written),))


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_reads_a_page_that_a_reload_fills() -> StateView:
    machine = Machine("r", "s")
    for request in ("r", "s"):
        machine.run(Segment(request, span=2))
    machine.offloaded("s")
    lease = machine.admit(Segment("r"))
    machine.reload("s")
    now = machine.view()
    [[_, written]] = row_of(now, lease).reads
    return with_row(now, lease, reads=((*claim_of(now, "reload", "s").device(0), written),))


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_reads_a_page_that_a_fetch_fills() -> StateView:
    machine = Machine("r", "s")
    machine.run(Segment("r", span=2))
    lease = machine.admit(Segment("r"))
    machine.fetch("s", 2)
    now = machine.view()
    [[_, written]] = row_of(now, lease).reads
    return with_row(now, lease, reads=((*claim_of(now, "retrieve", "s").device(0), written),))


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_writes_a_page_that_an_offload_reads() -> StateView:
    machine = Machine("r", "s")
    machine.run(Segment("s"))
    machine.offload("s")
    lease = machine.admit(Segment("r"))
    now = machine.view()
    return with_row(now, lease, reads=(claim_of(now, "offload", "s").device(0),))


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_runs_on_an_offloaded_stream() -> StateView:
    machine = Machine("r")
    lease = machine.admit(Segment("r"))
    machine_now = machine.view()
    assert row_of(machine_now, lease).void is False
    return with_stream(machine_now, "r", residency="OnHost", device=())


@breaks("a_leased_page_is_neither_free_nor_claimed")
def an_open_step_runs_on_a_stream_that_is_not_there() -> StateView:
    machine = Machine("r")
    lease = machine.admit(Segment("r"))
    return with_row(machine.view(), lease, incarnation=99)


@breaks("a_launched_step_keeps_its_pages")
def a_void_step_that_was_launched_reads_a_free_page() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    lease = machine.launch(machine.admit(Segment("r")))
    lifecycle.reset(machine.state, "r")
    now = machine.view()
    assert row_of(now, lease).void
    return with_row(now, lease, reads=((free_page(now), row_of(now, lease).reads[0][1]),))


@breaks("idle_means_empty")
def a_removed_request_left_pages_behind() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    now = machine.view()
    gone = attrs.evolve(stream_of(now, "r"), residency="Gone")
    return attrs.evolve(now, requests=(), streams=(), detached=(gone,))


@breaks("idle_means_empty")
def a_removed_request_left_host_pages_behind() -> StateView:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    machine.offloaded("r")
    now = machine.view()
    gone = attrs.evolve(stream_of(now, "r"), residency="Gone")
    return attrs.evolve(now, requests=(), streams=(), detached=(gone,))


@breaks("lengths_change_only_in_commit_landing_and_reset")
def admit_moves_a_length() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    old = stream_of(before, "r")
    return before, with_stream(before, "r", length=4, generation=old.generation + 1), "admit"


@breaks("lengths_change_only_in_commit_landing_and_reset")
def an_offload_lets_tokens_go_from_the_front() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    old = stream_of(before, "r")
    return before, with_stream(before, "r", released=2, generation=old.generation + 1), "commit_offload"


@breaks("generations_rise")
def a_commit_moves_a_length_at_the_same_generation() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    return before, with_stream(before, "r", length=4), "commit"


@breaks("generations_rise")
def a_generation_falls() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    return before, with_stream(before, "r", generation=0), "commit"


@breaks("generations_rise")
def an_epoch_falls() -> Broken:
    machine = Machine("r")
    lifecycle.reset(machine.state, "r")
    before = machine.view()
    return before, with_stream(before, "r", epoch=0), "commit"


@breaks("epochs_rise_before_pages_leave")
def a_page_of_a_stream_is_exchanged_at_the_same_epoch() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    [[first, _]] = stream_of(before, "r").device
    return before, recounted(with_stream(before, "r", device=((first, free_page(before)),))), "commit"


@breaks("epochs_rise_before_pages_leave")
def a_stream_is_offloaded_at_the_same_epoch() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    before = machine.view()
    machine.offloaded("r")
    return before, with_stream(machine.view(), "r", epoch=stream_of(before, "r").epoch), "commit_offload"


@breaks("fences_never_shrink")
def a_grant_clears_the_fence() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    lifecycle.reset(machine.state, "r")
    before = machine.view()
    page = max(range(8), key=lambda p: before.device[0].fences[p])
    return before, with_pool(before, fences=put(before.device[0].fences, page, NOTHING)), "admit"


@breaks("fences_never_shrink")
def a_host_page_forgets_one_queue() -> Broken:
    machine = Machine("r")
    machine.run(Segment("r", span=2))
    machine.offloaded("r")
    lifecycle.remove(machine.state, "r")
    before = machine.view()
    [compute, _, copy_in] = before.host[0].fences[0]
    return before, with_pool(before, "host", fences=put(before.host[0].fences, 0, (compute, 0, copy_in))), "admit"


# -- the tests


def broken(views: Broken) -> list[str]:
    before, now, verb = views
    return [promise.name for promise in PROMISES if promise.holds(before, now, verb) is not None]


@pytest.mark.parametrize("promise", [promise.name for promise in PROMISES])
def test_every_promise_has_a_view_that_breaks_it(promise: str) -> None:
    assert promise in {name for name, _, _ in BREAKS}, f"add a view to this file that breaks {promise}"


BY_SEALS = ("full_pages_are_sealed", "keys_find_sealed_pages", "nothing_writes_a_sealed_or_shared_page")
"""Promises whose views say themselves which pages are sealed; views of several groups do, too."""


@pytest.mark.parametrize(("promise", "change", "make"), BREAKS, ids=[f"{p}: {c}" for p, c, _ in BREAKS])
def test_a_broken_view_breaks_exactly_its_promise_and_the_check_names_it(
    promise: str, change: str, make: Callable[[], Broken]
) -> None:
    before, now, verb = make()
    if len(now.device) == 1 and promise not in BY_SEALS:
        before, now = sealed_where_full(before), sealed_where_full(now)
    assert broken((before, now, verb)) == [promise]
    with pytest.raises(PromiseBroken, match=promise) as raised:
        invariants.check(now, before, verb)
    assert raised.value.promise == promise
    assert raised.value.sentence in str(raised.value) and raised.value.detail in str(raised.value)


def test_every_promise_has_a_name_and_a_sentence_of_its_own() -> None:
    assert len({promise.name for promise in PROMISES}) == len(PROMISES)
    for promise in PROMISES:
        assert promise.sentence.endswith("."), promise.name
        assert "\n" not in promise.sentence


def test_a_view_alone_is_checked_as_if_nothing_had_changed() -> None:
    machine = Machine("r")
    machine.run(Segment("r", span=3))
    invariants.check(machine.view())


def test_recounting_a_real_view_changes_nothing() -> None:
    """The helper of this file counts owners as the machine does."""
    machine = Machine("r", "s", "t", pages=32)
    for request in ("r", "s"):
        machine.run(Segment(request, span=3), Segment(request, "cfg", span=2))
    machine.offloaded("s")
    machine.reload("s")
    machine.admit(Segment("r", span=2), commit=False)
    machine.fetch("t", 3)
    assert recounted(machine.view()) == machine.view()
