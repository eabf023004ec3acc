"""KVManager: one lock, an outbox, blocking verbs; what it refuses changes nothing, what fails leaves nothing behind."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from kvstate import admit_all, invariants, refusals
from kvstate.backend import Cancelled, Failed, Landed
from kvstate.errors import LockHeld, Poisoned, PromiseBroken, Refused, SubmitError
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, FetchBegin, FetchEnd, ForkCopy, Op, Plan, StepBegin, StepEnd
from kvstate.ordering import Clock
from kvstate.prefix import page_keys
from kvstate.refusals import (
    ClaimEnded,
    CopyFailed,
    LeaseEnded,
    ManagerClosed,
    ManagerPoisoned,
    NotLaunched,
    PagesExhausted,
    Refusal,
    StalePlan,
)
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport, ThreadTransport
from kvstate.transitions import lifecycle, offload, reload
from kvstate.transitions.lifecycle import Ingested
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.transitions.retrieve import Retrieval
from kvstate.transitions.step import Committed
from kvstate.types import Geometry, LabelFork, Publication, RequestConfig, Segment, Step, StreamFork, StreamId
from kvstate.view import StreamView


class Rig:
    """A manager over a memory backend under the judge; 8 pages of 2 tokens per tier, requests "r" and "s" live."""

    def __init__(
        self, network: Network | None = None, address: str = "kv", *, backend: type[MemoryBackend] = MemoryBackend,
        transport: Any = None, sizes: dict[str, int] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.geometry = Geometry(**{"pages": 8, "page_size": 2, "host_pages": 8, **(sizes or {})})
        self.network = network if network is not None else Network()
        self.judge = EdgeJudge(self.geometry.page_size, MemoryBackend.sinks_of(self.geometry))
        self.backend = backend(self.geometry, judge=self.judge, record=True)
        self.transport = transport if transport is not None else StepTransport(self.network, address)
        self.manager = KVManager(
            self.geometry, self.backend, transport=self.transport, address=address, **{"debug": True, **options}
        )
        self.network.join(address, self.backend, self.manager.epoch_holds)
        self.manager.ingest("r")
        self.manager.ingest("s")
        self._stamps = 0

    def staged(self, *segments: Segment, **kwargs: Any) -> tuple[Lease, Plan]:
        lease = self.manager.admit(Step(segments, **kwargs))
        assert isinstance(lease, Lease), lease
        plan = self.manager.plan(lease)
        assert isinstance(plan, Plan), plan
        return lease, plan

    def compute(self, plan: Plan) -> list[int]:
        """Write new stamps for every token of a launched plan; return them."""
        first = self._stamps
        for place, planned in enumerate(plan.in_step_order):
            self.backend.write(plan, place, range(self._stamps, self._stamps + planned.span))
            self._stamps += planned.span
        return list(range(first, self._stamps))

    def launched(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease, plan = self.staged(*segments, **kwargs)
        with self.manager.launch(plan):
            self.compute(plan)
        return lease

    def run(self, *segments: Segment, **kwargs: Any) -> Committed:
        done = self.manager.commit(self.launched(*segments, **kwargs))
        assert isinstance(done, Committed), done
        return done

    def stream(self, request: str, label: str = "main") -> StreamView:
        [found] = [s for s in self.manager.view().streams if (s.request, s.label) == (request, label)]
        return found

    def tokens(self, request: str) -> list[Any]:
        stream = self.stream(request)
        if stream.residency == "OnHost":
            return self.backend.read_host(stream.host[0], stream.length)
        return self.backend.read(stream.device[0], stream.length)

    def published(self, request: str) -> Publication:
        publication = self.manager.publish(request)
        assert publication is not None
        return publication

    def fetching(self, request: str, publication: Publication) -> Fetch:
        started = self.manager.claim_retrieve(request, publication)
        assert isinstance(started, Retrieval), started
        [fetch] = started.fetches
        return fetch

    def assert_empty_when_idle(self) -> None:
        """End what a test left open; then no page is missing and the judge saw no conflict."""
        manager = self.manager
        for claim in manager.claims():
            if isinstance(claim, Fetch):
                self.transport.fail(claim, "the test ended")
            else:
                manager.abandon(claim)
        manager.poll()
        manager.clear()
        now = manager.view()
        invariants.check(now)
        assert not (now.requests or now.leases or now.claims)
        assert manager.pages_free() == {"device": (self.geometry.pages,), "host": (self.geometry.host_pages,)}
        assert not self.judge.violations


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.assert_empty_when_idle()


@pytest.fixture
def pair() -> Iterator[tuple[Rig, Rig]]:
    """Two rigs on one network: a publisher and a consumer."""
    network = Network()
    made = Rig(network, "publisher"), Rig(network, "consumer")
    yield made
    for one in made:
        one.assert_empty_when_idle()


def tiny(**sizes: int) -> Rig:
    return Rig(sizes=sizes)


# -- refusals

Prepared = tuple[Rig, Callable[[], Any]]
"""A rig, and the call that it refuses."""

REFUSALS: list[tuple[type[Refusal], str, Callable[[], Prepared]]] = []
"""(refusal, the name it gives, preparation)"""


def refused(cls: type[Refusal], name: str) -> Callable[[Callable[[], Prepared]], Callable[[], Prepared]]:
    def add(prepare: Callable[[], Prepared]) -> Callable[[], Prepared]:
        REFUSALS.append((cls, name, prepare))
        return prepare

    return add


@refused(refusals.UnknownRequest, "nobody/cfg")
def _unknown_request() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.admit(Step([Segment("r", span=3), Segment("nobody", "cfg")]))


@refused(refusals.ConfigConflict, "r")
def _config_conflict() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.ingest("r", RequestConfig(labels=("cfg",)))


@refused(refusals.PagesExhausted, "s/main")
def _pages_exhausted() -> Prepared:
    rig = tiny(pages=3)
    rig.run(Segment("r", span=4))
    return rig, lambda: rig.manager.admit(Step([Segment("r"), Segment("s")]))


@refused(refusals.PagesExhausted, "r")
def _pages_exhausted_by_a_reload() -> Prepared:
    rig = tiny(pages=3)
    rig.run(Segment("r", span=4))
    rig.manager.offload("r")
    rig.run(Segment("s", span=3))
    return rig, lambda: rig.manager.claim_reload("r")


@refused(refusals.HostExhausted, "r")
def _host_exhausted() -> Prepared:
    rig = tiny(host_pages=1)
    rig.run(Segment("r", span=3))
    return rig, lambda: rig.manager.offload("r")


@refused(refusals.TooLarge, "s/main")
def _too_large() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.admit(Step([Segment("r"), Segment("s", span=99)]))


@refused(refusals.NoHostPool, "r")
def _no_host_pool() -> Prepared:
    rig = tiny(host_pages=0)
    rig.run(Segment("r"))
    return rig, lambda: rig.manager.offload("r")


@refused(refusals.StreamNotOnDevice, "r/main")
def _not_on_device() -> Prepared:
    rig = Rig()
    rig.run(Segment("r"))
    rig.manager.offload("r")
    return rig, lambda: rig.manager.admit(Step([Segment("s"), Segment("r")]))


@refused(refusals.NotOnHost, "r/main")
def _not_on_host() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.reload("r")


@refused(refusals.StreamBusy, "r/main")
def _stream_busy() -> Prepared:
    rig = Rig()
    rig.staged(Segment("r"))
    return rig, lambda: rig.manager.offload("r")


@refused(refusals.NotStored, "r/main")
def _not_stored() -> Prepared:
    rig = Rig()
    rig.run(Segment("r", span=3))
    return rig, lambda: rig.manager.key("r", range(4))


@refused(refusals.NotEmpty, "r/main")
def _not_empty() -> Prepared:
    rig = Rig()
    rig.run(Segment("r"))
    return rig, lambda: rig.manager.admit(Step([Segment("s"), Segment("r", prefix=page_keys(range(2), 2))]))


@refused(refusals.PrefixLost, "s/main")
def _prefix_lost() -> Prepared:
    rig = Rig()
    rig.run(Segment("r", span=2))
    rig.manager.key("r", range(2))
    return rig, lambda: rig.manager.admit(Step([Segment("r"), Segment("s", prefix=page_keys(range(4), 2))]))


@refused(refusals.ForkPending, "r/cfg")
def _fork_pending() -> Prepared:
    rig = Rig()
    rig.staged(Segment("r"), post_forks=[LabelFork("main", "cfg")])
    return rig, lambda: rig.manager.admit(Step([Segment("s"), Segment("r", "cfg")]))


def _published(**changes: Any) -> Publication:
    other = Rig(address="elsewhere")
    other.run(Segment("r", span=3))
    publication = other.published("r")
    [labels] = publication.ranks.values()
    ranks = {0: {label: attrs.evolve(record, **changes) for label, record in labels.items()}}
    return attrs.evolve(publication, ranks=ranks)


def _with_a_publisher() -> tuple[Rig, Publication]:
    network = Network()
    publisher, consumer = Rig(network, "publisher"), Rig(network, "consumer")
    publisher.run(Segment("r", span=3))
    return consumer, publisher.published("r")


@refused(refusals.FetchPending, "r/main")
def _fetch_pending() -> Prepared:
    rig, publication = _with_a_publisher()
    rig.fetching("r", publication)
    return rig, lambda: rig.manager.admit(Step([Segment("s"), Segment("r")]))


@refused(refusals.FetchFailed, "r/main")
def _fetch_failed() -> Prepared:
    rig, publication = _with_a_publisher()
    rig.transport.fail(rig.fetching("r", publication), "no route")
    rig.manager.poll()
    return rig, lambda: rig.manager.offload("r")


@refused(refusals.OnRemoteHost, "s/main")
def _on_remote_host() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.claim_retrieve("s", _published(on_host=True, pages=()))


@refused(refusals.WorldSizeMismatch, "s")
def _world_size_mismatch() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.claim_retrieve("s", attrs.evolve(_published(), world_size=2))


@refused(refusals.LayoutMismatch, "s/main")
def _layout_mismatch() -> Prepared:
    rig = Rig()
    return rig, lambda: rig.manager.claim_retrieve("s", _published(page_size=16))


@refused(refusals.StalePlan, "s/main")
def _stale_plan() -> Prepared:
    rig = Rig()
    _, plan = rig.staged(Segment("r"), Segment("s"))
    rig.manager.reset("s")
    return rig, lambda: rig.manager.launch_enter(plan)


@refused(refusals.NotLaunched, "r/main")
def _not_launched() -> Prepared:
    rig = Rig()
    lease, _ = rig.staged(Segment("r"))
    return rig, lambda: rig.manager.commit(lease)


@refused(refusals.AlreadyLaunched, "r/main")
def _already_launched() -> Prepared:
    rig = Rig()
    lease = rig.launched(Segment("r"))
    return rig, lambda: rig.manager.plan(lease)


@refused(refusals.OutOfOrder, "r/main")
def _out_of_order() -> Prepared:
    rig = Rig()
    rig.staged(Segment("r"))
    _, plan = rig.staged(Segment("r"))
    return rig, lambda: rig.manager.launch_enter(plan)


@refused(refusals.LeaseEnded, "r/main")
def _lease_ended() -> Prepared:
    rig = Rig()
    lease = rig.run(Segment("r")).lease
    return rig, lambda: rig.manager.commit(lease)


@refused(refusals.ClaimEnded, "r")
def _claim_ended() -> Prepared:
    rig = Rig()
    rig.run(Segment("r"))
    claim = rig.manager.claim_offload("r")
    rig.manager.commit_claim(claim)  # type: ignore[arg-type]
    return rig, lambda: rig.manager.abandon(claim)  # type: ignore[arg-type]


@refused(refusals.CopyFailed, "r")
def _copy_failed() -> Prepared:
    rig = Rig()
    rig.run(Segment("r"))
    rig.backend.fail_next(CopyOut)
    claim = rig.manager.claim_offload("r")
    return rig, lambda: rig.manager.commit_claim(claim)  # type: ignore[arg-type]


@refused(refusals.ManagerPoisoned, "")
def _manager_poisoned() -> Prepared:
    rig = Rig()
    rig.run(Segment("r"))
    rig.backend.fail_next(CopyOut, fatal=True)
    with pytest.raises(Poisoned):
        rig.manager.offload("r")
    return rig, lambda: rig.manager.reset("s")


@refused(refusals.ManagerClosed, "")
def _manager_closed() -> Prepared:
    rig = Rig()
    rig.manager.close()
    return rig, lambda: rig.manager.ingest("t")


@pytest.mark.parametrize(("cls", "name", "prepare"), REFUSALS, ids=[prepare.__name__ for _, _, prepare in REFUSALS])
def test_a_refused_verb_changes_nothing_and_says_who_why_and_when(
    cls: type[Refusal], name: str, prepare: Callable[[], Prepared]
) -> None:
    rig, call = prepare()
    before = rig.manager.view()
    refusal = call()
    assert type(refusal) is cls
    assert rig.manager.view() == before
    said = str(refusal)
    assert said.startswith(f"kv: {cls.__name__} ({name}): " if name else f"kv: {cls.__name__}: ")
    assert refusal.reason in said and said.endswith(refusal.kind.value)


def test_every_refusal_there_is_is_shown_to_change_nothing() -> None:
    classes = {cls for cls in vars(refusals).values() if isinstance(cls, type) and issubclass(cls, Refusal)}
    assert {cls for cls, _, _ in REFUSALS} == classes - {Refusal}


def test_every_verb_on_a_request_that_is_not_there_says_so(rig: Rig) -> None:
    manager, before = rig.manager, rig.manager.view()
    for answer in (
        manager.admit(Step([Segment("gone")])),
        manager.claim_offload("gone"),
        manager.offload("gone"),
        manager.claim_reload("gone"),
        manager.reload("gone"),
        manager.claim_retrieve("gone", None),
        manager.cancel_retrieve("gone"),
        manager.readiness("gone"),
        manager.reset("gone"),
        manager.remove("gone"),
    ):
        assert isinstance(answer, refusals.UnknownRequest) and answer.request == "gone"
    assert manager.reclaimable("gone") == 0
    assert manager.publish("gone") is None
    assert manager.view() == before


def test_short_says_how_many_pages_are_missing_for_the_whole_step() -> None:
    rig = tiny(pages=4)
    rig.run(Segment("r", span=4))
    answer = rig.manager.admit(Step([Segment("r", span=2), Segment("s", span=6)]))
    assert isinstance(answer, PagesExhausted) and answer.short == (2,)


# -- launch


def test_an_exception_in_a_launch_aborts_the_step_and_goes_on(rig: Rig) -> None:
    rig.run(Segment("r", span=3))
    before = rig.manager.view()
    lease, plan = rig.staged(Segment("r", span=3))
    with pytest.raises(ZeroDivisionError), rig.manager.launch(plan):
        rig.compute(plan)
        raise ZeroDivisionError
    assert not lease.open
    assert isinstance(rig.manager.commit(lease), LeaseEnded)
    assert rig.stream("r").length == 3
    assert rig.manager.view().device[0].owners == before.device[0].owners


def test_a_stale_plan_is_refused_at_the_entry_of_its_launch_and_can_be_planned_again(rig: Rig) -> None:
    lease, plan = rig.staged(Segment("r"), Segment("s"))
    rig.manager.reset("r")
    with (
        pytest.raises(Refused, match="StalePlan \\(r/main\\): segments 0 are void") as raised,
        rig.manager.launch(plan),
    ):
        pytest.fail("the model ran")
    assert isinstance(raised.value.refusal, StalePlan)
    again = rig.manager.plan(lease)
    assert isinstance(again, Plan)
    with rig.manager.launch(again):
        rig.compute(again)
    done = rig.manager.commit(lease)
    assert isinstance(done, Committed) and done.dropped == (0,)
    assert (rig.stream("r").length, rig.stream("s").length) == (0, 1)


def test_a_plan_that_a_newer_one_replaced_is_not_launched(rig: Rig) -> None:
    lease, old = rig.staged(Segment("r"))
    assert isinstance(rig.manager.plan(lease), Plan)
    with pytest.raises(Refused, match="a newer plan replaced this one"), rig.manager.launch(old):
        pytest.fail("the model ran")


def test_a_step_is_committed_once_after_its_launch(rig: Rig) -> None:
    lease, plan = rig.staged(Segment("r"))
    assert isinstance(rig.manager.commit(lease), NotLaunched)
    with rig.manager.launch(plan):
        assert isinstance(rig.manager.commit(lease), NotLaunched)
        rig.compute(plan)
    assert isinstance(rig.manager.commit(lease), Committed)
    assert isinstance(rig.manager.commit(lease), LeaseEnded)
    assert isinstance(rig.manager.abort(lease), LeaseEnded)


def test_a_launch_whose_fork_copies_fail_is_aborted_and_says_so(rig: Rig) -> None:
    rig.run(Segment("r", span=3))
    before = rig.manager.view()
    lease, plan = rig.staged(Segment("r", "cfg"), pre_forks=[LabelFork("main", "cfg")])
    rig.backend.fail_next(ForkCopy)
    with pytest.raises(SubmitError, match="ForkCopy was made to fail"), rig.manager.launch(plan):
        pytest.fail("the model ran")
    assert not lease.open
    assert [s.length for s in rig.manager.view().streams] == [s.length for s in before.streams]
    assert rig.manager.view().device[0].owners == before.device[0].owners


def test_a_launch_whose_begin_fails_is_aborted_and_the_next_one_runs(rig: Rig) -> None:
    lease, plan = rig.staged(Segment("r"))
    rig.backend.fail_next(StepBegin)
    with pytest.raises(SubmitError), rig.manager.launch(plan):
        pytest.fail("the model ran")
    assert not lease.open
    rig.run(Segment("r"))
    assert rig.stream("r").length == 1


# -- offload and reload


def test_what_was_offloaded_and_reloaded_is_what_was_committed(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    tokens = rig.tokens("r")
    assert rig.manager.offload("r") == Offloaded("r", 3)
    assert rig.tokens("r") == tokens == list(range(5))
    assert rig.manager.reload("r", Step([Segment("r", span=3)])) == Reloaded("r", 4)
    assert rig.tokens("r") == tokens


@pytest.mark.parametrize("verb", ["offload", "reload"])
def test_a_copy_that_fails_at_submit_leaves_everything_as_before(rig: Rig, verb: str) -> None:
    rig.run(Segment("r", span=3), Segment("r", "cfg"))
    tokens = rig.tokens("r")
    if verb == "reload":
        rig.manager.offload("r")
    before = rig.manager.view()
    rig.backend.fail_next(CopyOut if verb == "offload" else CopyIn)
    answer = getattr(rig.manager, verb)("r")
    assert isinstance(answer, CopyFailed) and "was made to fail" in str(answer)
    assert rig.manager.view().unordered() == before.unordered()
    assert rig.manager.claims() == ()
    assert rig.tokens("r") == tokens
    assert isinstance(getattr(rig.manager, verb)("r"), Offloaded | Reloaded), "and the next try succeeds"


@pytest.mark.parametrize(("verb", "module"), [("offload", offload), ("reload", reload)])
def test_a_blocking_verb_ends_its_claim_whatever_is_raised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, verb: str, module: Any
) -> None:
    rig.run(Segment("r", span=3))
    if verb == "reload":
        rig.manager.offload("r")
    before = rig.stream("r").residency

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, f"commit_{verb}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(rig.manager, verb)("r")
    assert rig.manager.claims() == ()
    assert rig.stream("r").residency == before


def test_a_claim_ends_once(rig: Rig) -> None:
    rig.run(Segment("r", span=3))
    claim = rig.manager.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    assert isinstance(rig.manager.abandon(claim), Abandoned)
    before = rig.manager.view()
    assert isinstance(rig.manager.abandon(claim), ClaimEnded)
    assert isinstance(rig.manager.commit_claim(claim), ClaimEnded)
    assert rig.manager.view() == before


def test_supports_offload_only_with_a_host_pool() -> None:
    assert Rig().manager.supports_offload
    rig = tiny(host_pages=0)
    assert not rig.manager.supports_offload
    rig.run(Segment("r"))
    assert isinstance(rig.manager.offload("r"), refusals.NoHostPool)


def test_reclaimable_is_what_an_offload_then_releases(rig: Rig) -> None:
    rig.run(Segment("r", span=5), post_forks=[StreamFork(StreamId("r"), StreamId("s"))])
    gain = rig.manager.reclaimable("r")
    assert gain == 1, "two of its pages stay with s"
    assert rig.manager.offload("r") == Offloaded("r", gain)
    assert rig.manager.reclaimable("r") == 0


def test_nothing_is_reclaimable_under_an_open_step_or_fetch(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=3))
    lease, _ = publisher.staged(Segment("r"))
    assert publisher.manager.reclaimable("r") == 0
    publisher.manager.abort(lease)
    assert publisher.manager.reclaimable("r") == 2
    consumer.run(Segment("r"))
    consumer.fetching("r", publisher.published("r"))
    assert consumer.manager.reclaimable("r") == 0


def test_offload_order_is_by_priority_then_the_newest_first_without_those_that_free_nothing(rig: Rig) -> None:
    for request, priority in (("t", 1), ("u", 0), ("v", 1), ("w", -1)):
        rig.manager.ingest(request, RequestConfig(offload_priority=priority))
    rig.run(*(Segment(request) for request in ("r", "t", "u", "v", "w")))
    assert rig.manager.offload_order() == ("v", "t", "u", "r", "w"), "s stores nothing"
    rig.manager.offload("v")
    rig.staged(Segment("r"))
    assert rig.manager.offload_order() == ("t", "u", "w")


def test_claims_are_found_by_age_oldest_first() -> None:
    now_s = [100.0]
    rig = Rig(clock=lambda: now_s[0])
    rig.run(Segment("r"), Segment("s"))
    first = rig.manager.claim_offload("r")
    now_s[0] = 107.5
    second = rig.manager.claim_offload("s")
    now_s[0] = 110.0
    assert rig.manager.claims() == (first, second)
    assert rig.manager.claims(older_than_s=2.5) == (first, second)
    assert rig.manager.claims(older_than_s=3.0) == (first,)
    assert rig.manager.claims(older_than_s=10.5) == ()
    rig.assert_empty_when_idle()


@pytest.mark.parametrize("verb", ["claim_offload", "claim_reload"])
def test_the_claim_of_a_thread_that_died_is_abandoned_by_another(rig: Rig, verb: str) -> None:
    rig.run(Segment("r", span=3))
    if verb == "claim_reload":
        rig.manager.offload("r")
    before = rig.manager.view()
    # The thread claims, and ends without a word.
    thread = threading.Thread(target=getattr(rig.manager, verb), args=("r",))
    thread.start()
    thread.join()
    [claim] = rig.manager.claims()
    assert isinstance(claim, OffloadClaim | ReloadClaim)
    assert rig.manager.abandon(claim) == Abandoned("r", orphaned=False)
    now = rig.manager.view()
    assert [(s.residency, s.length, s.device, s.host) for s in now.streams] == [
        (s.residency, s.length, s.device, s.host) for s in before.streams
    ]
    assert rig.tokens("r") == [0, 1, 2]


# -- admit_all


def test_admit_all_admits_on_every_manager_in_the_order_given() -> None:
    one, two = Rig(address="self"), Rig(address="cross")
    leases = admit_all([(one.manager, Step([Segment("r")])), (two.manager, Step([Segment("r", span=2)]))])
    assert isinstance(leases, tuple)
    assert [lease.step.segments[0].span for lease in leases] == [1, 2]
    one.assert_empty_when_idle()
    two.assert_empty_when_idle()


def test_admit_all_admits_on_none_when_one_refuses() -> None:
    one, two, three = Rig(), Rig(), tiny(pages=1)
    before = [rig.manager.view().unordered() for rig in (one, two, three)]
    answer = admit_all([(rig.manager, Step([Segment("r", span=3)])) for rig in (one, two, three)])
    assert isinstance(answer, refusals.TooLarge)
    assert [rig.manager.view().unordered() for rig in (one, two, three)] == before


# -- debug mode


def _moves_a_length(state: Any, request: str, config: Any = None) -> Any:
    result = INGEST(state, request, config)
    state.requests["r"].streams["main"].length += 1
    return result


INGEST = lifecycle.ingest


@pytest.mark.parametrize(
    ("argument", "variable", "checks"),
    [(True, None, True), (None, "1", True), (True, "0", True), (None, None, False), (None, "0", False),
     (None, "", False), (False, "1", False)],
)  # fmt: skip
def test_promises_are_checked_after_each_transition_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, argument: bool | None, variable: str | None, checks: bool
) -> None:
    monkeypatch.delenv("KVSTATE_DEBUG", raising=False)
    if variable is not None:
        monkeypatch.setenv("KVSTATE_DEBUG", variable)
    rig = Rig(debug=argument)
    monkeypatch.setattr(lifecycle, "ingest", _moves_a_length)
    if not checks:
        assert isinstance(rig.manager.ingest("t"), Ingested)
        return
    with pytest.raises(PromiseBroken, match="r/main") as raised:
        rig.manager.ingest("t")
    assert raised.value.promise in ("tables_cover_lengths", "lengths_change_only_in_commit_landing_and_reset")


# -- a device that fails


class Lost(MemoryBackend):
    """Raises what a device raises, at the first offload."""

    def submit(self, op: Op) -> None:
        if isinstance(op, CopyOut):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        super().submit(op)


def test_any_other_exception_of_the_backend_poisons_the_manager() -> None:
    rig = Rig(backend=Lost)
    rig.run(Segment("r", span=3))
    with pytest.raises(Poisoned, match=r"illegal memory access.*build a new manager"):
        rig.manager.offload("r")
    lease = rig.manager.admit(Step([Segment("s")]))
    assert isinstance(lease, ManagerPoisoned)
    for answer in (
        lease,
        rig.manager.ingest("t"),
        rig.manager.reset("r"),
        rig.manager.remove("r"),
        rig.manager.offload("r"),
        rig.manager.reload("r"),
        rig.manager.claim_retrieve("s", None),
        rig.manager.cancel_retrieve("s"),
        rig.manager.publish("r"),
        rig.manager.readiness("r"),
    ):
        assert isinstance(answer, ManagerPoisoned)
        assert "illegal memory access" in str(answer)


@pytest.mark.parametrize("kind", [StepEnd, FetchEnd])
def test_an_op_that_moves_nothing_and_fails_all_the_same_poisons(pair: tuple[Rig, Rig], kind: type[Op]) -> None:
    publisher, _ = pair
    consumer = Rig(publisher.network, "third")
    publisher.run(Segment("r", span=3))
    consumer.backend.fail_next(kind)
    if kind is StepEnd:
        _, plan = consumer.staged(Segment("r"))
        with pytest.raises(Poisoned), consumer.manager.launch(plan):
            consumer.compute(plan)
    else:
        consumer.transport.fail(consumer.fetching("r", publisher.published("r")), "made to fail")
        with pytest.raises(Poisoned):
            consumer.manager.poll()
    assert isinstance(consumer.manager.ingest("t"), ManagerPoisoned)


class LostWhileWaiting(MemoryBackend):
    """Fails after the submit, which a wait is the first to see."""

    def wait(self, clock: Clock) -> None:
        raise Poisoned("CUDA error: unspecified launch failure")


def test_a_failure_that_a_wait_sees_poisons_too() -> None:
    rig = Rig(backend=LostWhileWaiting)
    rig.run(Segment("r"))
    with pytest.raises(Poisoned, match="unspecified launch failure"):
        rig.manager.publish("r")
    assert isinstance(rig.manager.ingest("t"), ManagerPoisoned)


def test_a_poisoned_manager_can_be_closed() -> None:
    rig = Rig(backend=Lost)
    rig.run(Segment("r"))
    with pytest.raises(Poisoned):
        rig.manager.offload("r")
    rig.manager.close()
    assert isinstance(rig.manager.ingest("t"), ManagerPoisoned), "why it cannot be used is not forgotten"


# -- the locks


@pytest.mark.parametrize("lock", ["_lock", "_submission"])
@pytest.mark.parametrize(
    "verb", [lambda m: m.offload("r"), lambda m: m.reload("r"), lambda m: m.publish("r"), lambda m: m.close()]
)
def test_a_blocking_verb_under_a_lock_of_the_manager_is_an_error(
    rig: Rig, lock: str, verb: Callable[[KVManager], Any]
) -> None:
    rig.run(Segment("r"))
    before = rig.manager.view()
    with getattr(rig.manager, lock), pytest.raises(LockHeld, match="release it first"):
        verb(rig.manager)
    assert rig.manager.view() == before


class Lock:
    """An RLock that notes which locks its thread held when it was taken; made in order: state, submission."""

    made: list["Lock"]
    taken: list[tuple["Lock", ...]]

    def __init__(self) -> None:
        self._inner = RLOCK()
        self.made.append(self)

    def __enter__(self) -> None:
        self.taken.append((self, *(lock for lock in self.made if lock is not self and lock._is_owned())))
        self._inner.acquire()

    def __exit__(self, *_: Any) -> None:
        self._inner.release()

    def _is_owned(self) -> bool:
        return bool(self._inner._is_owned())  # type: ignore[attr-defined]


RLOCK = threading.RLock


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig whose manager found another lock under threading.RLock."""
    rig = Rig()
    Lock.made, Lock.taken = [], []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "RLock", Lock)
        rig.manager = KVManager(rig.geometry, rig.backend)
    rig.manager.ingest("r")
    return rig


