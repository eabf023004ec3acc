"""KVManager.batch(): what cannot wait for its end does not."""

from __future__ import annotations

from typing import Any

from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut
from kvstate.ordering import Clock, covers
from kvstate.refusals import CopyFailed
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry, Publication, Segment, Step, StreamFork, StreamId


class Served:
    """A manager whose request "r" stores 1, 2, 3."""

    def __init__(self) -> None:
        self.backend = MemoryBackend(Geometry(pages=8, page_size=2, host_pages=8))
        self.manager = KVManager(self.backend.geometry, self.backend, debug=True)
        self.manager.ingest("r")
        self.step(Step((Segment("r", span=3),)), [1, 2, 3])

    def step(self, step: Step, stamps: list[int]) -> list[Any]:
        """Run a step of one segment; return what it could read while it ran."""
        lease: Any = self.manager.admit(step)
        plan: Any = self.manager.plan(lease)
        with self.manager.launch(plan):
            self.backend.write(plan, 0, stamps)
            view = plan.in_step_order[0]
            read = self.backend.load(0, view.tables[0], 0, view.length)
        self.manager.commit(lease)
        return read

    def stored(self) -> list[Any]:
        """Return what "r" stores."""
        [stream] = self.manager.view().streams
        return self.backend.read(stream.device[0], stream.length)


def test_an_offload_whose_copy_fails_inside_a_batch_is_refused_and_nothing_is_lost() -> None:
    served = Served()
    served.backend.fail_next(CopyOut)
    with served.manager.batch():
        assert isinstance(served.manager.offload("r"), CopyFailed)
    assert served.stored() == [1, 2, 3]


def test_a_reload_whose_copy_fails_inside_a_batch_is_refused_and_can_be_repeated() -> None:
    served = Served()
    served.manager.offload("r")
    served.backend.fail_next(CopyIn)
    with served.manager.batch():
        assert isinstance(served.manager.reload("r"), CopyFailed)
    served.manager.reload("r")
    assert served.stored() == [1, 2, 3]


def test_a_launch_inside_a_batch_runs_behind_the_copies_of_its_forks() -> None:
    served = Served()
    fork = StreamFork(StreamId("r"), StreamId("r", "cfg"))
    with served.manager.batch():
        assert served.step(Step((Segment("r", "cfg", span=1),), pre_forks=(fork,)), [9]) == [1, 2, 3, 9]


def test_a_publish_inside_a_batch_submits_what_it_waits_for() -> None:
    served = Served()
    served.manager.ingest("s")
    waited = served.backend.wait

    def wait(after: Clock) -> None:
        assert covers(served.backend.completed(), after), "this would wait for ever"
        waited(after)

    served.backend.wait = wait  # type: ignore[method-assign]
    fork = StreamFork(StreamId("r"), StreamId("s"))
    with served.manager.batch():
        served.step(Step((Segment("r", span=2),), post_forks=(fork,)), [4, 5])
        assert isinstance(served.manager.publish("s"), Publication)
