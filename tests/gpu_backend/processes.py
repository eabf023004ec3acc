"""Ranks as real processes over gloo: each runs the same function, and writes down what it returned."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_LIMIT_S = 60
PROCESSES_LIMIT_S = 180

Run = Callable[[int, int], Any]
"""(rank, world) → something that JSON can hold. A function of a module: each process imports it."""


def _one(rank: int, world: int, folder: str, run: Run) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    returned = run(rank, world)
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(returned))


def run_ranks(run: Run, world: int, folder: Path) -> list[Any]:
    """Run `run` as each of `world` ranks; return what each returned. Strings hash differently in each."""
    deadline = time.monotonic() + PROCESSES_LIMIT_S
    context = mp.start_processes(_one, (world, str(folder), run), nprocs=world, join=False, start_method="spawn")
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{world} ranks did not end within {PROCESSES_LIMIT_S} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
