"""``kvstate bench``: what the machine costs, through the real KVManager, with a backend that does nothing.

Microseconds are CPU time of the one thread, so that a busy machine does not count as a slow one.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstate.cli import Exit
from kvstate.cli.bench_copy import bench_copy
from kvstate.cli.bench_schedule import bench_schedule
from kvstate.manager import KVManager
from kvstate.refusals import Refusal
from kvstate.testing.null_backend import NullBackend
from kvstate.types import Geometry, Segment, Step

PAGE_SIZE = 16
STREAMS = (1, 32, 256)
TOKENS = (1024, 8192)
CLAIM_PAGES = (64, 512, 4096)


def _done(result: Any) -> Any:
    if isinstance(result, Refusal):
        click.echo(f"the bench was refused: {result}", err=True)
        raise SystemExit(Exit.UNDECIDED)
    return result


def _manager(pages: int, host_pages: int = 0) -> KVManager:
    geometry = Geometry(pages=pages, page_size=PAGE_SIZE, host_pages=host_pages, name="bench")
    return KVManager(geometry, NullBackend(), debug=False)


def _run_step(manager: KVManager, step: Step) -> None:
    lease = _done(manager.admit(step))
    plan = _done(manager.plan(lease))
    with manager.launch(plan):
        pass
    _done(manager.commit(lease))


def measure_step(streams: int, tokens: int, repeats: int) -> list[float]:
    """Return µs per request-step of admit + plan + launch + commit, one value per repeat.

    All streams decode one token per step. Their lengths are spread over a page, so that in each step as many as usual
    ask for a new one. The step object is reused; edges are on, debug and trace off.
    """
    steps = PAGE_SIZE * max(1, 2048 // (streams * PAGE_SIZE))
    manager = _manager(streams * (-(-(tokens + PAGE_SIZE + steps * (repeats + 1)) // PAGE_SIZE) + 1))
    names = [f"r{index}" for index in range(streams)]
    for index, name in enumerate(names):
        _done(manager.ingest(name))
        _run_step(manager, Step((Segment(name, span=tokens + index % PAGE_SIZE),)))
    step = Step(tuple(Segment(name) for name in names))
    taken = []
    for _ in range(repeats + 1):
        began = time.thread_time()
        for _ in range(steps):
            _run_step(manager, step)
        taken.append((time.thread_time() - began) / (steps * streams) * 1e6)
    manager.close()
    return taken[1:]


def measure_claim(pages: int, repeats: int) -> dict[str, list[float]]:
    """Return µs per page of claim + commit, per direction, one value per repeat. Nothing is copied.

    The pool is worn, as a server's is: each page had an owner of its own before, so no two have the same fence.
    """
    manager = _manager(pages, pages)
    for page in range(pages):
        _done(manager.ingest(f"before {page}"))
        _run_step(manager, Step((Segment(f"before {page}"),)))
    for page in range(pages):
        _done(manager.remove(f"before {page}"))
    _done(manager.ingest("r"))
    _run_step(manager, Step((Segment("r", span=pages * PAGE_SIZE),)))
    taken: dict[str, list[float]] = {"offload": [], "reload": []}
    for _ in range(repeats + 1):
        for direction, claim in (("offload", manager.claim_offload), ("reload", manager.claim_reload)):
            began = time.thread_time()
            _done(manager.commit_claim(_done(claim("r"))))
            taken[direction].append((time.thread_time() - began) / pages * 1e6)
    manager.close()
    return {direction: values[1:] for direction, values in taken.items()}


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"min_us": min(values), "median_us": statistics.median(values)}


def _here() -> dict[str, str]:
    return {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    repeats = click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Timed so often.")
    to_file = click.option(
        "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write it here too."
    )
    return repeats(to_file(command))


def _report(json_file: Path | None, table: Table, result: dict[str, Any]) -> None:
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({**_here(), **result}, indent=2) + "\n", encoding="utf-8")


@click.group()
def bench() -> None:
    """Measure the machine through KVManager, with a backend that does nothing. Smallest and median of the repeats."""


@bench.command("step")
@_options
def bench_step(repeats: int, json_file: Path | None) -> None:
    """Microseconds per request-step: admit + plan + launch + commit of decoding streams."""
    results = [
        {"streams": streams, "tokens": tokens, **_summary(measure_step(streams, tokens, repeats))}
        for streams in STREAMS
        for tokens in TOKENS
    ]
    table = Table(title=f"bench step: CPU µs per request-step, pages of {PAGE_SIZE} tokens, {repeats} repeats")
    for name in ("streams", "tokens", "min", "median", "8k / 1k (medians)"):
        table.add_column(name, justify="right")
    for short, long in zip(results[::2], results[1::2], strict=True):
        ratio = long["median_us"] / short["median_us"]
        long["ratio_to_1k"] = ratio
        for row, last in ((short, ""), (long, f"{ratio:.2f}")):
            table.add_row(
                str(row["streams"]), f"{row['tokens']:,}", f"{row['min_us']:.2f}", f"{row['median_us']:.2f}", last
            )
    _report(json_file, table, {"bench": "step", "results": results})


@bench.command("claim")
@_options
def bench_claim(repeats: int, json_file: Path | None) -> None:
    """Microseconds per page of claim + commit, offload and reload; no copies."""
    results = [
        {"pages": pages, "direction": direction, **_summary(values)}
        for pages in CLAIM_PAGES
        for direction, values in measure_claim(pages, repeats).items()
    ]
    table = Table(title=f"bench claim: CPU µs per page, claim + commit, no copies, {repeats} repeats")
    for name in ("pages", "direction", "min", "median"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for row in results:
        table.add_row(f"{row['pages']:,}", str(row["direction"]), f"{row['min_us']:.3f}", f"{row['median_us']:.3f}")
    _report(json_file, table, {"bench": "claim", "results": results})


bench.add_command(bench_copy)
bench.add_command(bench_schedule)
