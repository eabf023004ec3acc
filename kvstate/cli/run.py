"""``kvstate run``: a serving trace through manager and backend, contents verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstate.cli import Exit
from kvstate.errors import KVStateError
from kvstate.testing import backends
from kvstate.testing.backends import CountsBytes, StampedBackend
from kvstate.testing.drive import CannotPreempt, MeteredJudge, Report, Undecided, drive, peak_demand, pool_pages
from kvstate.types import Geometry
from kvstate.workload import TraceRequest, WorkloadError, check_fits, load_trace, synthetic

FRACTION = 0.15
"""Of the peak demand: small enough that a default run preempts."""
REQUESTS = 300


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--synthetic", "made_up", is_flag=True, help="Make up a workload instead of reading TRACE.")
@click.option("--seed", type=int, help="Of --synthetic; 0 unless given.")
@click.option("--requests", type=click.IntRange(1), default=REQUESTS, show_default=True, help="Take the first so many.")
@click.option("--device", default="memory", show_default=True, help="Backend, by its entry point in kvstate.backends.")
@click.option("--pages", type=click.IntRange(1), help="Device pages.")
@click.option(
    "--memory-fraction",
    type=click.FloatRange(0, min_open=True),
    help="Device pages as a share of the peak demand, what the --batch largest requests hold together without sharing; "
    f"never less than the largest alone needs. {FRACTION} unless --pages is given; at 1 nothing is ever preempted.",
)
@click.option("--host-pages", type=click.IntRange(0), help="Host pages; the peak demand unless given; 0: no host pool.")
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens per page.")
@click.option(
    "--chunk", type=click.IntRange(1), default=2048, show_default=True, help="Prompt tokens per step, at most."
)
@click.option(
    "--batch", type=click.IntRange(1), default=32, show_default=True, help="Requests begun and not finished, at most."
)
@click.option("--threads", is_flag=True, help="Plan, launch and offload on three threads.")
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    help="Let requests arrive as in the trace, so many times as fast, in virtual time (20 ms a step); else at once.",
)
@click.option(
    "--no-judge", is_flag=True, help="Do not judge the edges between ops; contents are verified all the same."
)
@click.option("--layers", type=click.IntRange(1), help="Of a device with real bytes.  [default: 2]")
@click.option("--kv-heads", type=click.IntRange(1), help="Of a device with real bytes.  [default: 2]")
@click.option("--head-dim", type=click.IntRange(1), help="Of a device with real bytes.  [default: 8]")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here too.")
def run(
    trace: Path | None, made_up: bool, seed: int | None, requests: int, device: str, pages: int | None,
    memory_fraction: float | None, host_pages: int | None, page_size: int, chunk: int, batch: int, threads: bool,
    speed: float | None, no_judge: bool, layers: int | None, kv_heads: int | None, head_dim: int | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Serve TRACE (Azure CSV or Mooncake JSONL), every token verified.

    Chunked prefill, decode, forks, steps planned ahead, offload and reload. Every step reads every context back and
    compares it; the edge judge watches every op.
    """
    if made_up == (trace is not None):
        raise click.UsageError("give either a TRACE or --synthetic")
    if seed is not None and not made_up:
        raise click.UsageError("--seed goes with --synthetic; a TRACE is what it is")
    if pages is not None and memory_fraction is not None:
        raise click.UsageError("give either --pages or --memory-fraction")
    try:
        workload = load_trace(trace, limit=requests) if trace is not None else synthetic(requests, seed=seed or 0)
        demand = peak_demand(workload, page_size=page_size, batch=batch)
        if pages is None:
            pages = pool_pages(workload, page_size=page_size, batch=batch, fraction=memory_fraction or FRACTION)
        check_fits(workload, page_size=page_size, pages=pages)
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error
    geometry = Geometry(
        pages=pages, page_size=page_size, host_pages=demand if host_pages is None else host_pages, name="run"
    )
    judge = None if no_judge else MeteredJudge.of(geometry)
    try:
        backend = backends.make(device, geometry, judge, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    except (backends.BackendNotFound, ValueError) as error:
        raise click.UsageError(str(error)) from error
    console = Console()
    settings = {
        "workload": str(trace) if trace is not None else f"synthetic, seed {seed or 0}",
        "device": device,
        "page_size": page_size,
        "pages": pages,
        "host_pages": geometry.host_pages,
        "peak_demand": demand,
        "chunk": chunk,
        "batch": batch,
        "threads": threads,
        "speed": speed,
    }
    try:
        report = _drive(console, workload, geometry, backend, judge, threads, chunk, batch, speed)
    except KVStateError as error:
        if isinstance(error, CannotPreempt):
            raise click.UsageError(f"{type(error).__name__}: {error}") from error
        undecided = isinstance(error, Undecided)
        _write(
            json_file, {**settings, "holds": None if undecided else False, "error": f"{type(error).__name__}: {error}"}
        )
        click.echo(f"{'undecided' if undecided else 'violation'}: {type(error).__name__}: {error}", err=True)
        raise SystemExit(Exit.UNDECIDED if undecided else Exit.VIOLATION) from error
    moved = backend.moved() if isinstance(backend, CountsBytes) else {}
    console.print(_table(report, settings, moved))
    bytes_moved = {name: {"bytes": size, "seconds": took_s} for name, (size, took_s) in moved.items()}
    _write(json_file, {**settings, "holds": report.holds, **attrs.asdict(report), "moved": bytes_moved})
    if not report.holds:
        for line in _violations(report):
            click.echo(f"violation: {line}", err=True)
        raise SystemExit(Exit.VIOLATION)


def _drive(
    console: Console, workload: Sequence[TraceRequest], geometry: Geometry, backend: StampedBackend,
    judge: MeteredJudge | None, threads: bool, chunk: int, batch: int, speed: float | None,
) -> Report:  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(workload))

        def tell(finished: int, steps: int) -> None:
            progress.update(task, completed=finished, description=f"requests, {steps:,} steps")

        return drive(
            workload, geometry, backend,
            judge=judge, threads=threads, chunk=chunk, batch=batch, speed=speed,
            progress=tell if console.is_terminal else None,
        )  # fmt: skip


