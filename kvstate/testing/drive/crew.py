"""One thread or three: who carries out what the planner decided."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvstate.errors import KVStateError
from kvstate.testing.drive.jobs import Job
from kvstate.testing.drive.model import Launcher, Moved, Mover, Planned, StepEnded
from kvstate.types import Step

PATIENCE_S = 300.0
"""Threads that report nothing for so long are taken for deadlocked."""
SWITCH_S = 1e-4
"""How often Python switches between the threads, at least: its usual 5 ms let a whole step pass in between."""


class Undecided(KVStateError):
    """The threads stopped answering: nothing was shown, neither right nor wrong."""


Happened = StepEnded | Moved


class Crew(Protocol):
    """Has what the planner decided carried out. Everything handed over comes back once, through `next`."""

    def launch(self, planned: Planned) -> None:
        """Hand over a step; steps run in this order."""

    def offload(self, job: Job, discard: bool) -> None:
        """Hand over a victim."""

    def reload(self, job: Job, extra: Step) -> None:
        """Hand over a request that comes back."""

    def next(self) -> Happened:
        """Return what ended next; wait for it."""

    def ready(self) -> bool:
        """Tell whether `next` would not wait."""

    def close(self) -> None:
        """End the threads."""


class Inline:
    """Everything on the caller's thread. A step is in flight from its launch until `next` commits it."""

    def __init__(self, launcher: Launcher, mover: Mover) -> None:
        self._launcher = launcher
        self._mover = mover
        self._steps: deque[Planned] = deque()
        self._moved: deque[Moved] = deque()

    def launch(self, planned: Planned) -> None:
        """Launch the step, or queue it behind the one in flight."""
        self._steps.append(planned)
        if len(self._steps) == 1:
            self._launcher.launch(planned)

    def offload(self, job: Job, discard: bool) -> None:
        """Offload at once."""
        self._moved.append(self._mover.offload(job, discard))

    def reload(self, job: Job, extra: Step) -> None:
        """Reload at once."""
        self._moved.append(self._mover.reload(job, extra))

    def next(self) -> Happened:
        """Return what was moved, else commit the step in flight."""
        if self._moved:
            return self._moved.popleft()
        ended = self._launcher.commit(self._steps.popleft())
        if self._steps:
            self._launcher.launch(self._steps[0])
        return ended

    def ready(self) -> bool:
        """Tell whether something was moved."""
        return bool(self._moved)

    def close(self) -> None:
        """Do nothing: there are no threads."""


class Threads:
    """A launching and a moving thread besides the caller's, which plans. An error in one is raised by `next`."""

    def __init__(self, launcher: Launcher, mover: Mover) -> None:
        self._launcher = launcher
        self._mover = mover
        # Unbounded, and locked in C: nobody holds a lock while anything of this project runs.
        self._events: queue.SimpleQueue[Happened | BaseException] = queue.SimpleQueue()
        self._queues: list[queue.SimpleQueue[Callable[[], Happened] | None]] = [
            queue.SimpleQueue(),
            queue.SimpleQueue(),
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(orders,), name=f"kvstate-{name}", daemon=True)
            for name, orders in zip(("launcher", "mover"), self._queues, strict=True)
        ]
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        for thread in self._threads:
            thread.start()

    def _work(self, orders: queue.SimpleQueue[Callable[[], Happened] | None]) -> None:
        while (order := orders.get()) is not None:
            try:
                self._events.put(order())
            except BaseException as error:
                self._events.put(error)
                return

    def launch(self, planned: Planned) -> None:
        """Hand the step to the launching thread."""

        def order() -> Happened:
            self._launcher.launch(planned)
            return self._launcher.commit(planned)

        self._queues[0].put(order)

    def offload(self, job: Job, discard: bool) -> None:
        """Hand the victim to the moving thread."""
        self._queues[1].put(lambda: self._mover.offload(job, discard))

    def reload(self, job: Job, extra: Step) -> None:
        """Hand the request to the moving thread."""
        self._queues[1].put(lambda: self._mover.reload(job, extra))

    def next(self) -> Happened:
        """Wait for a thread to report."""
        try:
            happened = self._events.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise Undecided(
                f"nothing was reported for {PATIENCE_S:.0f} s: the threads may be deadlocked; run without --threads to "
                "tell a slow run from a hang"
            ) from None
        if isinstance(happened, BaseException):
            raise happened
        return happened

    def ready(self) -> bool:
        """Tell whether a report waits."""
        return not self._events.empty()

    def close(self) -> None:
        """End the threads after what they are at; one that hangs is left behind, as a daemon."""
        for orders in self._queues:
            orders.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        sys.setswitchinterval(self._switch_s)
