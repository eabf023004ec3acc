"""Handles go back to the manager they came from; an interrupted submit leaves no manager that seems well."""

from __future__ import annotations

import pytest

from kvstate import (
    Geometry,
    KVManager,
    Publication,
    Record,
    Segment,
    Step,
    StreamFork,
    StreamId,
    admit_all,
    invariants,
)
from kvstate.backend import Outcome
from kvstate.errors import ForeignHandle, Poisoned
from kvstate.ops import CopyOut, ForkCopy, Op, Plan
from kvstate.refusals import CopyFailed, ManagerPoisoned
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim, State
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions import lifecycle, offload, step
from kvstate.transitions.offload import Abandoned
from kvstate.view import view
from tests.steps import store

GEOMETRY = Geometry(pages=4, page_size=4, host_pages=4)


def manager(backend: MemoryBackend | None = None) -> KVManager:
    made = KVManager(GEOMETRY, backend if backend is not None else MemoryBackend(GEOMETRY), debug=True)
    made.ingest("r")
    return made


def admitted(kv: KVManager) -> Lease:
    lease = kv.admit(Step([Segment("r", span=3)]))
    assert isinstance(lease, Lease)
    return lease


@pytest.mark.parametrize("verb", ["plan", "commit", "abort"])
def test_a_lease_of_another_manager_is_an_error_and_changes_nothing(verb: str) -> None:
    mine, theirs = manager(), manager()
    own, foreign = admitted(mine), admitted(theirs)
    assert own.serial == foreign.serial, "serials are per manager: only the object tells them apart"
    before = mine.view(), theirs.view()
    if verb == "commit":
        plan = theirs.plan(foreign)
        assert isinstance(plan, Plan)
        with theirs.launch(plan):
            pass
        before = mine.view(), theirs.view()
    with pytest.raises(ForeignHandle, match="another manager"):
        getattr(mine, verb)(foreign)
    assert (mine.view(), theirs.view()) == before


def test_a_claim_of_another_manager_is_an_error_and_changes_nothing() -> None:
    mine, theirs = manager(), manager()
    own, foreign = mine.claim_offload("r"), theirs.claim_offload("r")
    assert isinstance(own, OffloadClaim) and isinstance(foreign, OffloadClaim) and own.serial == foreign.serial
    before = mine.view(), theirs.view()
    for verb in (mine.commit_claim, mine.abandon):
        with pytest.raises(ForeignHandle):
            verb(foreign)
    assert (mine.view(), theirs.view()) == before


def test_an_interrupted_submit_poisons_the_manager() -> None:
    class Interrupted(MemoryBackend):
        def submit(self, op: Op) -> None:
            if isinstance(op, CopyOut):
                raise KeyboardInterrupt
            super().submit(op)

    kv = manager(Interrupted(GEOMETRY))
    with pytest.raises(KeyboardInterrupt):
        kv.claim_offload("r")
    assert isinstance(kv.ingest("s"), ManagerPoisoned), "nobody knows what of the outbox was submitted"


def test_a_fetch_among_the_claims_is_given_up_like_any_other() -> None:
    network = Network()
    publisher = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), address="publisher")
    network.join("publisher", publisher.backend, publisher.epoch_holds)  # type: ignore[arg-type]
    publisher.ingest("r")
    store(publisher, Segment("r", span=3))
    transport = StepTransport(network, "consumer")
    consumer = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), transport=transport, address="consumer", debug=True)
    network.join("consumer", consumer.backend, consumer.epoch_holds)  # type: ignore[arg-type]
    consumer.ingest("r")
    published = publisher.publish("r")
    assert isinstance(published, Publication)
    consumer.claim_retrieve("r", published)
    [fetch] = consumer.claims()
    with pytest.raises(TypeError, match="ends by what its transport says"):
        consumer.commit_claim(fetch)  # type: ignore[arg-type]
    assert consumer.abandon(fetch) == Abandoned("r", False, pending=True)
    assert consumer.claims() == (fetch,), "its pages are taken until the transport has confirmed"
    transport.confirm_cancel(fetch)
    consumer.poll()
    assert consumer.claims() == () and consumer.pages_free()["device"] == (4,)


def test_a_fetch_of_another_manager_is_not_given_up_in_place_of_ones_own() -> None:
    network = Network()
    publisher = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), address="publisher")
    network.join("publisher", publisher.backend, publisher.epoch_holds)  # type: ignore[arg-type]
    record = Record(3, 0, 4, ((0,),), False, "publisher", 1, 0)
    published = Publication("r", 1, {0: {"main": record}})
    managers = []
    for address in ("mine", "theirs"):
        transport = StepTransport(network, address)
        kv = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), transport=transport, address=address)
        network.join(address, kv.backend, kv.epoch_holds)  # type: ignore[arg-type]
        kv.ingest("r")
        kv.claim_retrieve("r", published)
        managers.append((kv, transport))
    (mine, my_transport), (theirs, _) = managers
    [foreign] = theirs.claims()
    with pytest.raises(ForeignHandle):
        mine.abandon(foreign)
    assert my_transport.cancels == []
    [own] = mine.claims()
    assert mine.abandon(own) == mine.abandon(own) == Abandoned("r", False, pending=True)
    mine.remove("r")
    assert mine.abandon(own) == Abandoned("r", True, pending=True), "its request has gone by now"


