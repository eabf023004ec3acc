"""The fuzz: hypothesis writes programs of the alphabet, everything is checked after each call, and violations are short."""

import pytest

from kvstate.testing import fuzz, program, walk
from kvstate.testing.fuzz import machine, run_once
from kvstate.testing.walk import SIZES, Tally
from kvstate.testing.world import Sizes, Violation
from kvstate.transitions import retention, retrieve
from kvstate.types import RetentionPolicy

IDS = [f"{sizes.pages}+{sizes.host_pages} pages of {sizes.page_size}, {sizes.subject}" for sizes in SIZES]


@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_no_program_shows_anything(sizes: Sizes) -> None:
    tally = Tally("fuzz")
    assert run_once(sizes, 11, 10, tally) is None
    assert tally.programs >= 10
    assert tally.accepted["ingest"] and tally.accepted["admit"]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_no_program_of_a_long_fuzz_shows_anything(sizes: Sizes) -> None:
    assert run_once(sizes, 12, 2_000) is None


def test_the_same_seed_writes_the_same_programs() -> None:
    one, two, other = Tally("fuzz"), Tally("fuzz"), Tally("fuzz")
    run_once(SIZES[0], 3, 5, one)
    run_once(SIZES[0], 3, 5, two)
    run_once(SIZES[0], 4, 5, other)
    assert (one.programs, one.accepted, one.seen) == (two.programs, two.accepted, two.seen)
    assert one.accepted != other.accepted


def _greedy_retention(patch: pytest.MonkeyPatch) -> None:
    healthy = retention.pages_outside

    def greedy(length: int, policy: RetentionPolicy, page_size: int) -> tuple[int, int]:
        first, count = healthy(length, policy, page_size)
        return first, count + 1 if count else 0

    patch.setattr(retention, "pages_outside", greedy)


def _failed_offload_commits(patch: pytest.MonkeyPatch) -> None:
    from kvstate.transitions import claim, offload, reload

    def committable(claimed: object) -> None:
        return None

    for module in (claim, offload, reload):
        patch.setattr(module, "committable", committable)


@pytest.mark.parametrize("break_core", [_greedy_retention, _failed_offload_commits])
def test_a_broken_core_is_met_and_the_program_that_shows_it_is_short(
    monkeypatch: pytest.MonkeyPatch, break_core: object
) -> None:
    assert callable(break_core)
    with monkeypatch.context() as patch:
        break_core(patch)
        violation = run_once(SIZES[0], 1, 400)
        assert isinstance(violation, Violation)
        shortest = program.shrink(SIZES[0], violation.program, violation.witness)
        assert len(shortest) <= 12, program.text(shortest)
        _, again = program.run(SIZES[0], violation.program)
        assert again is not None and again.witness == violation.witness
    assert program.run(SIZES[0], violation.program)[1] is None


def test_a_fuzz_says_in_which_world_it_met_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    _greedy_retention(monkeypatch)
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
    rules = {rule.function.__name__ for rule in machine(SIZES[0]).rules()}
    assert {f"{node}_{letter.verb}" for node in "ab" for letter in walk.ALPHABET} <= rules
    assert {f"{node}_advance{i}" for node in "ab" for i in range(fuzz.ADVANCES)} <= rules


def test_what_a_program_leaves_open_is_ended_and_must_then_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = retrieve.failed

    def leaking(state: object, fetch: object, error: str) -> object:
        return healthy(state, fetch, error)  # type: ignore[arg-type]

    monkeypatch.setattr(retrieve, "failed", leaking)
    assert run_once(SIZES[0], 5, 3) is None
