"""Who arrives when: a workload becomes requests of a scheduler, in its virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvstate.refusals import Refusal
from kvstate.scheduler.requests import GenerationRequest, Output, refused_output
from kvstate.testing.drive.meters import MeteredScheduler
from kvstate.workload import TraceRequest, prompt_tokens

STEP_S = 0.02
"""Virtual seconds that one step takes."""
FORK_EVERY = 8
"""Of so many requests one asks for two samples: its prompt is forked into a new request."""


def samples_of(index: int) -> int:
    """Return how many samples the request at place `index` of a workload asks for.

    >>> [samples_of(index) for index in range(9)]
    [2, 1, 1, 1, 1, 1, 1, 1, 2]
    """
    return 1 if index % FORK_EVERY else 2


def request_of(index: int, traced: TraceRequest) -> GenerationRequest:
    """Return what the request at place `index` of a workload asks for: all its tokens, whatever they are."""
    return GenerationRequest(traced.id, prompt_tokens(traced), traced.output_tokens, samples_of(index))


def key_of(output: Output) -> str:
    """Return under which name the manager knew the sample of an output."""
    return f"{output.request}#{output.sample}" if output.sample else output.request


class Arrivals:
    """Adds a workload to a scheduler, before the pass in which each request has arrived.

    Parameters
    ----------
    make
        Makes the request at a place of the workload.
    speed
        None: all arrive at once. Else a step takes ``STEP_S × speed`` of the workload's time.

    Attributes
    ----------
    now_s
        Virtual time; 0 when all arrive at once. With nothing to do before the next arrival, it jumps there.
    """

    def __init__(
        self,
        scheduler: MeteredScheduler,
        workload: Sequence[TraceRequest],
        make: Callable[[int, TraceRequest], GenerationRequest],
        speed: float | None,
    ) -> None:
        self._scheduler = scheduler
        self._workload = workload
        self._make = make
        self._speed = speed
        self._next = 0
        # The last jump: when it was, and how many steps had been taken.
        self._jumped_s = 0.0
        self._jumped_at = 0

    @property
    def now_s(self) -> float:
        steps = self._scheduler.counts["steps"] - self._jumped_at
        return self._jumped_s + steps * STEP_S * (self._speed or 0.0)

    def __call__(self) -> Iterable[Output]:
        """Add who has arrived; return the outputs of those that were refused."""
        workload, scheduler = self._workload, self._scheduler
        if self._next == len(workload):
            return ()
        if self._speed is not None and not scheduler.roster.live and self.now_s < workload[self._next].arrival_s:
            self._jumped_s = workload[self._next].arrival_s
            self._jumped_at = scheduler.counts["steps"]
        now_s = self.now_s if self._speed is not None else math.inf
        refused = []
        while self._next < len(workload) and workload[self._next].arrival_s <= now_s:
            request = self._make(self._next, workload[self._next])
            self._next += 1
            added = scheduler.add(request)
            if isinstance(added, Refusal):
                scheduler.refused[f"add: {type(added).__name__}"] += 1
                refused.append(refused_output(request, added, self.now_s))
        return refused
