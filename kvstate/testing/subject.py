"""Subjects: what the kit checks, behind one small protocol.

A subject runs lock-sized verbs and lets the kit read contents back. The built-in machine (a State driven directly) and
the built-in manager (a KVManager) are the first two; both drive a backend whose bytes are token stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from kvstate.backend import Cancelled, Failed, Landed
from kvstate.errors import SubmitError
from kvstate.manager import KVManager
from kvstate.ops import FetchBegin, Op, Plan, PlanView, Tier
from kvstate.prefix import CacheEvent, Key, findable
from kvstate.refusals import Refusal
from kvstate.state import Fetch, State
from kvstate.testing.backends import find
from kvstate.testing.judge import BadEdge, Conflict, EdgeJudge
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions import VERBS, lifecycle, offload, prefix, retrieve
from kvstate.transitions import leaving as leaving_
from kvstate.transitions import step as step_
from kvstate.types import Geometry, Step
from kvstate.view import StateView, StreamView, view

Contents = tuple[list[Any], ...]
"""Stamps per group. All groups store the same tokens; a window group holds those from its first held page on."""


@attrs.frozen
class Capacities:
    """Sizes that a program may count on: tokens per page, pages per tier."""

    page_size: int
    pages: int
    host_pages: int


class Subject(Protocol):
    """Anything with a paged cache that the kit can drive.

    Attributes
    ----------
    verbs
        The lock-sized verbs it has. `kvstate.testing.alphabet` says what each needs before it can be called.
    capacities
        Its sizes.
    transport
        Decides what becomes of fetches.
    """

    verbs: frozenset[str]
    capacities: Capacities
    transport: StepTransport

    def apply(self, verb: str, *args: Any) -> Any:
        """Run one verb on kvstate's types and on what earlier verbs returned; return its outcome or a Refusal."""

    def compute(self, plan: Plan, stamps: Sequence[Sequence[Any]]) -> list[Contents]:
        """Run the model of a launched plan: write `stamps` per segment; return what each view had in front of them.

        Every group is read, from the first token it holds on (``view.skipped``); of rows that go to the sink, none is.
        """

    def fail_next(self, kind: type[Op]) -> None:
        """Make the next submit of such an op fail."""

    def fail_none(self) -> bool:
        """Forget failures that were asked for and did not happen; return whether all had happened."""

    def reclaimable(self, request: str) -> int:
        """Return what an offload of `request` would free."""

    def gain(self, request: str) -> int:
        """Return what would become available if `request` left and its steps in flight had ended."""

    def probe(self, step: Step, leaving: bool) -> Refusal | None:
        """Return what admitting `step` would be refused with; `leaving`: with what is leaving counted as available."""

    def pages_available(self) -> dict[str, tuple[int, ...]]:
        """Return per tier what each group alone could be granted."""

    def match(self, keys: Sequence[Key]) -> int:
        """Return how many leading pages of `keys` a request could start on."""

    def findable(self) -> dict[tuple[int, Key], Key | None]:
        """Return what the cache events so far say is findable: the parent of each (group, key)."""

    def content(self, now: StateView, stream: StreamView) -> Contents:
        """Return the stamps that a stream stores, wherever they are, in every group (``stream.skipped``)."""

    def snapshot(self) -> StateView:
        """Return everything the subject knows."""

    def poison(self, tier: Tier, group: int, pages: Sequence[int]) -> None:
        """Spoil pages that became free."""

    def conflicts(self) -> Sequence[Conflict | BadEdge]:
        """Return what the edge judge has found so far."""


class _Builtin:
    """What the two built-in subjects share: a stamped backend under an edge judge, and a stepped transport."""

    verbs = frozenset(VERBS) | {"poll"}

    def __init__(self, geometry: Geometry, network: Network, address: str, device: str = "memory") -> None:
        self.geometry = geometry
        self.capacities = Capacities(geometry.page_size, geometry.pages, geometry.host_pages)
        self.judge = EdgeJudge.of(geometry)
        self.backend = find(device)(geometry, judge=self.judge)
        self.transport = StepTransport(network, address)
        self.events: list[CacheEvent] = []
        self._found: tuple[int, dict[tuple[int, Key], Key | None]] = (0, {})
        network.join(address, self.backend, self.epoch_holds)

    def epoch_holds(self, incarnation: int, label: str, epoch: int) -> bool:
        """Answer a reader's question after its copy."""
        raise NotImplementedError

    def findable(self) -> dict[tuple[int, Key], Key | None]:
        if self._found[0] != len(self.events):
            self._found = (len(self.events), findable(self.events))
        return self._found[1]

    def compute(self, plan: Plan, stamps: Sequence[Sequence[Any]]) -> list[Contents]:
        seen = []
        for place, planned in enumerate(plan.in_step_order):
            seen.append(self._context(planned))
            self.backend.write(plan, place, stamps[place])
        return seen

    def _context(self, planned: PlanView) -> Contents:
        if planned.sink:
            return ()
        return tuple(
            self.backend.load(group, table, skipped * self.geometry.page_size, planned.start)
            for group, (table, skipped) in enumerate(zip(planned.tables, planned.skipped, strict=True))
        )

    def fail_next(self, kind: type[Op]) -> None:
        self.backend.fail_next(kind)

    def fail_none(self) -> bool:
        return self.backend.fail_none() == 0

    def content(self, now: StateView, stream: StreamView) -> Contents:
        device, host = stream.device, stream.host
        if stream.residency in ("Offloading", "Reloading"):
            claim = next(claim for claim in now.claims if claim.serial == stream.holder)
            part = next(part for part in claim.parts if part.label == stream.label)
            device, host = part.device, part.host
        on_host = stream.residency in ("OnHost", "Reloading")
        read = self.backend.read_host if on_host else self.backend.read
        size = self.geometry.page_size
        return tuple(
            read(table, stream.length - skipped * size, group)
            for group, (table, skipped) in enumerate(zip(host if on_host else device, stream.skipped, strict=True))
        )

    def poison(self, tier: Tier, group: int, pages: Sequence[int]) -> None:
        self.backend.poison(tier, group, pages)

    def conflicts(self) -> Sequence[Conflict | BadEdge]:
        return [*self.judge.conflicts, *self.judge.bad_edges]