def _exercise(rig: Rig) -> None:
    rig.run(Segment("r", span=3), post_forks=[LabelFork("main", "cfg")])
    rig.manager.offload("r")
    rig.manager.reload("r")
    rig.published("r")
    rig.manager.remove("r")
    rig.manager.clear()


def test_the_lock_is_looked_up_at_construction(locked: Rig) -> None:
    assert isinstance(locked.manager._lock, Lock) and isinstance(locked.manager._submission, Lock)
    assert not isinstance(Rig().manager._lock, Lock)


def test_the_submission_lock_is_taken_before_the_state_lock_and_never_after_it(locked: Rig) -> None:
    _exercise(locked)
    state, submission = locked.manager._lock, locked.manager._submission
    assert (state, submission) in Lock.taken, "ops are taken from the outbox under the submission lock"
    assert (submission, state) not in Lock.taken
    locked.manager.close()
    assert (submission, state) not in Lock.taken


def test_a_verb_under_the_state_lock_is_an_error_instead_of_a_deadlock(locked: Rig) -> None:
    locked.run(Segment("r", span=3))
    before = locked.manager.view()
    with locked.manager._lock, pytest.raises(LockHeld, match=r"under the state lock.*release it first"):
        locked.manager.claim_offload("r")
    assert locked.manager.view() == before
    assert (locked.manager._submission, locked.manager._lock) not in Lock.taken


