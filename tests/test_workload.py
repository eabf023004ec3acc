"""Traces are read exactly or refused with file and line; synthetic load is a function of its seed.

The published traces are no part of the repository: name the folder that holds them in KVSTATE_TRACES to read them too.
"""

import json
import os
import pickle
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.workload import (
    BLOCK_TOKENS,
    LINE_BYTES_MAX,
    TOKENS_MAX,
    TraceRequest,
    WorkloadError,
    check_fits,
    load_trace,
    prompt_tokens,
    synthetic,
)

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"{HEADER}\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319601,3180,8"
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 1000, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 27000, "input_length": 513, "output_length": 3, "hash_ids": [0, 2]}\n'
    '{"timestamp": 30001, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
)

counts = st.integers(1, TOKENS_MAX)
file_settings = settings(deadline=None)  # a busy disk is no failure


def written(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def azure(*rows: str) -> str:
    return "\n".join([HEADER, *rows])


def mooncake(**changed: object) -> str:
    record = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], **changed}
    return json.dumps({key: value for key, value in record.items() if value is not None})


def refusal(path: Path, limit: int | None = None) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        load_trace(path, limit=limit)
    error = caught.value
    assert str(error) == f"{path}:{error.line}: {error.problem}; {error.remedy}"
    assert error.path == str(path)
    return error


def request(**changed: object) -> TraceRequest:
    values = {"id": "r0", "arrival_s": 0.0, "prompt_tokens": 600, "output_tokens": 5, "blocks": (), "where": "t:2"}
    return TraceRequest(**(values | changed))  # type: ignore[arg-type]


# Reading


