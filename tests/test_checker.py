"""The checker: the same seed is the same program, a broken core is met and shrunk, and nothing decided is no pass."""

import queue
from collections import Counter
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvstate.testing import checker, program, schedules, sometimes, walk
from kvstate.testing.checker import CheckerDied, Report, check, job
from kvstate.testing.found import Found, FoundSchedule
from kvstate.testing.schedules import replay
from kvstate.testing.walk import Tally
from kvstate.testing.world import Sizes, Violation

from .breakages import forgetful_drop, greedy_retention, uncounted_sharing
from .mutants.scheduler import MUTANTS

# -- the walk


@pytest.mark.parametrize("index", range(3))
def test_a_program_of_the_walk_is_made_by_its_seed_and_index_alone(index: int) -> None:
    sizes = walk.SIZES[index]
    one, two = walk.program(3, index, sizes), walk.program(3, index, sizes)
    assert one.program == two.program
    assert one.a.now == two.a.now and one.b.now == two.b.now
    assert (one.seen, one.accepted, one.refused) == (two.seen, two.accepted, two.refused)
    assert walk.program(4, index, sizes).program != one.program
    assert walk.program(3, index + 100, sizes).program != one.program


@pytest.mark.slow
def test_a_walk_runs_its_programs_in_order_over_all_sizes() -> None:
    met: list[Any] = []

    def progress(tally: Tally) -> None:
        met.append((tally.programs, sum(tally.accepted.values())))

    tally = Tally("walk")
    assert walk.walk(5, 60.0, tally, progress, programs_max=4) is None
    worlds = [walk.program(5, index, walk.SIZES[index]) for index in range(4)]
    assert tally.programs == 4
    assert tally.accepted == sum((world.accepted for world in worlds), start=Counter())
    assert tally.refused == sum((world.refused for world in worlds), start=Counter())
    assert tally.seen == sum((world.seen for world in worlds), start=Counter())
    assert [programs for programs, _ in met] == [1, 2, 3, 4]
    assert met[-1][1] == sum(tally.accepted.values())


def test_a_walk_without_time_runs_nothing() -> None:
    tally = Tally("walk")
    assert walk.walk(5, 0.0, tally) is None
    assert tally.programs == 0


def test_tallies_of_processes_add_up_and_keep_the_longest_time() -> None:
    one = Tally("walk", 2, Counter(admit=3), Counter(StalePlan=1), Counter(padding=1), 1.5)
    one.join(Tally("walk", 5, Counter(admit=4, plan=1), Counter(StalePlan=2), Counter(padding=2), 0.5))
    assert one == Tally("walk", 7, Counter(admit=7, plan=1), Counter(StalePlan=3), Counter(padding=3), 1.5)


# -- one job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_core", "witnesses"),
    [(greedy_retention, {"oracle", "promise", "reference"}), (forgetful_drop, {"judge"})],
    ids=["retention", "drop"],
)
def test_a_broken_core_is_met_shrunk_and_reproduced(
    monkeypatch: pytest.MonkeyPatch, break_core: Any, witnesses: set[str]
) -> None:
    with monkeypatch.context() as patch:
        break_core(patch)
        tallies, found = job(1, 120.0, ("walk",))
        assert found is not None
        assert (found.layer, found.seed) == ("walk", 1) and found.witness in witnesses
        assert len(found.program) <= 40
        assert found.sizes in walk.SIZES
        _, again = program.run(found.sizes, found.program)
        assert again is not None and again.witness == found.witness and again.detail == found.detail
        assert [tally.layer for tally in tallies] == ["walk"]
    _, healthy = program.run(found.sizes, found.program)
    assert healthy is None, "on a healthy core the program shows nothing"


def test_a_job_stops_at_the_first_violation_and_runs_no_further_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted_sharing(monkeypatch)
    tallies, found = job(1, 120.0, ("fuzz", "walk"))
    assert found is not None and found.layer == "fuzz"
    assert [tally.layer for tally in tallies] == ["fuzz"]


@pytest.mark.slow
def test_a_job_on_a_healthy_core_runs_every_layer() -> None:
    heard: list[str] = []
    tallies, found = job(2, 1.0, checker.LAYERS, lambda tally: heard.append(tally.layer))
    assert found is None
    assert [tally.layer for tally in tallies] == ["fuzz", "walk", "scheduler"]
    assert all(tally.programs and tally.accepted for tally in tallies)
    assert set(heard) == {"fuzz", "walk", "scheduler"}


