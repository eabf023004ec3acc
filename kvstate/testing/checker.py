"""The checker: layers over one subject, in several processes, and what they say together."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from typing import Any

import attrs

from kvstate.testing import schedules, sometimes
from kvstate.testing.found import Found, FoundSchedule
from kvstate.testing.walk import Tally, walk

LAYERS = ("fuzz", "walk", "scheduler")
"""In the order in which each process runs them."""

SHARE = {"fuzz": 0.25, "walk": 0.55, "scheduler": 0.2}
"""Of the time, per layer; of what is left where a layer is not run."""


def required(layer: str) -> tuple[str, ...]:
    """Return what must be reached: by the schedules of the scheduler, or by the layers of the machine together."""
    return schedules.REQUIRED if layer == "scheduler" else sometimes.REQUIRED


def missing(tallies: Sequence[Tally]) -> tuple[str, ...]:
    """Return what must be reached and was not, by the layers that have run."""
    machine = [tally for tally in tallies if tally.layer != "scheduler"]
    reached = sum((tally.seen for tally in machine), start=Counter[str]())
    told = sometimes.missing(reached) if machine else ()
    for tally in tallies:
        if tally.layer == "scheduler":
            told += tuple(f"scheduler: {name}" for name in schedules.missing(tally.seen))
    return told


@attrs.frozen
class Report:
    """What a check has seen. `missing` is what must be reached and was not."""

    tallies: tuple[Tally, ...]
    found: tuple[Found | FoundSchedule, ...]
    missing: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        """``violation``, ``undecided`` or ``holds``."""
        if self.found:
            return "violation"
        return "undecided" if self.missing else "holds"


def job(
    seed: int,
    seconds: float,
    layers: Sequence[str],
    progress: Callable[[Tally], None] = lambda tally: None,
    device: str = "memory",
) -> tuple[list[Tally], Found | FoundSchedule | None]:
    """Run `layers` one after the other in this process; stop at the first violation."""
    tallies = []
    total = sum(SHARE[layer] for layer in layers)
    for layer in layers:
        tally = Tally(layer)
        tallies.append(tally)
        share = seconds * SHARE[layer] / total
        if layer == "scheduler":
            played = schedules.schedules(seed, share, tally, progress, device=device)
            if played is not None:
                return tallies, FoundSchedule.shrunk(layer, seed, *played)
            continue
        if layer == "fuzz":
            from kvstate.testing.fuzz import fuzz

            met = fuzz(seed, share, tally, progress, device)
        else:
            met = walk(seed, share, tally, progress, device=device)
        if met is not None:
            return tallies, Found.shrunk(layer, seed, *met)
    return tallies, None


def _process(seed: int, seconds: float, layers: Sequence[str], device: str, outbox: Queue[Any]) -> None:
    """Run a job in a process of its own and send what it says."""
    last = 0.0

    def progress(tally: Tally) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.5:
            last = now
            outbox.put(("progress", seed, tally.layer, tally.programs, sum(tally.accepted.values())))

    try:
        outbox.put(("done", seed, *job(seed, seconds, layers, progress, device)))
    except BaseException as error:
        outbox.put(("died", seed, f"{type(error).__name__}: {error}"))
        raise


class CheckerDied(Exception):
    """A process of the checker ended without an answer: nothing was decided."""


def check(
    seconds: float,
    seed: int = 0,
    jobs: int = 1,
    layers: Sequence[str] = LAYERS,
    progress: Callable[[int, str, int, int], None] = lambda job, layer, programs, accepted: None,
    device: str = "memory",
) -> Report:
    """Run `layers` for about `seconds` in `jobs` processes, job i with ``seed + i``.

    Parameters
    ----------
    progress
        Called with (job, layer, programs, accepted transitions) now and then.
    device
        The backend, by its name in `kvstate.testing.backends`.

    Raises
    ------
    CheckerDied
        When a process ended without an answer.
    """
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    outbox: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=_process, args=(seed + i, seconds, tuple(layers), device, outbox), daemon=True)
        for i in range(jobs)
    ]
    for process in processes:
        process.start()
    tallies: dict[str, Tally] = {layer: Tally(layer) for layer in layers}
    found: list[Found | FoundSchedule] = []
    waiting = set(range(seed, seed + jobs))
    try:
        while waiting:
            message = _next(outbox, processes)
            if message[0] == "progress":
                progress(message[1] - seed, *message[2:])
                continue
            waiting.discard(message[1])
            if message[0] == "died":
                raise CheckerDied(f"the job with seed {message[1]} died: {message[2]}")
            for tally in message[2]:
                tallies[tally.layer].join(tally)
            if message[3] is not None:
                found.append(message[3])
    finally:
        for process in processes:
            if waiting:
                process.terminate()
            process.join()
    told = tuple(tallies.values())
    return Report(told, tuple(found), missing(told), time.monotonic() - start)


def _next(outbox: Queue[Any], processes: Sequence[Any]) -> Any:
    """Return the next message; a process that was killed cannot send one."""
    while True:
        try:
            return outbox.get(timeout=1.0)
        except queue.Empty:
            for process in processes:
                if process.exitcode not in (None, 0):
                    raise CheckerDied(f"{process.name} ended with exit code {process.exitcode}") from None