def test_backend_and_transport_are_never_called_under_the_state_lock(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    under: list[str] = []

    def watched(owner: Any, name: str, manager: KVManager) -> None:
        inner = getattr(owner, name)

        def called(*args: Any) -> Any:
            if manager._lock._is_owned():  # type: ignore[attr-defined]
                under.append(name)
            return inner(*args)

        setattr(owner, name, called)

    for rig in pair:
        for name in ("submit", "skip", "wait", "completed"):
            watched(rig.backend, name, rig.manager)
        for name in ("start", "cancel", "poll"):
            watched(rig.transport, name, rig.manager)
    publisher.run(Segment("r", span=3), post_forks=[LabelFork("main", "cfg")])
    publication = publisher.published("r")
    consumer.fetching("r", publication)
    consumer.manager.cancel_retrieve("r")
    publisher.backend.fail_next(CopyOut)
    publisher.manager.offload("r")
    publisher.manager.offload("r")
    publisher.manager.clear()
    publisher.manager.close()
    assert under == []


# -- clear and close


def test_clear_leaves_the_manager_as_constructed_and_twice_is_harmless(rig: Rig) -> None:
    rig.run(Segment("r", span=3), Segment("s"))
    rig.manager.offload("s")
    rig.manager.claim_offload("r")
    rig.manager.reload("s")
    rig.staged(Segment("s", "cfg"))
    for _ in range(2):
        rig.manager.clear()
        now = rig.manager.view()
        assert not (now.requests or now.streams or now.detached or now.leases or now.claims)
        assert rig.manager.pages_free() == {"device": (8,), "host": (8,)}
    assert isinstance(rig.manager.ingest("r"), Ingested)
    assert rig.stream("r").length == 0


def test_what_a_running_launch_holds_returns_when_it_ends(rig: Rig) -> None:
    lease, plan = rig.staged(Segment("r", span=3))
    with rig.manager.launch(plan):
        rig.manager.clear()
        assert lease.open
        assert rig.manager.pages_free()["device"] == (6,)
        rig.compute(plan)
    assert not lease.open
    assert rig.manager.pages_free()["device"] == (8,)


def test_close_refuses_everything_afterwards_and_twice_is_harmless() -> None:
    rig = Rig()
    rig.run(Segment("r", span=3))
    for _ in range(2):
        rig.manager.close()
        assert isinstance(rig.manager.admit(Step([Segment("r")])), ManagerClosed)
        assert isinstance(rig.manager.offload("r"), ManagerClosed)
        assert isinstance(rig.manager.publish("r"), ManagerClosed)
        rig.manager.clear()
    assert rig.manager.pages_free() == {"device": (8,), "host": (8,)}


def test_a_launch_may_end_after_the_close() -> None:
    closed: list[str] = []

    class Watched(MemoryBackend):
        def close(self) -> None:
            closed.append("now")
            super().close()

    rig = Rig(backend=Watched)
    lease, plan = rig.staged(Segment("r"))
    with rig.manager.launch(plan):
        rig.manager.close()
        rig.compute(plan)
        assert lease.open and not closed, "the model may still write"
    assert not lease.open and closed == ["now"]
    assert rig.manager.view().leases == ()
    rig.manager.close()
    assert closed == ["now"]


def test_close_asks_for_the_end_of_fetches() -> None:
    network = Network()
    publisher, consumer = Rig(network, "publisher"), Rig(network, "consumer")
    publisher.run(Segment("r", span=3))
    fetch = consumer.fetching("r", publisher.published("r"))
    consumer.manager.close()
    assert consumer.transport.cancels == [fetch]


# -- publish, retrieve, land


def test_what_was_published_is_what_lands(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=5))
    fetch = consumer.fetching("s", publisher.published("r"))
    ready = consumer.manager.readiness("s")
    assert not isinstance(ready, Refusal) and ready.pending == ("main",) and not ready.ready
    assert consumer.stream("s").length == 0, "the length moves when the host has seen the bytes"
    consumer.transport.copy(fetch)
    consumer.transport.finish(fetch)
    assert consumer.manager.poll() == ((fetch, Landed()),)
    ready = consumer.manager.readiness("s")
    assert not isinstance(ready, Refusal) and ready.ready
    assert consumer.tokens("s") == publisher.tokens("r") == list(range(5))


