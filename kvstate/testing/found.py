"""A violation that a check found: what shows it, as a person reads it and as files."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvstate.testing import program
from kvstate.testing.schedules import Setup, replay
from kvstate.testing.world import Call, Sizes, Violation


@attrs.frozen
class Found:
    """A violation of the machine: which layer and seed met it, in what world, and the shortest program to show it."""

    layer: str
    seed: int
    sizes: Sizes
    witness: str
    detail: str
    program: tuple[Call, ...]

    @classmethod
    def shrunk(cls, layer: str, seed: int, sizes: Sizes, violation: Violation) -> Found:
        """Return what was met, as the shortest program that shows it."""
        shortest = program.shrink(sizes, violation.program, violation.witness)
        _, again = program.run(sizes, shortest)
        shown = again if again is not None else violation
        return cls(layer, seed, sizes, shown.witness, shown.detail, shown.program)

    def violation(self) -> Violation:
        """Return it as the exception it was."""
        return Violation(self.witness, self.detail, self.program)

    @property
    def lines(self) -> list[str]:
        """What was called, one call per line."""
        return program.text(self.program).splitlines()

    @property
    def preamble(self) -> str:
        """What makes the world in which that is called."""
        return program.preamble(self.sizes, self.program)

    def save(self, path: Path) -> None:
        """Write a replay file."""
        program.save(path, self.sizes, self.violation())

    def as_pytest(self) -> str:
        """Return a test that fails while the violation is there."""
        return program.as_pytest(self.sizes, self.violation())


@attrs.frozen
class FoundSchedule:
    """A violation of the scheduler: the world that it was met in, and what was called there."""

    layer: str
    seed: int
    world: Setup
    witness: str
    detail: str
    script: tuple[str, ...]

    @classmethod
    def shrunk(cls, layer: str, seed: int, world: Setup, violation: Violation) -> FoundSchedule:
        """Return what was met, as a simpler schedule that shows it."""
        simpler = replay.shrink(world, violation.witness)
        play, again = replay.played(simpler)
        shown = again if again is not None else violation
        return cls(layer, seed, simpler, shown.witness, replay.seen(shown), tuple(play.script))

    @property
    def lines(self) -> list[str]:
        """What was called, and in comments what came of it."""
        return list(self.script)

    @property
    def preamble(self) -> str:
        """What makes the world in which that is called."""
        return replay.as_python(self.world)

    def save(self, path: Path) -> None:
        """Write a replay file."""
        replay.save(path, self.world, self.witness, self.detail)

    def as_pytest(self) -> str:
        """Return a test that fails while the violation is there."""
        return replay.as_pytest(self.world, self.witness, self.detail)
