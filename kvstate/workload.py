"""Serving traces and synthetic load: what arrives, when, and how many tokens it brings.

Two public formats are read, told apart by their content:

=============  =============================================================  ==========================
format         a file looks like                                              source
=============  =============================================================  ==========================
Azure CSV      the header ``TIMESTAMP,ContextTokens,GeneratedTokens``         AzurePublicDataset
Mooncake JSONL one object per line: ``timestamp`` (ms), ``input_length``,     kvcache-ai/Mooncake, FAST25
               ``output_length``, ``hash_ids``
=============  =============================================================  ==========================
"""

import csv
import hashlib
import json
import math
import os
import random
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, count, islice
from typing import BinaryIO

from attrs import Attribute, field, frozen

BLOCK_TOKENS = 512
"""Tokens named by one entry of `TraceRequest.blocks` (Mooncake's unit; the last block of a prompt may be partial)."""

TOKENS_MAX = 2**31 - 1
"""Largest token count believed: page tables and kernels index tokens with 32 bits."""

LINE_BYTES_MAX = 2**20
"""Longest line read, so that a weights file or a device given by mistake is refused instead of loaded into memory."""

_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE_KEYS = ["timestamp", "input_length", "output_length", "hash_ids"]
_EXPECTED = f"expected the header {','.join(_AZURE_COLUMNS)} (Azure) or lines of JSON objects (Mooncake)"
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_WHERE = re.compile(r".+:[1-9][0-9]*", re.ASCII | re.DOTALL)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_TIMESTAMP_MS_MAX = 2**53
_UNNAMED = 2**62
"""Tokens from here on are in no named block: those are below 2**61 + TOKENS_MAX * BLOCK_TOKENS."""

# Messages quote what was found, and that may be a megabyte, or nested past the recursion limit.
_quoted = reprlib.Repr()
_quoted.maxstring, _quoted.maxlist = 60, 8


class WorkloadError(ValueError):
    """A trace cannot be read, or a request of it can never be served.

    Parameters
    ----------
    path : str
        The trace, as it was named by the caller.
    line : int
        Line in it, from 1; 0 where the file itself is at fault (missing, a directory, not readable).
    problem : str
        What is wrong.
    remedy : str
        What to do next.
    """

    def __init__(self, path: str, line: int, problem: str, remedy: str) -> None:
        # All four are args, so that the error survives pickling on its way out of a worker process.
        super().__init__(path, line, problem, remedy)
        self.path = path
        self.line = line
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}; {self.remedy}"


def _is_count(value: object, least: int) -> bool:
    # bool is an int to Python, and no count to anybody who writes a trace.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= TOKENS_MAX


