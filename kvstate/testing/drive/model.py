"""The two workers of a drive: the launcher, which is the model and verifies every step, and the mover.

Pages are spoiled just before they are given back: whoever reads them again without a copy reads poison.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from kvstate.backend import Backend
from kvstate.errors import Refused
from kvstate.manager import KVManager
from kvstate.ops import Op, Plan, PlanView, Tier
from kvstate.ordering import Clock, Queue, at
from kvstate.refusals import Refusal, StalePlan
from kvstate.state import Lease, OffloadClaim, ReloadClaim
from kvstate.testing.backends import StampedBackend
from kvstate.testing.drive.jobs import BEAM, Job, Part, in_words
from kvstate.testing.judge import EdgeJudge
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import MAIN, Step

T = TypeVar("T")

ERRORS_NAMED = 20
"""Content errors spelled out; the rest is counted."""


# -- measuring


class Meter:
    """CPU seconds of one thread, by what it did. The machine's include what its backend spent."""

    __slots__ = ("machine_s", "model_s", "verification_s")

    def __init__(self) -> None:
        self.machine_s = self.model_s = self.verification_s = 0.0

    def machine(self, verb: Callable[..., T], *args: Any) -> T:
        """Call a verb of the manager."""
        began = time.thread_time()
        try:
            return verb(*args)
        finally:
            self.machine_s += time.thread_time() - began


class MeteredJudge(EdgeJudge):
    """An EdgeJudge that knows what it cost."""

    cost_s = 0.0

    def observe(self, op: Op) -> None:
        """Judge the next op, in number order."""
        began = time.thread_time()
        super().observe(op)
        self.cost_s += time.thread_time() - began


