"""Explanations: why something was refused, and what evicting a request would bring, read from a view.

A refusal says what is missing. These functions say who has it, and what would bring it back. They read a view taken by
the caller and change nothing; equal views give equal words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvstate.ops import Tier
from kvstate.owners import Hold, holds, leases_in_words, owners
from kvstate.refusals import (
    FetchFailed,
    FetchPending,
    ForkPending,
    HostExhausted,
    NotOnHost,
    PagesExhausted,
    Refusal,
    StreamBusy,
    StreamNotOnDevice,
    TooLarge,
)
from kvstate.view import PoolView, StateView, StreamView

__all__ = ["Explanation", "explain", "explain_victim", "owners"]


@attrs.frozen
class Explanation:
    """What stands in the way: lines for a person; and plain data (numbers, strings, lists, dicts) for a program."""

    lines: tuple[str, ...]
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return "\n".join(self.lines)


# -- counting


def _amounts(counts: Sequence[int], groups: Sequence[str]) -> str:
    """Say how many: of several groups, by name."""
    if len(counts) == 1:
        return str(counts[0])
    return " + ".join(f"{count} {groups[group]}" for group, count in enumerate(counts) if count) or "0"


def _pages(counts: Sequence[int], groups: Sequence[str]) -> str:
    return f"{_amounts(counts, groups)} page{'' if sum(counts) == 1 else 's'}"


def _names(view: StateView, groups: Sequence[str]) -> tuple[str, ...]:
    return tuple(groups) or tuple(f"group-{group}" for group in range(len(view.device)))


@attrs.define
class _Holder:
    """One incarnation of a request: its pages per group, by who of it has them, and what becomes of each on eviction.

    `fates` has the pages that come back at once under ``""``, and the others under the reason why they do not.
    """

    request: str
    incarnation: int
    removed: bool
    pages: list[int]
    cached: list[int]
    parts: dict[str, list[int]]
    fates: dict[str, list[int]]

    def sectors(self, view: StateView) -> Fraction:
        """Return how much it is, in sectors (with one group: pages)."""
        return sum((Fraction(n, per) for n, per in zip(self.pages, view.pages_per_sector, strict=True)), Fraction())

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        none = [0] * len(self.pages)
        return {
            "request": self.request,
            "incarnation": self.incarnation,
            "removed": self.removed,
            "pages": self.pages,
            "parts": self.parts,
            "now": self.fates.get("", none),
            "waits": {why: counts for why, counts in self.fates.items() if why},
        }


def _fate(mine: Sequence[Hold], others: Sequence[Hold]) -> str:
    """Say why an eviction does not get a page back at once; nothing if it does."""
    if others:
        names = dict.fromkeys(
            hold.who.removeprefix("stream ") if hold.kind == "stream" else hold.who for hold in others
        )
        return f"shared with {', '.join(names)}"
    for hold in mine:
        if hold.kind in ("offload", "reload", "retrieve"):
            return f"until {hold.short} has ended"
    behind = sorted({serial for hold in mine for serial in hold.behind})
    return f"behind {leases_in_words(behind)}" if behind else ""


def _holders(view: StateView, tier: Tier) -> list[_Holder]:
    """Return who holds pages of a tier, the largest first."""
    held = [hold for hold in holds(view) if hold.tier is tier]
    live = set(view.requests)
    groups = range(len(view.device))
    by_page: list[dict[int, list[Hold]]] = [{} for _ in groups]
    holders: dict[tuple[str, int], _Holder] = {}
    for hold in held:
        if hold.request not in holders:
            none = [0] * len(groups)
            holders[hold.request] = _Holder(*hold.request, hold.request not in live, none, list(none), {}, {})
        for group, pages in enumerate(hold.pages):
            for page in pages:
                by_page[group].setdefault(page, []).append(hold)
    pools = view.device if tier is Tier.DEVICE else view.host
    keyed = [{page for page, _ in pool.keys} for pool in pools]
    for group in groups:
        for page, owning in by_page[group].items():
            for request in dict.fromkeys(hold.request for hold in owning):
                holder = holders[request]
                mine = [hold for hold in owning if hold.request == request]
                fate = _fate(mine, [hold for hold in owning if hold.request != request])
                holder.pages[group] += 1
                holder.cached[group] += not fate and page in keyed[group]
                holder.fates.setdefault(fate, [0] * len(groups))[group] += 1
                for part in dict.fromkeys(hold.short for hold in mine):
                    holder.parts.setdefault(part, [0] * len(groups))[group] += 1
    return sorted(holders.values(), key=lambda holder: -holder.sectors(view))


def _describe(holder: _Holder, groups: Sequence[str]) -> str:
    parts = ", ".join(f"{name} {_amounts(counts, groups)}" for name, counts in holder.parts.items())
    fates = []
    for why, counts in sorted(holder.fates.items()):
        fates.append(f"{_amounts(counts, groups)} {why or 'back at once'}")
    removed = " (removed)" if holder.removed else ""
    return f"{holder.request}{removed}: {_pages(holder.pages, groups)} ({parts}); by an eviction: {', '.join(fates)}"


def _available(view: StateView, tier: Tier) -> tuple[list[int], list[int], int]:
    """Return what each group alone could be granted, what of it lies in sectors of its own, and the other sectors."""
    pools, lent = (view.device, view.device_lent) if tier is Tier.DEVICE else (view.host, view.host_lent)
    if not lent:
        free = [len(pool.free) + len(pool.cached) for pool in pools]
        return free, free, 0
    loose, idle = [], len(lent)
    for pool, per_sector in zip(pools, view.pages_per_sector, strict=True):
        owned = [page for page, count in enumerate(pool.owners) if count]
        busy = len({page // per_sector for page in owned})
        loose.append(per_sector * busy - len(owned))
        idle -= busy
    return [own + per * idle for own, per in zip(loose, view.pages_per_sector, strict=True)], loose, idle


def _room(view: StateView, tier: Tier, groups: Sequence[str]) -> Iterator[str]:
    pools: tuple[PoolView, ...] = view.device if tier is Tier.DEVICE else view.host
    available, loose, idle = _available(view, tier)
    for group, pool in enumerate(pools):
        if len(pools) == 1:
            yield (
                f"{tier.value}: {available[0]} of {len(pool.owners)} pages available "
                f"({len(pool.free)} free, {len(pool.cached)} cached)"
            )
        else:
            yield (
                f"{tier.value}, {groups[group]}: {available[group]} of {len(pool.owners)} pages available to it alone "
                f"({loose[group]} in sectors that it uses, {idle} sectors that nobody uses)"
            )


# -- refusals


def explain(view: StateView, refusal: Refusal, groups: Sequence[str] = ()) -> Explanation:
    """Explain a refusal by the state it was given in.

    Parameters
    ----------
    view
        Of that state: a refusal changes nothing, so a view taken next is right unless other threads were quicker.
    refusal
        What was answered.
    groups
        Names of the groups, for the text.
    """
    names = _names(view, groups)
    lines = [str(refusal)]
    data: dict[str, Any] = {"refusal": type(refusal).__name__, "request": refusal.request, "label": refusal.label}
    if isinstance(refusal, (PagesExhausted, HostExhausted)):
        _exhausted(view, refusal, names, lines, data)
    elif isinstance(refusal, TooLarge):
        data |= {"wanted": refusal.wanted, "capacity": refusal.capacity}
        lines.append("no eviction helps: it must ask for less, or the cache be larger")
    elif refusal.request:
        streams = [stream for stream in view.streams if stream.request == refusal.request]
        data["streams"] = {stream.label: stream.residency for stream in streams}
        lines.extend(_state_of(stream) for stream in streams)
        lines.extend(_next(view, refusal, streams, names, data))
    return Explanation(tuple(lines), data)


def _exhausted(
    view: StateView, refusal: PagesExhausted | HostExhausted, groups: Sequence[str], lines: list[str],
    data: dict[str, Any],
) -> None:  # fmt: skip
    tier = Tier.DEVICE if isinstance(refusal, PagesExhausted) else Tier.HOST
    available, _, _ = _available(view, tier)
    holders = _holders(view, tier)
    data |= {"tier": tier.value, "short": list(refusal.short), "available": available}
    if len(groups) == 1:
        data["asked"] = [available[0] + refusal.short[0]]
        lines.append(f"asked for {data['asked'][0]} pages")
    data["holders"] = [holder.data() for holder in holders]
    lines.extend(_room(view, tier, groups))
    lines.extend(_describe(holder, groups) for holder in holders)


def _state_of(stream: StreamView) -> str:
    leases = sorted({*stream.rows, *stream.voided})
    named = f", named by {leases_in_words(leases)}" if leases else ""
    waits = f" by {'fetch' if stream.residency == 'Fetching' else 'claim'} {stream.holder}" if stream.holder else ""
    return f"{stream.request}/{stream.label}: {stream.residency}{waits}, {stream.length} tokens{named}"


def _next(
    view: StateView, refusal: Refusal, streams: Sequence[StreamView], groups: Sequence[str], data: dict[str, Any]
) -> Iterator[str]:
    """Yield what ends the refusal, where the state tells."""
    claims = [claim for claim in view.claims if claim.serial in {stream.holder for stream in streams}]
    status = {lease.serial: lease.status for lease in view.leases}
    if isinstance(refusal, (StreamNotOnDevice, NotOnHost)):
        data["claims"] = [claim.serial for claim in claims]
        for claim in claims:
            failure = f"; its copy failed ({claim.failure}), abandon it" if claim.failure else ""
            yield f"{claim.kind} claim {claim.serial} is open{failure}"
        if not claims and any(stream.host for stream in streams):
            pages = [len({page for s in streams if s.host for page in s.host[g]}) for g in range(len(groups))]
            data["pages"] = pages
            yield f"a reload asks for {_pages(pages, groups)} of the device, less what it still has by content keys"
            yield from _room(view, Tier.DEVICE, groups)
    elif isinstance(refusal, (StreamBusy, ForkPending)):
        if isinstance(refusal, ForkPending):
            # Nothing may name the target before the fork has its result, so its lease is the newest.
            serials = {stream.rows[-1] for stream in streams if stream.fork_pending}
        else:
            serials = {serial for stream in streams for serial in stream.rows}
        data["leases"] = sorted(serials)
        for serial in sorted(serials):
            what = "commit it, or abort it" if status[serial] == "launched" else "launch and commit it, or abort it"
            yield f"lease {serial} is {status[serial]}: {what}"
    elif isinstance(refusal, FetchPending):
        data["claims"] = [claim.serial for claim in claims]
        for claim in claims:
            pages = [len(set(claim.device(group))) for group in range(len(groups))]
            yield f"fetch {claim.serial} has {_pages(pages, groups)} until its transport says that it ended"
    elif isinstance(refusal, FetchFailed):
        yield "a reset clears the error; the tokens that were stored before the fetch go with it"


def explain_victim(view: StateView, request: str, groups: Sequence[str] = ()) -> Explanation:
    """Explain what an eviction of `request` would bring: at once, later, and not at all.

    Parameters
    ----------
    view
        Of the state it would be evicted from.
    request
        A live one.
    groups
        Names of the groups, for the text.
    """
    names = _names(view, groups)
    streams = [stream for stream in view.streams if stream.request == request]
    data: dict[str, Any] = {"request": request, "streams": {stream.label: stream.residency for stream in streams}}
    if request not in dict(view.requests):
        return Explanation((f"{request} is not here",), data)
    lines = [_state_of(stream) for stream in streams]
    for tier in Tier:
        mine = [holder for holder in _holders(view, tier) if holder.request == request and not holder.removed]
        for holder in mine:
            data[tier.value] = holder.data()
            lines.append(f"{tier.value}: {_describe(holder, names)}")
            if any(holder.cached):
                lines.append(f"{_pages(holder.cached, names)} of those that come back at once can still be found")
    if any(any(stream.device) for stream in streams):
        lines.append(_offload(view, streams, names, data))
    return Explanation(tuple(lines), data)


def _offload(view: StateView, streams: Sequence[StreamView], groups: Sequence[str], data: dict[str, Any]) -> str:
    """Say what an offload would ask of the host: each page that holds tokens, once."""
    if not any(pool.owners for pool in view.host):
        return "there is no host pool: its tokens would be computed again"
    wanted = []
    for group in range(len(groups)):
        content: set[int] = set()
        for stream in streams:
            if stream.device:
                held = -(-stream.length // view.page_size) - stream.skipped[group]
                content.update(stream.device[group][: max(0, held)])
        wanted.append(len(content))
    available, _, _ = _available(view, Tier.HOST)
    data["offload"] = {"wanted": wanted, "available": available}
    return f"an offload asks for {_pages(wanted, groups)} of the host; available: {_pages(available, groups)}"
