"""Handles go back to the manager they came from; an interrupted submit leaves no manager that seems well."""

from __future__ import annotations

import pytest

from kvstate import Geometry, KVManager, Segment, Step
from kvstate.errors import ForeignHandle
from kvstate.ops import CopyOut, Op, Plan
from kvstate.refusals import ManagerPoisoned
from kvstate.state import Lease, OffloadClaim
from kvstate.testing.memory import MemoryBackend

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
