"""``kvstate check`` and ``kvstate replay``."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstate.cli import Exit, one_thread_per_op
from kvstate.testing import backends, checker, program
from kvstate.testing.checker import Report
from kvstate.testing.found import Found, FoundSchedule
from kvstate.testing.schedules import replay as schedule_files
from kvstate.testing.walk import Tally

BUDGETS = {"smoke": 20.0, "ci": 90.0, "nightly": 1800.0}
"""Seconds."""


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1), help="Time for all layers; overrides --budget.")
@click.option("--budget", type=click.Choice(list(BUDGETS)), default="ci", show_default=True, help="20, 90 or 1,800 s.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Job i runs with SEED + i.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Processes.  [default: one per core]")
@click.option(
    "--layer", "layers", type=click.Choice(checker.LAYERS), multiple=True, help="Only this layer; may be repeated."
)
@click.option("--device", default="memory", show_default=True, help="Backend, by its entry point in kvstate.backends.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where a violation's files go.  [default: here]",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report here."
)
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write JUnit XML.")
def check(
    seconds: float | None,
    budget: str,
    seed: int,
    jobs: int | None,
    layers: tuple[str, ...],
    device: str,
    out: Path,
    json_file: Path | None,
    junit: Path | None,
) -> None:
    """Fuzz and walk the machine and manager beside the reference; drive the scheduler through random schedules.

    Promises, contents, edges and the reference's answers are checked after every call; whatever the scheduler's
    requests generate is compared with what they would with all the memory in the world. A violation is shrunk, printed
    as a program, and written as a replay file and a pytest file. Exit code 3, undecided, when not everything that must
    sometimes happen was reached: give it more time.
    """
    for file in (json_file, junit):
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"cannot write {file}: there is no folder {file.parent}")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    jobs = jobs if jobs is not None else os.cpu_count() or 1
    time_s = seconds if seconds is not None else BUDGETS[budget]
    layers = tuple(layer for layer in checker.LAYERS if not layers or layer in layers)
    one_thread_per_op()
    try:
        backends.find(device)
        report = _run(console, time_s, seed, jobs, layers, device)
    except backends.BackendNotFound as error:
        raise click.UsageError(str(error)) from error
    except checker.CheckerDied as died:
        click.echo(f"kvstate check: {died}; nothing was decided", err=True)
        raise SystemExit(Exit.UNDECIDED) from died
    _show(console, report)
    for found in sorted(report.found, key=lambda found: len(found.lines)):
        _show_found(console, found, out)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(report, time_s, seed, jobs), indent=1) + "\n")
    if junit is not None:
        junit.write_bytes(_junit(report))
    raise SystemExit({"holds": Exit.HOLDS, "violation": Exit.VIOLATION, "undecided": Exit.UNDECIDED}[report.verdict])


def _run(console: Console, time_s: float, seed: int, jobs: int, layers: tuple[str, ...], device: str) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task(f"job {i}", total=time_s, done="starting") for i in range(jobs)]

        def shown(job: int, layer: str, programs: int, accepted: int) -> None:
            done = progress.tasks[tasks[job]].elapsed or 0.0
            progress.update(
                tasks[job], completed=min(done, time_s), done=f"{layer}: {programs:,} programs, {accepted:,} accepted"
            )

        return checker.check(time_s, seed, jobs, layers, shown, device)


def _show(console: Console, report: Report) -> None:
    table = Table(title="kvstate check")
    for name in ("layer", "programs", "accepted", "refused", "reached", "seconds", "verdict"):
        table.add_column(name, justify="left" if name in ("layer", "verdict") else "right")
    violated = {found.layer for found in report.found}
    for tally in report.tallies:
        table.add_row(*_row(tally, tally.layer in violated))
    table.add_section()
    counts = [sum(numbers) for numbers in zip(*map(_counts, report.tallies), strict=True)]
    required = sum(map(len, {checker.required(tally.layer) for tally in report.tallies}))
    reached = f"{required - len(report.missing)}/{required}"
    table.add_row("all", *(f"{count:,}" for count in counts), reached, f"{report.seconds:.1f}", report.verdict)
    console.print(table)
    if report.verdict == "undecided":
        console.print(
            "Not reached (more time, or other sizes, are needed): " + ", ".join(report.missing), soft_wrap=True
        )


def _counts(tally: Tally) -> tuple[int, int, int]:
    return tally.programs, sum(tally.accepted.values()), sum(tally.refused.values())


def _row(tally: Tally, violated: bool) -> list[str]:
    required = checker.required(tally.layer)
    return [
        tally.layer,
        *(f"{count:,}" for count in _counts(tally)),
        f"{sum(1 for name in required if tally.seen[name])}/{len(required)}",
        f"{tally.seconds:.1f}",
        "violation" if violated else "no violation" if tally.programs else "not run",
    ]


def _show_found(console: Console, found: Found | FoundSchedule, out: Path) -> None:
    name = f"kvstate_{found.layer}_{found.seed}"
    replay_file, test_file = out / f"{name}.json", out / f"test_{name}.py"
    found.save(replay_file)
    test_file.write_text(found.as_pytest())
    for text in (
        f"\n{found.witness}: {found.detail}",
        found.preamble,
        "\n".join(found.lines),
        f"\nkvstate replay {replay_file}\npytest {test_file}",
    ):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _document(report: Report, time_s: float, seed: int, jobs: int) -> dict[str, object]:
    return {
        "verdict": report.verdict,
        "seconds_asked": time_s,
        "seconds": report.seconds,
        "seed": seed,
        "jobs": jobs,
        "layers": [
            {
                "layer": tally.layer,
                "programs": tally.programs,
                "accepted": dict(tally.accepted),
                "refused": dict(tally.refused),
                "sometimes": {name: tally.seen[name] for name in checker.required(tally.layer)},
                "seconds": tally.seconds,
            }
            for tally in report.tallies
        ],
        "missing": list(report.missing),
        "violations": [
            {
                "layer": found.layer,
                "seed": found.seed,
                "witness": found.witness,
                "detail": found.detail,
                "program": found.lines,
            }
            for found in report.found
        ],
    }


def _junit(report: Report) -> bytes:
    """One test case per layer, and one for what must be reached."""
    suite = ElementTree.Element("testsuite", name="kvstate check", tests=str(len(report.tallies) + 1))
    failures: Counter[str] = Counter()
    for tally in report.tallies:
        case = ElementTree.SubElement(
            suite, "testcase", classname="kvstate.check", name=tally.layer, time=f"{tally.seconds:.3f}"
        )
        for found in report.found:
            if found.layer == tally.layer:
                failures["failures"] += 1
                failure = ElementTree.SubElement(case, "failure", message=found.detail, type=found.witness)
                failure.text = "\n".join(found.lines)
    case = ElementTree.SubElement(suite, "testcase", classname="kvstate.check", name="sometimes", time="0")
    if report.missing:
        failures["errors"] += 1
        error = ElementTree.SubElement(case, "error", message="undecided: not everything was reached", type="undecided")
        error.text = "\n".join(report.missing)
    suite.set("failures", str(failures["failures"]))
    suite.set("errors", str(failures["errors"]))
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(file: Path) -> None:
    """Run the program or the schedule of a replay FILE again and say what it shows.

    Exit code 1 when the violation is still there, 0 when it is gone.
    """
    try:
        witness, seen, gone = _replay_schedule(file) if schedule_files.is_schedule(file) else _replay_program(file)
    except (ValueError, backends.BackendNotFound) as error:
        raise click.UsageError(str(error)) from error
    if seen is None:
        click.echo(f"\nno violation: the file records one that the {witness} saw; {gone}")
        raise SystemExit(Exit.HOLDS)
    click.echo(f"\n{seen}")
    raise SystemExit(Exit.VIOLATION)


def _replay_program(file: Path) -> tuple[str, str | None, str]:
    """Return (witness on file, what is seen now, what is to be said when that is nothing)."""
    sizes, calls, witness = program.load(file)
    click.echo(program.preamble(sizes, calls))
    click.echo(program.text(calls))
    world, violation = program.run(sizes, calls)
    gone = f"its calls, and those that end what they leave open ({len(world.program)} in all), show none"
    return witness, str(violation) if violation is not None else None, gone


def _replay_schedule(file: Path) -> tuple[str, str | None, str]:
    world, witness = schedule_files.load(file)
    click.echo(schedule_files.as_python(world))
    play, violation = schedule_files.played(world)
    click.echo("\n".join(play.script))
    seen = f"{violation.witness}: {schedule_files.seen(violation)}" if violation is not None else None
    return witness, seen, f"the {len(play.script)} calls of its schedule show none"