def test_two_managers_without_a_given_address_do_not_take_each_other_for_themselves() -> None:
    assert manager().address != manager().address


class Spoiled:
    """A post-fork onto a/x was committed, an offload of a was claimed, and then the copy of the fork failed."""

    def __init__(self) -> None:
        self.state = State(GEOMETRY)
        for request in ("a", "s"):
            lifecycle.ingest(self.state, request)
        self.run(Step([Segment("a")]))
        self.run(Step([Segment("s", span=3)]))
        self.run(Step([], post_forks=[StreamFork(StreamId("s"), StreamId("a", "x"))]))
        copy = next(op for op in self.state.outbox if isinstance(op, ForkCopy))
        claim = offload.claim_offload(self.state, "a")
        assert isinstance(claim, OffloadClaim)
        self.claim = claim
        lifecycle.op_failed(self.state, copy, "no memory")
        self.check("op_failed")

    def run(self, wanted: Step) -> None:
        lease = step.admit(self.state, wanted)
        assert isinstance(lease, Lease)
        plan = step.plan(self.state, lease)
        assert isinstance(plan, Plan)
        step.launch_enter(self.state, plan)
        step.launch_exit(self.state, lease)
        step.commit(self.state, lease)

    def check(self, verb: str) -> None:
        invariants.check(view(self.state), None, verb)

    def lengths(self) -> dict[str, tuple[str, int]]:
        return {s.label: (s.residency, s.length) for s in view(self.state).streams if s.request == "a"}


def test_a_failed_fork_copy_fails_the_offload_that_was_claimed_meanwhile() -> None:
    spoiled = Spoiled()
    assert isinstance(offload.commit_offload(spoiled.state, spoiled.claim), CopyFailed)
    before = view(spoiled.state)
    offload.abandon_offload(spoiled.state, spoiled.claim)
    invariants.check(view(spoiled.state), before, "abandon_offload")
    assert spoiled.lengths() == {"main": ("OnDevice", 1), "x": ("OnDevice", 0)}


def test_a_failed_fork_copy_takes_nothing_of_what_was_written_since() -> None:
    spoiled = Spoiled()
    lifecycle.reset(spoiled.state, "a")
    spoiled.run(Step([Segment("a", "x", 3)]))
    assert offload.abandon_offload(spoiled.state, spoiled.claim) == Abandoned("a", True)
    assert spoiled.lengths()["x"] == ("OnDevice", 3)


def test_the_copy_of_an_offload_that_a_fork_failed_ran_all_the_same_and_is_waited_for() -> None:
    spoiled = Spoiled()
    assert spoiled.claim.op is not None
    pages = [page for part in spoiled.claim.parts for page in part.device[0]]
    offload.abandon_offload(spoiled.state, spoiled.claim)
    lifecycle.remove(spoiled.state, "a")
    fences = spoiled.state.device.pools[0].fences
    assert all(fences[page][1] == spoiled.claim.op.number for page in pages)


def test_a_request_is_offloaded_from_its_claim_until_its_reload_commits() -> None:
    kv = manager()
    said = [kv.is_offloaded("r"), kv.is_offloaded("nobody")]
    claim = kv.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    said.append(kv.is_offloaded("r"))
    kv.abandon(claim)
    said.append(kv.is_offloaded("r"))
    kv.offload("r")
    said.append(kv.is_offloaded("r"))
    back = kv.claim_reload("r")
    assert isinstance(back, ReloadClaim)
    said.append(kv.is_offloaded("r"))
    kv.commit_claim(back)
    said.append(kv.is_offloaded("r"))
    assert said == [False, False, True, False, True, True, False]


def test_a_poisoned_manager_vouches_for_nothing() -> None:
    class Lost(MemoryBackend):
        def submit(self, op: Op) -> None:
            if isinstance(op, CopyOut):
                raise RuntimeError("the device is gone")
            super().submit(op)

    kv = manager(Lost(GEOMETRY))
    published = kv.publish("r")
    assert isinstance(published, Publication)
    record = published.ranks[0]["main"]
    assert kv.epoch_holds(record.incarnation, "main", record.epoch)
    with pytest.raises(Poisoned):
        kv.claim_offload("r")
    assert not kv.epoch_holds(record.incarnation, "main", record.epoch)
    assert isinstance(kv.publish("r"), ManagerPoisoned)


def test_admitting_on_several_managers_leaves_nothing_when_one_of_them_raises() -> None:
    class Deaf(StepTransport):
        def poll(self) -> list[tuple[Fetch, Outcome]]:
            raise OSError("the network is gone")

    mine = manager()
    other = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), transport=Deaf(Network(), "other"))
    with pytest.raises(OSError, match="network is gone"):
        admit_all([(mine, Step([Segment("r")])), (other, Step([Segment("unknown")]))])
    assert mine.view().leases == ()