def test_an_azure_trace_reads_as_written(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    assert load_trace(path) == (
        TraceRequest("r0", 0.0, 4808, 10, (), f"{path}:2"),
        TraceRequest("r1", 0.0520001, 3180, 8, (), f"{path}:3"),
    )


def test_a_mooncake_trace_reads_as_written(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    assert load_trace(path) == (
        TraceRequest("r0", 0.0, 1000, 500, (0, 1), f"{path}:1"),
        TraceRequest("r1", 0.0, 513, 3, (0, 2), f"{path}:2"),
        TraceRequest("r2", 3.001, 512, 1, (0,), f"{path}:3"),
    )


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace"])
def test_the_format_follows_from_the_content_whatever_the_name(tmp_path: Path, name: str) -> None:
    assert [r.prompt_tokens for r in load_trace(written(tmp_path, AZURE, name))] == [4808, 3180]
    assert [r.prompt_tokens for r in load_trace(written(tmp_path, MOONCAKE, name))] == [1000, 513, 512]


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    assert load_trace(str(path)) == load_trace(path)


@pytest.mark.parametrize(
    ("later", "seconds"),
    [
        ("2023-11-16 18:17:03", 3.0),
        ("2023-11-16T18:17:03", 3.0),
        ("2023-11-16 18:17:03.5", 3.5),
        ("2023-11-16 18:17:00.000000001", 1e-9),
        ("2023-11-16 18:17:00.000000+00:00", 0.0),
        ("2023-11-16 18:17:00Z", 0.0),
        ("2023-11-16 19:17:01.25+01:00", 1.25),
        ("2023-11-17 18:17:00.0000000", 86400.0),
        ("2024-02-29 18:17:00", 86400.0 * 105),
    ],
)
def test_azure_timestamps_keep_every_digit_and_their_offset(tmp_path: Path, later: str, seconds: float) -> None:
    path = written(tmp_path, azure("2023-11-16 18:17:00.0000000,1,1", f"{later},1,1"))
    assert load_trace(path)[1].arrival_s == seconds


def test_mooncake_timestamps_may_be_fractions_of_a_millisecond(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join([mooncake(timestamp=0.5), mooncake(timestamp=2)]))
    assert [r.arrival_s for r in load_trace(path)] == [0.0, 0.0015]


def test_blank_lines_and_a_byte_order_mark_count_as_lines_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff\n\r\n" + AZURE.replace("\r\n", "\r\n  \r\n") + "\n\n\n")
    assert [(r.id, r.where) for r in load_trace(path)] == [("r0", f"{path}:5"), ("r1", f"{path}:7")]
    path = written(tmp_path, "\ufeff\n" + MOONCAKE.replace("\n", "\n\n"))
    assert [r.where for r in load_trace(path)] == [f"{path}:2", f"{path}:4", f"{path}:6"]


def test_unknown_mooncake_keys_are_ignored(tmp_path: Path) -> None:
    assert len(load_trace(written(tmp_path, mooncake(session="a")))) == 1


@pytest.mark.parametrize("content", [AZURE, MOONCAKE])
def test_limit_takes_the_first_requests_or_all_there_are(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    whole = load_trace(path)
    assert load_trace(path, limit=1) == whole[:1]
    assert load_trace(path, limit=len(whole)) == whole
    assert load_trace(path, limit=1000) == whole


@pytest.mark.parametrize(
    "bad", [b"\n\xff\xfe", b"\nnonsense", b"\n" + b"x" * (LINE_BYTES_MAX + 1)], ids=["bytes", "text", "long"]
)
@pytest.mark.parametrize("content", [AZURE, MOONCAKE])
def test_nothing_past_the_limit_is_read(tmp_path: Path, content: str, bad: bytes) -> None:
    requests = len(load_trace(written(tmp_path, content)))
    path = written(tmp_path, content.rstrip("\n").encode() + bad)
    assert len(load_trace(path, limit=requests)) == requests
    assert refusal(path, limit=requests + 1).line == len(content.rstrip("\n").splitlines()) + 1


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_an_error(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit must be at least 1 .got {limit}.; leave it out"):
        load_trace(written(tmp_path, AZURE), limit=limit)


@st.composite
def arrivals(draw: st.DrawFn, unit_max: int) -> Sequence[int]:
    steps = draw(st.lists(st.integers(0, unit_max), min_size=1, max_size=20))
    return list(accumulate(steps))


@file_settings
@given(ticks=arrivals(10**12), data=st.data(), end=st.sampled_from(["\n", "\r\n", "\n\r\n"]), last_end=st.booleans())
def test_azure_round_trip(
    tmp_path_factory: pytest.TempPathFactory, ticks: Sequence[int], data: st.DataObject, end: str, last_end: bool
) -> None:
    tokens = data.draw(st.lists(st.tuples(counts, counts), min_size=len(ticks), max_size=len(ticks)))
    rows = [HEADER]
    for tick, (prompt, output) in zip(ticks, tokens, strict=True):
        seconds, fraction = divmod(tick, 10**7)
        days, seconds = divmod(seconds, 86400)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:07}"
        rows.append(f"2023-11-{days + 1:02} {clock},{prompt},{output}")
    path = written(tmp_path_factory.getbasetemp(), end.join(rows) + end * last_end, "azure")
    loaded = load_trace(path)
    assert [r.arrival_s for r in loaded] == [float(Fraction(tick - ticks[0], 10**7)) for tick in ticks]
    assert [(r.prompt_tokens, r.output_tokens) for r in loaded] == tokens
    assert [r.id for r in loaded] == [f"r{index}" for index in range(len(ticks))]
    assert {r.blocks for r in loaded} == {()}


@file_settings
@given(times=arrivals(10**9), data=st.data(), end=st.sampled_from(["\n", "\r\n", "\n\n"]), last_end=st.booleans())
def test_mooncake_round_trip(
    tmp_path_factory: pytest.TempPathFactory, times: Sequence[int], data: st.DataObject, end: str, last_end: bool
) -> None:
    expected, rows = [], []
    path = tmp_path_factory.getbasetemp() / "mooncake"
    for index, time in enumerate(times):
        blocks = tuple(data.draw(st.lists(st.integers(0, TOKENS_MAX), min_size=1, max_size=5)))
        prompt = len(blocks) * BLOCK_TOKENS - data.draw(st.integers(0, BLOCK_TOKENS - 1))
        output = data.draw(counts)
        line = 1 + index * end.count("\n")
        arrival_s = float(Fraction(time - times[0], 1000))
        expected.append(TraceRequest(f"r{index}", arrival_s, prompt, output, blocks, f"{path}:{line}"))
        rows.append(mooncake(timestamp=time, input_length=prompt, output_length=output, hash_ids=blocks))
    path.write_bytes((end.join(rows) + end * last_end).encode())
    assert load_trace(path) == tuple(expected)


@file_settings
@given(
    base=st.sampled_from([AZURE.encode(), MOONCAKE.encode()]),
    start=st.integers(0, 300),
    removed=st.integers(0, 300),
    inserted=st.one_of(st.binary(max_size=6), st.text(max_size=3).map(lambda text: text.encode(errors="replace"))),
)
def test_a_damaged_file_loads_or_is_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, base: bytes, start: int, removed: int, inserted: bytes
) -> None:
    content = base[:start] + inserted + base[start + removed :]
    path = written(tmp_path_factory.getbasetemp(), content, "damaged")
    try:
        loaded = load_trace(path)
    except WorkloadError as error:
        assert str(error).startswith(f"{path}:{error.line}: ")
        assert 1 <= error.line <= content.count(b"\n") + 2
    else:
        assert loaded
        assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(loaded))


# Refusing


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "absent.csv")
    assert (error.line, error.problem) == (0, "cannot be read (No such file or directory)")
    error = refusal(tmp_path)
    assert (error.line, error.problem) == (0, "cannot be read (Is a directory)")


