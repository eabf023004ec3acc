"""Random schedules: an engine around the reference scheduler, in tiny pools, under everything that can happen to it.

A schedule is drawn from (seed, index) alone. Requests are added, cancelled, failed, added again; batches are scheduled,
launched and updated, one by one or one ahead; copies and launches fail. What is generated must be what a model with all
the memory in the world generates (`engine.expected`); no call may raise; nothing may hang; and when nothing is live,
nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from kvstate.testing.schedules.flags import REQUIRED, missing
from kvstate.testing.schedules.play import Play
from kvstate.testing.schedules.setup import Setup, setup
from kvstate.testing.walk import Tally
from kvstate.testing.world import Violation

__all__ = ["REQUIRED", "Play", "Setup", "missing", "play", "schedules", "setup"]


def play(seed: int, index: int) -> Play:
    """Play one schedule and return it.

    Raises
    ------
    Violation
        When something is not as it must be.
    """
    run = Play(setup(seed, index))
    run.run()
    return run


def schedules(
    seed: int,
    seconds: float,
    tally: Tally,
    progress: Callable[[Tally], None] = lambda tally: None,
    schedules_max: int | None = None,
    device: str = "memory",
) -> tuple[Setup, Violation] | None:
    """Play schedules on backend `device` until `seconds` are over or `schedules_max` were played.

    Returns
    -------
    The first violation and its world.
    """
    start = time.monotonic()
    index = 0
    while (schedules_max is None or index < schedules_max) and time.monotonic() - start < seconds:
        world = attrs.evolve(setup(seed, index), device=device)
        run = Play(world)
        try:
            run.run()
        except Violation as violation:
            return world, violation
        finally:
            tally.programs += 1
            tally.accepted.update(run.calls)
            tally.refused.update(run.refused)
            tally.seen.update(+run.seen)
            tally.seconds = time.monotonic() - start
        index += 1
        progress(tally)
    return None
