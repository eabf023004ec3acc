"""How much memory a workload would use if it had all it wants, and how much it must have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.demand import fits, pages_at_most
from kvstate.scheduler.loop import Sampled, serve
from kvstate.scheduler.requests import GenerationRequest
from kvstate.testing.drive.arrivals import Arrivals, key_of, samples_of
from kvstate.testing.drive.meters import MeteredScheduler
from kvstate.testing.null_backend import NullBackend
from kvstate.types import Geometry
from kvstate.workload import TraceRequest, WorkloadError, check_fits


class _Lengths:
    """A Model that computes nothing, and notes what all those begun and not ended would hold with nothing shared."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.held: dict[str, tuple[int, ...]] = {}
        self.totals = [0] * len(geometry.groups)
        self.peak = 0

    def launch(self, batch: Batch, plan: Plan) -> None:
        """Count the pages of those that are in the batch."""
        geometry, totals = self.geometry, self.totals
        for place, work in enumerate(batch.works):
            start = batch.start(place)
            pages = geometry.pages_for(start + batch.span(place))
            self._hold(work.key, tuple(pages - geometry.skipped(group, start) for group in range(len(totals))))
        self.peak = max(self.peak, geometry.sectors_for(totals))

    def result(self, batch: Batch) -> Sampled:
        """Return tokens; which ones does not matter to how many there are."""
        return Sampled((0,) * batch.tokens_drawn)

    def end(self, key: str) -> None:
        """Note that a sample holds nothing any more."""
        self._hold(key, (0,) * len(self.totals))
        del self.held[key]

    def _hold(self, key: str, pages: tuple[int, ...]) -> None:
        before = self.held.get(key)
        if pages != before:
            self.held[key] = pages
            for group, count in enumerate(pages):
                self.totals[group] += count - (before[group] if before is not None else 0)


def _like(geometry: Geometry, pages: int) -> Geometry:
    return Geometry(pages=pages, page_size=geometry.page_size, groups=geometry.groups, name="demand")


def _alone(geometry: Geometry, traced: TraceRequest, chunk: int) -> int:
    """Return the sectors that one sample of a request holds at most; with one group, its pages."""
    return geometry.sectors_for(pages_at_most(geometry, traced.prompt_tokens, traced.output_tokens + 1, chunk))


def peak_demand(
    workload: Sequence[TraceRequest], geometry: Geometry, *, chunk: int, batch: int, speed: float | None = None,
    asynchronous: bool = False,
) -> int:  # fmt: skip
    """Return the most pages (of several groups: sectors) that those begun and not ended hold together without limit.

    The workload is served once with all the memory that it could ask for and with nothing computed, and what each holds
    is added up with nothing shared, neither between the samples of a prompt nor through the prefix cache. The sizes of
    `geometry` do not matter.
    """
    needed = [_alone(geometry, one, chunk) for index, one in enumerate(workload) for _ in range(samples_of(index))]
    # No more than `batch` are active when somebody enters, and each may be forked once.
    plenty = _like(geometry, sum(sorted(needed, reverse=True)[: 2 * batch]))
    scheduler = MeteredScheduler(
        KVManager(plenty, NullBackend(), debug=False), budget=chunk, batch=batch, asynchronous=asynchronous
    )
    model = _Lengths(plenty)

    def make(index: int, traced: TraceRequest) -> GenerationRequest:
        return GenerationRequest(traced.id, (0,) * traced.prompt_tokens, traced.output_tokens, samples_of(index))

    for output in serve(scheduler, model, between=Arrivals(scheduler, workload, make, speed)):
        model.end(key_of(output))
    return model.peak


def pool_pages(
    workload: Sequence[TraceRequest], geometry: Geometry, *, demand: int, chunk: int, fraction: float
) -> int:
    """Return ``ceil(fraction × demand)``, but never less than the longest request alone needs."""
    longest = max(_alone(geometry, one, chunk) for one in workload)
    return max(math.ceil(fraction * demand), longest)


def stamps_read(workload: Sequence[TraceRequest], geometry: Geometry) -> int:
    """Return about how many tokens are read back, over all groups, when every decode step compares its context."""
    return len(geometry.groups) * sum(
        one.output_tokens * (one.prompt_tokens + one.output_tokens // 2) * samples_of(index)
        for index, one in enumerate(workload)
    )


def check_workload(workload: Sequence[TraceRequest], geometry: Geometry) -> None:
    """Refuse a workload with a request that can never be served, before anything runs.

    Raises
    ------
    WorkloadError
        For the first such request.
    """
    if len(geometry.groups) == 1 and not geometry.windowed:
        check_fits(workload, page_size=geometry.page_size, pages=geometry.pages)
        return
    for traced in workload:
        pages = pages_at_most(geometry, traced.prompt_tokens, traced.output_tokens, 1)
        if not fits(geometry, pages):
            path, _, line = traced.where.rpartition(":")
            wanted = geometry.sectors_for(pages)
            raise WorkloadError(
                path,
                int(line),
                f"request {traced.id} needs {wanted} sectors ({traced.prompt_tokens} prompt + {traced.output_tokens} "
                f"output tokens), and the device pool has {geometry.pages}",
                f"raise --pages to {wanted}, or drop this request",
            )
