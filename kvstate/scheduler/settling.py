"""What the tokens of a committed batch change: who got one, who ends, who is forked, which pages become findable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstate.manager import KVManager
from kvstate.refusals import Refusal
from kvstate.scheduler.batch import Batch, Update
from kvstate.scheduler.drafting import Draft
from kvstate.scheduler.reasons import Notes, Reason, decisions
from kvstate.scheduler.requests import Finish, Output, Work
from kvstate.scheduler.roster import Roster


class Engine(Protocol):
    """What of a Scheduler settling needs."""

    manager: KVManager
    roster: Roster
    prefix_cache: bool
    clock: Callable[[], float]


def settle(
    engine: Engine, batch: Batch, dropped: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float] | None
) -> Update:
    """Hand out the tokens of a committed batch. `dropped` are the places whose requests have left, or were set back."""
    notes: Notes = []
    if batch.plain and not dropped and logprobs is None:
        advanced: Sequence[Work] = batch.works
        ended = _settle_plain(batch.works, tokens)
        late = 0
    else:
        advanced, ended, late = _settle_each(engine, batch, frozenset(dropped), tokens, logprobs, notes)
    if engine.prefix_cache:
        for place, work in enumerate(batch.works):
            if place not in dropped and not work.anew:
                offer(engine.manager, work)
    outputs: tuple[Output, ...] = ()
    if ended:
        outputs = tuple(engine.roster.end(work, finish) for work, finish in ended)
    return Update(advanced, outputs, late, decisions(notes))


Ended = list[tuple[Work, Finish]]


def _settle_plain(works: Sequence[Work], tokens: Sequence[int]) -> Ended:
    """Hand out one token each to those that decode. This is what most steps are, so it does nothing else."""
    ended: Ended = []
    for work, token in zip(works, tokens, strict=True):
        known = work.tokens
        known.append(token)
        work.stored += 1
        if token in work.stop:
            ended.append((work, Finish.STOP))
        elif len(known) >= work.limit:
            ended.append((work, Finish.LENGTH))
    return ended


def _settle_each(
    engine: Engine,
    batch: Batch,
    dropped: frozenset[int],
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    notes: Notes,
) -> tuple[list[Work], Ended, int]:
    advanced: list[Work] = []
    ended: Ended = []
    late = at = 0
    forked = forked_lengths(batch)
    drafts: Sequence[Draft | None] = batch.drafts if batch.drafts is not None else (None,) * len(batch)
    for place, (work, one) in enumerate(zip(batch.works, drafts, strict=True)):
        plain = one is None or one.reason is Reason.DECODES
        draws = 1 if one is None else one.draws
        drawn = tokens[at : at + draws]
        logs: Sequence[float | None] = logprobs[at : at + draws] if logprobs is not None else (None,) * draws
        at += draws
        if place in dropped:
            # Late: it left, or was set back to what it had before this step, which it computes again.
            late += draws
            work.late_tokens += draws
            continue
        if plain:
            work.stored += 1
        else:
            assert one is not None
            _store(work, one, one.start if one.segment.prefix else 0)
        takers = (work, *one.children) if one is not None and draws > 1 else (work,) * draws
        for sample, who in enumerate(takers):
            if who is not work and one is not None and one.forks:
                _fork(engine, work, who, forked.get(who.key, 0), notes)
            finish = give(engine, who, drawn[sample], logs[sample])
            advanced.append(who)
            if finish is not None:
                ended.append((who, finish))
        if draws > 1:
            work.children = []
    return advanced, ended, late


def _store(work: Work, one: Draft, found: int) -> None:
    """Note what a segment has stored, and what of it was stored before or `found` in the prefix cache."""
    stop = one.start + one.span
    work.cached_tokens += found
    work.keyed = max(work.keyed, found)
    work.recomputed_tokens += max(0, min(stop, work.stored_most) - one.start)
    work.stored = stop


def give(engine: Engine, work: Work, token: int, logprob: float | None) -> Finish | None:
    """Give a sample its next token; return how that ends it, or None."""
    work.tokens.append(token)
    if logprob is not None:
        work.logprobs = work.logprobs if work.logprobs is not None else []
        work.logprobs.append(logprob)
    if work.first_token_s is None:
        work.first_token_s = engine.clock()
    if token in work.stop:
        return Finish.STOP
    return Finish.LENGTH if len(work.tokens) >= work.limit else None


def forked_lengths(batch: Batch) -> dict[str, int]:
    """Return what each sample that was to be forked stores now; 0 where the copy of its last page failed."""
    return {fork.target.stream.request.id: fork.target.stream.length for fork in batch.lease.forks if not fork.pre}


def _fork(engine: Engine, parent: Work, child: Work, length: int, notes: Notes) -> None:
    """Let a forked sample go on by itself; one whose copy failed computes the prompt itself."""
    child.first_scheduled_s = parent.first_scheduled_s
    if length:
        child.stored = parent.stored
        child.keyed = parent.keyed
        engine.roster.activate(child)
    else:
        notes.append((child, Reason.RESET_FORK_FAILED, None))
        engine.roster.begin_again(child)


def offer(manager: KVManager, work: Work) -> None:
    """Make the pages of `work` findable that have been filled since the last offer."""
    size = manager.geometry.page_size
    whole = work.stored // size * size
    if whole > work.keyed and not isinstance(manager.key(work.key, tuple(work.tokens[work.keyed : whole])), Refusal):
        work.keyed = whole
