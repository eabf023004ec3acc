"""Every mutant of the scheduler is caught, and the scheduler as it is passes the very same schedules and programs."""

from __future__ import annotations

import pytest

from kvstate.testing.schedules import schedules
from kvstate.testing.walk import Tally
from tests.mutants.scheduler import MUTANTS, Mutant, hunt

ROWS = ("Q2", "Q3", "Q5", "Q17", "Q20", "O13", "Q12")
"""The rows of `tests/bugs/test_scheduler_rows.py` that are one wrong line."""

PLAYED = [mutant for mutant in MUTANTS if mutant.layers]


def test_every_row_has_a_mutant_and_every_mutant_says_what_catches_it() -> None:
    assert set(ROWS) <= {mutant.row for mutant in MUTANTS}
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    assert all(bool(mutant.layers) != (mutant.by_hand is not None) for mutant in MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", PLAYED, ids=lambda mutant: mutant.id)
def test_schedules_catch(mutant: Mutant) -> None:
    caught = hunt(mutant)
    assert caught is not None, f"{mutant.what}: {mutant.schedules} schedules and nobody objected"
    assert caught.violation.witness in mutant.layers, str(caught.violation)
    assert schedules(mutant.seed, float("inf"), Tally("as it is"), schedules_max=caught.schedules) is None


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.by_hand], ids=lambda mutant: mutant.id)
def test_a_program_by_hand_catches(mutant: Mutant) -> None:
    assert mutant.by_hand is not None
    mutant.by_hand()
    with mutant.patch(), pytest.raises(AssertionError):
        mutant.by_hand()