@pytest.mark.parametrize("content", ["", "\n", " \r\n\n", "\ufeff"])
def test_an_empty_file_is_named_with_what_was_expected(tmp_path: Path, content: str) -> None:
    error = refusal(written(tmp_path, content))
    assert (error.line, error.problem) == (1, "the file is empty")
    assert HEADER in error.remedy and "Mooncake" in error.remedy


@pytest.mark.parametrize(("content", "line"), [(HEADER, 2), (f"{HEADER}\r\n", 2), (f"\n{HEADER}\n\n\n", 3)])
def test_a_header_alone_is_no_trace(tmp_path: Path, content: str, line: int) -> None:
    error = refusal(written(tmp_path, content))
    assert (error.line, error.problem) == (line, "the file ends after its header")


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("TIMESTAMP,ContextTokens", "['TIMESTAMP', 'ContextTokens']"),
        ("TIMESTAMP,GeneratedTokens,ContextTokens", "['TIMESTAMP', 'GeneratedTokens', 'ContextTokens']"),
        ("TIMESTAMP;ContextTokens;GeneratedTokens", "['TIMESTAMP;ContextTokens;GeneratedTokens']"),
        (f"{HEADER},Model", "['TIMESTAMP', 'ContextTokens', 'GeneratedTokens', 'Model']"),
        ("2023-11-16 18:17:03.9799600,4808,10", "['2023-11-16 18:17:03.9799600', '4808', '10']"),
        ("[1]", "['[1]']"),
    ],
)
def test_wrong_columns_name_the_found_and_the_expected(tmp_path: Path, header: str, found: str) -> None:
    error = refusal(written(tmp_path, f"{header}\n2023-11-16 18:17:03.9799600,4808,10\n"))
    assert (error.line, error.problem) == (1, f"has the columns {found}")
    assert error.remedy == f"expected the header {HEADER} (Azure) or lines of JSON objects (Mooncake)"


