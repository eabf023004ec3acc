"""The random walk: volume. Seeded programs of the alphabet, until time is up."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from kvstate.testing.alphabet import ADVANCE, ALPHABET, RandomChooser
from kvstate.testing.world import Sizes, Violation, World
from kvstate.types import Group

CALLS = 400
"""Calls of one program, before it is ended: long, so that pages are used again and again."""

SIZES = (
    Sizes(pages=8, host_pages=6, page_size=2),
    Sizes(pages=10, host_pages=6, page_size=3, subject="machine"),
    Sizes(pages=14, host_pages=9, page_size=2),
    Sizes(pages=6, host_pages=4, page_size=4),
    Sizes(pages=10, host_pages=7, page_size=1),
    Sizes(pages=5, host_pages=8, page_size=2, subject="machine"),
    Sizes(pages=8, host_pages=0, page_size=2),
    Sizes(pages=9, host_pages=7, page_size=2, groups=(Group("full", 512), Group("window", 128, window=3))),
    Sizes(pages=10, host_pages=8, page_size=1, subject="machine", groups=(Group("full", 512), Group("small", 128))),
    Sizes(pages=10, host_pages=6, page_size=3, groups=(Group("window", 128, window=7),)),
)
"""Small worlds, so that everything is scarce: of one group, one without a host pool, and of groups in sectors."""


@attrs.define
class Tally:
    """What a layer has done."""

    layer: str
    programs: int = 0
    accepted: Counter[str] = attrs.field(factory=Counter)
    refused: Counter[str] = attrs.field(factory=Counter)
    seen: Counter[str] = attrs.field(factory=Counter)
    seconds: float = 0.0

    def add(self, world: World) -> None:
        """Add one program's world."""
        self.programs += 1
        self.accepted.update(world.accepted)
        self.refused.update(world.refused)
        self.seen.update(world.seen)

    def join(self, other: Tally) -> None:
        """Add what another process has done for the same layer."""
        self.programs += other.programs
        self.accepted.update(other.accepted)
        self.refused.update(other.refused)
        self.seen.update(other.seen)
        self.seconds = max(self.seconds, other.seconds)


def program(seed: int, index: int, sizes: Sizes, calls: int = CALLS) -> World:
    """Run program `index` of the walk with `seed` and return its world.

    Raises
    ------
    Violation
        When a witness objects.
    """
    choose = RandomChooser(random.Random(f"{seed}/{index}"))
    world = World(sizes)
    single = choose.below(3) == 0
    for _ in range(calls):
        node = world.b if not single and choose.below(5) < 2 else world.a
        letters = [letter for letter in (*ALPHABET, ADVANCE) if letter.ready(node)]
        total = sum(letter.weight for letter in letters)
        at = choose.below(total)
        for letter in letters:
            at -= letter.weight
            if at < 0:
                letter.call(node, choose)
                break
    world.finish()
    return world


def walk(
    seed: int,
    seconds: float,
    tally: Tally,
    progress: Callable[[Tally], None] = lambda tally: None,
    programs_max: int | None = None,
    device: str = "memory",
    worlds: Sequence[Sizes] = SIZES,
) -> tuple[Sizes, Violation] | None:
    """Walk on backend `device` until `seconds` are over or `programs_max` programs ran; return the first violation.

    The programs take the `worlds` in turn.
    """
    start = time.monotonic()
    index = 0
    while (programs_max is None or index < programs_max) and time.monotonic() - start < seconds:
        sizes = attrs.evolve(worlds[index % len(worlds)], device=device)
        try:
            tally.add(program(seed, index, sizes))
        except Violation as violation:
            tally.programs += 1
            tally.seconds = time.monotonic() - start
            return sizes, violation
        index += 1
        tally.seconds = time.monotonic() - start
        progress(tally)
    return None
