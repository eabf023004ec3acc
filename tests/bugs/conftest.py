"""A manager over a memory backend under the edge judge, in the verbs of the schedules of the known bugs.

Promises are checked after every transition (``debug=True``), pages that became free are spoiled, and at the end of
every test everything is ended: then no page may be missing, and the judge may have seen no conflict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

from kvstate import invariants, view
from kvstate.manager import KVManager
from kvstate.ops import Op, Plan, StepEnd, Tier
from kvstate.ordering import NOTHING
from kvstate.prefix import CacheEvent, findable
from kvstate.refusals import Refusal
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim, State
from kvstate.testing.judge import Conflict, EdgeJudge
from kvstate.testing.memory import MemoryBackend, nobodys
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions import lifecycle, offload, reload, step
from kvstate.transitions.step import Committed
from kvstate.types import MAIN, Geometry, Segment, Step
from kvstate.view import PagesView, StreamView


def stamps_of(plan: Plan, counter: Iterator[int]) -> list[list[str]]:
    """Return one new stamp per computed token, per segment."""
    return [
        [f"{seen.request}/{seen.label}@{seen.position + token}#{next(counter)}" for token in range(seen.span)]
        for seen in plan.in_step_order
    ]


def replay(geometry: Geometry, ops: list[Op], skipped: set[int], stripped: Op | None) -> list[Conflict]:
    """Return the conflicts of a recorded run in which `stripped` follows nothing (a step: its begin and its end)."""
    judge = EdgeJudge.of(geometry)
    begin = stripped.begin if isinstance(stripped, StepEnd) else None
    for op in ops:
        if op is stripped or op.number == begin:
            op = attrs.evolve(op, after=NOTHING)
        (judge.skip if op.number in skipped else judge.observe)(op)
    return judge.conflicts


class Kv:
    """A KVManager, its backend, judge and transport; verbs take and return what the manager's do."""

    def __init__(self, network: Network, counter: Iterator[int], *, address: str = "kv", **sizes: Any) -> None:
        self.geometry = Geometry(**{"pages": 8, "page_size": 2, "host_pages": 8, **sizes})
        self.judge = EdgeJudge.of(self.geometry)
        self.backend = MemoryBackend(self.geometry, judge=self.judge, record=True)
        self.events: list[CacheEvent] = []
        self.transport = StepTransport(network, address)
        self.manager = KVManager(
            self.geometry, self.backend, transport=self.transport, address=address, debug=True, clock=lambda: 0.0,
            events=self.events,
        )  # fmt: skip
        network.join(address, self.backend, self.manager.epoch_holds)
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        """Pass verbs on to the manager, and spoil what became free."""
        verb = getattr(self.manager, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = verb(*args, **kwargs)
            self.spoil()
            return result

        return called

    def spoil(self) -> None:
        """Spoil every free page of both tiers."""
        for tier, group, pages in nobodys(self.manager.view()):
            self.backend.poison(tier, group, pages)

    # -- programs

    def ingest(self, *requests: str, **kwargs: Any) -> None:
        """Ingest requests."""
        for request in requests:
            self.manager.ingest(request, **kwargs)

    def admit(self, *segments: Segment, **kwargs: Any) -> Lease | Refusal:
        """Admit the step of `segments`."""
        return self.manager.admit(Step(segments, **kwargs))

    def staged(self, *segments: Segment, **kwargs: Any) -> tuple[Lease, Plan]:
        """Admit and plan."""
        lease = self.admit(*segments, **kwargs)
        assert isinstance(lease, Lease), lease
        plan = self.manager.plan(lease)
        assert isinstance(plan, Plan), plan
        return lease, plan

    def compute(self, plan: Plan) -> list[list[str]]:
        """Write new stamps for every computed token; return what each segment had in front of them."""
        stamps = stamps_of(plan, self._counter)
        contexts = []
        for place, planned in enumerate(plan.in_step_order):
            contexts.append([] if planned.sink else self.read(planned.tables, planned.start, planned.skipped))
            self.backend.write(plan, place, stamps[place])
        return contexts

    def read(self, tables: PagesView, length: int, skipped: Sequence[int], tier: Tier = Tier.DEVICE) -> list[str]:
        """Return the first tokens of a table as the first group has them; others hold the same from their window on."""
        read = self.backend.read if tier is Tier.DEVICE else self.backend.read_host
        whole: list[str] = read(tables[0], length)
        for group, (table, skip) in enumerate(zip(tables[1:], skipped[1:], strict=True), start=1):
            first = skip * self.geometry.page_size
            held = read(table[skip:], length - first, group)
            assert held == whole[first:], f"group {group} holds {held}, the first one {whole}"
        return whole

    def launch(self, plan: Plan) -> list[list[str]]:
        """Run the model of `plan`; return what each segment had in front of its tokens."""
        with self.manager.launch(plan) as launched:
            return self.compute(launched)

    def launched(self, *segments: Segment, **kwargs: Any) -> Lease:
        """Admit, plan and launch."""
        lease, plan = self.staged(*segments, **kwargs)
        self.launch(plan)
        return lease

    def run(self, *segments: Segment, accepted: tuple[int, ...] | None = None, **kwargs: Any) -> Committed:
        """Admit, plan, launch and commit."""
        done = self.commit(self.launched(*segments, **kwargs), accepted)
        assert isinstance(done, Committed), done
        return done

    # -- what there is

    @property
    def device_free(self) -> int:
        """Free device pages."""
        return self.manager.pages_free()["device"][0]

    @property
    def host_free(self) -> int:
        """Free host pages."""
        return self.manager.pages_free()["host"][0]

    def stream(self, request: str, label: str = MAIN) -> StreamView | None:
        """Return the view of a live stream."""
        return next((s for s in self.manager.view().streams if (s.request, s.label) == (request, label)), None)

    def tokens(self, request: str, label: str = MAIN) -> list[str]:
        """Return what a stream stores, on the device or on the host."""
        stream = self.stream(request, label)
        assert stream is not None, f"{request}/{label} is not there"
        assert stream.residency in ("OnHost", "OnDevice", "Fetching", "FetchFailed"), stream.residency
        on_host = stream.residency == "OnHost"
        tables = tuple(
            (0,) * skip + table
            for table, skip in zip(stream.host if on_host else stream.device, stream.skipped, strict=True)
        )
        return self.read(tables, stream.length, stream.skipped, Tier.HOST if on_host else Tier.DEVICE)

    def pages(self, request: str, label: str = MAIN, group: int = 0) -> tuple[int, ...]:
        """Return the device table of a stream."""
        stream = self.stream(request, label)
        assert stream is not None
        return stream.device[group]

    def last(self, kind: type[Op], owner: Any = None) -> Any:
        """Return the newest op of `kind`, of `owner` if given."""
        return [op for op in self.backend.ops if isinstance(op, kind) and owner in (None, op.owner)][-1]

    def step_of(self, lease: Lease) -> StepEnd:
        """Return the op of a launched step."""
        return self.last(StepEnd, lease)

    def conflicts_without_the_edges_of(self, op: Op) -> list[Conflict]:
        """Return what the judge says of this run when `op` follows nothing: not empty where its edges are needed."""
        return replay(self.geometry, self.backend.ops, self.backend.skipped, op)

    # -- the end

    def finish(self) -> None:
        """End everything; then nothing may be missing and no conflict may have been seen."""
        manager = self.manager
        manager.poll()
        for lease in list(manager._state.leases.values()):
            assert lease.status.value != "launching", f"the test leaves {lease} in its launch"
            manager.abort(lease)
        for claim in manager.claims():
            if isinstance(claim, Fetch):
                self.transport.fail(claim, "the test ended")
            else:
                manager.abandon(claim)
        manager.poll()
        for request, _ in manager.view().requests:
            manager.remove(request)
        invariants.check(manager.view())
        keys = {(group, key) for group, pool in enumerate(manager.view().device) for _, key in pool.keys}
        assert {(group, key.hex()) for group, key in findable(self.events)} == keys
        manager.reset_prefix_cache()
        assert manager.pages_free() == {"device": self.geometry.group_pages, "host": self.geometry.host_group_pages}
        assert not self.judge.violations, "\n".join(map(str, self.judge.violations))


class Bare:
    """A State whose outbox is handed on when the schedule says so: ``drain`` is a step of its own."""

    def __init__(self, counter: Iterator[int], **sizes: int) -> None:
        self.geometry = Geometry(**{"pages": 8, "page_size": 2, "host_pages": 8, **sizes})
        self.state = State(self.geometry)
        self.judge = EdgeJudge.of(self.geometry)
        self.backend = MemoryBackend(self.geometry, judge=self.judge, record=True)
        self._counter = counter

    def ingest(self, *requests: str) -> None:
        """Ingest requests."""
        for request in requests:
            lifecycle.ingest(self.state, request)

    def drain(self) -> None:
        """Submit the outbox; what a step computes is written before its StepEnd is submitted."""
        while self.state.outbox:
            op = self.state.outbox.pop(0)
            if isinstance(op, StepEnd):
                for place, stamps in enumerate(stamps_of(op.plan, self._counter)):
                    self.backend.write(op.plan, place, stamps)
            self.backend.submit(op)

    def run(self, *segments: Segment, **kwargs: Any) -> Committed:
        """Admit, plan, launch and commit."""
        lease = step.admit(self.state, Step(segments, **kwargs))
        assert isinstance(lease, Lease), lease
        plan = step.plan(self.state, lease)
        assert isinstance(plan, Plan)
        step.launch_enter(self.state, plan)
        step.launch_exit(self.state, lease)
        self.drain()
        done = step.commit(self.state, lease)
        assert isinstance(done, Committed)
        self.drain()
        return done

    def tokens(self, request: str, label: str = MAIN) -> list[str]:
        """Return what a stream stores on the device or on the host."""
        stream = next(s for s in view.view(self.state).streams if (s.request, s.label) == (request, label))
        read, tables = (
            (self.backend.read_host, stream.host)
            if stream.residency == "OnHost"
            else (self.backend.read, stream.device)
        )
        return read(tables[0] if tables else (), stream.length)

    def finish(self) -> None:
        """End everything; then nothing may be missing and no conflict may have been seen."""
        self.drain()
        for lease in list(self.state.leases.values()):
            step.abort(self.state, lease)
        for claim in list(self.state.claims.values()):
            if isinstance(claim, OffloadClaim):
                offload.abandon_offload(self.state, claim)
            elif isinstance(claim, ReloadClaim):
                reload.abandon_reload(self.state, claim)
        for request in list(self.state.requests):
            lifecycle.remove(self.state, request)
        self.drain()
        invariants.check(view.view(self.state))
        assert self.state.device.free() == (self.geometry.pages,)
        assert self.state.host.free() == (self.geometry.host_pages,)
        assert not self.judge.violations, "\n".join(map(str, self.judge.violations))


@pytest.fixture
def machines() -> Iterator[Callable[..., Kv]]:
    """Make managers that reach each other: ``machines(pages=…, page_size=…, host_pages=…, address=…)``."""
    network, counter = Network(), itertools.count(1)
    made: list[Kv] = []

    def make(**kwargs: Any) -> Kv:
        made.append(Kv(network, counter, **kwargs))
        return made[-1]

    yield make
    for kv in made:
        kv.finish()


@pytest.fixture
def kv(machines: Callable[..., Kv]) -> Kv:
    """Return a manager with 8 device and 8 host pages of 2 tokens."""
    return machines()


@pytest.fixture
def bare() -> Iterator[Bare]:
    """Return a bare State with 8 device and 8 host pages of 2 tokens."""
    made = Bare(itertools.count(1))
    yield made
    made.finish()