@pytest.mark.parametrize("columns", [5000, 1])
def test_a_message_stays_short_whatever_it_quotes(tmp_path: Path, columns: int) -> None:
    content = ",".join(["x" * (100_000 // columns)] * columns)
    assert len(str(refusal(written(tmp_path, content)))) < 1000


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("2023-11-16 18:17:04.0319601,3180", "has 2 of the 3 fields TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-11-16 18", "has 1 of the 3 fields TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-11-16 18:17:04.0319601,3180,8,9", "has 4 of the 3 fields TIMESTAMP,ContextTokens,GeneratedTokens"),
        ('2023-11-16 18:17:04.0319601,"3180,8', "is not a line of CSV (unexpected end of data)"),
        ("2023-11-16 18:17:04.0319601,3180,", f"GeneratedTokens is '', not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,0,8", f"ContextTokens is 0, not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,7,0", f"GeneratedTokens is 0, not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,-7,8", f"ContextTokens is '-7', not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,7.0,8", f"ContextTokens is '7.0', not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601, 7,8", f"ContextTokens is ' 7', not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,1_0,8", f"ContextTokens is '1_0', not a whole number from 1 to {TOKENS_MAX}"),
        ("2023-11-16 18:17:04.0319601,٣,8", f"ContextTokens is '٣', not a whole number from 1 to {TOKENS_MAX}"),
        (f"2023-11-16 18:17:04,{TOKENS_MAX + 1},8", f"ContextTokens is {TOKENS_MAX + 1}, not a whole number from 1"),
        pytest.param(f"2023-11-16 18:17:04,{'9' * 5000},8", "ContextTokens is '9999", id="digits"),
        (",7,8", "TIMESTAMP is '', no time that exists"),
        ("yesterday,7,8", "TIMESTAMP is 'yesterday', no time that exists"),
        ("1700158624,7,8", "TIMESTAMP is '1700158624', no time that exists"),
        ("2023-02-30 18:17:04,7,8", "TIMESTAMP is '2023-02-30 18:17:04', no time that exists (day is out of range"),
        ("0000-01-01 18:17:04,7,8", "TIMESTAMP is '0000-01-01 18:17:04', no time that exists"),
        ("2023-11-16 18:17:04.,7,8", "TIMESTAMP is '2023-11-16 18:17:04.', no time that exists"),
        ("2023-11-16 18:17:04.0123456789,7,8", "TIMESTAMP is '2023-11-16 18:17:04.0123456789', no time that exists"),
        ("2023-11-16 18:17:04.5+30:00,7,8", "TIMESTAMP is '2023-11-16 18:17:04.5+30:00', no time that exists"),
        ("2023-11-16 18:17:02.4799600,7,8", "arrives 1.5 s before the request on line 2"),
    ],
)
def test_a_bad_azure_row_is_named_by_file_and_line(tmp_path: Path, row: str, problem: str) -> None:
    for after in ("", "\r\n", "\n2023-11-16 18:17:05,1,1\n"):
        error = refusal(written(tmp_path, azure("2023-11-16 18:17:03.9799600,4808,10", row) + after))
        assert error.line == 3
        assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"timestamp": 3, "input_length": 60', "is not one JSON object (Expecting ',' delimiter: column"),
        ('{"timestamp": 3, "input_le', "is not one JSON object (Unterminated string starting at: column 18)"),
        (mooncake() + mooncake(), "is not one JSON object (Extra data: column"),
        ("nonsense", "is not one JSON object (Expecting value: column 1)"),
        ("[1, 2]", "is [1, 2], not a JSON object"),
        pytest.param('{"a":' + "9" * 5000 + "}", "has a number too long or nesting too deep to read", id="digits"),
        ("{}", "has no timestamp, input_length, output_length, hash_ids (found the keys [])"),
        (
            mooncake(hash_ids=None),
            "has no hash_ids (found the keys ['timestamp', 'input_length', 'output_length'])",
        ),
        (mooncake(input_length="600"), f"input_length is '600', not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(input_length=0, hash_ids=[]), f"input_length is 0, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(input_length=600.0), f"input_length is 600.0, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(input_length=-600), f"input_length is -600, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(output_length=0), f"output_length is 0, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(output_length=True), f"output_length is True, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(output_length=2**31), f"output_length is {2**31}, not a whole number from 1 to {TOKENS_MAX}"),
        (mooncake(timestamp="0"), "timestamp is '0', not milliseconds from 0 to 2**53"),
        (mooncake(timestamp=True), "timestamp is True, not milliseconds from 0 to 2**53"),
        (mooncake(timestamp=-1), "timestamp is -1, not milliseconds from 0 to 2**53"),
        (mooncake(timestamp=float("nan")), "timestamp is nan, not milliseconds from 0 to 2**53"),
        (mooncake(timestamp=float("inf")), "timestamp is inf, not milliseconds from 0 to 2**53"),
        pytest.param(mooncake(timestamp=10**400), "timestamp is 1000", id="late"),
        (mooncake(hash_ids=7), f"hash_ids is 7, not a list of whole numbers from 0 to {TOKENS_MAX}"),
        (mooncake(hash_ids=[0, "1"]), f"hash_ids is [0, '1'], not a list of whole numbers from 0 to {TOKENS_MAX}"),
        (mooncake(hash_ids=[0, -1]), f"hash_ids is [0, -1], not a list of whole numbers from 0 to {TOKENS_MAX}"),
        (mooncake(hash_ids=[0]), "hash_ids names 1 blocks, and 600 prompt tokens have 2 of 512 tokens"),
        (mooncake(hash_ids=[0, 1, 2]), "hash_ids names 3 blocks, and 600 prompt tokens have 2 of 512 tokens"),
    ],
)
def test_a_bad_mooncake_row_is_named_by_file_and_line(tmp_path: Path, row: str, problem: str) -> None:
    for after in ("", "\r\n", "\n" + mooncake() + "\n"):
        error = refusal(written(tmp_path, f"{mooncake()}\n{row}{after}"))
        assert error.line == 2
        assert error.problem.startswith(problem)


