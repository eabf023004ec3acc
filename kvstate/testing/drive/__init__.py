"""Drives a serving workload through a KVManager and a backend with stamps, and verifies every token of every step.

Three roles that talk through queues only, on one thread or on three::

    planner    the caller's thread. Owns the jobs: admits and plans steps, one ahead of the one that runs; picks victims
    launcher   the model: writes stamps, reads every context back, compares them at once; commits
    mover      offloads and reloads: claim, copy, commit

What each request does is written down before anything runs (`jobs`), so its content does not depend on the threads.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import attrs

from kvstate.manager import KVManager
from kvstate.testing.backends import StampedBackend
from kvstate.testing.drive.crew import Crew, Inline, Threads, Undecided
from kvstate.testing.drive.jobs import BEAM, Job, jobs_of, peak_demand, pool_pages
from kvstate.testing.drive.model import Launcher, MeteredBackend, MeteredJudge, Mover
from kvstate.testing.drive.planner import CannotPreempt, Planner, Stuck, choose_victim
from kvstate.types import MAIN, Geometry
from kvstate.workload import TraceRequest, check_fits

__all__ = [
    "CannotPreempt",
    "MeteredJudge",
    "Report",
    "Stuck",
    "Undecided",
    "choose_victim",
    "drive",
    "peak_demand",
    "pool_pages",
]

STEP_S = 0.02
"""Virtual seconds that one step takes."""


@attrs.frozen(kw_only=True)
class Report:
    """What a drive did and found.

    Parameters
    ----------
    conflicts
        What the judge found; None when nobody judged.
    leaks
        What was not empty at the end.
    unfinished
        Ids of requests that did not finish.
    pages_out, pages_in
        Pages copied by offloads and by reloads.
    recomputed
        Requests that were reset and began again, because the host pool had no room for them.
    refused
        How often what was refused, as "verb: refusal".
    digest
        Checksum over what was read back last of every finished stream: equal for equal contents.
    machine_s, copies_s, judge_s, model_s, verification_s
        CPU seconds, all threads: in KVManager's own code; in its backend, without the judge; in the judge; writing
        stamps; reading contexts back and comparing them.
    """

    requests: int
    finished: int
    steps: int
    tokens_prefilled: int
    tokens_decoded: int
    preemptions: int
    reloads: int
    pages_out: int
    pages_in: int
    forks: int
    planned_ahead: int
    voided: int
    recomputed: int
    refused: dict[str, int]
    content_errors: int
    errors: tuple[str, ...]
    conflicts: tuple[str, ...] | None
    leaks: tuple[str, ...]
    unfinished: tuple[str, ...]
    digest: int
    virtual_s: float
    wall_s: float
    cpu_s: float
    machine_s: float
    copies_s: float
    judge_s: float
    model_s: float
    verification_s: float

    @property
    def holds(self) -> bool:
        """True when every request finished with its exact content, no edge was missing and nothing leaked."""
        return not (self.content_errors or self.conflicts or self.leaks or self.unfinished)


def drive(
    requests: Sequence[TraceRequest],
    geometry: Geometry,
    backend: StampedBackend,
    *,
    judge: MeteredJudge | None = None,
    threads: bool = False,
    chunk: int = 2048,
    batch: int = 32,
    speed: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Serve `requests` on a manager of their own, verify every step, and say what happened.

    Parameters
    ----------
    requests
        In order of arrival.
    geometry, backend
        The pools, and what holds their contents.
    judge
        The one that `backend` shows its ops; None: nobody judges.
    threads
        Plan, launch and move on three threads.
    chunk
        Prompt tokens of one step, over all requests.
    batch
        Requests that hold anything, at most.
    speed
        None: all arrive at once. Else a step takes ``STEP_S × speed`` of the workload's time.
    progress
        Called with (requests finished, steps) after each step.

    Raises
    ------
    WorkloadError
        When a request can never fit.
    Stuck
        When the run cannot go on.
    """
    check_fits(requests, page_size=geometry.page_size, pages=geometry.pages)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    jobs = jobs_of(requests, page_size=geometry.page_size, pages=geometry.pages)
    metered = MeteredBackend(backend)
    manager = KVManager(geometry, metered)
    launcher = Launcher(manager, backend, jobs)
    mover = Mover(manager, backend)
    planner = Planner(manager, backend, jobs, chunk, batch)
    if speed is None:
        planner.now_s = float("inf")
    else:
        planner.step_s = STEP_S * speed
    crew: Crew = Threads(launcher, mover) if threads else Inline(launcher, mover)
    try:
        while planner.counts["finished"] < len(jobs):
            while planner.act(crew):
                pass
            if not (planner.steps_open or planner.moves_open):
                raise planner.stuck()
            planner.take(crew.next())
            while crew.ready():
                planner.take(crew.next())
            if progress is not None:
                progress(planner.counts["finished"], planner.counts["steps"])
        while planner.steps_open or planner.moves_open:
            planner.take(crew.next())
    finally:
        crew.close()
    leaks = _leaks(manager)
    manager.close()
    counts = planner.counts
    machine_s = sum(meter.machine_s for meter in (planner.meter, launcher.meter, mover.meter))
    judge_s = judge.cost_s if judge is not None else 0.0
    return Report(
        requests=len(jobs),
        finished=counts["finished"],
        steps=counts["steps"],
        tokens_prefilled=counts["prefilled"],
        tokens_decoded=counts["decoded"],
        preemptions=counts["preemptions"],
        reloads=counts["reloads"],
        pages_out=counts["pages_out"],
        pages_in=counts["pages_in"],
        forks=counts["forks"],
        planned_ahead=counts["planned_ahead"],
        voided=counts["voided"],
        recomputed=counts["recomputed"],
        refused=dict(sorted(planner.refused.items())),
        content_errors=launcher.error_count,
        errors=tuple(launcher.errors),
        conflicts=tuple(map(str, judge.violations)) if judge is not None else None,
        leaks=leaks,
        unfinished=_unfinished(jobs, launcher),
        digest=zlib.crc32(repr(sorted(launcher.finals.items())).encode()),
        virtual_s=planner.now_s if speed is not None else 0.0,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        machine_s=machine_s - metered.cost_s,
        copies_s=metered.cost_s - judge_s,
        judge_s=judge_s,
        model_s=launcher.meter.model_s,
        verification_s=launcher.meter.verification_s,
    )


def _unfinished(jobs: Sequence[Job], launcher: Launcher) -> tuple[str, ...]:
    """Return the requests that did not finish with their exact content on every label."""
    return tuple(
        job.id
        for job in jobs
        if any((job.index, label) not in launcher.finals for label in ((MAIN, BEAM) if job.style.forks else (MAIN,)))
    )


def _leaks(manager: KVManager) -> tuple[str, ...]:
    """Idle means empty: return what is left of a manager whose requests were all removed."""
    leaks = []
    totals = {"device": manager.geometry.pages, "host": manager.geometry.host_pages}
    for tier, free in manager.pages_free().items():
        if any(pages != totals[tier] for pages in free):
            leaks.append(f"{tier} has {', '.join(map(str, free))} of {totals[tier]} pages free")
    left = manager.view()
    for what, there in (("requests", left.requests), ("leases", left.leases), ("claims", left.claims)):
        if there:
            leaks.append(f"{len(there)} {what} are open")
    return tuple(leaks)
