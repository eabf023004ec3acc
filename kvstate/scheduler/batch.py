"""What the scheduler hands out and gets back: batches, updates, and the outcomes without a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs

from kvstate.errors import KVStateError
from kvstate.ops import Plan
from kvstate.refusals import Refusal
from kvstate.scheduler.drafting import Draft
from kvstate.scheduler.reasons import Decision, Notes, Reason, decisions
from kvstate.scheduler.requests import Output, Work
from kvstate.state import Lease


@attrs.frozen
class Entry:
    """One segment of a batch, in the order of the step's segments.

    Parameters
    ----------
    request, sample
        Whose it is.
    start, span
        It computes the keys and values of tokens ``start … start + span`` of the request; those in front are stored.
    tokens
        What is fed. None is the token that the batch before this one samples, while nobody has seen it.
    feeds
        Place of that token among all that the batch before samples; None when nothing is missing.
    draws
        Tokens to sample behind the last one fed: 0 in the middle of a prompt, several where samples are forked.
    """

    request: str
    sample: int
    start: int
    span: int
    tokens: tuple[int | None, ...]
    feeds: int | None
    draws: int


class Batch:
    """A step that is admitted and planned: launch its `plan`, then give what was sampled to `Scheduler.update`.

    Attributes
    ----------
    lease, plan
        The manager's. `Scheduler.promote` replaces a plan that went stale.
    drafts
        What each request asked for; None when all decode, so that each entry computes one token and draws one.
    ended
        Outputs of requests that ended while the batch was put together.
    """

    __slots__ = ("drafts", "ended", "lease", "notes", "plan", "previous", "serial", "works")

    def __init__(
        self,
        serial: int,
        lease: Lease,
        plan: Plan,
        works: tuple[Work, ...],
        drafts: Sequence[Draft] | None,
        previous: Batch | None,
        notes: Notes,
    ) -> None:
        self.serial = serial
        self.lease = lease
        self.plan = plan
        self.works = works
        self.drafts = drafts
        self.previous = previous
        self.notes = notes
        self.ended: tuple[Output, ...] = ()

    def __repr__(self) -> str:
        return f"<batch {self.serial} of {len(self.works)}>"

    def __len__(self) -> int:
        return len(self.works)

    @property
    def plain(self) -> bool:
        """True when every entry computes and draws one token of a request that decodes."""
        return self.drafts is None

    def span(self, place: int) -> int:
        """Return the tokens that an entry computes."""
        return 1 if self.drafts is None else self.drafts[place].span

    def start(self, place: int) -> int:
        """Return the first token that an entry computes."""
        if self.drafts is not None:
            return self.drafts[place].start
        row, start = self.lease.placed(place)
        return start + (row.released_before if row is not None else 0)

    def found(self, place: int) -> int:
        """Return the tokens that an entry starts behind because the prefix cache had them."""
        return self.start(place) if self.lease.step.segments[place].prefix else 0

    def drawn(self, place: int) -> int:
        """Return how many tokens an entry draws."""
        return 1 if self.drafts is None else self.drafts[place].draws

    def children(self, place: int) -> tuple[Work, ...]:
        """Return the samples that get their first token from an entry, its own sample left out."""
        return () if self.drafts is None else self.drafts[place].children

    def forks(self, place: int) -> bool:
        """Tell whether those samples are forked from an entry; where they may have one token only, they need not be."""
        return self.drafts is not None and bool(self.drafts[place].forks)

    @property
    def tokens_drawn(self) -> int:
        """Tokens that the whole batch draws."""
        return len(self.works) if self.drafts is None else sum(one.draws for one in self.drafts)

    def check(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Raise ValueError when a model has not sampled what this batch draws."""
        if len(tokens) != self.tokens_drawn or (logprobs is not None and len(logprobs) != len(tokens)):
            raise ValueError(f"{self!r} draws {self.tokens_drawn} tokens, got {len(tokens)}")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What the model is to compute, one entry per segment of the step."""
        feeds: dict[int, int] = {}
        if self.previous is not None:
            at = 0
            for place, work in enumerate(self.previous.works):
                feeds[work.rank] = at
                at += self.previous.drawn(place)
        return tuple(self._entry(place, feeds) for place in range(len(self.works)))

    def _entry(self, place: int, feeds: dict[int, int]) -> Entry:
        work = self.works[place]
        start, span = self.start(place), self.span(place)
        fed: tuple[int | None, ...] = tuple(work.tokens[start : start + span])
        missing = span - len(fed)
        return Entry(
            work.request.id,
            work.sample,
            start,
            span,
            fed + (None,) * missing,
            feeds.get(work.rank) if missing else None,
            self.drawn(place),
        )

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Why each request was chosen, skipped, evicted or left waiting when this batch was put together."""
        if self.drafts is None:
            chosen: Notes = [(work, Reason.DECODES, None) for work in self.works]
        else:
            chosen = [(one.work, one.reason, None) for one in self.drafts]
        return decisions(chosen + self.notes)


class BatchOutOfOrder(KVStateError):
    """A batch was updated, aborted or promoted that is not in flight, or updated before an older one."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(f"{batch!r} is not the oldest in flight; update batches once each, in the order of schedule")


@attrs.frozen
class Idle:
    """Nothing is live: there is nothing to do. `ended` are outputs of requests that ended in this call."""

    ended: tuple[Output, ...] = ()
    decisions: tuple[Decision, ...] = ()


@attrs.frozen
class InFlight:
    """Nothing can be scheduled before a batch that is in flight was given to `Scheduler.update`."""

    ended: tuple[Output, ...] = ()
    decisions: tuple[Decision, ...] = ()


@attrs.frozen
class Blocked:
    """Nothing can run and nothing is in flight: somebody else holds the pages, or the manager refuses everything."""

    refusal: Refusal | None
    ended: tuple[Output, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        return f"nothing can run and nothing is in flight: {self.refusal}"


Scheduled = Batch | Idle | InFlight | Blocked


@attrs.frozen(eq=False, slots=False)
class Update:
    """What a batch's tokens changed.

    Parameters
    ----------
    advanced
        The samples that got a token.
    ended
        Outputs of the samples that ended.
    late
        Tokens that came for somebody who had given them up.
    decisions
        What was decided about samples whose fork failed.
    """

    advanced: Sequence[Work]
    ended: tuple[Output, ...]
    late: int = 0
    decisions: tuple[Decision, ...] = ()

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """A snapshot of every sample that got a token, as of when this is first asked for."""
        ended = {(output.request, output.sample): output for output in self.ended}
        return tuple(ended.get((work.request.id, work.sample)) or work.output() for work in self.advanced)
