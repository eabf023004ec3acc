"""``kvstate bench copy``: what copying pages costs, beside one memcpy of the same bytes.

What measures needs torch, and is found by name like a backend; here stands how the result is shown.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstate.testing import backends

GROUP = "kvstate.benches"
"""The entry point group of what measures devices."""

METHODS = {"copier": "this copier", "gather": "gather, then runs", "layer_major": "layer-major"}


def _find(name: str) -> Callable[..., dict[str, Any]]:
    """Return the bench called `name`."""
    try:
        return backends.installed(GROUP, "bench", name)
    except backends.BackendNotFound as error:
        raise click.UsageError(str(error)) from error


def _size(size_bytes: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << bits:
            return f"{size_bytes / (1 << bits):.4g} {unit}"
    return f"{size_bytes} B"


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title="bench copy: ratio to one memcpy of the same bytes (1 is the limit), and bytes of temporaries; "
        f"one thread, median of {result['repeats']} interleaved repeats",
        caption=f"layer-major: {result['layers']} layers. At most {_size(result['bytes_max'])} were used in all.",
    )
    for name in ("pool", "page", "pages", "limit GB/s", *METHODS.values()):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for row in result["results"]:
        shown = [f"{row['ratio'][name]:.2f} · {_size(row['temporary_bytes'][name])}" for name in METHODS]
        table.add_row(
            row["pool"], _size(row["page_bytes"]), f"{row['pages']:,}", f"{row['limit_gb_s']:.2f}", *shown,
        )  # fmt: skip
    return table


@click.command("copy")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed so often.")
@click.option(
    "--gib", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Memory to use in all."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write it here too.")
def bench_copy(repeats: int, gib: float, json_file: Path | None) -> None:
    """Page copies between two pools, fresh and fragmented, beside one memcpy of the same bytes.

    Compared: this copier; a gather into a temporary, then runs; layer-major storage, page by page. Needs torch.
    """
    measure = _find("copy")
    console = Console()
    columns = (TextColumn("copying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("copying", total=None)
        try:
            result = measure(
                repeats=repeats,
                bytes_max=int(gib * 2**30),
                progress=lambda done, cases: shown.update(task, completed=done, total=cases),
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    console.print(_table(result))
    if json_file is not None:
        here = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        json_file.write_text(json.dumps({**here, **result}, indent=2) + "\n", encoding="utf-8")
