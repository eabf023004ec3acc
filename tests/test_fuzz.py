"""The fuzz: hypothesis writes programs of the alphabet, all is checked after each call, and violations are short."""

from collections.abc import Callable

import pytest

from kvstate.testing import fuzz, program
from kvstate.testing.alphabet import LETTERS
from kvstate.testing.fuzz import machine, run_once
from kvstate.testing.walk import SIZES, Tally
from kvstate.testing.world import Sizes

from .breakages import greedy_retention, uncounted_sharing

IDS = [f"{sizes.pages}+{sizes.host_pages} pages of {sizes.page_size}, {sizes.subject}" for sizes in SIZES]


@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_no_program_shows_anything(sizes: Sizes) -> None:
    tally = Tally("fuzz")
    assert run_once(sizes, 11, 6, tally) is None
    assert tally.programs >= 6
    assert tally.accepted["ingest"] and tally.accepted["admit"]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_no_program_of_a_long_fuzz_shows_anything(sizes: Sizes) -> None:
    assert run_once(sizes, 12, 2_000) is None


def test_the_same_seed_writes_the_same_programs() -> None:
    one, two, other = Tally("fuzz"), Tally("fuzz"), Tally("fuzz")
    run_once(SIZES[0], 3, 3, one)
    run_once(SIZES[0], 3, 3, two)
    run_once(SIZES[0], 4, 3, other)
    assert (one.programs, one.accepted, one.seen) == (two.programs, two.accepted, two.seen)
    assert one.accepted != other.accepted


@pytest.mark.parametrize("break_core", [uncounted_sharing, pytest.param(greedy_retention, marks=pytest.mark.slow)])
def test_a_broken_core_is_met_and_the_program_that_shows_it_is_short(
    monkeypatch: pytest.MonkeyPatch, break_core: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        break_core(patch)
        violation = next(met for seed in range(40) if (met := run_once(SIZES[0], seed, 50)) is not None)
        shortest = program.shrink(SIZES[0], violation.program, violation.witness)
        assert len(shortest) <= 12, program.text(shortest)
        _, again = program.run(SIZES[0], shortest)
        assert again is not None and again.witness == violation.witness
    assert program.run(SIZES[0], shortest)[1] is None, "on a healthy core the program shows nothing"


def test_a_fuzz_says_in_which_world_it_met_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted_sharing(monkeypatch)
    tally = Tally("fuzz")
    met = fuzz.fuzz(2, 120.0, tally)
    assert met is not None
    sizes, violation = met
    assert sizes in SIZES
    assert program.run(sizes, violation.program)[1] is not None
    assert tally.programs and tally.seconds > 0


def test_a_fuzz_without_time_runs_nothing() -> None:
    tally = Tally("fuzz")
    assert fuzz.fuzz(2, 0.0, tally) is None
    assert tally.programs == 0


def test_every_verb_of_both_nodes_is_a_rule() -> None:
    rules = {name for name, value in vars(machine(SIZES[0])).items() if hasattr(value, "hypothesis_stateful_rule")}
    assert rules == {
        f"{node}_{verb}"
        for node in ("a", "b")
        for verb in [*LETTERS, *(f"advance{copy}" for copy in range(fuzz.ADVANCES))]
    }
