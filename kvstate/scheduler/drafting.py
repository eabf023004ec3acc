"""What one request would do in the next step, and which of several such drafts fit into a step together."""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.eviction import Starved
from kvstate.manager import KVManager
from kvstate.prefix import Key
from kvstate.refusals import Refusal
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import Work
from kvstate.types import MAIN, Segment, Step, StreamFork


class Draft:
    """One request's part of a step that is being put together: tokens ``start … start + span``, and what it draws."""

    __slots__ = ("children", "draws", "forks", "reason", "segment", "span", "start", "work")

    def __init__(self, work: Work, segment: Segment, start: int, span: int, draws: int, reason: Reason) -> None:
        self.work = work
        self.segment = segment
        self.start = start
        self.span = span
        self.draws = draws
        self.reason = reason
        # The samples that get their first token from this one's, and the forks that give them its pages.
        self.children: tuple[Work, ...] = ()
        self.forks: tuple[StreamFork, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Return the manager's ids of the samples that it is about."""
        return (self.work.key, *(child.key for child in self.children))

    def starved(self) -> Starved:
        """Return what it asked for, for a relief. What it might find in the prefix cache does not count."""
        segment = self.segment
        if segment.prefix:
            segment = Segment(segment.request, span=self.start + self.span)
        return Starved(self.work.key, self.work.rank, segment, self.forks)


def draft(work: Work, budget: int, found: tuple[Key, ...], page_size: int) -> Draft | Reason:
    """Return the next piece of `work` in at most `budget` tokens, or why there is none.

    `found` are keys of the prefix cache that it can start on, when it has nothing stored.
    """
    start = work.stored + work.ahead + len(found) * page_size
    known = len(work.tokens)
    if start >= known:
        # The token to feed is in flight. One more is computed only if one more is allowed.
        if known + 1 >= work.limit:
            return Reason.LAST_IN_FLIGHT
        return Draft(work, work.decode, start, 1, 1, Reason.DECODES)
    if known - start == 1 and known > work.first and not found:
        return Draft(work, work.decode, start, 1, 1, Reason.DECODES)
    span = min(known - start, budget, work.chunk)
    if start + span < known:
        return Draft(work, Segment(work.key, span=span, prefix=found), start, span, 0, Reason.PREFILLS)
    drafted = Draft(work, Segment(work.key, span=span, prefix=found), start, span, 1, Reason.PREFILLS)
    if work.children:
        drafted.children = tuple(work.children)
        drafted.draws = 1 + len(work.children)
        if work.limit - work.first > 1:
            drafted.forks = tuple(StreamFork(work.stream, child.stream) for child in work.children)
    return drafted


def step_of(drafts: Sequence[Draft]) -> Step:
    """Return the step of `drafts`."""
    return Step(
        tuple(one.segment for one in drafts), post_forks=tuple(fork for one in drafts for fork in one.forks)
    )  # fmt: skip


def needs_pages(one: Draft, page_size: int) -> bool:
    """Tell whether a draft may ask for a page; one that stays inside its last page never does."""
    config = one.work.request.config
    return (
        -(-(one.start + one.span) // page_size) > -(-one.start // page_size)
        or bool(one.forks)
        or (config is not None and MAIN in config.retention)
    )


def fit(manager: KVManager, drafts: Sequence[Draft]) -> tuple[list[Draft], list[tuple[Draft, Refusal]]]:
    """Divide drafts that do not all fit into one step: who is in, and who is refused, each behind those before it.

    In the order of `drafts`, each is in when it fits together with those that are; one that asks for no page always is.
    Called for a step that was refused, so at least one is refused here too, whatever another thread did meanwhile.
    """
    size = manager.geometry.page_size
    asking = [one for one in drafts if needs_pages(one, size)]
    inside: list[Draft] = []
    refused: list[tuple[Draft, Refusal]] = []
    at = 0
    while at < len(asking):
        # The most that fit in a row, by bisection: `low` do, `high` do not.
        refusal = manager.probe(step_of(inside + asking[at:]))
        if refusal is None:
            inside += asking[at:]
            break
        low, high = 0, len(asking) - at
        while high - low > 1:
            middle = (low + high) // 2
            met = manager.probe(step_of(inside + asking[at : at + middle]))
            if met is None:
                low = middle
            else:
                high, refusal = middle, met
        inside += asking[at : at + low]
        refused.append((asking[at + low], refusal))
        at += high
    out = {id(one) for one, _ in refused}
    return [one for one in drafts if id(one) not in out], refused
