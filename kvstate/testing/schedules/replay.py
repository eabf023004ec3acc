"""What a violation of a schedule leaves behind: a simpler schedule, its world as a file, and a pytest test.

A schedule is drawn from its world alone, so the world is all there is to write down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvstate.testing.schedules.play import Play
from kvstate.testing.schedules.setup import Setup
from kvstate.testing.world import Violation
from kvstate.types import Geometry, Group

FORMAT = 1

INDICES = 25
"""Of a world with so many requests, so many schedules are looked at for a shorter one."""


def _sizes(change: Callable[[Geometry], dict[str, Any]]) -> Callable[[Setup], Setup]:
    return lambda world: attrs.evolve(world, geometry=attrs.evolve(world.geometry, **change(world.geometry)))


SIMPLER: tuple[Callable[[Setup], Setup], ...] = (
    lambda world: attrs.evolve(world, trouble=0.0),
    lambda world: attrs.evolve(world, prefix_cache=False),
    lambda world: attrs.evolve(world, asynchronous=False),
    lambda world: attrs.evolve(world, logprobs=False, debug=False, policy="decode-first"),
    lambda world: attrs.evolve(world, budget=64),
    lambda world: attrs.evolve(world, batch=16),
    _sizes(lambda geometry: {"groups": geometry.groups[:1]}),
    _sizes(lambda geometry: {"host_pages": 0}),
    _sizes(lambda geometry: {"pages": max(1, geometry.pages - 1)}),
)
"""What may be left out of a world."""


def played(world: Setup) -> tuple[Play, Violation | None]:
    """Play a schedule; return it and the violation it met, if any."""
    play = Play(world)
    try:
        play.run()
    except Violation as violation:
        return play, violation
    return play, None


def seen(violation: Violation) -> str:
    """Return what a schedule's violation saw, without the world and the calls that follow."""
    return violation.detail.split("\n", 1)[0]


def shrink(world: Setup, witness: str) -> Setup:
    """Return a simpler or shorter schedule that the same witness objects to."""
    best, length = world, len(played(world)[0].script)

    def better(candidate: Setup, length_max: int) -> bool:
        nonlocal best, length
        play, violation = played(candidate)
        if violation is None or violation.witness != witness or len(play.script) > length_max:
            return False
        best, length = candidate, len(play.script)
        return True

    # Worlds with less in them.
    while any([simpler(best) != best and better(simpler(best), length) for simpler in SIMPLER]):
        pass
    # Other schedules of this world, of as few requests as it takes.
    for requests in range(1, best.requests + 1):
        fewer = attrs.evolve(best, requests=requests)
        if any([better(attrs.evolve(fewer, index=index), length - 1) for index in range(INDICES)]):
            break
    return best


# -- files


def save(path: Path, world: Setup, witness: str, detail: str) -> None:
    """Write a replay file."""
    document = {"kvstate": FORMAT, "schedule": attrs.asdict(world), "witness": witness, "detail": detail}
    path.write_text(json.dumps(document, indent=1) + "\n")


def is_schedule(path: Path) -> bool:
    """Tell whether a replay file holds a schedule."""
    try:
        return "schedule" in json.loads(path.read_text())
    except (TypeError, ValueError):
        return False


def load(path: Path) -> tuple[Setup, str]:
    """Return (world, witness) of a replay file.

    Raises
    ------
    ValueError
        When the file is no replay file of a schedule, saying what is wrong with it.
    """
    try:
        document = json.loads(path.read_text())
        if document["kvstate"] != FORMAT:
            raise ValueError(f"format {document['kvstate']!r}; this version reads format {FORMAT}")
        fields = dict(document["schedule"])
        sizes = dict(fields.pop("geometry"))
        geometry = Geometry(**{**sizes, "groups": [Group(**group) for group in sizes["groups"]]})
        world = Setup(geometry=geometry, **fields)
        Play(world)
        return world, str(document["witness"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a replay file ({why}); `kvstate check` writes them") from error


def as_python(world: Setup) -> str:
    """Return the expression that makes a world, one field per line."""
    lines = [f"    {name}={value!r}," for name, value in attrs.asdict(world, recurse=False).items()]
    return "\n".join(["Setup(", *lines, ")"])


def as_pytest(world: Setup, witness: str, detail: str) -> str:
    """Return a test file that plays the schedule; it fails while the violation is there."""
    told = " ".join(detail.replace('"""', "'''").replace("\\", "/").split())
    setup = as_python(world).replace("\n", "\n    ")
    return (
        f'"""Found by kvstate check. {witness}: {told}"""\n\n'
        "from kvstate.testing.schedules import Play, Setup\n"
        "from kvstate.types import Geometry, Group\n\n\n"
        f"def test_{witness}_holds():\n    world = {setup}\n    Play(world).run()\n"
    )
