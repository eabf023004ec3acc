"""One step on a manager whose contents do not matter to a test."""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.refusals import Refusal
from kvstate.state import Lease
from kvstate.types import Segment, Step, StreamFork


def store(manager: KVManager, *segments: Segment, forks: Sequence[StreamFork] = ()) -> None:
    """Run a step of `segments`, with post-forks, to its commit."""
    lease = manager.admit(Step(segments, post_forks=forks))
    assert isinstance(lease, Lease), lease
    plan = manager.plan(lease)
    assert isinstance(plan, Plan), plan
    with manager.launch(plan):
        pass
    assert not isinstance(manager.commit(lease), Refusal)