def test_admit_looks_for_landed_fetches_before_it_refuses(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=3))
    fetch = consumer.fetching("r", publisher.published("r"))
    assert isinstance(consumer.manager.admit(Step([Segment("r")])), refusals.FetchPending)
    consumer.transport.copy(fetch)
    consumer.transport.finish(fetch)
    assert isinstance(consumer.manager.admit(Step([Segment("r")])), Lease)


def test_content_that_changed_during_the_copy_does_not_land(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=3))
    fetch = consumer.fetching("r", publisher.published("r"))
    consumer.transport.copy(fetch)
    publisher.manager.remove("r")
    consumer.transport.finish(fetch)
    [(ended, outcome)] = consumer.manager.poll()
    assert ended is fetch and isinstance(outcome, Failed) and "epoch" in outcome.error
    assert consumer.stream("r").residency == "FetchFailed"
    consumer.manager.reset("r")
    assert consumer.stream("r").residency == "OnDevice"


def test_a_fetch_that_its_transport_refuses_has_failed(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=3))
    consumer.transport.refuse = lambda op: True
    assert not consumer.fetching("r", publisher.published("r")).open
    ready = consumer.manager.readiness("r")
    assert not isinstance(ready, Refusal)
    assert [label for label, _ in ready.failed] == ["main"]
    assert "was made to fail" in ready.failed[0][1]


