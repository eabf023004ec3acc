"""Serves a workload through the reference scheduler, and verifies what every step reads and every token it generates.

The rooms::

    chain      what must come out: stamps and tokens, from the prompts alone
    arrivals   the workload becomes requests; every eighth asks for two samples
    model      writes stamps, reads the pages back, compares, samples from what it has read
    ledger     what came out, and what was left
    threads    the loop with the model on a thread of its own; else it is that of `kvstate.scheduler.loop`
    demand     how much memory a workload would use
    meters     what is counted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut
from kvstate.scheduler.loop import Stopped, serve
from kvstate.scheduler.requests import GenerationRequest, Output
from kvstate.testing.backends import StampedBackend
from kvstate.testing.drive.arrivals import Arrivals, key_of, request_of, samples_of
from kvstate.testing.drive.chain import Scripts
from kvstate.testing.drive.demand import check_workload, peak_demand, pool_pages, stamps_read
from kvstate.testing.drive.ledger import Ledger, leaks_of
from kvstate.testing.drive.meters import MeteredBackend, MeteredJudge, MeteredScheduler
from kvstate.testing.drive.model import ERRORS_NAMED, SAMPLED_EVERY, ChainModel
from kvstate.testing.drive.threads import Undecided, serve_on_two_threads
from kvstate.testing.memory import nobodys
from kvstate.types import Geometry
from kvstate.workload import TraceRequest

__all__ = [
    "MeteredJudge",
    "Report",
    "Stopped",
    "Undecided",
    "check_workload",
    "drive",
    "peak_demand",
    "pool_pages",
    "samples_of",
    "stamps_read",
]

SPOIL_EVERY = 64
"""Every page that nobody holds is spoiled now and then: whoever reads it again reads poison. Looking for them takes
time in proportion to the pools, so it is done every so many steps, or as many pages per step, whichever is rarer."""


COUNTS = (
    "steps", "tokens_prefilled", "tokens_decoded", "tokens_recomputed", "tokens_cached", "tokens_late", "offloads",
    "reloads", "soft_resets", "forks", "voided",
)  # fmt: skip
"""What the scheduler's meter counts, by the names that they have in a Report."""


