"""`kvstate bench copy`: every method moves the same bytes, what it takes for itself is seen, and all is told."""

import json
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

from click.testing import CliRunner

from gpu_backend import bench_copy
from gpu_backend.bench_copy import METHODS, BenchTooLarge, Case, cases, main, measure, temporary_bytes
from gpu_backend.host_size import HostMemory
from kvstate.cli import Exit
from kvstate.cli import bench_copy as command
from kvstate.cli import main as kvstate

PAGE = 4096
TINY: dict[str, Any] = {"bytes_max": 1 << 20, "page_bytes": (PAGE, 2 * PAGE), "pages": (4, 32, 64), "layers": 8}


def case(pool: str, pages: int = 16) -> Case:
    [*_, found] = [made for name, made in cases(1 << 20, (PAGE,), (pages,), layers=8) if name == pool]
    found.source.copy_(torch.randint(0, 256, found.source.shape, generator=torch.Generator().manual_seed(0)))
    found.target.zero_()
    return found


def parts(memory: torch.Tensor) -> torch.Tensor:
    """The pages of a layer-major storage."""
    return memory.view(8, len(memory), PAGE // 8).transpose(0, 1).reshape(len(memory), PAGE)


@pytest.mark.parametrize("place", [0, 16, 48])
@pytest.mark.parametrize("pool", bench_copy.POOLS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_same_pages_and_touches_nothing_else(method: str, pool: str, place: int) -> None:
    made = case(pool)
    sources, targets = made.lists(place)
    METHODS[method](made, place)
    source, target = (parts(m) if method == "layer_major" else m for m in (made.source, made.target))
    if method == "limit":
        sources = targets = list(range(place, place + 16))
    assert torch.equal(target[targets], source[sources])
    rest = [page for page in range(len(target)) if page not in targets]
    assert rest and not target[rest].any()


def test_a_fragmented_pool_has_no_runs_to_speak_of_and_a_fresh_one_is_one_run() -> None:
    for pool, fewest, most in (("fresh", 1, 1), ("fragmented", 15, 16)):
        made = case(pool)
        METHODS["copier"](made, 0)
        assert fewest <= made.copier.runs[1] <= most


def test_only_the_gather_takes_memory_of_the_payloads_size() -> None:
    made = case("fragmented", 32)
    payload = 32 * PAGE
    assert payload <= temporary_bytes(METHODS["gather"], made) < 1.2 * payload
    for method in ("copier", "layer_major"):
        assert temporary_bytes(METHODS[method], made) < 0.2 * payload


def test_methods_take_turns_and_the_first_round_does_not_count() -> None:
    taken = measure(case("fresh", 64), 5)
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys(METHODS, 5)
    assert all(second > 0 for values in taken.values() for second in values)


def test_cases_are_those_that_fit_into_a_quarter_of_the_memory() -> None:
    found = [(pool, made.page_bytes, made.pages) for pool, made in cases(1 << 20, (PAGE, 2 * PAGE), (4, 32, 64), 8)]
    fit = [(PAGE, 4), (PAGE, 32), (PAGE, 64), (2 * PAGE, 4), (2 * PAGE, 32)]
    assert found == [(pool, *size) for size in fit for pool in bench_copy.POOLS]
    with pytest.raises(BenchTooLarge, match="do not hold four times 4 pages of 4096 bytes"):
        cases(1 << 15, (PAGE,), (4,), 8)
    with pytest.raises(ValueError, match="cannot be divided into 3 layers"):
        cases(1 << 20, (PAGE,), (4,), 3)


def test_no_more_than_half_of_the_available_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_copy, "host_memory", lambda local_ranks: HostMemory(1 << 19))
    threads = torch.get_num_threads()
    result = main(repeats=1, **TINY)
    assert result["bytes_max"] == 1 << 18
    assert [(row["page_bytes"], row["pages"]) for row in result["results"]] == [(PAGE, 4)] * 2 + [(2 * PAGE, 4)] * 2
    assert torch.get_num_threads() == threads


def test_the_command_shows_the_ratios_and_writes_them_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def tiny(repeats: int, bytes_max: int, progress: Any) -> dict[str, Any]:
        assert (repeats, bytes_max) == (2, 1 << 20)

        def both(done: int, of: int) -> None:
            told.append((done, of))
            progress(done, of)

        return main(repeats=repeats, progress=both, **TINY)

    monkeypatch.setattr(EntryPoint, "load", lambda self: tiny)
    file = tmp_path / "out.json"
    result = CliRunner().invoke(
        kvstate, ["bench", "copy", "--repeats", "2", "--gib", str(2**-10), "--json", str(file)], env={"COLUMNS": "160"}
    )
    assert result.exit_code == Exit.HOLDS, result.output
    assert "this copier" in result.output and "fragmented" in result.output and "4 KiB" in result.output
    found = json.loads(file.read_text())
    assert found["bench"] == "copy" and len(found["results"]) == 10
    for row in found["results"]:
        assert row["limit_gb_s"] > 0 and set(row["ratio"]) == set(METHODS) - {"limit"}
        assert row["copy_bytes"] == row["pages"] * row["page_bytes"] <= row["temporary_bytes"]["gather"]
    assert told[-1] == (10, 10)


def test_the_entry_point_is_the_bench() -> None:
    assert command._find("copy") is main


def test_memory_that_is_too_small_is_bad_usage() -> None:
    result = CliRunner().invoke(kvstate, ["bench", "copy", "--gib", "0.0001"])
    assert result.exit_code == Exit.USAGE and "ask for fewer or smaller ones" in result.output


def test_without_torch_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: EntryPoint) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(EntryPoint, "load", load)
    result = CliRunner().invoke(kvstate, ["bench", "copy"])
    assert result.exit_code == Exit.USAGE and "pip install 'kvstate[gpu]'" in result.output


def test_without_the_entry_point_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.backends, "entry_points", lambda group: ())
    result = CliRunner().invoke(kvstate, ["bench", "copy"])
    assert result.exit_code == Exit.USAGE and "reinstall kvstate" in result.output