def test_without_a_transport_a_fetch_fails_and_nothing_hangs() -> None:
    publisher = Rig(address="publisher")
    publisher.run(Segment("r", span=3))
    rig = Rig()
    rig.manager.transport = None
    assert not rig.fetching("s", publisher.published("r")).open
    ready = rig.manager.readiness("s")
    assert not isinstance(ready, Refusal) and ready.failed == (("main", "this manager has no transport"),)


def test_a_cancel_is_told_to_the_transport_once_and_leaves_the_stream_as_before(pair: tuple[Rig, Rig]) -> None:
    publisher, consumer = pair
    publisher.run(Segment("r", span=5))
    consumer.run(Segment("r"))
    before = consumer.manager.view()
    fetch = consumer.fetching("r", publisher.published("r"))
    assert consumer.manager.cancel_retrieve("r") == (fetch,)
    assert consumer.manager.cancel_retrieve("r") == (fetch,)
    assert consumer.transport.cancels == [fetch]
    assert isinstance(consumer.manager.admit(Step([Segment("r")])), refusals.FetchPending)
    consumer.transport.confirm_cancel(fetch)
    assert consumer.manager.poll() == ((fetch, Cancelled()),)
    assert consumer.manager.view().unordered() == before.unordered()


@pytest.fixture
def fetched() -> Iterator[Callable[..., tuple[Rig, Rig, ThreadTransport]]]:
    """Make a publisher and a consumer whose fetches run on a thread: ``fetched(never=…)``."""
    network = Network()
    transports: list[ThreadTransport] = []

    def make(**behaviour: Any) -> tuple[Rig, Rig, ThreadTransport]:
        transports.append(ThreadTransport(network, "consumer", **behaviour))
        publisher = Rig(network, "publisher")
        publisher.run(Segment("r", span=5))
        return publisher, Rig(network, "consumer", transport=transports[-1]), transports[-1]

    yield make
    for transport in transports:
        transport.close()