def test_a_mooncake_arrival_that_steps_back_names_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "\n\n".join([mooncake(timestamp=3000), mooncake(timestamp=2999)]))
    error = refusal(path)
    assert str(error) == (f"{path}:3: arrives 0.001 s before the request on line 1; sort the trace by its timestamps")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_past_the_stack_is_refused(tmp_path: Path, opening: str) -> None:
    # How deep JSON may nest depends on the Python; that it ends in a refusal does not.
    assert refusal(written(tmp_path, f"{mooncake()}\n{opening * 100_000}\n")).line == 2


def test_a_stray_quote_is_reported_where_it_stands(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03,1,1", '2023-11-16 18:17:03,1,"1', *["2023-11-16 18:17:03,1,1"] * 50]
    assert refusal(written(tmp_path, azure(*rows))).line == 3


def test_bytes_that_are_no_text_are_named_by_column(tmp_path: Path) -> None:
    error = refusal(written(tmp_path, AZURE.encode() + b"\n2023-11-16 \xff,1,1"))
    assert (error.line, error.problem) == (4, "is not UTF-8 text (byte 0xff at column 12)")


def test_a_compressed_file_is_told_to_be_decompressed(tmp_path: Path) -> None:
    error = refusal(written(tmp_path, b"\x1f\x8b\x08\x00"))
    assert (error.line, error.problem) == (1, "is not UTF-8 text (byte 0x8b at column 2)")
    assert error.remedy.startswith("decompress")


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as handle:
        handle.truncate(2**30)
    tracemalloc.start()
    try:
        error = refusal(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * LINE_BYTES_MAX
    assert (error.line, error.problem) == (1, f"is longer than {LINE_BYTES_MAX} bytes")


def test_a_workload_error_survives_pickling(tmp_path: Path) -> None:
    error = refusal(tmp_path / "absent")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, WorkloadError) and isinstance(copy, ValueError)
    assert str(copy) == str(error) and (copy.path, copy.line) == (error.path, 0)


# Values


def test_a_request_is_frozen_and_slotted() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        request().prompt_tokens = 7  # type: ignore[misc]
    assert not hasattr(request(), "__dict__")


@pytest.mark.parametrize(
    "changed",
    [
        {"id": ""},
        {"id": 7},
        {"arrival_s": -0.5},
        {"arrival_s": float("nan")},
        {"arrival_s": float("inf")},
        {"arrival_s": "0"},
        {"prompt_tokens": 0},
        {"prompt_tokens": 7.0},
        {"prompt_tokens": TOKENS_MAX + 1},
        {"output_tokens": 0},
        {"output_tokens": True},
        {"blocks": [0, 1]},
        {"blocks": (0,)},
        {"blocks": (0, 1, 2)},
        {"blocks": (0, -1)},
        {"where": ""},
        {"where": "trace"},
        {"where": "trace:0"},
        {"where": ":1"},
    ],
)
def test_a_request_that_exists_is_valid(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(changed))} must "):
        request(**changed)


