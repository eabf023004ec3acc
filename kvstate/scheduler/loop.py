"""The loop of an engine around a Scheduler: schedule, launch, take the result, update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import attrs

from kvstate.errors import KVStateError, Poisoned, SubmitError
from kvstate.ops import Plan
from kvstate.refusals import Refusal
from kvstate.scheduler.batch import Batch, Blocked, Idle
from kvstate.scheduler.requests import GenerationRequest, Output, Phase, refused_output
from kvstate.scheduler.scheduler import Scheduler

LAUNCHES_FAILED_MAX = 3
"""Launches that fail in a row before the requests of the batch fail too."""


@attrs.frozen
class Sampled:
    """What a batch sampled: for each entry that draws, in order, as many tokens as it draws."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None


class Model(Protocol):
    """Computes batches, one after the other, in the order of their launches."""

    def launch(self, batch: Batch, plan: Plan) -> None:
        """Submit the kernels of a batch; called inside the launch of its plan.

        `batch.entries` says what is fed and `plan` where it goes. Views that are the sink's belong to requests that
        have left: what is computed for them does not count.
        """

    def result(self, batch: Batch) -> Sampled:
        """Wait for a batch that was launched, and return what it sampled. The oldest is asked for first."""


class Stopped(KVStateError):
    """The loop cannot go on: nothing can run and nothing is in flight.

    Attributes
    ----------
    blocked
        What `schedule` said.
    """

    def __init__(self, blocked: Blocked) -> None:
        super().__init__(str(blocked))
        self.blocked = blocked


def serve(
    scheduler: Scheduler,
    model: Model,
    requests: Iterable[GenerationRequest] = (),
    *,
    between: Callable[[], Iterable[Output]] = tuple,
) -> Iterator[Output]:
    """Yield the output of each sample as it ends, until nothing is live.

    With an asynchronous scheduler the next step is launched while one is in flight. A model that raises, or samples
    another number of tokens, fails the requests of that batch, and nobody else. When the loop is left early, `serve`
    may be called again: what was in flight is computed again.

    Parameters
    ----------
    requests
        Added before anything runs. One that is refused ends at once, as Finish.REFUSED.
    between
        Called before each pass, on this thread: it may add, cancel and fail requests, and what it returns is yielded.

    Raises
    ------
    Poisoned
        When the device fails.
    Stopped
        When nothing can run any more: somebody else holds the pages, or the manager was closed.
    """
    for request in requests:
        added = scheduler.add(request)
        if isinstance(added, Refusal):
            yield refused_output(request, added, scheduler.clock())
    # Batches of a loop that was left: nobody has their results any more.
    for batch in reversed(scheduler.in_flight):
        scheduler.abort(batch)
    launched: deque[Batch] = deque()
    failures = 0
    while True:
        yield from between()
        outcome = scheduler.schedule()
        yield from outcome.ended
        if isinstance(outcome, Batch):
            error = _launch(scheduler, model, outcome, launched)
            failures = failures + 1 if error else 0
            if error and (failures == LAUNCHES_FAILED_MAX or not isinstance(error, SubmitError)):
                failures = 0
                yield from _fail(scheduler, outcome, error)
            if scheduler.asynchronous and len(launched) == 1:
                continue
        if launched:
            batch = launched.popleft()
            try:
                sampled = model.result(batch)
                batch.check(sampled.tokens, sampled.logprobs)
            except Poisoned:
                raise
            except Exception as met:
                scheduler.abort(batch)
                yield from _fail(scheduler, batch, met)
            else:
                yield from scheduler.update(batch, sampled.tokens, sampled.logprobs).ended
        elif isinstance(outcome, Idle):
            return
        elif isinstance(outcome, Blocked):
            raise Stopped(outcome)


def _launch(scheduler: Scheduler, model: Model, batch: Batch, launched: deque[Batch]) -> Exception | None:
    """Launch a batch, if anything in it still counts; return why that failed."""
    try:
        plan = scheduler.promote(batch)
        if plan is None:
            return None
        with scheduler.manager.launch(plan):
            model.launch(batch, plan)
    except Poisoned:
        raise
    except Exception as error:
        scheduler.abort(batch)
        return error
    launched.append(batch)
    return None


def _fail(scheduler: Scheduler, batch: Batch, error: Exception) -> Iterator[Output]:
    """Fail every request of a batch that could not be computed."""
    for request in dict.fromkeys(work.request.id for work in batch.works if work.phase is not Phase.FINISHED):
        yield from scheduler.fail(request, f"{type(error).__name__}: {error}")