def _yes(_: FetchBegin) -> bool:
    return True


def test_a_fetch_on_a_thread_of_its_own_lands(fetched: Callable[..., tuple[Rig, Rig, ThreadTransport]]) -> None:
    publisher, consumer, transport = fetched()
    fetch = consumer.fetching("r", publisher.published("r"))
    assert transport.wait()
    assert consumer.manager.poll() == ((fetch, Landed()),)
    assert consumer.tokens("r") == publisher.tokens("r")
    consumer.assert_empty_when_idle()


@pytest.mark.parametrize(("behaviour", "error"), [("fail", "made to fail"), ("short", "short read: 2 of 5 tokens")])
def test_a_fetch_that_fails_late_keeps_nothing_but_the_error(
    fetched: Callable[..., tuple[Rig, Rig, ThreadTransport]], behaviour: str, error: str
) -> None:
    publisher, consumer, transport = fetched(**{behaviour: _yes})
    fetch = consumer.fetching("r", publisher.published("r"))
    assert transport.wait()
    [(ended, outcome)] = consumer.manager.poll()
    assert ended is fetch and isinstance(outcome, Failed) and error in outcome.error
    assert (consumer.stream("r").residency, consumer.stream("r").length) == ("FetchFailed", 0)
    assert consumer.manager.pages_free()["device"] == (8,)
    consumer.assert_empty_when_idle()