def _check_id(_: object, attribute: "Attribute[str]", value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{attribute.name} must be a non-empty string (got {_quoted.repr(value)})")


def _check_arrival(_: object, attribute: "Attribute[float]", value: object) -> None:
    if not isinstance(value, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{attribute.name} must be a finite float of seconds, at least 0 (got {_quoted.repr(value)})")


def _check_tokens(_: object, attribute: "Attribute[int]", value: object) -> None:
    if not _is_count(value, 1):
        raise ValueError(f"{attribute.name} must be an int from 1 to {TOKENS_MAX} (got {_quoted.repr(value)})")


def _check_blocks(request: "TraceRequest", attribute: "Attribute[tuple[int, ...]]", value: object) -> None:
    if not isinstance(value, tuple) or not all(_is_count(block, 0) for block in value):
        raise ValueError(f"{attribute.name} must be a tuple of ints from 0 to {TOKENS_MAX}")
    if value and len(value) != _ceil_div(request.prompt_tokens, BLOCK_TOKENS):
        raise ValueError(
            f"{attribute.name} must be empty or name each {BLOCK_TOKENS}-token block of {request.prompt_tokens} "
            f"prompt tokens (got {len(value)} blocks)"
        )


def _check_where(_: object, attribute: "Attribute[str]", value: object) -> None:
    if not isinstance(value, str) or not _WHERE.fullmatch(value):
        raise ValueError(f"{attribute.name} must read 'file:line', lines from 1 (got {_quoted.repr(value)})")


@frozen
class TraceRequest:
    """One request of a workload.

    Parameters
    ----------
    id : str
        Unique in its workload: ``r0``, ``r1``, … in order of arrival.
    arrival_s : float
        Seconds since the first arrival of the workload, at least 0.
    prompt_tokens : int
        Length of the prompt in tokens, at least 1.
    output_tokens : int
        Tokens to generate, at least 1.
    blocks : tuple of int
        Names of the prompt's `BLOCK_TOKENS`-token blocks, in order, the last one possibly partial: prompts that begin
        with the same names begin with the same tokens. Empty where the workload does not say.
    where : str
        ``file:line``, for messages.

    Raises
    ------
    ValueError
        If a value is not as above. A count is never above `TOKENS_MAX`.
    """

    id: str = field(validator=_check_id)
    arrival_s: float = field(validator=_check_arrival)
    prompt_tokens: int = field(validator=_check_tokens)
    output_tokens: int = field(validator=_check_tokens)
    blocks: tuple[int, ...] = field(validator=_check_blocks)
    where: str = field(validator=_check_where)


_Fail = Callable[[str, str], WorkloadError]
_Row = tuple[int, int, int, tuple[int, ...]]  # timestamp in ns, prompt tokens, output tokens, blocks


def load_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> tuple[TraceRequest, ...]:
    r"""Read a serving trace, Azure CSV or Mooncake JSONL, recognised by its first line and never by its name.

    Lines may end in CRLF or LF, the last one in neither; blank lines are skipped and a byte order mark is accepted.
    Nothing past the last request taken is read, so the cost follows `limit`, and so do the errors.

    Arrivals must not go backwards; equal ones are fine. All published traces are ordered, so a step back means a
    damaged or spliced file, and sorting it would hide that. For the same reason a request that generates nothing is
    an error: published traces have none. Azure timestamps carry 1 to 9 fractional digits, all of them kept, and
    optionally a UTC offset (UTC where there is none); Mooncake's are milliseconds, whole or not.

    Parameters
    ----------
    path : str or os.PathLike
        The trace.
    limit : int, optional
        Take the first `limit` requests, or all of a file that has fewer. At least 1.

    Returns
    -------
    tuple of TraceRequest
        In file order, at least one. Azure traces name no blocks.

    Raises
    ------
    WorkloadError
        If the file cannot be read, is of neither format, holds no request, or a line of it is wrong.
    ValueError
        If `limit` is below 1.

    References
    ----------
    .. [1] https://github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023)
    .. [2] https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trace = pathlib.Path(folder, "one.csv")
    ...     _ = trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    ...     [(request.id, request.arrival_s, request.prompt_tokens) for request in load_trace(trace)]
    [('r0', 0.0, 374)]
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 (got {limit}); leave it out to take the whole trace")
    name = os.fspath(path)
    try:
        with open(name, "rb") as handle:
            return tuple(islice(_requests(name, _lines(name, handle)), limit))
    except OSError as error:
        raise WorkloadError(
            name, 0, f"cannot be read ({error.strerror})", "give the path of a readable trace file"
        ) from error


def synthetic(
    requests: int,
    *,
    seed: int,
    prompt_tokens: tuple[int, int] = (128, 4096),
    output_tokens: tuple[int, int] = (16, 512),
    rate_per_s: float = 5.0,
    shared_prefix_share: float = 0.0,
) -> tuple[TraceRequest, ...]:
    """Make up a workload: Poisson arrivals, heavy-tailed lengths, prompts that continue earlier ones.

    Lengths follow a bounded Pareto law with exponent 1 (half of them below about twice the lower bound, a few near the
    upper one). A request chosen to share repeats the whole blocks of one earlier request, as far as both prompts reach,
    so prompts below `BLOCK_TOKENS` share nothing. Arrivals and lengths do not depend on `shared_prefix_share`, and
    fewer requests of one seed are a prefix of more.

    Parameters
    ----------
    requests : int
        How many, at least 1.
    seed : int
        Same arguments and seed, same workload.
    prompt_tokens, output_tokens : tuple of int
        Lowest and highest length in tokens, both included.
    rate_per_s : float
        Mean arrivals per second, above 0.
    shared_prefix_share : float
        Probability, 0 to 1, that a request continues an earlier one.

    Returns
    -------
    tuple of TraceRequest
        All with blocks named.

    Raises
    ------
    ValueError
        If an argument is outside its range.

    Examples
    --------
    >>> [request.prompt_tokens for request in synthetic(4, seed=0, prompt_tokens=(8, 64))]
    [23, 25, 14, 39]
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1 (got {requests})")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high <= TOKENS_MAX:
            raise ValueError(f"{name} must be (low, high) with 1 <= low <= high <= {TOKENS_MAX} (got {(low, high)})")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ValueError(f"rate_per_s must be finite and above 0 (got {rate_per_s})")
    if not 0 <= shared_prefix_share <= 1:
        raise ValueError(f"shared_prefix_share must be from 0 to 1 (got {shared_prefix_share})")
    generator = random.Random(seed)
    made: list[TraceRequest] = []
    arrival_s, block = 0.0, 0
    for index in range(requests):
        # Five draws per request, used or not, so that no argument shifts what the others get.
        gap, prompt_draw, output_draw, sharing, parent_draw = (generator.random() for _ in range(5))
        if index:
            arrival_s -= math.log(1 - gap) / rate_per_s
        prompt = _heavy_tailed(prompt_draw, *prompt_tokens)
        shared: tuple[int, ...] = ()
        if made and sharing < shared_prefix_share:
            parent = made[int(parent_draw * len(made))]
            shared = parent.blocks[: min(parent.prompt_tokens, prompt) // BLOCK_TOKENS]
        fresh = _ceil_div(prompt, BLOCK_TOKENS) - len(shared)
        made.append(
            TraceRequest(
                id=f"r{index}",
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                output_tokens=_heavy_tailed(output_draw, *output_tokens),
                blocks=(*shared, *range(block, block + fresh)),
                where=f"synthetic(seed={seed}):{index + 1}",
            )
        )
        block += fresh
    return tuple(made)


def prompt_tokens(request: TraceRequest, *, seed: int = 0) -> tuple[int, ...]:
    """Return the tokens of a prompt: public traces name blocks of tokens, and no text.

    A block is the same tokens wherever its name appears, and no token of it appears in another block, so two prompts
    begin with the same tokens exactly as far as they name the same blocks. A request that names none shares nothing
    with any other. Seeds are workloads of their own: what is named alike under two of them is different.

    Parameters
    ----------
    request : TraceRequest
        Of any workload; what names no blocks is told apart by its id.
    seed : int
        Same request and seed, same tokens.

    Returns
    -------
    tuple of int
        ``request.prompt_tokens`` whole numbers from 0 to 2**63 − 1: no vocabulary is that large, but none could name
        every block of a trace apart.

    Examples
    --------
    >>> first, second = synthetic(2, seed=3, prompt_tokens=(1500, 1600), shared_prefix_share=1.0)
    >>> first.blocks, second.blocks
    ((0, 1, 2, 3), (0, 1, 4))
    >>> one, two = prompt_tokens(first), prompt_tokens(second)
    >>> one[:1024] == two[:1024], set(one[1024:]) & set(two)
    (True, set())
    """
    if not request.blocks:
        first = _UNNAMED + _digest(f"{seed}/{request.id}")
        return tuple(range(first, first + request.prompt_tokens))
    origin = _digest(f"{seed}")
    starts = (origin + block * BLOCK_TOKENS for block in request.blocks)
    tokens = chain.from_iterable(range(start, start + BLOCK_TOKENS) for start in starts)
    return tuple(islice(tokens, request.prompt_tokens))


def check_fits(requests: Iterable[TraceRequest], *, page_size: int, pages: int) -> None:
    """Refuse a workload with a request that could never finish, before anything runs.

    Parameters
    ----------
    requests : iterable of TraceRequest
        Checked in order, counting no sharing.
    page_size : int
        Tokens per page, at least 1.
    pages : int
        Device pages that can be granted (the sink is not one of them), at least 1.

    Raises
    ------
    WorkloadError
        For the first request whose prompt and output together need more than `pages` pages.
    ValueError
        If `page_size` or `pages` is below 1.

    Examples
    --------
    >>> check_fits(synthetic(3, seed=0), page_size=16, pages=16)
    Traceback (most recent call last):
    ...
    kvstate.workload.WorkloadError: synthetic(seed=0):1: request r0 needs 32 pages of 16 tokens (481 prompt + 27
    output tokens), and the device pool has 16; raise --pages to 32 or --page-size to 32, or drop this request
    """
    if page_size < 1 or pages < 1:
        raise ValueError(f"page_size and pages must be at least 1 (got page_size={page_size}, pages={pages})")
    for request in requests:
        tokens = request.prompt_tokens + request.output_tokens
        needed = _ceil_div(tokens, page_size)
        if needed > pages:
            path, _, line = request.where.rpartition(":")
            raise WorkloadError(
                path,
                int(line),
                f"request {request.id} needs {needed} pages of {page_size} tokens ({request.prompt_tokens} prompt + "
                f"{request.output_tokens} output tokens), and the device pool has {pages}",
                f"raise --pages to {needed} or --page-size to {_ceil_div(tokens, pages)}, or drop this request",
            )


def _requests(path: str, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, its format decided by the first line that is not blank."""
    first_line, text = next(lines, (0, ""))
    if not text:
        raise WorkloadError(path, 1, "the file is empty", _EXPECTED)
    read_row: Callable[[_Fail, str], _Row] = _azure_row
    rows: Iterator[tuple[int, str]] = lines
    if text.lstrip().startswith("{"):
        read_row, rows = _mooncake_row, chain([(first_line, text)], lines)
    else:
        _check_azure_header(partial(WorkloadError, path, first_line), text)

    first_ns = previous_ns = previous_line = 0
    index = -1
    for index, (line, text) in enumerate(rows):
        fail = partial(WorkloadError, path, line)
        arrival_ns, prompt, output, blocks = read_row(fail, text)
        if index == 0:
            first_ns = arrival_ns
        elif arrival_ns < previous_ns:
            raise fail(
                f"arrives {(previous_ns - arrival_ns) / _NS_PER_S:g} s before the request on line {previous_line}",
                "sort the trace by its timestamps",
            )
        previous_ns, previous_line = arrival_ns, line
        # int / int rounds once, correctly, so no digit of the trace is lost on the way.
        arrival_s = (arrival_ns - first_ns) / _NS_PER_S
        yield TraceRequest(f"r{index}", arrival_s, prompt, output, blocks, f"{path}:{line}")
    if index < 0:
        raise WorkloadError(path, first_line + 1, "the file ends after its header", "give a trace with requests in it")


def _lines(path: str, handle: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each line that is not blank, reading no further than asked."""
    for line in count(1):
        fail = partial(WorkloadError, path, line)
        raw = handle.readline(LINE_BYTES_MAX + 1)
        if not raw:
            return
        if len(raw) > LINE_BYTES_MAX:
            raise fail(f"is longer than {LINE_BYTES_MAX} bytes", _EXPECTED)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise fail(
                f"is not UTF-8 text (byte 0x{raw[error.start]:02x} at column {error.start + 1})",
                "decompress the file or convert it to UTF-8",
            ) from error
        if line == 1:
            text = text.removeprefix("\ufeff")
        if text.strip():
            yield line, text


def _csv_fields(fail: _Fail, text: str) -> list[str]:
    """Split one line. Each has its own reader: a stray quote then costs a line, not the rest of the file."""
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise fail(f"is not a line of CSV ({error})", "repair the line, or drop it") from error


def _check_azure_header(fail: _Fail, text: str) -> None:
    found = _csv_fields(fail, text)
    if found != _AZURE_COLUMNS:
        raise fail(f"has the columns {_quoted.repr(found)}", _EXPECTED)


def _azure_row(fail: _Fail, text: str) -> _Row:
    """Read ``2023-11-16 18:17:03.9799600,4808,10``."""
    fields = _csv_fields(fail, text)
    if len(fields) != len(_AZURE_COLUMNS):
        raise fail(
            f"has {len(fields)} of the {len(_AZURE_COLUMNS)} fields {','.join(_AZURE_COLUMNS)}",
            "the line may be cut off or joined with another: repair it, or drop it",
        )
    timestamp, *counts = fields
    # int() would take " 7", "1_000" and other scripts' digits; ten digits are enough for TOKENS_MAX.
    numbers = [int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text for text in counts]
    prompt, output = (_tokens(fail, *pair) for pair in zip(_AZURE_COLUMNS[1:], numbers, strict=True))
    return _azure_ns(fail, timestamp), prompt, output, ()


def _azure_ns(fail: _Fail, timestamp: str) -> int:
    """Return ns since 1970. The traces write seven fractional digits, and datetime keeps six, so it sees none."""
    try:
        match = _AZURE_TIME.fullmatch(timestamp)
        if match is None:
            raise ValueError("it reads YYYY-MM-DD hh:mm:ss.fffffff")
        date, time, fraction, offset = match.groups()
        whole = datetime.fromisoformat(f"{date}T{time}{offset or '+00:00'}")
    except ValueError as error:
        raise fail(
            f"TIMESTAMP is {_quoted.repr(timestamp)}, no time that exists ({error})", "repair the line, or drop it"
        ) from error
    return (whole - _EPOCH) // timedelta(seconds=1) * _NS_PER_S + int((fraction or "").ljust(9, "0"))


def _mooncake_row(fail: _Fail, text: str) -> _Row:
    """Read ``{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, …]}``."""
    record = _json_object(fail, text)
    missing = [key for key in _MOONCAKE_KEYS if key not in record]
    if missing:
        raise fail(
            f"has no {', '.join(missing)} (found the keys {_quoted.repr(list(record))})",
            f"each line needs {', '.join(_MOONCAKE_KEYS)}",
        )
    timestamp, prompt, output, blocks = (record[key] for key in _MOONCAKE_KEYS)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp <= _TIMESTAMP_MS_MAX:
        raise fail(
            f"timestamp is {_quoted.repr(timestamp)}, not milliseconds from 0 to 2**53", "repair the line, or drop it"
        )
    prompt = _tokens(fail, "input_length", prompt)
    output = _tokens(fail, "output_length", output)
    if not isinstance(blocks, list) or not all(_is_count(block, 0) for block in blocks):
        raise fail(
            f"hash_ids is {_quoted.repr(blocks)}, not a list of whole numbers from 0 to {TOKENS_MAX}",
            "repair the line, or drop it",
        )
    named = _ceil_div(prompt, BLOCK_TOKENS)
    if len(blocks) != named:
        raise fail(
            f"hash_ids names {len(blocks)} blocks, and {prompt} prompt tokens have {named} of {BLOCK_TOKENS} tokens",
            "convert a trace with another block size first",
        )
    return round(timestamp * _NS_PER_MS), prompt, output, tuple(blocks)


def _json_object(fail: _Fail, text: str) -> dict[str, object]:
    try:
        record: object = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise fail(
            f"is not one JSON object ({error.msg}: column {error.colno})",
            "the line may be cut off or joined with another: repair it, or drop it",
        ) from error
    except (ValueError, RecursionError) as error:
        # Python refuses integers past 4,300 digits and nesting past its stack, both as errors of their own.
        raise fail("has a number too long or nesting too deep to read", "repair the line, or drop it") from error
    if not isinstance(record, dict):
        raise fail(f"is {_quoted.repr(record)}, not a JSON object", "repair the line, or drop it")
    return record


def _tokens(fail: _Fail, name: str, value: object) -> int:
    if isinstance(value, int) and _is_count(value, 1):
        return value
    raise fail(
        f"{name} is {_quoted.repr(value)}, not a whole number from 1 to {TOKENS_MAX}", "repair the line, or drop it"
    )


def _heavy_tailed(draw: float, low: int, high: int) -> int:
    """Map `draw`, uniform in [0, 1), to a bounded Pareto length with exponent 1.

    Plain arithmetic, no power function: the same length on every platform.
    """
    end = high + 1
    return min(high, int(low * end / (end - draw * (end - low))))


def _digest(text: str) -> int:
    """Return a number below 2**61 that another text gives with no probability worth a thought."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 3


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)
