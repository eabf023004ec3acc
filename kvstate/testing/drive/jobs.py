"""What each request of a driven workload does, written down before anything runs; and the pages that takes.

A request computes its prompt in chunks, then decodes token by token; some also draft a token ahead, and some fork onto
a second label. Its final content is the same whatever the threads do.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence

import attrs

from kvstate.types import MAIN, Segment, Step, StreamFork, StreamId
from kvstate.workload import TraceRequest

BEAM = "beam"
FORK_EVERY = 8
"""Of so many requests one forks: every other of them once, at the end of its prompt, the rest again and again."""
REFORK_EVERY = 12
"""Decode steps between two pre-forks of one request."""

_DRAFT = 1 << 32
_OWNER = 1 << 33


class Style(enum.Enum):
    """What a request does besides prefill and decode."""

    PLAIN = "plain"
    DRAFTS = "drafts"
    """Computes a draft token behind each token; at some positions it is not accepted."""
    POST_FORK = "post-fork"
    """Forks onto a second label at the end of its prompt; both decode from there."""
    PRE_FORKS = "pre-forks"
    """Forks onto a second label every so many steps; both decode in between."""

    @property
    def forks(self) -> bool:
        """True when there is a second label."""
        return self in (Style.POST_FORK, Style.PRE_FORKS)


def style_of(index: int) -> Style:
    """Return what the request at place `index` of a workload does.

    >>> [style_of(index).value for index in (0, 1, 2, 8)]
    ['pre-forks', 'drafts', 'plain', 'post-fork']
    """
    if index % FORK_EVERY == 0:
        return Style.PRE_FORKS if index % (2 * FORK_EVERY) == 0 else Style.POST_FORK
    return Style.DRAFTS if index % 4 == 1 else Style.PLAIN


class Phase(enum.Enum):
    """Where a job stands, to the planner."""

    WAITING = "waiting"
    RUNNING = "running"
    OFFLOADING = "offloading"
    OFFLOADED = "offloaded"
    RELOADING = "reloading"
    FINISHED = "finished"


@attrs.define(eq=False)
class Part:
    """What one step does for one job: `span` tokens on each of `labels`, which stand at `places` of the step.

    `start` is what the planner believes until the machine has said (a draft may have been refused meanwhile).
    `beam_before` is the launcher's: what the second label held before a pre-fork.
    """

    job: Job
    start: int
    span: int
    labels: tuple[str, ...]
    pre_fork: bool = False
    post_fork: bool = False
    places: range = range(0)
    beam_before: list[int] | None = None

    @property
    def stop(self) -> int:
        """Tokens on each label when everything is accepted."""
        return self.start + self.span


@attrs.define(eq=False)
class Job:
    """One request on its way. The planner owns all but `content` and `tables`, which are the launcher's.

    Parameters
    ----------
    request
        From the workload.
    index
        Its place there; with it, the stamps.
    style
        What it does besides prefill and decode.
    """

    request: TraceRequest
    index: int
    style: Style
    phase: Phase = Phase.WAITING
    stored: int = 0
    pending: deque[Part] = attrs.field(factory=deque)
    leases: int = 0
    unmovable: bool = False
    content: dict[str, list[int]] = attrs.field(factory=lambda: {MAIN: [], BEAM: []})
    tables: tuple[tuple[tuple[int, ...], ...], ...] = ()
    _segments: dict[tuple[str, int], Segment] = attrs.field(factory=dict)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def total(self) -> int:
        """Tokens of each label in the end: every generated token is stored."""
        return self.request.prompt_tokens + self.request.output_tokens

    def next_part(self, budget: int) -> Part | None:
        """Return what comes after all that is planned, `budget` prompt tokens at most; None: nothing for now."""
        start = self.pending[-1].stop if self.pending else self.stored
        left = self.total - start
        prompt = self.request.prompt_tokens - start
        if not left or (prompt > 0 and not budget):
            return None
        if self.pending and self.pending[-1].post_fork:
            # No step may name the target before the fork has its result (ForkPending).
            return None
        if prompt > 0:
            span = min(prompt, budget)
            return Part(self, start, span, (MAIN,), post_fork=self.style is Style.POST_FORK and span == prompt)
        if self.style is Style.DRAFTS:
            return Part(self, start, min(left, 2), (MAIN,))
        if self.style is Style.PLAIN:
            return Part(self, start, 1, (MAIN,))
        return Part(
            self, start, 1, (MAIN, BEAM), pre_fork=self.style is Style.PRE_FORKS and -prompt % REFORK_EVERY == 0
        )

    def accepts(self, start: int, span: int) -> int:
        """Return how many tokens of a part that starts at `start` count."""
        draft = self.style is Style.DRAFTS and span == 2 and start >= self.request.prompt_tokens
        return 1 if draft and (start + self.index) % 5 == 0 else span

    def stamps(self, label: str, start: int, stop: int, accepted: int | None = None) -> list[int]:
        """Return what tokens ``start … stop`` of a label are: request, label, position and "refused" in one number."""
        base = (2 * self.index + (label == BEAM) + 1) * _OWNER
        counts = stop if accepted is None else start + accepted
        return [*range(base + start, base + counts), *range(base + counts + _DRAFT, base + stop + _DRAFT)]

    def final(self, label: str) -> list[int]:
        """Return what `label` holds in the end, from the script alone."""
        forked = 0
        if label == BEAM:
            last = (self.request.output_tokens - 1) // REFORK_EVERY * REFORK_EVERY
            forked = self.request.prompt_tokens + (last if self.style is Style.PRE_FORKS else 0)
        return self.stamps(MAIN, 0, forked) + self.stamps(label, forked, self.total)

    def segment(self, label: str, span: int) -> Segment:
        """Return a segment, made once."""
        made = self._segments.get((label, span))
        if made is None:
            made = self._segments[label, span] = Segment(self.id, label, span)
        return made

    def ended(self, part: Part, start: int, stored: int | None) -> None:
        """Take note of a part that ended: `stored` tokens from `start` on, or dropped (None)."""
        self.leases -= 1
        if self.pending and self.pending[0] is part:
            self.pending.popleft()
        if stored is not None:
            self.stored = start + stored
            if self.pending and self.pending[0].start != self.stored:
                # Planned on top of a draft that was refused: void.
                self.pending.clear()

    def restart(self) -> None:
        """Begin again, after a reset."""
        self.stored = 0
        self.pending.clear()
        self.content = {MAIN: [], BEAM: []}


def step_of(parts: Sequence[Part]) -> Step:
    """Return the step that does `parts`, and note in each where its segments stand."""
    segments: list[Segment] = []
    pre: list[StreamFork] = []
    post: list[StreamFork] = []
    for part in parts:
        part.places = range(len(segments), len(segments) + len(part.labels))
        segments.extend(part.job.segment(label, part.span) for label in part.labels)
        if part.pre_fork or part.post_fork:
            fork = StreamFork(StreamId(part.job.id, MAIN), StreamId(part.job.id, BEAM))
            (pre if part.pre_fork else post).append(fork)
    return Step(segments, pre_forks=pre, post_forks=post)


def in_words(stamp: object, jobs: Sequence[Job]) -> str:
    """Say what a stamp stands for."""
    if not isinstance(stamp, int) or not _OWNER <= stamp < (2 * len(jobs) + 1) * _OWNER:
        return repr(stamp)
    owner, position = divmod(stamp, _OWNER)
    refused = "the refused draft of " if position >= _DRAFT else ""
    return f"{refused}{jobs[(owner - 1) // 2].id}/{MAIN if owner % 2 else BEAM} token {position % _DRAFT}"


# -- pages


def pages_needed(request: TraceRequest, style: Style, page_size: int) -> int:
    """Return the device pages that a request may ask for at once, nothing shared: never less than TooLarge counts."""
    pages = -(-(request.prompt_tokens + request.output_tokens) // page_size)
    return 2 * pages + 2 if style.forks else pages


def peak_demand(requests: Sequence[TraceRequest], *, page_size: int, batch: int) -> int:
    """Return the pages of the `batch` largest requests at full length, forks counted without sharing.

    No more than `batch` requests hold pages at any time, so a pool of this size never preempts.
    """
    needed = sorted((pages_needed(r, style_of(i), page_size) for i, r in enumerate(requests)), reverse=True)
    return sum(needed[:batch])


def pool_pages(requests: Sequence[TraceRequest], *, page_size: int, batch: int, fraction: float) -> int:
    """Return ``ceil(fraction × peak demand)``, but never less than the largest request needs, its fork included."""
    largest = max(pages_needed(r, style_of(i), page_size) for i, r in enumerate(requests))
    return max(math.ceil(fraction * peak_demand(requests, page_size=page_size, batch=batch)), largest)


def jobs_of(requests: Sequence[TraceRequest], *, page_size: int, pages: int) -> list[Job]:
    """Return the jobs of a workload. A request whose fork could not fit into the pool does not fork."""
    jobs = []
    for index, request in enumerate(requests):
        style = style_of(index)
        if pages_needed(request, style, page_size) > pages:
            style = Style.PLAIN
        jobs.append(Job(request, index, style))
    return jobs