# Synthetic load


@given(st.integers(), st.integers(1, 40))
def test_synthetic_load_is_a_function_of_its_seed(seed: int, requests: int) -> None:
    made = synthetic(requests, seed=seed)
    assert made == synthetic(requests, seed=seed)
    assert made != synthetic(requests, seed=seed + 1)
    assert made == synthetic(50, seed=seed)[:requests]
    assert [r.id for r in made] == [f"r{index}" for index in range(requests)]
    assert [r.where for r in made] == [f"synthetic(seed={seed}):{index + 1}" for index in range(requests)]


def test_synthetic_load_is_the_same_on_every_machine() -> None:
    made = synthetic(3, seed=7, shared_prefix_share=1.0, prompt_tokens=(600, 5000))
    assert [(r.prompt_tokens, r.output_tokens) for r in made] == [(691, 43), (632, 31), (652, 27)]
    assert [r.arrival_s for r in made] == pytest.approx([0.0, 0.09104315551049133, 0.10552620478956015], rel=1e-12)
    assert [r.blocks for r in made] == [(0, 1), (0, 2), (0, 3)]


@given(
    prompt=st.tuples(counts, counts).map(sorted),
    output=st.tuples(counts, counts).map(sorted),
    seed=st.integers(0, 100),
)
def test_synthetic_lengths_stay_in_their_bounds(prompt: list[int], output: list[int], seed: int) -> None:
    # Blocks of prompts of any length would take gigabytes.
    low, high = prompt[0] % 5000 + 1, prompt[0] % 5000 + 1 + prompt[1] % 5000
    made = synthetic(20, seed=seed, prompt_tokens=(low, high), output_tokens=(output[0], output[1]))
    assert all(low <= r.prompt_tokens <= high for r in made)
    assert all(output[0] <= r.output_tokens <= output[1] for r in made)


def test_synthetic_lengths_reach_both_bounds() -> None:
    assert {r.prompt_tokens for r in synthetic(500, seed=0, prompt_tokens=(1, 4))} == {1, 2, 3, 4}
    assert {r.prompt_tokens for r in synthetic(5, seed=0, prompt_tokens=(9, 9))} == {9}


def test_synthetic_lengths_have_a_heavy_tail() -> None:
    lengths = sorted(r.prompt_tokens for r in synthetic(4000, seed=0, prompt_tokens=(100, 10_000)))
    median, mean = lengths[2000], sum(lengths) / 4000
    assert 180 <= median <= 220
    assert mean > 2 * median
    assert 20 <= sum(length > 5000 for length in lengths) <= 100


def test_synthetic_arrivals_start_at_zero_and_keep_the_rate() -> None:
    made = synthetic(4000, seed=0, rate_per_s=8.0)
    assert made[0].arrival_s == 0.0
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(made))
    assert 3999 / made[-1].arrival_s == pytest.approx(8.0, rel=0.1)


def test_the_share_of_shared_prefixes_is_kept_and_moves_nothing_else() -> None:
    shares = {}
    for share in (0.0, 0.4, 1.0):
        made = synthetic(2000, seed=0, prompt_tokens=(512, 8192), shared_prefix_share=share)
        seen: set[int] = set()
        sharing = 0
        for r in made:
            sharing += r.blocks[0] in seen
            seen.update(r.blocks)
        shares[share] = sharing / 2000
        plain = synthetic(2000, seed=0, prompt_tokens=(512, 8192))
        assert [attrs.evolve(r, blocks=()) for r in made] == [attrs.evolve(r, blocks=()) for r in plain]
    assert shares == {0.0: 0.0, 0.4: pytest.approx(0.4, abs=0.05), 1.0: 1999 / 2000}