class MachineSubject(_Builtin):
    """The bare State: transitions called directly, the outbox handed to the backend after each."""

    def __init__(self, geometry: Geometry, network: Network, address: str, device: str = "memory") -> None:
        super().__init__(geometry, network, address, device)
        self.state = State(geometry, address)
        for pool in self.state.device.pools:
            pool.events = self.events

    def apply(self, verb: str, *args: Any) -> Any:
        if verb == "poll":
            return self._poll()
        result = VERBS[verb](self.state, *args)
        self._drain()
        for claim in self.state.claims.values():
            if isinstance(claim, Fetch) and claim.cancel_requested and not claim.cancel_told:
                claim.cancel_told = True
                self.transport.cancel(claim)
        return result

    def _poll(self) -> tuple[Any, ...]:
        ended = self.transport.poll()
        for fetch, outcome in ended:
            if isinstance(outcome, Landed):
                self.apply("landed", fetch)
            elif isinstance(outcome, Failed):
                self.apply("failed", fetch, outcome.error)
            elif isinstance(outcome, Cancelled):
                self.apply("cancelled", fetch)
        return tuple(ended)

    def _drain(self) -> None:
        while self.state.outbox:
            op = self.state.outbox.pop(0)
            try:
                self.backend.submit(op)
                if isinstance(op, FetchBegin):
                    self.transport.start(op)
            except SubmitError as error:
                self.backend.skip(op)
                lifecycle.op_failed(self.state, op, str(error))

    def epoch_holds(self, incarnation: int, label: str, epoch: int) -> bool:
        return retrieve.epoch_holds(self.state, incarnation, label, epoch)

    def snapshot(self) -> StateView:
        return view(self.state)

    def reclaimable(self, request: str) -> int:
        return offload.reclaimable(self.state, request)

    def gain(self, request: str) -> int:
        return leaving_.gain(self.state, request)

    def probe(self, step: Step, leaving: bool) -> Refusal | None:
        return step_.probe(self.state, step, leaving)

    def pages_available(self) -> dict[str, tuple[int, ...]]:
        return {"device": self.state.device.available(), "host": self.state.host.available()}

    def match(self, keys: Sequence[Key]) -> int:
        return prefix.match(self.state, keys)


class ManagerSubject(_Builtin):
    """A KVManager, driven by its lock-sized verbs."""

    def __init__(self, geometry: Geometry, network: Network, address: str, device: str = "memory") -> None:
        super().__init__(geometry, network, address, device)
        self.manager = KVManager(
            geometry, self.backend, transport=self.transport, address=address, debug=False, events=self.events
        )
        self._named: dict[str, Callable[..., Any]] = {
            "commit_offload": self.manager.commit_claim,
            "commit_reload": self.manager.commit_claim,
            "abandon_offload": self.manager.abandon,
            "abandon_reload": self.manager.abandon,
            "publish": self.manager.publish_noted,
        }

    def apply(self, verb: str, *args: Any) -> Any:
        function = self._named.get(verb)
        return (function if function is not None else getattr(self.manager, verb))(*args)

    def epoch_holds(self, incarnation: int, label: str, epoch: int) -> bool:
        return self.manager.epoch_holds(incarnation, label, epoch)

    def snapshot(self) -> StateView:
        return self.manager.view()

    def reclaimable(self, request: str) -> int:
        return self.manager.reclaimable(request)

    def gain(self, request: str) -> int:
        return self.manager.gain(request)

    def probe(self, step: Step, leaving: bool) -> Refusal | None:
        return self.manager.probe(step, leaving)

    def pages_available(self) -> dict[str, tuple[int, ...]]:
        return self.manager.pages_available()

    def match(self, keys: Sequence[Key]) -> int:
        return self.manager.match(keys)


SUBJECTS: dict[str, Callable[[Geometry, Network, str, str], MachineSubject | ManagerSubject]] = {
    "manager": ManagerSubject,
    "machine": MachineSubject,
}