def test_a_fetch_that_never_moves_ends_by_its_cancel_also_after_remove(
    fetched: Callable[..., tuple[Rig, Rig, ThreadTransport]],
) -> None:
    publisher, consumer, transport = fetched(never=_yes)
    publication = publisher.published("r")
    kept, orphan = consumer.fetching("r", publication), consumer.fetching("s", publication)
    consumer.manager.cancel_retrieve("r")
    consumer.manager.remove("s")
    while consumer.manager.claims():  # a verb may have polled the first of the two already
        assert transport.wait()
        assert all(outcome == Cancelled() for _, outcome in consumer.manager.poll())
    assert not kept.open and not orphan.open
    assert consumer.stream("r").residency == "OnDevice"
    assert consumer.manager.pages_free()["device"] == (8,)
    consumer.assert_empty_when_idle()


def test_a_publisher_removed_in_the_middle_of_a_copy_fails_the_fetch(
    fetched: Callable[..., tuple[Rig, Rig, ThreadTransport]],
) -> None:
    publisher, consumer, transport = fetched()

    def removed_before_the_answer(incarnation: int, label: str, epoch: int) -> bool:
        publisher.manager.remove("r")
        return publisher.manager.epoch_holds(incarnation, label, epoch)

    publisher.network.join("publisher", publisher.backend, removed_before_the_answer)
    consumer.fetching("r", publisher.published("r"))
    assert transport.wait()
    [(_, outcome)] = consumer.manager.poll()
    assert isinstance(outcome, Failed) and "epoch" in outcome.error
    consumer.assert_empty_when_idle()
    publisher.assert_empty_when_idle()


