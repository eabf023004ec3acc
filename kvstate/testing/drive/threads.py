"""The loop with the model on a thread of its own.

The scheduler's thread schedules the next batch and updates the last one while the model's thread launches, computes,
reads back and compares the one between: the manager's verbs meet each other.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from kvstate.errors import KVStateError, Refused
from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.refusals import StalePlan
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch, Blocked, Idle
from kvstate.scheduler.loop import Stopped
from kvstate.scheduler.requests import Output
from kvstate.state import Lease
from kvstate.testing.drive.model import ChainModel, Job

PATIENCE_S = 300.0
"""A model that reports nothing for so long is taken for deadlocked."""
SWITCH_S = 1e-4
"""How often Python switches between the threads, at least: its usual 5 ms let a whole step pass in between."""


class Undecided(KVStateError):
    """The model's thread stopped answering: nothing was shown, neither right nor wrong."""


def serve_on_two_threads(
    scheduler: Scheduler, model: ChainModel, *, between: Callable[[], Iterable[Output]] = tuple
) -> Iterator[Output]:
    """Yield the output of each sample as it ends, as `kvstate.serve` does; the scheduler is asynchronous.

    Raises
    ------
    Undecided
        When the model does not answer.
    Stopped
        When nothing can run any more.
    """
    with ModelThread(scheduler.manager, model) as thread:
        handed: deque[Batch] = deque()
        while True:
            yield from between()
            outcome = scheduler.schedule()
            yield from outcome.ended
            if isinstance(outcome, Batch):
                plan = scheduler.promote(outcome)
                if plan is not None:
                    handed.append(outcome)
                    # What it is fed is read here: an update may change it while the model computes.
                    thread.hand(model.job(outcome), outcome.lease, plan)
                if len(handed) == 1:
                    continue
            if handed:
                batch = handed.popleft()
                tokens = thread.next()
                if tokens is None:
                    scheduler.abort(batch)
                else:
                    yield from scheduler.update(batch, tokens).ended
            elif isinstance(outcome, Idle):
                return
            elif isinstance(outcome, Blocked):
                raise Stopped(outcome)


class ModelThread:
    """Launches what it is handed, in that order; an error there is raised by `next`."""

    def __init__(self, manager: KVManager, model: ChainModel) -> None:
        self._manager = manager
        self._model = model
        # Unbounded, and locked in C: nobody holds a lock while anything of this project runs.
        self._orders: queue.SimpleQueue[tuple[Job, Lease, Plan] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvstate-model", daemon=True)
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> ModelThread:
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread after what it is at; one that hangs is left behind, as a daemon."""
        self._orders.put(None)
        self._thread.join(timeout=5.0)
        sys.setswitchinterval(self._switch_s)

    def hand(self, job: Job, lease: Lease, plan: Plan) -> None:
        """Have a batch launched and computed."""
        self._orders.put((job, lease, plan))

    def next(self) -> list[int] | None:
        """Wait for the oldest batch handed over: what it sampled, or None when nothing of it counts any more."""
        try:
            result = self._results.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise Undecided(
                f"the model reported nothing for {PATIENCE_S:.0f} s: the threads may be deadlocked; run without "
                "--threads to tell a slow run from a hang"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._results.put(self._launch(*order))
            except BaseException as error:
                self._results.put(error)
                return

    def _launch(self, job: Job, lease: Lease, plan: Plan) -> list[int] | None:
        """Launch a plan; when an eviction has voided some of it meanwhile, plan what is left."""
        while len(plan.sunk) < len(job.entries):
            try:
                with self._manager.launch(plan):
                    return self._model.compute(job, plan)
            except Refused as refused:
                if not isinstance(refused.refusal, StalePlan):
                    raise
            again = self._manager.plan(lease)
            while isinstance(again, StalePlan):
                again = self._manager.plan(lease)
            if not isinstance(again, Plan):
                raise Refused(again)
            plan = again
        return None
