"""Every mutant is caught, by a layer that the registry names, and the machine as it is passes the very same programs.

That a mutant is caught shows that the checker can see its kind. What the walk needs for it: docs/mutants.md, which
``python -m tests.mutants.table`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import pytest

from kvstate.testing import program
from kvstate.testing.walk import Tally, walk
from tests.mutants import pools, registry
from tests.mutants.registry import NOT_HERE, ONE_GROUP, WITNESSES, Mutant, core_modules, hunt

MUTANTS = (*registry.MUTANTS, *pools.POOLS)

ROWS = (
    *("O1", "O2", "O3", "O5", "O6", "O7", "O8", "O10", "O12", "O15"),
    *("D1", "D2", "D3", "D4", "D5", "D6", "D7", "D10", "D11", "D12", "D13"),
    *("F1", "F2", "F3", "F4", "F5"),
    *("S1", "S2", "S3", "S6"),
    *("P1", "P3", "P4", "P7"),
    *("Q1", "Q8", "Q9", "Q10", "Q13", "Q14", "Q15"),
)
"""The rows of `tests/bugs/` that are one wrong line of the core, and so must be a mutant."""

WALKED = [mutant for mutant in MUTANTS if mutant.layers]


@cache
def holds(seed: int, programs: int) -> bool:
    """Tell whether the machine as it is passes the first `programs` programs of a seed."""
    return walk(seed, float("inf"), Tally("as it is"), programs_max=programs, worlds=ONE_GROUP) is None


def functions() -> Iterator[tuple[Any, str, CodeType]]:
    """Yield every function of the core with the place where it is named, and its code."""
    for module in core_modules():
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            for name, value in vars(owner).items():
                if isinstance(value, FunctionType):
                    yield owner, name, value.__code__


def test_every_row_has_a_mutant_or_a_reason() -> None:
    covered = {mutant.row for mutant in MUTANTS} | NOT_HERE.keys()
    assert set(ROWS) <= covered
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


def test_every_mutant_names_what_catches_it() -> None:
    for mutant in MUTANTS:
        assert bool(mutant.layers) + (mutant.by_hand is not None) + bool(mutant.to_come) == 1, mutant.id
        assert set(mutant.layers) <= set(WITNESSES), mutant.id


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_patch_changes_the_core_and_leaves_nothing_behind(mutant: Mutant) -> None:
    before = list(functions())
    with mutant.patch():
        assert list(functions()) != before
    assert list(functions()) == before


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.id) for m in WALKED])
def test_the_walk_catches(mutant: Mutant, record_property: Any) -> None:
    caught = hunt(mutant)
    assert caught is not None, f"{mutant.what}: {mutant.programs} programs and nobody objected"
    record_property("witness", caught.violation.witness)
    record_property("programs", caught.programs)
    assert caught.violation.witness in mutant.layers, str(caught.violation)

    assert holds(mutant.seed, caught.programs)
    _, violation = program.run(caught.sizes, caught.violation.program)
    assert violation is None


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.id) for m in MUTANTS if m.by_hand is not None])
def test_a_program_by_hand_catches(mutant: Mutant) -> None:
    assert mutant.by_hand is not None
    mutant.by_hand()
    with mutant.patch(), pytest.raises(AssertionError):
        mutant.by_hand()
