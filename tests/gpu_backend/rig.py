"""A KVManager on a TorchBackend, with the few verbs that these tests repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st

from gpu_backend.backend import TorchBackend
from gpu_backend.layout import CacheLayout
from gpu_backend.queues import HostQueues, Mark
from kvstate import KVManager, Segment, Step
from kvstate.ops import Plan
from kvstate.ordering import Queue
from kvstate.state import Lease, OnDevice
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.transitions.step import Committed

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("a", "b", "c")), st.sampled_from(("main", "cfg")), st.integers(0, 7)),
        st.tuples(st.none(), st.just("main"), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=6,
)
"""Steps of three requests and of padding: (request, label, span) per segment."""

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


def layout(**changes: Any) -> CacheLayout:
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 12, "host_pages": 12}
    return CacheLayout(**{**sizes, **changes})


class Rig:
    def __init__(self, sizes: CacheLayout | None = None, **options: Any) -> None:
        self.layout = sizes if sizes is not None else layout()
        self.judge = EdgeJudge(self.layout.page_size, MemoryBackend.sinks_of(self.layout.geometry()))
        self.backend = TorchBackend(self.layout, judge=self.judge, **options)
        self.manager = KVManager(self.layout.geometry(), self.backend, debug=True)

    def ingest(self, *requests: str) -> None:
        for request in requests:
            self.manager.ingest(request)

    def admit(self, step: Step) -> Lease:
        lease = self.manager.admit(step)
        assert isinstance(lease, Lease), lease
        return lease

    def plan(self, step: Step) -> Plan:
        plan = self.manager.plan(self.admit(step))
        assert isinstance(plan, Plan), plan
        return plan

    @contextmanager
    def step(self, *segments: Segment, **options: Any) -> Iterator[Plan]:
        """Run a step: the body is the model; then it is committed."""
        with self.launched(Step(segments, **options)) as plan:
            yield plan
        assert isinstance(self.manager.commit(plan.lease), Committed)

    @contextmanager
    def launched(self, step: Step) -> Iterator[Plan]:
        with self.manager.launch(self.plan(step)) as plan:
            yield plan

    def store(self, request: str, stamps: Sequence[int], label: str = "main", **options: Any) -> None:
        with self.step(Segment(request, label, len(stamps)), **options) as plan:
            self.backend.write(plan, 0, stamps)

    def table(self, request: str, label: str = "main") -> list[int]:
        stream = self.manager._state.requests[request].streams[label]
        assert isinstance(stream.residency, OnDevice)
        return list(stream.residency.tables[0])

    def content(self, request: str, label: str = "main") -> list[Any]:
        stream = self.manager._state.requests[request].streams[label]
        return self.backend.read(self.table(request, label), stream.length)


class LateQueues(HostQueues):
    """While `late`, uploads run when somebody waits for them or the test says so: a device behind the host."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.uploads = 0
        self.waits = 0
        self.done = 0
        self.late = True

    def upload(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        self.uploads += 1
        self.pending.append((target, source))
        if not self.late:
            self.run()

    def mark(self, queue: Queue) -> Mark:
        return _Late(self, self.uploads)

    def run(self, count: int | None = None) -> None:
        """Run the oldest uploads."""
        for target, source in self.pending[:count]:
            target.copy_(source)
            self.done += 1
        del self.pending[:count]


class _Late:
    def __init__(self, queues: LateQueues, number: int) -> None:
        self.queues = queues
        self.number = number

    def reached(self) -> bool:
        return self.queues.done >= self.number

    def wait(self) -> None:
        self.queues.waits += 1
        self.queues.run(self.number - self.queues.done)


class CountingQueues(HostQueues):
    """Counts uploads."""

    uploads = 0

    def upload(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        self.uploads += 1
        super().upload(queue, target, source)