# -- threads


class Worker(threading.Thread):
    """Runs `turns` of one kind against a manager; what goes wrong is kept for the test."""

    def __init__(self, rig: Rig, barrier: threading.Barrier, seed: int, turns: int) -> None:
        super().__init__(daemon=True)
        self.rig = rig
        self.barrier = barrier
        self.random = random.Random(seed)
        self.seed = seed
        self.turns = turns
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.barrier.wait()
            for turn in range(self.turns):
                self.turn(turn)
        except BaseException as error:
            self.error = error

    def turn(self, turn: int) -> None:
        raise NotImplementedError


class Owner(Worker):
    """Steps one request and remembers what it should hold."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.request = f"request {self.seed}"
        self.rig.manager.ingest(self.request)
        self.tokens: list[Any] = []
        self.commits = 0

    def turn(self, turn: int) -> None:
        manager, kind = self.rig.manager, self.random.randrange(20)
        if kind == 0:
            assert not isinstance(manager.reset(self.request, free=self.random.random() < 0.5), Refusal)
            self.tokens = []
        elif kind == 1:
            manager.offload(self.request)
        elif kind == 2:
            manager.publish(self.request)
        else:
            self.step(turn, abort=kind == 3)

    def step(self, turn: int, abort: bool) -> None:
        manager, span = self.rig.manager, 1 + self.random.randrange(3)
        wanted = Step([Segment(self.request, span=span)])
        lease = manager.admit(wanted)
        if isinstance(lease, refusals.StreamNotOnDevice):
            manager.reload(self.request, wanted)
            return
        if isinstance(lease, refusals.TooLarge):
            manager.reset(self.request)
            self.tokens = []
            return
        if isinstance(lease, Refusal):
            assert isinstance(lease, PagesExhausted), lease
            manager.offload(self.request)
            return
        plan = manager.plan(lease)
        if isinstance(plan, Refusal):
            assert isinstance(plan, StalePlan), plan
            assert not isinstance(manager.abort(lease), Refusal)
            return
        [planned] = plan.in_step_order
        stamps = [(self.seed, turn, token) for token in range(span)]
        try:
            with manager.launch(plan):
                assert planned.sink or self.rig.backend.read(planned.pages, planned.start) == self.tokens
                self.rig.backend.write(plan, 0, stamps)
        except Refused:
            manager.abort(lease)
            return
        if abort:
            assert not isinstance(manager.abort(lease), Refusal)
            return
        done = manager.commit(lease)
        assert isinstance(done, Committed), done
        if not done.dropped:
            self.tokens += stamps
            self.commits += 1


class Evictor(Worker):
    """Offloads whoever is there, in the middle of a step too, and looks at everything that can be looked at."""

    def turn(self, turn: int) -> None:
        manager = self.rig.manager
        for victim in manager.offload_order()[:1]:
            manager.offload(victim)
        victim = f"request {self.random.randrange(3)}"
        claim = manager.claim_offload(victim, discard_in_flight=self.random.random() < 0.3)
        if isinstance(claim, OffloadClaim):
            (manager.commit_claim if self.random.random() < 0.6 else manager.abandon)(claim)
        invariants.check(manager.view())
        manager.reclaimable(victim)
        manager.pages_free()


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(2))
def test_four_threads_lose_no_token_and_no_page(switching_often: None, seed: int) -> None:
    rig = Rig(sizes={"pages": 24, "host_pages": 24})
    barrier = threading.Barrier(4)
    owners = [Owner(rig, barrier, number, 100) for number in range(3)]
    for owner in owners:
        owner.random.seed(seed * 10 + owner.seed)
    workers: list[Worker] = [*owners, Evictor(rig, barrier, 3 + 10 * seed, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not [worker for worker in workers if worker.is_alive()], "the threads hang"
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    assert all(owner.commits for owner in owners)
    invariants.check(rig.manager.view())
    for owner in owners:
        assert rig.tokens(owner.request) == owner.tokens
    rig.assert_empty_when_idle()