def test_a_synthetic_block_is_shared_only_whole_and_only_as_a_prefix() -> None:
    made = synthetic(500, seed=3, prompt_tokens=(100, 4000), shared_prefix_share=0.7)
    prefix_of: dict[int, tuple[int, ...]] = {}
    users: dict[int, list[TraceRequest]] = {}
    for r in made:
        for index, block in enumerate(r.blocks):
            assert prefix_of.setdefault(block, r.blocks[:index]) == r.blocks[:index]
            users.setdefault(block, []).append(r)
    shared = [(len(prefix_of[block]), using) for block, using in users.items() if len(using) > 1]
    assert shared
    for index, using in shared:
        assert all(r.prompt_tokens >= (index + 1) * BLOCK_TOKENS for r in using)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"requests": 0}, "requests must be at least 1"),
        ({"prompt_tokens": (0, 4)}, "prompt_tokens must be .low, high."),
        ({"prompt_tokens": (5, 4)}, "prompt_tokens must be .low, high."),
        ({"output_tokens": (1, TOKENS_MAX + 1)}, "output_tokens must be .low, high."),
        ({"rate_per_s": 0.0}, "rate_per_s must be finite and above 0"),
        ({"rate_per_s": float("inf")}, "rate_per_s must be finite and above 0"),
        ({"rate_per_s": float("nan")}, "rate_per_s must be finite and above 0"),
        ({"shared_prefix_share": -0.1}, "shared_prefix_share must be from 0 to 1"),
        ({"shared_prefix_share": 1.1}, "shared_prefix_share must be from 0 to 1"),
        ({"shared_prefix_share": float("nan")}, "shared_prefix_share must be from 0 to 1"),
    ],
)
def test_synthetic_refuses_arguments_outside_their_range(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        synthetic(**({"requests": 2, "seed": 0} | arguments))  # type: ignore[arg-type]


# Fitting


def test_a_request_that_exactly_fills_the_pool_fits() -> None:
    check_fits([request(prompt_tokens=60, output_tokens=4)], page_size=16, pages=4)
    with pytest.raises(WorkloadError):
        check_fits([request(prompt_tokens=60, output_tokens=5)], page_size=16, pages=4)


def test_nothing_always_fits() -> None:
    check_fits([], page_size=1, pages=1)


def test_the_first_request_that_cannot_fit_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, azure(*(f"2023-11-16 18:17:03,{prompt},10" for prompt in (100, 500, 900))), "odd:name.csv")
    requests = load_trace(path)
    check_fits(requests[:1], page_size=16, pages=8)
    with pytest.raises(WorkloadError) as caught:
        check_fits(requests, page_size=16, pages=8)
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert str(caught.value) == (
        f"{path}:3: request r1 needs 32 pages of 16 tokens (500 prompt + 10 output tokens), and the device pool has 8; "
        "raise --pages to 32 or --page-size to 64, or drop this request"
    )


