"""`kvstate run`: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvstate
from kvstate.cli import COMMANDS, Exit, main
from kvstate.cli import run as run_module
from kvstate.ops import CopyIn, Op
from kvstate.refusals import PagesExhausted
from kvstate.scheduler.batch import Blocked
from kvstate.testing.drive import Stopped, Undecided
from kvstate.testing.memory import MemoryBackend

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
SMALL = ("--page-size", "4", "--chunk", "32", "--batch", "6")


def kv(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def azure(path: Path, rows: int = 16) -> Path:
    lines = [
        f"2023-11-16 18:15:{46 + row // 4}.68059{row % 4}0,{20 + 13 * row % 50},{6 + 7 * row % 30}"
        for row in range(rows)
    ]
    path.write_text("\r\n".join([AZURE_HEADER, *lines]), encoding="utf-8")
    return path


def mooncake(path: Path, rows: int = 16) -> Path:
    lines = [
        {
            "timestamp": 100 * row,
            "input_length": 20 + 13 * row % 50,
            "output_length": 6 + 7 * row % 30,
            "hash_ids": [row],
        }
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


# -- 0: holds


@pytest.mark.parametrize("make", [azure, mooncake])
@pytest.mark.parametrize("mode", [(), ("--async",), ("--threads",)], ids=["step by step", "one ahead", "two threads"])
def test_a_real_trace_under_eviction_holds(make: Any, mode: tuple[str, ...], tmp_path: Path) -> None:
    result = kv("run", make(tmp_path / "trace"), *SMALL, *mode, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.HOLDS, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["holds"] is True and found["finished"] == found["requests"] == 16
    assert found["offloads"] > 0 and found["conflicts"] == [] and found["leaks"] == []
    assert found["pages"] < found["peak_demand"] == found["host_pages"]
    assert (found["asynchronous"], found["threads"]) == (bool(mode), mode == ("--threads",))
    for row in ("requests finished", "16 / 16", "judge conflicts", "idle means empty", found["digest"], "holds"):
        assert row in result.output


def test_every_way_to_serve_a_trace_generates_the_same(tmp_path: Path) -> None:
    ways: list[tuple[object, ...]] = [
        ("--memory-fraction", 1),
        ("--memory-fraction", 0.125, "--async"),
        ("--host-pages", 0, "--threads", "--prefix-cache"),
        ("--pages", 30, "--speed", 3, "--verify", "sampled", "--no-judge"),
        ("--device", "memory", "--groups", "mine"),
    ]
    found = []
    for way in ways:
        result = kv("run", mooncake(tmp_path / "trace"), *SMALL, *way, "--json", tmp_path / "out.json")
        assert result.exit_code == Exit.HOLDS, result.output
        found.append(json.loads((tmp_path / "out.json").read_text()))
    assert len({one["digest"] for one in found}) == 1
    assert [one["verify"] for one in found] == ["all"] * 3 + ["sampled", "all"]
    assert found[0]["offloads"] == 0 and found[1]["offloads"] > 0
    assert found[2]["soft_resets"] > 0 and found[2]["prefix_cache"] is True
    assert found[3]["pages"] == 30


def test_layers_may_be_grouped_by_how_they_attend(tmp_path: Path) -> None:
    way = ("--groups", "full@2,local:16", "--prefix-cache", "--json", tmp_path / "out.json")
    result = kv("run", mooncake(tmp_path / "trace"), *SMALL, *way)
    assert result.exit_code == Exit.HOLDS, result.output
    assert "device sectors" in result.output and "full@2,local:16" in result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["groups"] == "full@2,local:16" and found["offloads"] > 0


def test_a_synthetic_workload_needs_no_file() -> None:
    result = kv("run", "--synthetic", "--requests", 3, "--seed", 5)
    assert result.exit_code == Exit.HOLDS, result.output
    assert "synthetic, seed 5" in result.output and "3 / 3" in result.output


def test_arrivals_may_follow_the_trace(tmp_path: Path) -> None:
    result = kv("run", azure(tmp_path / "trace"), *SMALL, "--speed", 2, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.HOLDS, result.output
    assert json.loads((tmp_path / "out.json").read_text())["virtual_s"] >= 3.0


@pytest.mark.parametrize(("given", "then"), [(None, "1"), ("3", "3")])
def test_an_op_has_one_thread_unless_the_environment_asks_for_more(
    given: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert kv("run", "--synthetic", "--requests", 1).exit_code == Exit.HOLDS
    assert os.environ["OMP_NUM_THREADS"] == then


def test_what_was_not_judged_is_not_called_free_of_conflicts(tmp_path: Path) -> None:
    result = kv("run", azure(tmp_path / "trace"), *SMALL, "--no-judge", "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.HOLDS
    [row] = [line for line in result.output.splitlines() if "judge conflicts" in line]
    assert "not judged" in row and "0" not in row
    assert json.loads((tmp_path / "out.json").read_text())["conflicts"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("azure_llm_2023_conv.csv", ("--requests", 60, "--async")),
        ("azure_llm_2023_code.csv", ("--requests", 60, "--threads")),
        ("mooncake_conversation.jsonl", ("--requests", 30, "--prefix-cache")),
    ],
)
def test_the_published_traces_are_served(name: str, options: tuple[object, ...], tmp_path: Path) -> None:
    """They are no part of the repository: name the folder that holds them in KVSTATE_TRACES."""
    folder = os.environ.get("KVSTATE_TRACES")
    if not folder or not Path(folder, name).is_file():
        pytest.skip(f"KVSTATE_TRACES names no folder with {name}")
    digests = []
    for memory in (
        ("--memory-fraction", 1),
        ("--memory-fraction", 0.25),
        ("--memory-fraction", 0.25, "--host-pages", 0),
    ):
        result = kv("run", Path(folder, name), *options, *memory, "--json", tmp_path / "out.json")
        assert result.exit_code == Exit.HOLDS, result.output
        found = json.loads((tmp_path / "out.json").read_text())
        assert (found["offloads"] + found["soft_resets"] > 0) == (memory[1] < 1)
        digests.append(found["digest"])
    assert len(set(digests)) == 1


# -- 1: violation


class LosesCopies(MemoryBackend):
    """Spoils what was copied back in."""

    def submit(self, op: Op) -> None:
        super().submit(op)
        if isinstance(op, CopyIn):
            for group, copies in enumerate(op.copies):
                self.poison(op.target_tier, group, [target for _, target, _ in copies])


def test_a_content_error_is_a_violation_that_names_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module.backends, "find", lambda name: LosesCopies)
    result = kv("run", azure(tmp_path / "trace"), *SMALL, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.VIOLATION
    assert "VIOLATION" in result.output
    assert "token" in result.output and "found POISON" in result.output
    assert "requests did not generate exactly their tokens: r" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["holds"] is False


def test_a_run_in_which_nothing_can_run_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*args: object, **options: object) -> None:
        raise Stopped(Blocked(PagesExhausted(request="r7", short=(2,))))

    monkeypatch.setattr(run_module, "drive", stops)
    result = kv("run", azure(tmp_path / "trace", 2), *SMALL, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.VIOLATION
    assert "violation: Stopped: nothing can run and nothing is in flight: PagesExhausted (r7)" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["holds"] is False


def test_without_a_host_pool_requests_begin_again(tmp_path: Path) -> None:
    result = kv("run", azure(tmp_path / "trace"), *SMALL, "--host-pages", 0, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.HOLDS, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["soft_resets"] > 0 and found["tokens_recomputed"] > 0 and found["pages_out"] == 0


# -- 2: usage


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("", 1, "the file is empty"),
        ("TIMESTAMP,Context,Generated\n", 1, "has the columns"),
        (f"{AZURE_HEADER}\n", 2, "ends after its header"),
        (
            f"{AZURE_HEADER}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,39",
            3,
            "has 2 of the 3 fields",
        ),
        ('{"timestamp": 0, "input_length": 67', 1, "is not one JSON object"),
        ('{"timestamp": 0, "input_length": 67}\n', 1, "has no output_length, hash_ids"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(content: str, line: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(content, encoding="utf-8")
    result = kv("run", path)
    assert result.exit_code == Exit.USAGE
    assert f"{path}:{line}: " in result.output and words in result.output


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = kv("run", tmp_path / "nowhere.csv")
    assert result.exit_code == Exit.USAGE
    assert f"{tmp_path / 'nowhere.csv'}:0: cannot be read (No such file or directory)" in result.output


def test_a_request_larger_than_the_pool_is_named_with_its_line_and_a_remedy(tmp_path: Path) -> None:
    path = azure(tmp_path / "trace")
    result = kv("run", path, *SMALL, "--pages", 8)
    assert result.exit_code == Exit.USAGE
    assert f"{path}:3: request r1 needs" in result.output and "raise --pages to" in result.output
    result = kv("run", path, *SMALL, "--pages", 8, "--groups", "full@2,local:16")
    assert result.exit_code == Exit.USAGE
    assert f"{path}:2: request r0 needs 10 sectors" in result.output and "raise --pages to 10" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "either a TRACE or --synthetic"),
        (("some.csv", "--synthetic"), "either a TRACE or --synthetic"),
        (("some.csv", "--seed", 1), "--seed goes with --synthetic"),
        (("--synthetic", "--pages", 9, "--memory-fraction", 1), "either --pages or --memory-fraction"),
        (("--synthetic", "--memory-fraction", 0), "--memory-fraction"),
        (("--synthetic", "--speed", -1), "--speed"),
        (("--synthetic", "--requests", 0), "--requests"),
        (("--synthetic", "--host-pages", -1), "--host-pages"),
        (("--synthetic", "--page-size", 0), "--page-size"),
        (("--synthetic", "--device", "abacus"), "no backend 'abacus'; installed: "),
        (("--synthetic", "--verify", "most"), "--verify"),
        (("--synthetic", "--groups", ""), "--groups: "),
        (("--synthetic", "--groups", "full,full"), "--groups: geometry 'run' has two groups of one name"),
        (("--synthetic", "--groups", "local:1"), "--groups: window '1' of group 'local'"),
        (("--synthetic", "--groups", "full@1.5"), "--groups: page size '1.5' of group 'full'"),
        (("--synthetic", "--frobnicate"), "No such option"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(args: tuple[object, ...], words: str) -> None:
    result = kv("run", *args)
    assert result.exit_code == Exit.USAGE
    assert words in result.output


def test_a_result_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    result = kv("run", azure(tmp_path / "trace", 2), *SMALL, "--json", tmp_path / "no" / "out.json")
    assert result.exit_code == Exit.USAGE
    assert "cannot write" in result.output


# -- 3: undecided


def test_threads_that_stop_answering_are_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*args: object, **options: object) -> None:
        raise Undecided("nothing was reported for 300 s")

    monkeypatch.setattr(run_module, "drive", hangs)
    result = kv("run", azure(tmp_path / "trace", 2), *SMALL, "--json", tmp_path / "out.json")
    assert result.exit_code == Exit.UNDECIDED
    assert "undecided: " in result.output
    assert json.loads((tmp_path / "out.json").read_text())["holds"] is None


def test_an_interrupted_run_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "drive", interrupted)
    result = kv("run", azure(tmp_path / "trace", 2), *SMALL)
    assert result.exit_code == Exit.UNDECIDED
    assert "interrupted: undecided" in result.output


# -- the group


def test_version_and_help_name_every_command() -> None:
    assert kvstate.__version__ in kv("--version").output
    helped = kv("--help")
    assert helped.exit_code == Exit.HOLDS
    assert all(name in helped.output for name in COMMANDS)
    assert "3 undecided" in helped.output


def test_every_command_listed_is_there() -> None:
    for name in COMMANDS:
        assert kv(name, "--help").exit_code == Exit.HOLDS, name


def test_an_unknown_command_is_a_usage_error() -> None:
    assert kv("frobnicate").exit_code == Exit.USAGE


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from kvstate.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert done.stderr == f"kvstate: the command line needs {missing}; install it with: pip install 'kvstate[check]'\n"