def _table(report: Report, settings: dict[str, Any], moved: dict[str, tuple[int, float]]) -> Table:
    cpu_s = report.cpu_s or 1.0
    verified_s = report.verification_s + report.judge_s
    table = Table(
        title=f"{settings['workload']}: {settings['pages']:,} device pages of {settings['page_size']} tokens, "
        f"{settings['host_pages']:,} host pages, {'three threads' if settings['threads'] else 'one thread'}",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("requests finished", f"{report.finished:,} / {report.requests:,}"),
        ("steps", f"{report.steps:,}"),
        ("  planned ahead", f"{report.planned_ahead:,}"),
        ("tokens prefilled", f"{report.tokens_prefilled:,}"),
        ("tokens decoded", f"{report.tokens_decoded:,}"),
        ("forks", f"{report.forks:,}"),
        ("preemptions (offloads)", f"{report.preemptions:,}"),
        ("reloads", f"{report.reloads:,}"),
        ("recomputed (host pool full)", f"{report.recomputed:,}"),
        ("pages out / in", f"{report.pages_out:,} / {report.pages_in:,}"),
        *(
            (f"bytes, {name}", f"{size / 2**20:,.1f} MiB at {size / 1e9 / took_s if took_s else 0:.2f} GB/s")
            for name, (size, took_s) in moved.items()
        ),
        ("voided segments", f"{report.voided:,}"),
        *((f"refused, {what}", f"{count:,}") for what, count in report.refused.items()),
        ("content errors", f"{report.content_errors:,}"),
        ("judge conflicts", "not judged" if report.conflicts is None else f"{len(report.conflicts):,}"),
        ("idle means empty", "no" if report.leaks else "yes"),
        ("wall", f"{report.wall_s:.1f} s"),
        ("CPU, all threads", f"{report.cpu_s:.1f} s"),
        ("  in the machine", f"{report.machine_s / cpu_s:.0%}"),
        ("  in verification (read, compare, judge)", f"{verified_s / cpu_s:.0%}"),
        ("  in copies", f"{report.copies_s / cpu_s:.0%}"),
        ("  in the model", f"{report.model_s / cpu_s:.0%}"),
        ("verdict", "holds" if report.holds else "VIOLATION"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _violations(report: Report) -> list[str]:
    lines = list(report.errors)
    if report.content_errors > len(lines):
        lines.append(f"… and {report.content_errors - len(report.errors):,} more content errors")
    lines.extend(f"conflict: {conflict}" for conflict in (report.conflicts or ())[:20])
    lines.extend(f"leak: {leak}" for leak in report.leaks)
    if report.unfinished:
        named = ", ".join(report.unfinished[:20])
        lines.append(f"{len(report.unfinished)} requests did not finish with their exact content: {named}")
    return lines


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