@given(prompt=counts, output=counts, page_size=st.integers(1, 10**6), pages=st.integers(1, 10**6))
def test_following_the_advice_makes_a_request_fit(prompt: int, output: int, page_size: int, pages: int) -> None:
    requests = [request(prompt_tokens=prompt, output_tokens=output)]
    fits = prompt + output <= page_size * pages
    try:
        check_fits(requests, page_size=page_size, pages=pages)
        assert fits
    except WorkloadError:
        assert not fits
        check_fits(requests, page_size=page_size, pages=-(-(prompt + output) // page_size))
        check_fits(requests, page_size=-(-(prompt + output) // pages), pages=pages)


@pytest.mark.parametrize(("page_size", "pages"), [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_without_pages_or_tokens_is_an_error(page_size: int, pages: int) -> None:
    with pytest.raises(ValueError, match="page_size and pages must be at least 1"):
        check_fits([], page_size=page_size, pages=pages)


# The published traces


@pytest.mark.parametrize(
    ("name", "rows", "prompt_total", "output_total", "blocks", "last_arrival_s"),
    [
        ("azure_llm_2023_code.csv", 8_819, 18_059_974, 245_896, False, 3435.948056),
        ("azure_llm_2023_conv.csv", 19_366, 22_361_870, 4_088_665, False, 3501.721937),
        ("mooncake_conversation.jsonl", 12_031, 144_793_823, 4_122_048, True, 3536.999),
    ],
)
def test_the_published_traces_load_whole(
    name: str, rows: int, prompt_total: int, output_total: int, blocks: bool, last_arrival_s: float
) -> None:
    folder = os.environ.get("KVSTATE_TRACES")
    if not folder or not Path(folder, name).is_file():
        pytest.skip(f"KVSTATE_TRACES names no folder with {name}")
    requests = load_trace(Path(folder, name))
    assert len(requests) == rows
    assert requests[-1].arrival_s == last_arrival_s
    assert sum(r.prompt_tokens for r in requests) == prompt_total
    assert sum(r.output_tokens for r in requests) == output_total
    assert all(bool(r.blocks) == blocks for r in requests)
    assert load_trace(Path(folder, name), limit=300) == requests[:300]


# -- the tokens of a prompt


def named(tokens: int, *blocks: int, id: str = "r0") -> TraceRequest:
    return TraceRequest(id, 0.0, tokens, 1, blocks, "trace:1")


blocks_of_prompts = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(blocks_of_prompts, blocks_of_prompts, st.integers(1, BLOCK_TOKENS), st.integers(1, BLOCK_TOKENS))
def test_prompts_share_the_tokens_of_equal_blocks_and_no_others(
    one: list[int], two: list[int], rest: int, other_rest: int
) -> None:
    lengths = [BLOCK_TOKENS * (len(blocks) - 1) + last for blocks, last in ((one, rest), (two, other_rest))]
    first, second = (named(n, *blocks) for n, blocks in zip(lengths, (one, two), strict=True))
    left, right = prompt_tokens(first), prompt_tokens(second)
    assert (len(left), len(right)) == tuple(lengths)
    for place in range(min(lengths)):
        block, slot = divmod(place, BLOCK_TOKENS)
        assert (left[place] == right[place]) == (one[block] == two[block]), (block, slot)
    assert set(left) & set(right) <= {token for block in set(one) & set(two) for token in whole(block)}


def whole(block: int) -> tuple[int, ...]:
    return prompt_tokens(named(BLOCK_TOKENS, block))


def test_no_token_of_a_block_is_in_another_block_or_twice_in_one() -> None:
    tokens = [token for block in (0, 1, 2, TOKENS_MAX - 1, TOKENS_MAX) for token in whole(block)]
    assert len(set(tokens)) == len(tokens) == 5 * BLOCK_TOKENS


def test_what_names_no_blocks_shares_nothing() -> None:
    unnamed = [named(2000, id=f"r{index}") for index in range(50)]
    tokens = [token for request in unnamed for token in prompt_tokens(request)]
    assert len(set(tokens)) == 50 * 2000
    assert not set(tokens) & set(prompt_tokens(named(2000, 0, 1, 2, 3)))


def test_tokens_are_a_function_of_request_and_seed() -> None:
    for request in (named(700, 1, 2), named(700)):
        assert prompt_tokens(request) == prompt_tokens(attrs.evolve(request, arrival_s=4.0, where="other:9"))
        assert not set(prompt_tokens(request)) & set(prompt_tokens(request, seed=1))


@pytest.mark.slow
@given(st.integers(0, TOKENS_MAX), st.text(min_size=1), st.integers())
def test_tokens_fit_into_64_bits_with_a_sign(block: int, id: str, seed: int) -> None:
    for request in (named(3, block), named(3, id=id), named(1 + 2**20, id=id)):
        tokens = prompt_tokens(request, seed=seed)
        assert 0 <= min(tokens) <= max(tokens) < 2**63
        assert all(isinstance(token, int) for token in tokens[:3])


def test_the_longest_prompt_is_no_special_case() -> None:
    many = 200
    request = named(BLOCK_TOKENS * many - 1, *range(many))
    tokens = prompt_tokens(request)
    assert len(tokens) == len(set(tokens)) == request.prompt_tokens
    assert tokens[: 2 * BLOCK_TOKENS] == prompt_tokens(named(2 * BLOCK_TOKENS, 0, 1))
