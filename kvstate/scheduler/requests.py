"""What a scheduler is asked for, what it answers, and what it knows of a request in between."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

import attrs

from kvstate.prefix import Key, page_keys
from kvstate.refusals import Refusal
from kvstate.types import RequestConfig, Segment, StreamId
from kvstate.validators import non_empty, whole


def _tokens(values: Iterable[int]) -> tuple[int, ...]:
    tokens = tuple(values)
    try:
        array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens are whole numbers of 64 bits: {error}") from None
    return tokens


@attrs.frozen
class GenerationRequest:
    """A prompt, and how much to generate behind it.

    An empty prompt, or nothing to generate, is a value that `Scheduler.add` refuses: it comes from a user.

    Parameters
    ----------
    id
        Sample k > 0 is known to the manager as ``f"{id}#{k}"``.
    prompt
        Token ids.
    tokens_max
        Tokens generated per sample, at most.
    samples
        Continuations of the prompt, each by itself.
    stop
        Token ids that end a sample; the token that does is part of the output.
    config
        For the manager; its `cache_salt` separates prefixes. A retention policy for "main" is respected; what such a
        request generates depends on when its tokens leave, so on the chunks that it was computed in.
    """

    id: str = attrs.field(validator=non_empty)
    prompt: tuple[int, ...] = attrs.field(converter=_tokens)
    tokens_max: int = attrs.field(validator=whole)
    samples: int = attrs.field(default=1, validator=whole)
    stop: tuple[int, ...] = attrs.field(default=(), converter=_tokens)
    config: RequestConfig | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(RequestConfig))
    )

    def key(self, sample: int) -> str:
        """Return the id under which the manager knows a sample."""
        return f"{self.id}#{sample}" if sample else self.id

    @property
    def keys(self) -> tuple[str, ...]:
        """The manager's ids of all samples."""
        return tuple(self.key(sample) for sample in range(self.samples))


@attrs.frozen(kw_only=True)
class EmptyPrompt(Refusal):
    """The prompt has no tokens: there is nothing to compute the first token from."""


@attrs.frozen(kw_only=True)
class NothingToGenerate(Refusal):
    """Nothing is asked for: `tokens_max` and `samples` must be at least 1."""

    tokens_max: int
    samples: int


@attrs.frozen(kw_only=True)
class DuplicateRequest(Refusal):
    """A request of that id is live; `id` is the manager's, which may be that of another request's sample."""

    id: str

    @property
    def reason(self) -> str:
        return f"a request {self.id!r} is live; cancel it, or wait until it has finished"


@attrs.frozen
class Added:
    """A request that was accepted."""

    request: str


class Finish(enum.Enum):
    """How a sample ended."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"


@attrs.frozen
class Timings:
    """Seconds of the scheduler's clock; None: not yet. A soft reset changes none of them."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@attrs.frozen
class Counts:
    """What a sample went through.

    Parameters
    ----------
    offloads
        Times its pages went to the host.
    soft_resets
        Times it had to begin again with the tokens it had.
    recomputed_tokens
        Tokens stored that had been stored before.
    cached_tokens
        Tokens found in the prefix cache, over all its starts.
    late_tokens
        Tokens that the model returned after they had been given up.
    """

    offloads: int = 0
    soft_resets: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    late_tokens: int = 0


@attrs.frozen
class Output:
    """What one sample of a request has generated so far: everything behind the prompt as it was first given."""

    request: str
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish: Finish | None
    error: str
    timings: Timings
    counts: Counts


class Phase(enum.Enum):
    """Where a sample stands."""

    WAITING = "waiting, nothing stored"
    FORKING = "waiting for its prompt's first sample"
    ACTIVE = "active"
    OFFLOADED = "waiting, on the host"
    FINISHED = "finished"


