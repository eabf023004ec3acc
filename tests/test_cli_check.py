"""``kvstate check`` and ``kvstate replay``: exit codes, what they print, and what a violation leaves behind."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
from click.testing import CliRunner, Result

from kvstate.cli import main
from kvstate.testing import checker, program, schedules, sometimes
from kvstate.testing.checker import CheckerDied, Report
from kvstate.testing.found import Found, FoundSchedule
from kvstate.testing.schedules import replay
from kvstate.testing.walk import Tally
from kvstate.testing.world import Sizes, Violation, World
from kvstate.transitions import retention
from kvstate.types import RetentionPolicy, Segment, Step

from .mutants.scheduler import MUTANTS

SIZES = Sizes(pages=8, host_pages=6, page_size=2)

[MUTANT] = [mutant for mutant in MUTANTS if mutant.id == "Q20-kept"]

TALLIES = (
    Tally("fuzz", 1_200, Counter(admit=30_000, plan=12_345), Counter(StalePlan=7), Counter(padding=3), 6.0),
    Tally("walk", 80, Counter(admit=500), Counter(StalePlan=1), Counter(sometimes.REQUIRED), 14.0),
)


@pytest.fixture
def kvstate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """Let the checker answer with a report, or raise, and return what it was asked for."""

    def answer(report: Report | Exception) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def check(*arguments: Any) -> Report:
            calls.append(arguments)
            if isinstance(report, Exception):
                raise report
            return report

        monkeypatch.setattr(checker, "check", check)
        return calls

    return answer


@pytest.fixture
def broken() -> Iterator[None]:
    """Let retention take a page too many."""
    healthy = retention.pages_outside

    def greedy(length: int, policy: RetentionPolicy, page_size: int) -> tuple[int, int]:
        first, count = healthy(length, policy, page_size)
        return first, count + 1 if count else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "pages_outside", greedy)
        yield


def found() -> Found:
    """Return what a checker would have found; the core is broken."""
    world = World(SIZES)
    with pytest.raises(Violation) as raised:
        world.a.ingest("r")
        lease = world.a.admit(Step([Segment("r", span=5)], retention={"main": RetentionPolicy(3)}))
        world.a.launch_enter(world.a.plan(lease))
        world.a.launch_exit(lease)
        world.a.commit(lease)
    violation = raised.value
    return Found("walk", 17, SIZES, violation.witness, violation.detail, violation.program)


def found_schedule() -> FoundSchedule:
    """Return what a checker would have found; the scheduler is broken."""
    met = schedules.schedules(MUTANT.seed, float("inf"), Tally("scheduler"), schedules_max=MUTANT.schedules)
    assert met is not None
    return FoundSchedule.shrunk("scheduler", 3, *met)


HOLDS = Report(TALLIES, (), (), 20.5)
UNDECIDED = Report(TALLIES, (), ("fetch landed", "surplus pages"), 20.5)


# -- exit codes and what is shown


def test_a_check_that_holds_returns_0_and_says_what_it_did(kvstate: Any, asked: Any) -> None:
    asked(HOLDS)
    done = kvstate("check")
    assert done.exit_code == 0
    for text in ("fuzz", "1,200", "42,345", "walk", "no violation", "holds", f"{len(sometimes.REQUIRED)}/"):
        assert text in done.output
    assert "Not reached" not in done.output


def test_a_check_that_did_not_reach_everything_is_no_pass(kvstate: Any, asked: Any) -> None:
    asked(UNDECIDED)
    done = kvstate("check")
    assert done.exit_code == 3
    assert "undecided" in done.output
    assert "Not reached" in done.output and "fetch landed, surplus pages" in done.output


def test_a_checker_that_died_decides_nothing(kvstate: Any, asked: Any) -> None:
    asked(CheckerDied("the job with seed 3 died: MemoryError"))
    done = kvstate("check")
    assert done.exit_code == 3
    assert "the job with seed 3 died: MemoryError; nothing was decided" in done.stderr


def test_a_violation_is_shown_as_a_program_and_leaves_a_replay_file_and_a_test(
    kvstate: Any, asked: Any, tmp_path: Path, broken: None
) -> None:
    one = found()
    asked(Report(TALLIES, (one,), ("surplus pages",), 20.5))
    done = kvstate("check", "--out", tmp_path / "found")
    assert done.exit_code == 1
    assert f"{one.witness}: {one.detail}" in done.output
    assert program.text(one.program) in done.output
    file, test = tmp_path / "found" / "kvstate_walk_17.json", tmp_path / "found" / "test_kvstate_walk_17.py"
    assert f"kvstate replay {file}" in done.output and f"pytest {test}" in done.output
    assert program.load(file) == (SIZES, list(one.program), one.witness)
    assert test.read_text() == program.as_pytest(SIZES, one.violation())


def test_a_violation_of_each_job_leaves_files_of_its_own(
    kvstate: Any, asked: Any, tmp_path: Path, broken: None
) -> None:
    one = found()
    asked(Report(TALLIES, (one, attrs.evolve(one, layer="fuzz", seed=18)), (), 20.5))
    assert kvstate("check").exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kvstate_fuzz_18.json", "kvstate_walk_17.json", "test_kvstate_fuzz_18.py", "test_kvstate_walk_17.py",
    ]  # fmt: skip


def test_nothing_is_written_where_nothing_was_found(kvstate: Any, asked: Any, tmp_path: Path) -> None:
    asked(HOLDS)
    kvstate("check")
    assert list(tmp_path.iterdir()) == []


# -- options


@pytest.mark.parametrize(
    ("options", "seconds", "seed", "jobs", "layers"),
    [
        (["--jobs", "2"], 90.0, 0, 2, ("fuzz", "walk", "scheduler")),
        (["--budget", "smoke", "--jobs", "1"], 20.0, 0, 1, ("fuzz", "walk", "scheduler")),
        (["--budget", "nightly", "--seconds", "5", "--jobs", "1"], 5.0, 0, 1, ("fuzz", "walk", "scheduler")),
        (["--seed", "9", "--jobs", "3", "--layer", "walk"], 90.0, 9, 3, ("walk",)),
        (["--jobs", "1", "--layer", "walk", "--layer", "fuzz"], 90.0, 0, 1, ("fuzz", "walk")),
        (["--jobs", "1", "--layer", "scheduler"], 90.0, 0, 1, ("scheduler",)),
    ],
)
def test_options_reach_the_checker(
    kvstate: Any, asked: Any, options: list[str], seconds: float, seed: int, jobs: int, layers: tuple[str, ...]
) -> None:
    calls = asked(HOLDS)
    assert kvstate("check", *options).exit_code == 0
    [call] = calls
    assert call[:4] == (seconds, seed, jobs, layers)


def test_one_job_per_core_unless_said_otherwise(kvstate: Any, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asked(HOLDS)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    kvstate("check")
    assert calls[0][2] == 5


@pytest.mark.parametrize(
    "options",
    [
        ["--seconds", "0"],
        ["--seconds", "soon"],
        ["--seed", "-1"],
        ["--jobs", "0"],
        ["--layer", "divination"],
        ["--budget", "weekly"],
        ["--device", "abacus"],
        ["--nonsense"],
        ["a.json"],
    ],
)
def test_wrong_options_are_usage_errors(kvstate: Any, asked: Any, options: list[str]) -> None:
    calls = asked(HOLDS)
    done = kvstate("check", *options)
    assert done.exit_code == 2
    assert options[-1] in done.stderr or options[0] in done.stderr
    assert calls == []


# -- reports for machines


def test_the_json_report_says_everything(kvstate: Any, asked: Any, tmp_path: Path, broken: None) -> None:
    one = found()
    asked(Report(TALLIES, (one,), ("surplus pages",), 20.5))
    kvstate("check", "--seed", 4, "--jobs", 2, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert {key: report[key] for key in ("verdict", "seconds_asked", "seconds", "seed", "jobs", "missing")} == {
        "verdict": "violation", "seconds_asked": 90.0, "seconds": 20.5, "seed": 4, "jobs": 2,
        "missing": ["surplus pages"],
    }  # fmt: skip
    assert [layer["layer"] for layer in report["layers"]] == ["fuzz", "walk"]
    fuzz = report["layers"][0]
    assert (fuzz["programs"], fuzz["accepted"]["plan"], fuzz["refused"]["StalePlan"]) == (1_200, 12_345, 7)
    assert set(fuzz["sometimes"]) == set(sometimes.REQUIRED) and fuzz["sometimes"]["padding"] == 3
    [violation] = report["violations"]
    assert violation["witness"] == one.witness and violation["detail"] == one.detail
    assert violation["program"] == program.text(one.program).splitlines()


def test_the_json_report_of_a_check_that_holds_has_no_violation(kvstate: Any, asked: Any, tmp_path: Path) -> None:
    asked(HOLDS)
    kvstate("check", "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["missing"], report["violations"]) == ("holds", [], [])


def _junit(path: Path) -> tuple[dict[str, str], dict[str, list[ElementTree.Element]]]:
    suite = ElementTree.fromstring(path.read_bytes())
    return dict(suite.attrib), {case.attrib["name"]: list(case) for case in suite}


def test_junit_has_a_case_per_layer_and_one_for_what_must_be_reached(
    kvstate: Any, asked: Any, tmp_path: Path, broken: None
) -> None:
    one = found()
    asked(Report(TALLIES, (one,), ("surplus pages",), 20.5))
    kvstate("check", "--junit", tmp_path / "report.xml")
    suite, cases = _junit(tmp_path / "report.xml")
    assert (suite["tests"], suite["failures"], suite["errors"]) == ("3", "1", "1")
    assert list(cases) == ["fuzz", "walk", "sometimes"]
    assert cases["fuzz"] == []
    [failure] = cases["walk"]
    assert (failure.tag, failure.attrib["type"], failure.attrib["message"]) == ("failure", one.witness, one.detail)
    assert failure.text == program.text(one.program)
    [error] = cases["sometimes"]
    assert (error.tag, error.attrib["type"], error.text) == ("error", "undecided", "surplus pages")


def test_junit_of_a_check_that_holds_has_neither_failures_nor_errors(kvstate: Any, asked: Any, tmp_path: Path) -> None:
    asked(HOLDS)
    kvstate("check", "--junit", tmp_path / "report.xml")
    suite, cases = _junit(tmp_path / "report.xml")
    assert (suite["tests"], suite["failures"], suite["errors"]) == ("3", "0", "0")
    assert all(not case for case in cases.values())


def test_a_report_that_cannot_be_written_is_a_usage_error(kvstate: Any, asked: Any, tmp_path: Path) -> None:
    asked(HOLDS)
    for option in ("--json", "--junit"):
        done = kvstate("check", option, tmp_path / "nowhere" / "report")
        assert done.exit_code == 2
        assert "nowhere" in done.stderr


# -- replay


def test_a_replay_shows_the_violation_while_it_is_there_and_returns_0_once_it_is_gone(
    kvstate: Any, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        healthy = retention.pages_outside
        patch.setattr(retention, "pages_outside", lambda *a: (healthy(*a)[0], healthy(*a)[1] and healthy(*a)[1] + 1))
        one = found()
        program.save(file, SIZES, one.violation())
        done = kvstate("replay", file)
        assert done.exit_code == 1
        assert program.text(one.program) in done.output
        assert f"{one.witness}: {one.detail}" in done.output
    done = kvstate("replay", file)
    assert done.exit_code == 0
    assert program.text(one.program) in done.output
    assert "no violation" in done.output and one.witness in done.output


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        '{"kvstate": 99}',
        '{"kvstate": 1, "sizes": {"pages": 0}, "witness": "judge", "detail": "", "program": []}',
        '{"kvstate": 1, "sizes": {}, "witness": "judge", "detail": "", "program": '
        '[{"node": "a", "verb": "divine", "args": [], "gives": "divine1"}]}',
    ],
)
def test_what_is_no_replay_file_is_a_usage_error_that_names_it(kvstate: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    done = kvstate("replay", file)
    assert done.exit_code == 2
    assert "bad.json" in done.stderr


def test_a_replay_file_that_is_not_there_is_a_usage_error(kvstate: Any) -> None:
    done = kvstate("replay", "nowhere.json")
    assert done.exit_code == 2
    assert "nowhere.json" in done.stderr


# -- schedules


def test_a_violation_of_the_scheduler_is_shown_as_its_world_and_what_was_called(
    kvstate: Any, asked: Any, tmp_path: Path
) -> None:
    with MUTANT.patch():
        one = found_schedule()
    tally = Tally("scheduler", 4, Counter(schedule=70), Counter(add=2), Counter(), 1.5)
    asked(Report((*TALLIES, tally), (one,), ("scheduler: window",), 20.5))
    files = ("--json", tmp_path / "report.json", "--junit", tmp_path / "report.xml", "--out", tmp_path / "found")
    done = kvstate("check", *files)
    assert done.exit_code == 1
    assert f"{one.witness}: {one.detail}" in done.output and "\n" not in one.detail
    assert "Setup(\n    seed=1," in done.output and "\n".join(one.script) in done.output
    assert f"0/{len(schedules.REQUIRED)}" in done.output
    [violation] = json.loads((tmp_path / "report.json").read_text())["violations"]
    assert violation["layer"] == "scheduler" and violation["program"] == list(one.script)
    _, cases = _junit(tmp_path / "report.xml")
    [failure] = cases["scheduler"]
    assert failure.text == "\n".join(one.script)
    assert sorted(file.name for file in (tmp_path / "found").iterdir()) == [
        "kvstate_scheduler_3.json", "test_kvstate_scheduler_3.py",
    ]  # fmt: skip


def test_the_files_of_a_schedule_fail_while_the_violation_is_there(kvstate: Any, asked: Any, tmp_path: Path) -> None:
    with MUTANT.patch():
        one = found_schedule()
        asked(Report(TALLIES, (one,), (), 20.5))
        kvstate("check", "--out", tmp_path)
        done = kvstate("replay", tmp_path / "kvstate_scheduler_3.json")
        assert done.exit_code == 1
        assert f"{one.witness}: {one.detail}" in done.output and "\n".join(one.script) in done.output
        test: dict[str, Any] = {}
        exec((tmp_path / "test_kvstate_scheduler_3.py").read_text(), test)
        with pytest.raises(Violation, match=one.witness):
            test[f"test_{one.witness}_holds"]()
    test[f"test_{one.witness}_holds"]()
    done = kvstate("replay", tmp_path / "kvstate_scheduler_3.json")
    assert done.exit_code == 0
    assert "no violation" in done.output and one.witness in done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kvstate": 9}, "reads format 1"),
        ({"schedule": {}}, "KeyError: 'geometry'"),
        ({"schedule": {"geometry": {"pages": 0, "groups": []}}}, "pages"),
        ({"schedule": None}, "TypeError"),
    ],
)
def test_what_is_no_schedule_is_a_usage_error_that_names_it(
    kvstate: Any, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    file = tmp_path / "schedule.json"
    world = schedules.setup(0, 0)
    replay.save(file, world, "output", "something")
    assert replay.load(file) == (world, "output")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    done = kvstate("replay", file)
    assert done.exit_code == 2
    assert "schedule.json: not a replay file" in done.stderr and words in done.stderr


# -- the real thing


@pytest.mark.slow
def test_a_short_real_check_runs_every_layer_and_is_never_a_violation(kvstate: Any, tmp_path: Path) -> None:
    done = kvstate("check", "--seconds", 2, "--jobs", 1, "--seed", 5, "--json", tmp_path / "report.json")
    assert done.exit_code in (0, 3), done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == {0: "holds", 3: "undecided"}[done.exit_code]
    assert all(layer["programs"] and sum(layer["accepted"].values()) for layer in report["layers"])
