"""Random schedules of the scheduler: they hold, they reach what they must, and they say what they saw."""

from __future__ import annotations

import pytest

from kvstate.testing.schedules import REQUIRED, missing, play, schedules, setup
from kvstate.testing.walk import Tally
from tests.mutants.scheduler import MUTANTS


def test_schedules_hold() -> None:
    tally = Tally("scheduler")
    assert schedules(0, float("inf"), tally, schedules_max=60) is None
    assert tally.programs == 60
    assert tally.accepted["schedule"] > 500 and tally.refused["add"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_schedules_hold_and_each_quarter_reaches_everything(seed: int) -> None:
    tally = Tally("scheduler")
    met = schedules(seed, float("inf"), tally, schedules_max=500)
    assert met is None, str(met)
    assert missing(tally.seen) == ()
    assert set(tally.seen) - set(REQUIRED) == set()


def test_a_schedule_is_the_same_whenever_it_is_played() -> None:
    worlds = [setup(7, index) for index in range(30)]
    assert worlds == [setup(7, index) for index in range(30)] and len(set(map(str, worlds))) == 30
    assert play(7, 3).script == play(7, 3).script


def test_what_was_not_reached_is_said() -> None:
    seen = play(0, 0).seen
    assert set(missing(seen)) == {name for name in REQUIRED if not seen[name]} != set()


def test_a_violation_shows_the_world_and_the_calls() -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.id == "Q20-kept"]
    with mutant.patch():
        met = schedules(mutant.seed, float("inf"), Tally("mutants"), schedules_max=mutant.schedules)
    assert met is not None
    world, violation = met
    assert str(world) in violation.detail and "schedule()  # batch " in violation.detail