class Work:
    """One sample of a request, while it is live.

    `tokens` are all known ones, the prompt first, and only ever grow: that they are computed again after a soft reset
    changes nothing of them. `stored` counts those whose keys and values are committed, `ahead` those of open steps that
    still count, and `pending` tells that one of those will sample the token behind the last known::

        tokens   | prompt ……………………… | generated … |
                 0     stored   stored + ahead      len(tokens)
    """

    __slots__ = (
        "ahead", "anew", "arrival_s", "cached_tokens", "children", "chunk", "decode", "error", "finish", "finished_s",
        "first", "first_scheduled_s", "first_token_s", "key", "keyed", "late_tokens", "limit", "logprobs",
        "moved_at", "offloads", "pending", "phase", "prefix", "rank", "recomputed_tokens", "reload_failures", "request",
        "sample", "soft_resets", "stop", "stored", "stored_most", "stream", "tokens",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, sample: int, rank: int, chunk: int, arrival_s: float) -> None:
        self.request = request
        self.sample = sample
        self.key = request.key(sample)
        # Its place in the order of arrival: the age that eviction goes by, whatever it has been through since.
        self.rank = rank
        # Tokens of one step, at most.
        self.chunk = chunk
        self.stream = StreamId(self.key)
        self.decode = Segment(self.key)
        self.stop = frozenset(request.stop)
        self.tokens = list(request.prompt)
        self.first = len(self.tokens)
        self.limit = self.first + request.tokens_max
        self.logprobs: list[float] | None = None
        self.phase = Phase.WAITING
        self.stored = 0
        self.ahead = 0
        self.pending = False
        # Tokens whose pages have been offered to the prefix cache; and the most that was ever stored.
        self.keyed = 0
        self.stored_most = 0
        # Keys of the whole pages of all but the last token, once they were asked for.
        self.prefix: tuple[Key, ...] | None = None
        # Samples that are forked from this one once it has its prompt.
        self.children: list[Work] = []
        self.reload_failures = 0
        # That it starts on no found pages, leaves none, and runs no step ahead while it is alone; and how far it was
        # when its pages were moved together.
        self.anew = False
        self.moved_at = (0, -1)
        self.finish: Finish | None = None
        self.error = ""
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.offloads = 0
        self.soft_resets = 0
        self.recomputed_tokens = 0
        self.cached_tokens = 0
        self.late_tokens = 0

    def __repr__(self) -> str:
        return f"<{self.key} {self.phase.value}, {self.stored} of {len(self.tokens)} tokens stored>"

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.first

    def prefix_keys(self, page_size: int) -> tuple[Key, ...]:
        """Return the keys under which the tokens in front of the last known one may be found."""
        if self.prefix is None:
            salt = self.request.config.cache_salt if self.request.config is not None else ""
            self.prefix = page_keys(self.tokens[:-1], page_size, salt)
        return self.prefix

    def soft_reset(self) -> None:
        """Begin again with all known tokens as the prompt; everything else about the request stays."""
        self.stored_most = max(self.stored_most, self.stored)
        self.stored = self.ahead = self.keyed = self.reload_failures = 0
        self.pending = False
        self.prefix = None
        self.soft_resets += 1
        self.phase = Phase.WAITING

    def output(self, generated: int | None = None) -> Output:
        """Return what it has generated; of that, the first `generated` tokens."""
        stop = None if generated is None else self.first + generated
        return Output(
            self.request.id,
            self.sample,
            tuple(self.tokens[self.first : stop]),
            tuple(self.logprobs[:generated]) if self.logprobs is not None else None,
            self.finish,
            self.error,
            Timings(self.arrival_s, self.first_scheduled_s, self.first_token_s, self.finished_s),
            Counts(
                self.offloads, self.soft_resets, self.recomputed_tokens, self.cached_tokens, self.late_tokens
            ),
        )  # fmt: skip


def refused_output(request: GenerationRequest, refusal: Refusal, now_s: float) -> Output:
    """Return the output of a request that `add` refused."""
    return Output(request.id, 0, (), None, Finish.REFUSED, str(refusal), Timings(now_s, finished_s=now_s), Counts())
