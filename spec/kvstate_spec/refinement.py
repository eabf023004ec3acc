"""From the machine's view to the reference's state: what must be equal after every action.

The mapping forgets page numbers, ordering, generations and what a backend sees. While a request moves, its pages may
stand with its streams or with the claim: both are read as the stream's.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvstate.view import ClaimView, PagesView, StateView, StreamView
from kvstate_spec.abstract import Abstract, StreamAbstract, classes

# Of several groups every table has the same shape; this release drives exactly one.
GROUP = 0


def _pages(pages: PagesView) -> tuple[int, ...]:
    return pages[GROUP] if pages else ()


def _device(stream: StreamView, claims: Mapping[int, ClaimView]) -> tuple[int, ...]:
    """Return a stream's device pages, content first; of a moving one those that are not yet given up."""
    if stream.residency in ("OnHost", "Reloading"):
        return ()
    own = _pages(stream.device)
    if own or stream.residency != "Offloading":
        return own
    return next(_pages(part.device) for part in claims[stream.holder].parts if part.label == stream.label)


def _host(stream: StreamView, claims: Mapping[int, ClaimView]) -> tuple[int, ...]:
    """Return a stream's host pages; of a moving one those that hold its content already."""
    if stream.residency not in ("OnHost", "Reloading"):
        return ()
    own = _pages(stream.host)
    if own or stream.residency != "Reloading":
        return own
    return next(_pages(part.host) for part in claims[stream.holder].parts if part.label == stream.label)


def abstract_view(view: StateView) -> Abstract:
    """Return what a view of the machine means."""
    claims = {claim.serial: claim for claim in view.claims}
    opened = sorted((s for s in view.streams if s.opened), key=lambda s: (s.request, s.label))
    tables = [_device(s, claims) for s in opened]
    contents = [-(-s.length // view.page_size) for s in opened]
    device = classes([table[:count] for table, count in zip(tables, contents, strict=True)])
    host = classes([_host(s, claims) for s in opened])
    return Abstract(
        device_free=len(view.device[GROUP].free),
        host_free=len(view.host[GROUP].free) if view.host else 0,
        streams={
            (s.request, s.label): StreamAbstract(
                length=s.length,
                released=s.released,
                residency=s.residency,
                content_pages=len(device[i]),
                surplus_pages=len(tables[i]) - len(device[i]),
                device=device[i],
                host=host[i],
            )
            for i, s in enumerate(opened)
        },
        leases={lease.serial: (lease.status, lease.void_places) for lease in view.leases},
        claims={claim.serial: claim.kind for claim in view.claims},
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
