"""Handles go back to the manager they came from; an interrupted submit leaves no manager that seems well."""

from __future__ import annotations

import pytest

from kvstate import Geometry, KVManager, Publication, Segment, Step, StreamFork, StreamId, admit_all, invariants
from kvstate.backend import Outcome
from kvstate.errors import ForeignHandle
from kvstate.ops import CopyOut, ForkCopy, Op, Plan
from kvstate.refusals import CopyFailed, ManagerPoisoned
from kvstate.state import Fetch, Lease, OffloadClaim, State
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions import lifecycle, offload, step
from kvstate.transitions.offload import Abandoned
from kvstate.view import view

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
    lease = publisher.admit(Step([Segment("r", span=3)]))
    assert isinstance(lease, Lease)
    plan = publisher.plan(lease)
    assert isinstance(plan, Plan)
    with publisher.launch(plan):
        pass
    publisher.commit(lease)
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


def test_two_managers_without_a_given_address_do_not_take_each_other_for_themselves() -> None:
    assert manager().address != manager().address


def test_a_failed_fork_copy_fails_the_offload_that_was_claimed_meanwhile() -> None:
    state = State(GEOMETRY)
    for request in ("a", "s"):
        lifecycle.ingest(state, request)

    def run(wanted: Step) -> None:
        lease = step.admit(state, wanted)
        assert isinstance(lease, Lease)
        plan = step.plan(state, lease)
        assert isinstance(plan, Plan)
        step.launch_enter(state, plan)
        step.launch_exit(state, lease)
        step.commit(state, lease)

    run(Step([Segment("a")]))
    run(Step([Segment("s", span=3)]))
    run(Step([], post_forks=[StreamFork(StreamId("s"), StreamId("a", "x"))]))
    copy = next(op for op in state.outbox if isinstance(op, ForkCopy))
    claim = offload.claim_offload(state, "a")
    assert isinstance(claim, OffloadClaim)
    lifecycle.op_failed(state, copy, "no memory")
    invariants.check(view(state))
    assert isinstance(offload.commit_offload(state, claim), CopyFailed)
    offload.abandon_offload(state, claim)
    invariants.check(view(state))
    assert {s.label: (s.residency, s.length) for s in view(state).streams if s.request == "a"} == {
        "main": ("OnDevice", 1),
        "x": ("OnDevice", 0),
    }


def test_admitting_on_several_managers_leaves_nothing_when_one_of_them_raises() -> None:
    class Deaf(StepTransport):
        def poll(self) -> list[tuple[Fetch, Outcome]]:
            raise OSError("the network is gone")

    mine = manager()
    other = KVManager(GEOMETRY, MemoryBackend(GEOMETRY), transport=Deaf(Network(), "other"))
    with pytest.raises(OSError, match="network is gone"):
        admit_all([(mine, Step([Segment("r")])), (other, Step([Segment("unknown")]))])
    assert mine.view().leases == ()