def test_a_broken_scheduler_is_met_made_simpler_and_reproduced() -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.id == "Q20-kept"]
    with mutant.patch():
        tallies, found = job(mutant.seed, 120.0, ("scheduler",))
        assert isinstance(found, FoundSchedule)
        assert (found.layer, found.seed) == ("scheduler", mutant.seed) and found.witness in mutant.layers
        play, again = replay.played(found.world)
        assert again is not None and again.witness == found.witness and replay.seen(again) == found.detail
        assert tuple(play.script) == found.script and len(found.script) <= 40
    assert [tally.layer for tally in tallies] == ["scheduler"]
    _, healthy = replay.played(found.world)
    assert healthy is None, "with a healthy scheduler the schedule shows nothing"


def test_schedules_are_shrunk_to_fewer_requests_and_troubles() -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.id == "Q2-only-finish"]
    with mutant.patch():
        met = schedules.schedules(mutant.seed, float("inf"), Tally("scheduler"), schedules_max=mutant.schedules)
        assert met is not None
        world, violation = met
        simpler = replay.shrink(world, violation.witness)
        length, shorter = (len(replay.played(one)[0].script) for one in (world, simpler))
    assert shorter < length
    assert simpler.requests < world.requests and simpler.trouble == 0.0 and not simpler.prefix_cache


# -- the report

FOUND = Found("walk", 0, Sizes(), "judge", "a missing edge", ())


def test_what_was_found_becomes_the_violation_it_was() -> None:
    violation = FOUND.violation()
    assert isinstance(violation, Violation)
    assert (violation.witness, violation.detail, violation.program) == ("judge", "a missing edge", ())


@pytest.mark.parametrize(
    ("found", "missing", "verdict"),
    [((), (), "holds"), ((), ("padding",), "undecided"), ((FOUND,), (), "violation"), ((FOUND,), ("x",), "violation")],
)
def test_a_verdict_is_a_pass_only_when_everything_was_reached(
    found: tuple[Found, ...], missing: tuple[str, ...], verdict: str
) -> None:
    assert Report((), found, missing, 1.0).verdict == verdict


def test_each_layer_that_ran_must_have_reached_what_is_required_of_it() -> None:
    fuzz = Tally("fuzz", seen=Counter(sometimes.REQUIRED[::2]))
    walk = Tally("walk", seen=Counter(sometimes.REQUIRED[1::2]))
    played = Tally("scheduler", seen=Counter(schedules.REQUIRED))
    assert checker.missing((fuzz, walk)) == checker.missing((fuzz, walk, played)) == ()
    assert checker.missing((walk,)) == sometimes.REQUIRED[::2]
    assert checker.missing((fuzz, walk, Tally("scheduler", seen=Counter(schedules.REQUIRED[1:])))) == (
        f"scheduler: {schedules.REQUIRED[0]}",
    )
    assert checker.missing((played,)) == ()


def test_what_must_be_reached_is_named_while_it_is_missing() -> None:
    assert sometimes.missing(Counter()) == sometimes.REQUIRED
    assert sometimes.missing(Counter({name: 1 for name in sometimes.REQUIRED[1:]})) == sometimes.REQUIRED[:1]
    assert sometimes.missing(Counter(sometimes.REQUIRED)) == ()
    assert len(set(sometimes.REQUIRED)) == len(sometimes.REQUIRED)


# -- processes


class Silent:
    """A queue on which nothing comes."""

    def get(self, timeout: float) -> Any:
        raise queue.Empty


@pytest.mark.parametrize("exitcode", [-9, 1])
def test_a_process_that_was_killed_is_noticed(exitcode: int) -> None:
    processes = [SimpleNamespace(name="one", exitcode=None), SimpleNamespace(name="two", exitcode=exitcode)]
    with pytest.raises(CheckerDied, match=f"two ended with exit code {exitcode}"):
        checker._next(Silent(), processes)  # type: ignore[arg-type]


def test_a_process_that_ended_well_has_said_so_first() -> None:
    outbox: queue.Queue[Any] = queue.Queue()
    outbox.put(("done", 0, [], None))
    assert checker._next(outbox, [SimpleNamespace(name="one", exitcode=0)])[0] == "done"  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_processes_check_with_seeds_of_their_own_and_their_tallies_add_up() -> None:
    heard: Counter[int] = Counter()
    report = check(2.5, seed=40, jobs=2, progress=lambda job, layer, programs, accepted: heard.update([job]))
    assert report.verdict in ("holds", "undecided") and not report.found
    assert [tally.layer for tally in report.tallies] == list(checker.LAYERS)
    assert all(tally.programs and tally.accepted and tally.refused for tally in report.tallies)
    assert set(heard) == {0, 1}
    assert report.missing == checker.missing(report.tallies)
    assert report.seconds >= 2.5


@pytest.mark.slow
def test_a_job_that_dies_decides_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckerDied, match="seed 7 died: KeyError: 'divination'"):
        check(1.0, seed=7, layers=("divination",))
    assert "KeyError" in capfd.readouterr().err


def test_a_report_is_a_value() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Report((), (), (), 1.0).seconds = 2.0  # type: ignore[misc]
