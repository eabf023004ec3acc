"""Eviction: who leaves the device when active requests starve.

Cached pages leave first, as many as are needed: a step that is admitted takes them by itself, so whoever is refused for
pages has had that. Then requests leave, picked among those that starve, and for one of these reasons each:

1. newest by arrival first, whatever they have been through since: the oldest always gets on;
2. until all that still starve can be stored, once what is already leaving has left; not one more;
3. never the last active request, never the oldest while others get on, and never one that frees nothing;
4. to the host where it has room, else to begin again later (soft reset); a later, smaller one still tries the host;
5. all copies of one relief in one submission.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvstate.manager import KVManager
from kvstate.refusals import HostExhausted, NoHostPool, Refusal
from kvstate.scheduler.reasons import Reason
from kvstate.state import OffloadClaim
from kvstate.types import Segment, Step, StreamFork


@attrs.frozen(eq=False)
class Starved:
    """An active request that was refused for pages: what it asked for.

    Parameters
    ----------
    request
        Its id in the manager.
    rank
        Its place in the order of arrival; the newest has the highest.
    segment, forks
        What its next step needs.
    """

    request: str
    rank: int
    segment: Segment
    forks: tuple[StreamFork, ...] = ()


@attrs.frozen
class Verdict:
    """What a relief decided about one that starves, and the refusal behind it."""

    request: str
    reason: Reason
    refusal: Refusal | None = None


@attrs.frozen
class Relief:
    """What a relief did: who went to the host and who was reset, newest first, and a verdict on each that starves."""

    offloaded: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def released(self) -> bool:
        """True when somebody left."""
        return bool(self.offloaded or self.reset)


def step_of(starved: Sequence[Starved]) -> Step:
    """Return the step in which all of them get what they asked for."""
    return Step(tuple(one.segment for one in starved), post_forks=tuple(f for one in starved for f in one.forks))


def newest_first(starved: Sequence[Starved]) -> list[Starved]:
    """Return them in the order in which they would leave: by arrival, never by when they last became active."""
    return sorted(starved, key=lambda one: one.rank, reverse=True)


def storable(manager: KVManager, starved: Sequence[Starved]) -> bool:
    """Tell whether all of them can be stored once everything that is leaving has left."""
    return not starved or manager.probe(step_of(starved), leaving=True) is None


def spared(manager: KVManager, one: Starved, active: int, together: bool, oldest: str | None = None) -> Reason | None:
    """Return why `one` stays although others starve, or None: then it leaves."""
    if active == 1:
        return Reason.LAST_ACTIVE
    if one.request == oldest:
        return Reason.OLDEST
    if not together and not manager.gain(one.request):
        return Reason.NO_GAIN
    return None


def relieve(
    manager: KVManager, starved: Sequence[Starved], active: int, *, together: bool = False, oldest: str | None = None
) -> Relief:
    """Evict as few of the `starved` as it takes to store the others.

    Parameters
    ----------
    active
        Active requests, those in a step included.
    together
        Also take one that frees nothing by itself, because all that it holds is shared with others that starve. For a
        scheduler in which nothing else can happen: of those that share, each frees nothing while the others stay.
    oldest
        Stays: the oldest active request, while others get on. Evicted again and again for newer ones, it would never.

    Returns
    -------
    What was done. Nothing is held when it returns: each copy was committed, or failed and its request was reset.
    """
    rest = sorted(starved, key=lambda one: one.rank)
    moving: list[tuple[Starved, OffloadClaim]] = []
    verdicts: dict[str, Verdict] = {}
    left: dict[str, bool] = {}
    enough = False
    with manager.batch():
        for one in newest_first(starved):
            enough = enough or storable(manager, rest)
            stays = Reason.ENOUGH if enough else spared(manager, one, active, together, oldest)
            if stays is not None:
                verdicts[one.request] = Verdict(one.request, stays)
                continue
            claim = manager.claim_offload(one.request, discard_in_flight=True)
            if isinstance(claim, Refusal):
                verdicts[one.request] = _reset(manager, one, _why_reset(claim), claim)
                left[one.request] = False
            else:
                moving.append((one, claim))
                left[one.request] = True
            rest.remove(one)
            active -= 1
    for one, claim in moving:
        verdict = _settle(manager, one, claim)
        verdicts[one.request] = verdict
        left[one.request] = verdict.reason is Reason.OFFLOADED
    return Relief(
        tuple(request for request, on_host in left.items() if on_host),
        tuple(request for request, on_host in left.items() if not on_host),
        tuple(verdicts[one.request] for one in newest_first(starved)),
    )


def _why_reset(refusal: Refusal) -> Reason:
    """Return why a victim whose offload was refused begins again."""
    if isinstance(refusal, HostExhausted):
        return Reason.RESET_HOST_FULL
    return Reason.RESET_NO_HOST if isinstance(refusal, NoHostPool) else Reason.RESET_REFUSED


def _settle(manager: KVManager, one: Starved, claim: OffloadClaim) -> Verdict:
    """End the claim of a victim whose copy was submitted, or failed."""
    done = manager.commit_claim(claim)
    if not isinstance(done, Refusal):
        return Verdict(one.request, Reason.OFFLOADED)
    manager.abandon(claim)
    return _reset(manager, one, Reason.RESET_COPY_FAILED, done)


def _reset(manager: KVManager, one: Starved, reason: Reason, refusal: Refusal) -> Verdict:
    manager.reset(one.request)
    return Verdict(one.request, reason, refusal)
