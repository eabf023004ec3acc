"""From the machine's view to the reference's state: what must be equal after every action.

The mapping forgets page numbers, sectors, ordering, generations and what a backend sees. While a request moves, its
pages may stand with its streams or with the claim: both are read as the stream's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvstate.view import ClaimView, PagesView, PoolView, StateView, StreamView
from kvstate_spec.abstract import Abstract, Classes, StreamAbstract


def _device(stream: StreamView, claims: Mapping[int, ClaimView]) -> PagesView:
    """Return a stream's device pages, content first; of a moving one those that are not yet given up."""
    if stream.residency in ("OnHost", "Reloading"):
        return ()
    if any(stream.device) or stream.residency != "Offloading":
        return stream.device
    return next(part.device for part in claims[stream.holder].parts if part.label == stream.label)


def _host(stream: StreamView, claims: Mapping[int, ClaimView]) -> PagesView:
    """Return a stream's host pages; of a moving one those that hold its content already."""
    if stream.residency not in ("OnHost", "Reloading"):
        return ()
    if any(stream.host) or stream.residency != "Reloading":
        return stream.host
    return next(part.host for part in claims[stream.holder].parts if part.label == stream.label)


def _owned(pools: Sequence[PoolView]) -> tuple[int, ...]:
    return tuple(sum(owners > 0 for owners in pool.owners) for pool in pools)


def abstract_view(view: StateView) -> Abstract:
    """Return what a view of the machine means."""
    groups = range(len(view.device))
    claims = {claim.serial: claim for claim in view.claims}
    device, host = Classes(), Classes()
    streams: dict[tuple[str, str], StreamAbstract] = {}
    for s in sorted((s for s in view.streams if s.opened), key=lambda s: (s.request, s.label)):
        content = [-(-s.length // view.page_size) - skipped for skipped in s.skipped]
        # A stream that is away may still list what a claim holds; a table that is absent is one empty table per group.
        mine = [list(table) for table in _device(s, claims)] or [[] for _ in groups]
        away = [list(table) for table in _host(s, claims)] or [[] for _ in groups]
        tables = [table[:count] for table, count in zip(mine, content, strict=True)]
        streams[s.request, s.label] = StreamAbstract(
            length=s.length,
            released=s.released,
            residency=s.residency,
            content_pages=tuple(map(len, tables)),
            surplus_pages=tuple(len(all_) - len(table) for all_, table in zip(mine, tables, strict=True)),
            device=tuple(device.of([(g, page) for page in table]) for g, table in enumerate(tables)),
            host=tuple(host.of([(g, page) for page in table]) for g, table in enumerate(away)),
            skipped=s.skipped,
            keyed=s.keyed,
            stale=s.stale,
        )
    keys = [dict(pool.keys) for pool in view.device]
    return Abstract(
        device_owned=_owned(view.device),
        host_owned=_owned(view.host),
        streams=streams,
        leases={lease.serial: (lease.status, lease.void_places) for lease in view.leases},
        claims={claim.serial: claim.kind for claim in view.claims},
        findable={(g, key): device.known((g, page)) for g in groups for page, key in keys[g].items()},
        cached=tuple(
            tuple(keys[g].get(page, f"page {page}") for page in pool.cached) for g, pool in enumerate(view.device)
        ),
        key_epoch=view.key_epoch,
    )


def difference(machine: Abstract, reference: Abstract) -> str | None:
    """Say in which field two abstract states differ first, None if they are equal."""
    for field in attrs.fields(Abstract):
        ours, theirs = getattr(machine, field.name), getattr(reference, field.name)
        if ours == theirs:
            continue
        if not isinstance(ours, Mapping):
            return f"{field.name}: the machine has {ours}, the reference {theirs}"
        for key in sorted(set(ours) | set(theirs)):
            if key not in theirs or key not in ours:
                return f"{field.name}[{key}]: only the {'machine' if key in ours else 'reference'} has it"
            if ours[key] == theirs[key]:
                continue
            if not isinstance(ours[key], StreamAbstract):
                return f"{field.name}[{key}]: the machine has {ours[key]}, the reference {theirs[key]}"
            for part in attrs.fields(StreamAbstract):
                mine, its = getattr(ours[key], part.name), getattr(theirs[key], part.name)
                if mine != its:
                    return f"{field.name}[{key}].{part.name}: the machine has {mine}, the reference {its}"
    return None