@attrs.frozen(kw_only=True)
class Report:
    """What a drive did and found.

    Parameters
    ----------
    finished
        Requests whose samples have all generated exactly their tokens.
    tokens_prefilled, tokens_decoded
        Tokens computed and stored: in chunks, and one by one.
    tokens_recomputed
        Of both, those that had been stored before and were given up by a soft reset.
    tokens_cached
        Prompt tokens that requests found in the prefix cache when they first started.
    tokens_late
        Tokens sampled for somebody who had been evicted meanwhile.
    voided
        Segments given up while they were in a step.
    pages_out, pages_in
        Pages copied by offloads and by reloads, in so many `submissions`.
    refused
        How often who was refused what, as "reason: refusal".
    stamps_compared
        Tokens read back and compared, over all groups.
    conflicts
        What the judge found; None when nobody judged.
    leaks
        What was not empty at the end. Cached pages are no leak.
    unfinished
        Ids of requests that did not finish so.
    digest
        Checksum over everything that was generated: equal for equal outputs.
    copies_s, judge_s, model_s, verification_s
        CPU seconds, all threads: in the backend, without the judge; in the judge; writing and sampling, scripts
        included; reading back and comparing. The rest of `cpu_s` is the scheduler's and the machine's.
    """

    requests: int
    finished: int
    steps: int
    prompt_tokens: int
    tokens_prefilled: int
    tokens_decoded: int
    tokens_recomputed: int
    tokens_cached: int
    tokens_late: int
    offloads: int
    reloads: int
    soft_resets: int
    forks: int
    voided: int
    pages_out: int
    pages_in: int
    submissions: int
    refused: dict[str, int]
    stamps_compared: int
    content_errors: int
    errors: tuple[str, ...]
    conflicts: tuple[str, ...] | None
    leaks: tuple[str, ...]
    unfinished: tuple[str, ...]
    digest: str
    virtual_s: float
    wall_s: float
    cpu_s: float
    copies_s: float
    judge_s: float
    model_s: float
    verification_s: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the prefix cache."""
        return self.tokens_cached / self.prompt_tokens

    @property
    def holds(self) -> bool:
        """True when every request generated exactly its tokens, all that was read was right, and nothing is left."""
        return not (self.content_errors or self.conflicts or self.leaks or self.unfinished)


def drive(
    workload: Sequence[TraceRequest],
    geometry: Geometry,
    backend: StampedBackend,
    *,
    judge: MeteredJudge | None = None,
    asynchronous: bool = False,
    threads: bool = False,
    prefix_cache: bool = False,
    sampled: bool = False,
    chunk: int = 2048,
    batch: int = 32,
    speed: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Serve `workload` on a manager of its own, verify every step, and say what happened.

    Parameters
    ----------
    workload
        In order of arrival.
    geometry, backend
        The pools, and what holds their contents.
    judge
        The one that `backend` shows its ops; None: nobody judges.
    asynchronous
        Schedule and launch the next step while one is in flight.
    threads
        Launch and compute on a second thread; asynchronous.
    prefix_cache
        Start on cached pages where a prompt begins as an earlier one did.
    sampled
        Of what is decoded, compare one context in `SAMPLED_EVERY`; else all. Every step reads the last stamp.
    chunk
        Tokens of one step, over all requests.
    batch
        Requests begun and not ended, at most; samples that are forked may be more.
    speed
        None: all arrive at once. Else a step takes ``STEP_S × speed`` of the workload's time.
    progress
        Called with (samples ended, steps) before each pass.

    Raises
    ------
    WorkloadError
        When a request can never fit.
    Stopped
        When nothing can run any more.
    Undecided
        When the model's thread does not answer.
    """
    check_workload(workload, geometry)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    metered = MeteredBackend(backend)
    manager = KVManager(geometry, metered)
    scripts = Scripts(len(geometry.groups))
    ledger = Ledger(scripts)

    def make(index: int, traced: TraceRequest) -> GenerationRequest:
        request = request_of(index, traced)
        scripts.add(index, request)
        return request

    arrivals: Arrivals
    scheduler = MeteredScheduler(
        manager, budget=chunk, batch=batch, prefix_cache=prefix_cache, asynchronous=asynchronous or threads,
        clock=lambda: arrivals.now_s,
    )  # fmt: skip
    arrivals = Arrivals(scheduler, workload, make, speed)
    model = ChainModel(backend, geometry, scripts, SAMPLED_EVERY if sampled else 1)
    counts = scheduler.counts
    pause = max(SPOIL_EVERY, sum(geometry.group_pages + geometry.host_group_pages) // SPOIL_EVERY)
    spoiled = 0

    def between() -> Iterable[Output]:
        nonlocal spoiled
        if counts["steps"] >= spoiled + pause:
            spoiled = counts["steps"]
            for tier, group, pages in nobodys(manager.view()):
                backend.poison(tier, group, pages)
        if progress is not None:
            progress(ledger.ended, counts["steps"])
        return arrivals()

    serving = serve_on_two_threads if threads else serve
    for output in serving(scheduler, model, between=between):
        ledger.take(output)
        model.forget(key_of(output))
    leaks = leaks_of(manager)
    manager.close()
    judge_s = judge.cost_s if judge is not None else 0.0
    unfinished = tuple(traced.id for index, traced in enumerate(workload) if not ledger.finished(index))
    return Report(
        requests=len(workload),
        finished=len(workload) - len(unfinished),
        prompt_tokens=sum(traced.prompt_tokens for traced in workload),
        **{name: counts[name] for name in COUNTS},
        pages_out=metered.pages[CopyOut],
        pages_in=metered.pages[CopyIn],
        submissions=metered.submissions,
        refused=dict(sorted(scheduler.refused.items())),
        stamps_compared=model.stamps_compared,
        content_errors=model.error_count + len(ledger.wrong),
        errors=(*model.errors, *ledger.wrong[:ERRORS_NAMED]),
        conflicts=tuple(map(str, judge.violations)) if judge is not None else None,
        leaks=leaks,
        unfinished=unfinished,
        digest=ledger.digest(),
        virtual_s=arrivals.now_s,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        copies_s=metered.cost_s - judge_s,
        judge_s=judge_s,
        model_s=model.model_s + scripts.cost_s,
        verification_s=model.verification_s,
    )
