"""``kvstate run``: a serving trace through scheduler, manager and backend, contents verified."""

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
from kvstate.testing.drive import (
    MeteredJudge,
    Report,
    Undecided,
    check_workload,
    drive,
    peak_demand,
    pool_pages,
    samples_of,
    stamps_read,
)
from kvstate.types import Geometry, Group
from kvstate.workload import TraceRequest, WorkloadError, load_trace, synthetic

FRACTION = 0.25
"""Of the peak demand: small enough that a default run evicts."""
REQUESTS = 300
SHARED = 0.5
"""Of the requests that --synthetic makes up, so many continue an earlier one's prompt."""
READS_MAX = 1_000_000_000
"""Tokens read back that a run compares all of, unless told otherwise: about ten seconds in memory."""
UNIT_BYTES = 128
"""What --groups counts page bytes in: a sector is a whole number of these."""


def read_groups(text: str) -> tuple[Group, ...]:
    """Return the groups that ``NAME[:WINDOW][@SIZE],…`` describes.

    >>> [(group.name, group.window, group.page_bytes) for group in read_groups("full@4,local:1024")]
    [('full', None, 512), ('local', 1024, 128)]

    Raises
    ------
    ValueError
        Saying what is wrong with which group.
    """
    groups = []
    for part in text.split(","):
        front, _, size = part.partition("@")
        name, _, window = front.partition(":")
        for what, number, least in (("window", window, 2), ("page size", size, 1)):
            if number and not (number.isascii() and number.isdigit() and int(number) >= least):
                raise ValueError(f"{what} {number!r} of group {name!r} is no whole number of at least {least}")
        groups.append(Group(name, UNIT_BYTES * int(size or 1), int(window) if window else None))
    return tuple(groups)


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--synthetic", "made_up", is_flag=True, help="Make up a workload instead of reading TRACE.")
@click.option("--seed", type=int, help="Of --synthetic; 0 unless given.")
@click.option("--requests", type=click.IntRange(1), default=REQUESTS, show_default=True, help="Take the first so many.")
@click.option("--device", default="memory", show_default=True, help="Backend, by its entry point in kvstate.backends.")
@click.option(
    "--groups",
    "grouped",
    default="full",
    show_default=True,
    metavar="NAME[:WINDOW][@SIZE],…",
    help="Groups of layers: those with a WINDOW attend to so many tokens; a page of SIZE 2 has twice the bytes of one "
    "of SIZE 1.",
)
@click.option("--pages", type=click.IntRange(1), help="Device pages; of several groups, device sectors.")
@click.option(
    "--memory-fraction",
    type=click.FloatRange(0, min_open=True),
    help="Device pages as a share of the peak demand: the most pages that the requests begun and not ended hold "
    "together when nothing limits them and nothing is shared. Never less than the longest request alone needs. "
    f"{FRACTION} unless --pages is given.",
)
@click.option(
    "--host-pages",
    type=click.IntRange(0),
    help="Host pages, or sectors; the peak demand unless given; 0: no host pool.",
)
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens per page.")
@click.option("--chunk", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per step, at most.")
@click.option(
    "--batch", type=click.IntRange(1), default=32, show_default=True, help="Requests begun and not ended, at most."
)
@click.option("--prefix-cache", is_flag=True, help="Start on cached pages where a prompt begins as an earlier one did.")
@click.option("--async", "asynchronous", is_flag=True, help="Launch the next step while one is in flight.")
@click.option(
    "--threads", is_flag=True, help="Launch, compute and verify on a second thread while the first schedules; --async."
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    help="Let requests arrive as in the trace, so many times as fast, in virtual time (20 ms a step); else at once.",
)
@click.option(
    "--verify",
    type=click.Choice(["all", "sampled"]),
    help="Compare all that every step reads back; or all of prefills, restores and forks and one decode read in 16. "
    "Each step samples from the last stamp it reads, so a wrong one shows in the output either way.  "
    f"[default: all, up to {READS_MAX:,} tokens read]",
)
@click.option(
    "--no-judge", is_flag=True, help="Do not judge the edges between ops; contents are verified all the same."
)
@click.option("--layers", type=click.IntRange(1), help="Of a device with real bytes.  [default: 2]")
@click.option("--kv-heads", type=click.IntRange(1), help="Of a device with real bytes.  [default: 2]")
@click.option("--head-dim", type=click.IntRange(1), help="Of a device with real bytes.  [default: 8]")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here too.")
def run(
    trace: Path | None, made_up: bool, seed: int | None, requests: int, device: str, grouped: str, pages: int | None,
    memory_fraction: float | None, host_pages: int | None, page_size: int, chunk: int, batch: int, prefix_cache: bool,
    asynchronous: bool, threads: bool, speed: float | None, verify: str | None, no_judge: bool, layers: int | None,
    kv_heads: int | None, head_dim: int | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Serve TRACE (Azure CSV or Mooncake JSONL) by the reference scheduler, every token verified.

    Chunked prefill, decode, eviction to the host, soft reset, restore; every eighth request is forked into two samples.
    What a token stores depends on all tokens before it, what is read back is compared, and what is generated follows
    from what was read: the digest is that of a run with all the memory it wants. The edge judge watches every op.
    """
    if made_up == (trace is not None):
        raise click.UsageError("give either a TRACE or --synthetic")
    if seed is not None and not made_up:
        raise click.UsageError("--seed goes with --synthetic; a TRACE is what it is")
    if pages is not None and memory_fraction is not None:
        raise click.UsageError("give either --pages or --memory-fraction")
    asynchronous = asynchronous or threads
    try:
        workload = (
            load_trace(trace, limit=requests)
            if trace is not None
            else synthetic(requests, seed=seed or 0, shared_prefix_share=SHARED)
        )
        geometry = Geometry(pages=pages or 1, page_size=page_size, groups=read_groups(grouped), name="run")
        demand = peak_demand(workload, geometry, chunk=chunk, batch=batch, speed=speed, asynchronous=asynchronous)
        if pages is None:
            pages = pool_pages(workload, geometry, demand=demand, chunk=chunk, fraction=memory_fraction or FRACTION)
        geometry = attrs.evolve(geometry, pages=pages, host_pages=demand if host_pages is None else host_pages)
        check_workload(workload, geometry)
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        raise click.UsageError(f"--groups: {error}") from error
    judge = None if no_judge else MeteredJudge.of(geometry)
    try:
        backend = backends.make(device, geometry, judge, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    except (backends.BackendNotFound, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if verify is None:
        verify = "all" if stamps_read(workload, geometry) <= READS_MAX else "sampled"
    console = Console()
    settings = {
        "workload": str(trace) if trace is not None else f"synthetic, seed {seed or 0}",
        "device": device,
        "groups": grouped,
        "page_size": page_size,
        "pages": geometry.pages,
        "host_pages": geometry.host_pages,
        "peak_demand": demand,
        "chunk": chunk,
        "batch": batch,
        "prefix_cache": prefix_cache,
        "asynchronous": asynchronous,
        "threads": threads,
        "speed": speed,
        "verify": verify,
    }
    options = {name: settings[name] for name in ("chunk", "batch", "prefix_cache", "asynchronous", "threads", "speed")}
    try:
        report = _drive(console, workload, geometry, backend, judge=judge, sampled=verify == "sampled", **options)
    except KVStateError as error:
        undecided = isinstance(error, Undecided)
        _write(
            json_file, {**settings, "holds": None if undecided else False, "error": f"{type(error).__name__}: {error}"}
        )
        click.echo(f"{'undecided' if undecided else 'violation'}: {type(error).__name__}: {error}", err=True)
        raise SystemExit(Exit.UNDECIDED if undecided else Exit.VIOLATION) from error
    moved = backend.moved() if isinstance(backend, CountsBytes) else {}
    console.print(_table(report, settings, moved))
    bytes_moved = {name: {"bytes": size, "seconds": took_s} for name, (size, took_s) in moved.items()}
    found = {"holds": report.holds, "hit_rate": report.hit_rate, **attrs.asdict(report), "moved": bytes_moved}
    _write(json_file, {**settings, **found})
    if not report.holds:
        for line in _violations(report):
            click.echo(f"violation: {line}", err=True)
        raise SystemExit(Exit.VIOLATION)


def _drive(
    console: Console, workload: Sequence[TraceRequest], geometry: Geometry, backend: StampedBackend, **options: Any
) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        samples = sum(samples_of(index) for index in range(len(workload)))
        task = progress.add_task("samples", total=samples)

        def tell(ended: int, steps: int) -> None:
            progress.update(task, completed=ended, description=f"samples, {steps:,} steps")

        return drive(workload, geometry, backend, progress=tell if console.is_terminal else None, **options)


def _table(report: Report, settings: dict[str, Any], moved: dict[str, tuple[int, float]]) -> Table:
    cpu_s = report.cpu_s or 1.0
    verified_s = report.verification_s + report.judge_s
    rest_s = cpu_s - verified_s - report.copies_s - report.model_s
    unit = "pages" if "," not in settings["groups"] else "sectors"
    loop = "two threads" if settings["threads"] else "one step ahead" if settings["asynchronous"] else "step by step"
    table = Table(
        title=f"{settings['workload']}: {settings['pages']:,} device {unit}, {settings['host_pages']:,} host {unit}, "
        f"peak demand {settings['peak_demand']:,}; {settings['groups']}, pages of {settings['page_size']} tokens; "
        f"{loop}{', prefix cache' if settings['prefix_cache'] else ''}",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("requests finished", f"{report.finished:,} / {report.requests:,}"),
        ("steps", f"{report.steps:,}"),
        ("tokens prefilled", f"{report.tokens_prefilled:,}"),
        ("tokens decoded", f"{report.tokens_decoded:,}"),
        ("tokens recomputed", f"{report.tokens_recomputed:,}"),
        ("hit rate", f"{report.hit_rate:.1%} of {report.prompt_tokens:,} prompt tokens"),
        ("forks", f"{report.forks:,}"),
        ("offloads", f"{report.offloads:,}"),
        ("reloads", f"{report.reloads:,}"),
        ("soft resets", f"{report.soft_resets:,}"),
        ("pages out / in", f"{report.pages_out:,} / {report.pages_in:,}"),
        ("  in submissions", f"{report.submissions:,}"),
        *(
            (f"bytes, {name}", f"{size / 2**20:,.1f} MiB at {size / 1e9 / took_s if took_s else 0:.2f} GB/s")
            for name, (size, took_s) in moved.items()
        ),
        ("voided segments, late tokens", f"{report.voided:,}, {report.tokens_late:,}"),
        *((f"refused, {what}", f"{count:,}") for what, count in report.refused.items()),
        (f"stamps compared ({settings['verify']})", f"{report.stamps_compared:,}"),
        ("content errors", f"{report.content_errors:,}"),
        ("judge conflicts", "not judged" if report.conflicts is None else f"{len(report.conflicts):,}"),
        ("idle means empty", "no" if report.leaks else "yes"),
        ("digest of the outputs", report.digest),
        ("wall", f"{report.wall_s:.1f} s"),
        ("CPU, all threads", f"{report.cpu_s:.1f} s"),
        ("  in scheduler and machine", f"{rest_s / cpu_s:.0%}"),
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
        lines.append(f"{len(report.unfinished)} requests did not generate exactly their tokens: {named}")
    return lines


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
