"""`kvstate bench`: it measures what it says, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstate.cli import Exit, bench, bench_schedule, main
from kvstate.manager import KVManager
from kvstate.refusals import PagesExhausted


def kept_open(monkeypatch: pytest.MonkeyPatch) -> list[KVManager]:
    """Have managers noted here instead of closed."""
    managers: list[KVManager] = []

    def close(self: KVManager) -> None:
        managers.append(self)

    monkeypatch.setattr(KVManager, "close", close)
    return managers


def test_bench_step_covers_every_size_and_gives_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STREAMS", (1, 4))
    monkeypatch.setattr(bench, "TOKENS", (64, 128))
    result = CliRunner().invoke(main, ["bench", "step", "--repeats", "2", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == Exit.HOLDS, result.output
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(row["streams"], row["tokens"]) for row in found] == [(1, 64), (1, 128), (4, 64), (4, 128)]
    assert all(0 < row["min_us"] <= row["median_us"] for row in found)
    assert found[3]["ratio_to_1k"] == found[3]["median_us"] / found[2]["median_us"]
    assert "8k / 1k" in result.output


def test_bench_claim_covers_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CLAIM_PAGES", (2, 8))
    result = CliRunner().invoke(main, ["bench", "claim", "--repeats", "1", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == Exit.HOLDS, result.output
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(row["pages"], row["direction"]) for row in found] == [
        (2, "offload"), (2, "reload"), (8, "offload"), (8, "reload"),
    ]  # fmt: skip


def test_bench_schedule_shows_scheduler_and_machine_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_schedule, "REQUESTS", (2, 4))
    monkeypatch.setattr(bench_schedule, "PROMPT", 8)
    result = CliRunner().invoke(main, ["bench", "schedule", "--repeats", "1", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == Exit.HOLDS, result.output
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(row["requests"], row["asynchronous"]) for row in found] == [(2, False), (2, True), (4, False), (4, True)]
    assert all(row["machine_us"] > 0 and 0 < row["min_us"] <= row["median_us"] for row in found)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_schedule_that_is_measured_gives_everybody_a_token_per_step(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr(bench_schedule, "PROMPT", 8)
    managers = kept_open(monkeypatch)
    bench_schedule.measure_schedule(16, asynchronous, 1)
    [manager] = managers
    steps = 2 * bench_schedule.PAGE_SIZE + 2 * 128 - 1
    flying = bool(asynchronous)
    assert [stream.length for stream in manager.view().streams] == [8 + index + steps - flying for index in range(16)]


def test_a_step_that_is_measured_stores_a_token_on_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = kept_open(monkeypatch)
    assert len(bench.measure_step(3, 20, 2)) == 2
    [manager] = managers
    steps = bench.PAGE_SIZE * (2048 // (3 * bench.PAGE_SIZE))
    assert [stream.length for stream in manager.view().streams] == [20 + index + 3 * steps for index in range(3)]


def test_a_claim_that_is_measured_moves_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = kept_open(monkeypatch)
    taken = bench.measure_claim(5, 3)
    assert {direction: len(values) for direction, values in taken.items()} == {"offload": 3, "reload": 3}
    [stream] = managers[0].view().streams
    assert stream.residency == "OnDevice" and len(stream.device[0]) == 5


def test_a_refusal_leaves_the_bench_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "admit", lambda self, step: PagesExhausted(short=(1,)))
    result = CliRunner().invoke(main, ["bench", "step", "--repeats", "1"])
    assert result.exit_code == Exit.UNDECIDED
    assert "the bench was refused" in result.output


def test_bench_without_a_name_lists_what_there_is() -> None:
    result = CliRunner().invoke(main, ["bench"])
    assert "claim" in result.output and "step" in result.output
