"""The planner: what is admitted, who leaves, who comes back.

Oldest first: whoever is preempted is newer than all that run, and comes back before anybody new starts. So the oldest
request always gets on, and a run ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from kvstate.errors import KVStateError
from kvstate.manager import KVManager
from kvstate.ops import Tier
from kvstate.refusals import HostExhausted, NoHostPool, PagesExhausted, Refusal
from kvstate.testing.backends import StampedBackend
from kvstate.testing.drive.crew import Crew, Happened
from kvstate.testing.drive.jobs import Job, Part, Phase, step_of
from kvstate.testing.drive.model import Meter, Moved, Planned, StepEnded
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import Step

AHEAD = 2
"""Steps admitted and not ended: the one that runs, and one planned ahead."""


BARREN_MAX = 1000
"""Steps and moves in a row that stored no token, per request: more are taken for a loop."""


class Stuck(KVStateError):
    """The run cannot go on: nothing runs, nothing is in flight, and what waits is refused."""


class CannotPreempt(Stuck):
    """Running requests need pages, and there is no host pool to offload to (NoHostPool)."""


def choose_victim(manager: KVManager, running: Sequence[Job], urgent: bool) -> tuple[Job, bool] | None:
    """Return whom to offload, of the running jobs in order of arrival: the newest that frees something, never the last.

    An `urgent` choice also takes one that a step in flight names (True): what that step computes for it is given up.
    """
    for job in reversed(running[1:]):
        frees = manager.reclaimable(job.id)
        if not job.unmovable and (frees or (urgent and job.leases)):
            return job, not frees
    return None


class Planner:
    """Decides. Every job, and every count of the report, belongs to this thread."""

    def __init__(
        self, manager: KVManager, backend: StampedBackend, jobs: Sequence[Job], chunk: int, batch: int
    ) -> None:
        self.manager = manager
        self.backend = backend
        self.jobs = jobs
        self.chunk = chunk
        self.batch = batch
        self.meter = Meter()
        self.waiting = deque(jobs)
        self.running: list[Job] = []
        self.away: list[Job] = []
        # Steps and moves that ended since a token was stored.
        self.barren = 0
        self.steps_open = 0
        self.moves_open = 0
        self.offloads_open = 0
        # False after a preemption, or a refusal to somebody who waits, until a request finishes: nobody enters.
        self.room = True
        # Requests finished when the reload in flight was asked for: its refusal may be out of date.
        self.finished_then = 0
        self.now_s = 0.0
        self.step_s = 0.0
        self.last = Step(())
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.last_refusal: Refusal | None = None

    # -- what came back

    def take(self, happened: Happened) -> None:
        """Take note of what ended."""
        self.barren += 1
        if isinstance(happened, StepEnded):
            self.steps_open -= 1
            for part, start, stored in happened.outcomes:
                self._part_ended(part, start, stored)
        else:
            self.moves_open -= 1
            self._moved(happened)
        if self.barren > BARREN_MAX * len(self.jobs):
            raise Stuck(f"{self.barren} steps and moves stored no token: {self._summary()}")

    def _part_ended(self, part: Part, start: int, stored: int | None) -> None:
        job = part.job
        job.ended(part, start, stored)
        if stored is None:
            self.counts["voided"] += len(part.labels)
            return
        self.barren = 0
        prefill = start < job.request.prompt_tokens
        self.counts["prefilled" if prefill else "decoded"] += stored * len(part.labels)
        self.counts["forks"] += part.pre_fork + part.post_fork
        if job.stored == job.total:
            self._retire(job)

    def _retire(self, job: Job) -> None:
        """Give back what a finished job holds, unless a move has to end first."""
        if job.phase is Phase.RUNNING:
            self.running.remove(job)
            for group in range(len(self.manager.geometry.groups)):
                pages = dict.fromkeys(page for tables in job.tables for page in tables[group])
                self.backend.poison(Tier.DEVICE, group, pages)
        elif job.phase is Phase.OFFLOADED:
            self.away.remove(job)
        else:
            return
        job.phase = Phase.FINISHED
        self.counts["finished"] += 1
        self._must(self.meter.machine(self.manager.remove, job.id))
        self.room = True
        self._host_changed()

    def _host_changed(self) -> None:
        for job in self.running:
            job.unmovable = False

    def _moved(self, moved: Moved) -> None:
        job, outcome = moved.job, moved.outcome
        if isinstance(outcome, Offloaded):
            self.offloads_open -= 1
            self.counts["preemptions"] += 1
            self.counts["pages_out"] += moved.pages
            job.phase = Phase.OFFLOADED
            self.away.append(job)
            self.away.sort(key=lambda job: job.index)
            if job.stored == job.total:
                self._retire(job)
        elif isinstance(outcome, Reloaded):
            self.counts["reloads"] += 1
            self.counts["pages_in"] += moved.pages
            self._run(job)
            self._host_changed()
        elif isinstance(outcome, HostExhausted):
            self.offloads_open -= 1
            self._note("claim_offload", outcome)
            job.unmovable = True
            self._run(job)
            if job.stored == job.total:
                self._retire(job)
        elif isinstance(outcome, PagesExhausted):
            self._note("claim_reload", outcome)
            job.phase = Phase.OFFLOADED
            self.away.append(job)
            self.away.sort(key=lambda job: job.index)
            self.room = self.counts["finished"] > self.finished_then
            if not (self.room or self.running or self.steps_open or self.moves_open):
                raise self.stuck()
        else:
            raise Stuck(f"moving {job.id} ended with {outcome}. {self._summary()}")

    def _run(self, job: Job) -> None:
        job.phase = Phase.RUNNING
        self.running.append(job)
        self.running.sort(key=lambda job: job.index)

    # -- what comes next

    def act(self, crew: Crew) -> bool:
        """Hand one thing to the crew, or let time pass; return False when only the crew can change anything."""
        return self._resume(crew) or self._plan(crew) or self._let_time_pass()

    def _resume(self, crew: Crew) -> bool:
        """Reload the oldest request that is away, one at a time."""
        if not self.away or self.away[0].leases or self.moves_open or not self._may_enter():
            return False
        job = self.away.pop(0)
        job.pending.clear()
        part = job.next_part(self.chunk)
        assert part is not None
        job.phase = Phase.RELOADING
        self.moves_open += 1
        self.finished_then = self.counts["finished"]
        crew.reload(job, step_of([part]))
        return True

    def _may_enter(self) -> bool:
        return self.room or not (self.running or self.steps_open or self.moves_open)

    def _plan(self, crew: Crew) -> bool:
        """Admit and plan a step of all that run, and of somebody new as long as there is room and budget."""
        if self.steps_open == AHEAD:
            return False
        parts, fresh = self._parts()
        if not parts:
            return False
        lease = self._admit(parts)
        while isinstance(lease, PagesExhausted) and fresh:
            self.waiting.appendleft(fresh.pop())
            self.room = False
            del parts[-1]
            if not parts:
                if not (self.steps_open or self.moves_open):
                    raise self.stuck()
                return False
            lease = self._admit(parts)
        if isinstance(lease, PagesExhausted):
            return self._relieve(crew)
        if isinstance(lease, Refusal):
            raise Stuck(f"admit was refused: {lease}. {self._summary()}")
        # Refused, the launcher plans again: a draft was refused between the two calls.
        plan = self.meter.machine(self.manager.plan, lease)
        for part in parts:
            job = part.job
            view_start = lease.placed(part.places[0])[1]
            part.start = view_start
            job.pending.append(part)
            job.leases += 1
        for job in fresh:
            self._run(job)
        self.counts["steps"] += 1
        self.counts["planned_ahead"] += bool(self.steps_open)
        self.steps_open += 1
        self.now_s += self.step_s
        crew.launch(Planned(lease, plan, parts))
        return True

    def _parts(self) -> tuple[list[Part], list[Job]]:
        budget = self.chunk
        parts: list[Part] = []
        fresh: list[Job] = []
        for job in self.running:
            part = job.next_part(budget)
            if part is not None:
                parts.append(part)
                budget -= part.span if part.start < job.request.prompt_tokens else 0
        while (
            budget
            and self.waiting
            and self.waiting[0].request.arrival_s <= self.now_s
            and not (self.away or self.moves_open)
            and len(self.running) + len(fresh) < self.batch
            and self._may_enter()
        ):
            job = self.waiting.popleft()
            self._must(self.meter.machine(self.manager.ingest, job.id))
            part = job.next_part(budget)
            assert part is not None
            parts.append(part)
            fresh.append(job)
            budget -= part.span
        return parts, fresh

    def _admit(self, parts: Sequence[Part]) -> Any:
        step = step_of(parts)
        if step == self.last:
            step = self.last
        self.last = step
        lease = self.meter.machine(self.manager.admit, step)
        if isinstance(lease, Refusal):
            self._note("admit", lease)
        return lease

    def _relieve(self, crew: Crew) -> bool:
        """Those that run are short of pages: offload by the policy, or wait for what is in flight."""
        if self.offloads_open:
            return False
        if not self.manager.supports_offload:
            if self.steps_open or self.moves_open:
                return False
            raise CannotPreempt(f"{NoHostPool().reason}; give --host-pages, or more --pages. {self._summary()}")
        # Every other time without waiting for the step in flight: its tokens for the victim are then void.
        urgent = bool(self.counts["preemptions"] % 2)
        choice = self.meter.machine(choose_victim, self.manager, self.running, urgent)
        if choice is not None:
            victim, discard = choice
            self.running.remove(victim)
            victim.phase = Phase.OFFLOADING
            self.room = False
            self.moves_open += 1
            self.offloads_open += 1
            crew.offload(victim, discard)
            return True
        if self.steps_open or self.moves_open:
            return False
        if len(self.running) < 2:
            raise self.stuck()
        # The host pool is full: the newest begins again, later.
        newest = self.running.pop()
        self._must(self.meter.machine(self.manager.reset, newest.id))
        newest.restart()
        newest.phase = Phase.WAITING
        self.waiting.appendleft(newest)
        self.counts["recomputed"] += 1
        self.room = False
        return True

    def _let_time_pass(self) -> bool:
        """With nothing to do before the next arrival, jump there."""
        if self.running or self.away or self.steps_open or self.moves_open or not self.waiting:
            return False
        if self.waiting[0].request.arrival_s <= self.now_s:
            return False
        self.now_s = self.waiting[0].request.arrival_s
        return True

    # -- words

    def _note(self, verb: str, refusal: Refusal) -> None:
        self.refused[f"{verb}: {type(refusal).__name__}"] += 1
        self.last_refusal = refusal

    def _must(self, result: Any) -> Any:
        if isinstance(result, Refusal):
            raise Stuck(f"refused: {result}. {self._summary()}")
        return result

    def _summary(self) -> str:
        phases = Counter(job.phase for job in self.jobs)
        named = [
            f"{job.id} ({job.phase.value}, {job.stored} of {job.total} tokens)" for job in (*self.running, *self.away)
        ]
        told = f"; last refusal: {self.last_refusal}" if self.last_refusal is not None else ""
        return (
            f"{', '.join(f'{count} {phase.value}' for phase, count in phases.items())}; "
            f"{', '.join(named[:6]) or 'nobody holds pages'}; free pages {self.manager.pages_free()}; "
            f"in flight {self.steps_open} steps, {self.moves_open} moves{told}"
        )

    def stuck(self) -> Stuck:
        """Return the error for a run in which nothing can happen any more."""
        return Stuck(f"nothing is in flight and nothing can be admitted: {self._summary()}")