class MeteredBackend:
    """Counts what a manager spends in its backend. Submits come one at a time, so a plain sum is right."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.cost_s = 0.0

    def submit(self, op: Op) -> None:
        """Pass on one op."""
        began = time.thread_time()
        try:
            self.inner.submit(op)
        finally:
            self.cost_s += time.thread_time() - began

    def skip(self, op: Op) -> None:
        """Pass on an op that failed at submit."""
        self.inner.skip(op)

    def completed(self) -> Clock:
        """Return what has completed."""
        return self.inner.completed()

    def wait(self, clock: Clock) -> None:
        """Wait for what `clock` names."""
        self.inner.wait(clock)

    def lose(self, why: str) -> None:
        """Wake whoever waits."""
        self.inner.lose(why)

    def close(self) -> None:
        """Release the memory."""
        self.inner.close()


# -- the launcher


@attrs.define(eq=False)
class Planned:
    """A step on its way from the planner through the launcher. `accepted` is per segment, None for everything."""

    lease: Lease
    plan: Plan | Refusal
    parts: Sequence[Part]
    accepted: list[int] | None = None


@attrs.frozen(eq=False)
class StepEnded:
    """A step that was committed or aborted: per part its first token and the tokens stored, None if dropped."""

    outcomes: Sequence[tuple[Part, int, int | None]]


class Launcher:
    """The model. What it computes for a token is the stamp of its request, label and position.

    Attributes
    ----------
    errors, error_count
        The first content errors, and how many there were.
    finals
        Checksum of what was read back last, per finished (request, label).
    """

    def __init__(self, manager: KVManager, backend: StampedBackend, jobs: Sequence[Job]) -> None:
        self.manager = manager
        self.backend = backend
        self.jobs = jobs
        self.meter = Meter()
        self.errors: list[str] = []
        self.error_count = 0
        self.finals: dict[tuple[int, str], int] = {}

    def launch(self, planned: Planned) -> None:
        """Launch a step; plan it again as often as segments went void; abort it when none is left."""
        meter, lease = self.meter, planned.lease
        plan = planned.plan
        while True:
            if isinstance(plan, Plan):
                planned.plan = plan
                if len(plan.sunk) == len(lease.step.segments):
                    meter.machine(self.manager.abort, lease)
                    return
                began = time.thread_time()
                try:
                    with self.manager.launch(plan):
                        entered = time.thread_time()
                        self._compute(planned, plan)
                        began += time.thread_time() - entered
                    return
                except Refused as refused:
                    if not isinstance(refused.refusal, StalePlan):
                        raise
                finally:
                    meter.machine_s += time.thread_time() - began
            elif not isinstance(plan, StalePlan):
                raise Refused(plan)
            plan = meter.machine(self.manager.plan, lease)

    def _compute(self, planned: Planned, plan: Plan) -> None:
        """Write every segment; then read every context back and compare them all at once."""
        began = time.thread_time()
        views = plan.in_step_order
        live: list[tuple[Part, str, PlanView, int]] = []
        accepted: list[int] = []
        for part in planned.parts:
            view = views[part.places[0]]
            count = part.job.accepts(view.start, part.span)
            accepted.extend([count] * len(part.labels))
            if not view.sink:
                self._write(plan, part, count)
                live.extend(
                    (part, label, views[place], count) for label, place in zip(part.labels, part.places, strict=True)
                )
        if any(count < view.span for count, view in zip(accepted, views, strict=True)):
            planned.accepted = accepted
        written = time.thread_time()
        found = self.backend.read_many([view.pages for _, _, view, _ in live], [view.length for _, _, view, _ in live])
        expected = [part.job.content[label] for part, label, _, _ in live]
        if found != expected:
            for (part, label, _, _), got, wanted in zip(live, found, expected, strict=True):
                if got != wanted:
                    self._mismatch(part.job, label, got, wanted)
        for (part, label, view, count), got in zip(live, found, strict=True):
            if view.start + count == part.job.total:
                self._finish(part.job, label, got)
        self.meter.model_s += written - began
        self.meter.verification_s += time.thread_time() - written

    def _write(self, plan: Plan, part: Part, accepted: int) -> None:
        job = part.job
        if part.pre_fork:
            part.beam_before = job.content[BEAM]
            job.content[BEAM] = job.content[MAIN].copy()
        for label, place in zip(part.labels, part.places, strict=True):
            view = plan.in_step_order[place]
            known = job.content[label]
            if len(known) != view.start:
                self._error(f"{job.id}/{label}: the plan starts at token {view.start}, and {len(known)} were stored")
            stamps = job.stamps(label, view.start, view.length, accepted)
            self.backend.write(plan, place, stamps)
            known += stamps

    def commit(self, planned: Planned) -> StepEnded:
        """Commit a launched step, in the machine and in what the contents should be."""
        assert isinstance(planned.plan, Plan)
        views = planned.plan.in_step_order
        dropped: Sequence[int] = range(len(views))
        if planned.lease.open:
            committed = self.meter.machine(self.manager.commit, planned.lease, planned.accepted)
            if isinstance(committed, Refusal):
                raise Refused(committed)
            dropped = committed.dropped
        return StepEnded([self._settle(planned, views, part, part.places[0] in dropped) for part in planned.parts])

    def _settle(
        self, planned: Planned, views: Sequence[PlanView], part: Part, dropped: bool
    ) -> tuple[Part, int, int | None]:
        """Make the expected contents what the machine says it stored."""
        job, place = part.job, part.places[0]
        view = views[place]
        stored = part.span if planned.accepted is None else planned.accepted[place]
        if not view.sink:
            kept = view.start if dropped else view.start + stored
            for label in part.labels:
                del job.content[label][kept:]
            if dropped and part.beam_before is not None:
                job.content[BEAM] = part.beam_before
        if dropped:
            return part, view.start, None
        if part.post_fork:
            job.content[BEAM] = job.content[MAIN].copy()
        job.tables = tuple(views[place].tables for place in part.places)
        return part, view.start, stored

    def _finish(self, job: Job, label: str, found: list[Any]) -> None:
        """Compare the last read of a stream with what the script alone says."""
        wanted = job.final(label)
        if found == wanted:
            self.finals[job.index, label] = zlib.crc32(array("q", found).tobytes())
        else:
            self._mismatch(job, label, found, wanted)

    def _mismatch(self, job: Job, label: str, found: list[Any], wanted: list[int]) -> None:
        pairs = enumerate(zip(found, wanted, strict=False))
        place = next((i for i, (got, want) in pairs if got != want), min(len(found), len(wanted)))
        got, want = (in_words(s[place], self.jobs) if place < len(s) else "nothing" for s in (found, wanted))
        self._error(f"{job.id}/{label}, token {place}: expected {want}, found {got}")

    def _error(self, what: str) -> None:
        self.error_count += 1
        if self.error_count <= ERRORS_NAMED:
            self.errors.append(what)


# -- the mover


@attrs.frozen(eq=False)
class Moved:
    """An offload or a reload that ended: its outcome, and the pages copied."""

    job: Job
    outcome: Offloaded | Reloaded | Abandoned | Refusal
    pages: int


class Mover:
    """Offloads and reloads: claim, copy, commit."""

    def __init__(self, manager: KVManager, backend: StampedBackend) -> None:
        self.manager = manager
        self.backend = backend
        self.meter = Meter()

    def offload(self, job: Job, discard: bool) -> Moved:
        """Offload a request; `discard` gives up what a step in flight computes for it."""
        claim = self.meter.machine(self.manager.claim_offload, job.id, discard)
        # A step in flight still reads the device pages of a request taken from it.
        return self._finish(job, claim, None if discard else Tier.DEVICE, Queue.COPY_OUT)

    def reload(self, job: Job, extra: Step) -> Moved:
        """Reload a request with room for its next step."""
        claim = self.meter.machine(self.manager.claim_reload, job.id, extra)
        return self._finish(job, claim, Tier.HOST, Queue.COPY_IN)

    def _finish(self, job: Job, claim: OffloadClaim | ReloadClaim | Refusal, spoil: Tier | None, queue: Queue) -> Moved:
        if isinstance(claim, Refusal):
            return Moved(job, claim, 0)
        try:
            assert claim.op is not None
            if spoil is not None and claim.failure is None:
                self.backend.wait(at(queue, claim.op.number))
                for group, copies in enumerate(claim.op.copies):
                    self.backend.poison(spoil, group, [source for source, _, _ in copies])
            outcome = self.meter.machine(self.manager.commit_claim, claim)
            return Moved(job, outcome, sum(map(len, claim.op.copies)))
        finally:
            if claim.open:
                self.manager.abandon(claim)
