"""``kvstate bench schedule``: what the reference scheduler costs, with the manager's verbs, and beside them alone."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstate.cli import Exit
from kvstate.manager import KVManager
from kvstate.refusals import Refusal
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.requests import GenerationRequest
from kvstate.state import Lease
from kvstate.testing.null_backend import NullBackend
from kvstate.types import Geometry, Segment, Step

REQUESTS = (16, 64, 256)
PAGE_SIZE = 16
PROMPT = 1024


def measure_schedule(requests: int, asynchronous: bool, repeats: int) -> list[float]:
    """Return µs per request-step of schedule + launch + update, one value per repeat.

    All requests decode, with nobody waiting; their lengths are spread over a page. No model runs, and sampled tokens
    are those of a list.
    """
    steps = PAGE_SIZE * max(1, 2048 // (requests * PAGE_SIZE))
    tokens_max = steps * (repeats + 3) + 2 * PAGE_SIZE
    pages = requests * (-(-(PROMPT + PAGE_SIZE + tokens_max) // PAGE_SIZE) + 1)
    manager = KVManager(Geometry(pages=pages, page_size=PAGE_SIZE, name="bench"), NullBackend(), debug=False)
    scheduler = Scheduler(manager, budget=requests * (PROMPT + PAGE_SIZE), batch=requests, asynchronous=asynchronous)
    for index in range(requests):
        prompt = range(PROMPT + index % PAGE_SIZE)
        _done(scheduler.add(GenerationRequest(f"r{index}", tuple(prompt), tokens_max)))
    flight: deque[Batch] = deque()
    tokens = [1] * requests
    taken = []
    run_steps(scheduler, flight, tokens, 2 * PAGE_SIZE)
    for _ in range(repeats + 1):
        began = time.thread_time()
        run_steps(scheduler, flight, tokens, steps)
        taken.append((time.thread_time() - began) / (steps * requests) * 1e6)
    manager.close()
    return taken[1:]


def run_steps(scheduler: Scheduler, flight: deque[Batch], tokens: list[int], steps: int) -> None:
    """Schedule and launch `steps` steps; update each as soon as the scheduler allows no more in flight."""
    for _ in range(steps):
        batch = scheduler.schedule()
        if not isinstance(batch, Batch):
            click.echo(f"the bench got {batch}", err=True)
            raise SystemExit(Exit.UNDECIDED)
        plan = scheduler.promote(batch)
        assert plan is not None
        with scheduler.manager.launch(plan):
            pass
        flight.append(batch)
        if len(flight) > scheduler.asynchronous:
            done = flight.popleft()
            scheduler.update(done, tokens)


def measure_machine(requests: int, asynchronous: bool, repeats: int) -> list[float]:
    """Return µs per request-step of the manager's verbs alone, in the same steps and the same order."""
    steps = PAGE_SIZE * max(1, 2048 // (requests * PAGE_SIZE))
    pages = requests * (-(-(PROMPT + PAGE_SIZE + steps * (repeats + 2)) // PAGE_SIZE) + 1)
    manager = KVManager(Geometry(pages=pages, page_size=PAGE_SIZE, name="bench"), NullBackend(), debug=False)
    flight: deque[Lease] = deque()
    for index in range(requests):
        _done(manager.ingest(f"r{index}"))
    first = Step(tuple(Segment(f"r{index}", span=PROMPT + index % PAGE_SIZE) for index in range(requests)))
    _run_machine(manager, first, flight, False, 1)
    step = Step(tuple(Segment(f"r{index}") for index in range(requests)))
    taken = []
    for _ in range(repeats + 1):
        began = time.thread_time()
        _run_machine(manager, step, flight, asynchronous, steps)
        taken.append((time.thread_time() - began) / (steps * requests) * 1e6)
    manager.close()
    return taken[1:]


def _run_machine(manager: KVManager, step: Step, flight: deque[Lease], asynchronous: bool, steps: int) -> None:
    for _ in range(steps):
        lease = _done(manager.admit(step))
        with manager.launch(_done(manager.plan(lease))):
            pass
        flight.append(lease)
        if len(flight) > asynchronous:
            _done(manager.commit(flight.popleft()))


def _done(result: Any) -> Any:
    if isinstance(result, Refusal):
        click.echo(f"the bench was refused: {result}", err=True)
        raise SystemExit(Exit.UNDECIDED)
    return result


@click.command("schedule")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Timed so often.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write it here too.")
def bench_schedule(repeats: int, json_file: Path | None) -> None:
    """Microseconds per request-step: schedule + launch + update of decoding requests, beside the machine alone."""
    results = []
    for requests in REQUESTS:
        for asynchronous in (False, True):
            machine = statistics.median(measure_machine(requests, asynchronous, repeats))
            both = measure_schedule(requests, asynchronous, repeats)
            results.append(
                {
                    "requests": requests,
                    "asynchronous": asynchronous,
                    "machine_us": machine,
                    "min_us": min(both),
                    "median_us": statistics.median(both),
                }
            )
    table = Table(
        title=f"bench schedule: CPU µs per request-step, {PROMPT:,} tokens and more, medians of {repeats} repeats"
    )
    for name in ("requests", "steps", "machine alone", "scheduler and machine", "min", "scheduler's share"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for row in results:
        table.add_row(
            str(row["requests"]),
            "one ahead" if row["asynchronous"] else "one by one",
            f"{row['machine_us']:.2f}",
            f"{row['median_us']:.2f}",
            f"{row['min_us']:.2f}",
            f"{row['median_us'] - row['machine_us']:.2f}",
        )
    Console().print(table)
    if json_file is not None:
        here = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        json_file.write_text(json.dumps({**here, "bench": "schedule", "results": results}, indent=2) + "\n")
