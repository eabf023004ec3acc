"""Who owns which page, read from a view: by name, in the words of a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvstate.ops import Tier
from kvstate.view import PagesView, StateView, StreamView

Owners = dict[tuple[Tier, int], dict[int, tuple[str, ...]]]
"""Per tier and group: the owners of every page, in words."""


@attrs.frozen
class Hold:
    """What one owner has in one tier. `who` names it whole, `short` beside its request.

    A stream has `content` pages of tokens from place ``places[group]`` of its table on, what follows is surplus. Pages
    that leave it are held while the leases `behind` are open.
    """

    tier: Tier
    kind: str
    who: str
    short: str
    request: tuple[str, int]
    pages: PagesView
    behind: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    content: int = 0

    def name(self, group: int, index: int) -> str:
        """Name the owner of the page at `index`."""
        if self.kind != "stream":
            return self.who
        place = self.places[group] + index
        return f"{self.who} page {place}" if place < self.content else f"{self.who} surplus"


def leases_in_words(serials: Sequence[int]) -> str:
    """Name leases by their serials."""
    return f"lease{'s' if len(serials) > 1 else ''} {', '.join(map(str, serials))}"


def _of_stream(view: StateView, stream: StreamView, removed: str) -> Iterator[Hold]:
    name, request = f"{stream.request}/{stream.label}", (stream.request, stream.incarnation)
    open_on = tuple(sorted({*stream.rows, *stream.voided}))
    content = -(-stream.length // view.page_size)
    for tier, pages in ((Tier.DEVICE, stream.device), (Tier.HOST, stream.host)):
        behind = open_on if tier is Tier.DEVICE else ()
        if any(pages):
            yield Hold(tier, "stream", f"stream {name}", stream.label, request, pages, behind, stream.skipped, content)
    for behind, pages in stream.held:
        short = f"held behind {leases_in_words(behind)}"
        yield Hold(
            Tier.DEVICE,
            "held",
            f"held for {name}{removed} behind {leases_in_words(behind)}",
            short,
            request,
            pages,
            behind,
        )


def holds(view: StateView) -> list[Hold]:
    """Return every ownership there is: streams, then leases, then claims."""
    found: list[Hold] = []
    for stream in view.streams:
        found.extend(_of_stream(view, stream, ""))
    for stream in view.detached:
        found.extend(_of_stream(view, stream, " (removed)"))
    open_on: dict[tuple[str, int, str], list[int]] = {}
    for lease in view.leases:
        for row in lease.rows:
            open_on.setdefault((row.request, row.incarnation, row.label), []).append(lease.serial)
    for lease in view.leases:
        for row in lease.rows:
            pages = tuple(take + temp for take, temp in zip(row.takes, row.temps, strict=True))
            if any(pages):
                short = f"lease {lease.serial} ({lease.status})"
                serials = open_on[row.request, row.incarnation, row.label]
                behind = tuple(serial for serial in serials if serial >= lease.serial)
                who = f"{short} for {row.request}/{row.label}"
                found.append(Hold(Tier.DEVICE, "lease", who, short, (row.request, row.incarnation), pages, behind))
    for claim in view.claims:
        for part in claim.parts:
            request = (claim.request, claim.incarnation)
            if claim.kind == "retrieve":
                short, who = f"fetch {claim.serial}", f"fetch {claim.serial} of {claim.request}/{part.label}"
            else:
                short = f"{claim.kind} claim {claim.serial}"
                who = f"{short} of {claim.request}"
            for tier, pages in ((Tier.DEVICE, part.device), (Tier.HOST, part.host)):
                if any(pages):
                    found.append(Hold(tier, claim.kind, who, short, request, pages))
    return found


def owners(view: StateView) -> Owners:
    """Return who owns each page: in words, several where it is shared; ``"free"`` or ``"cached"`` where nobody does.

    A page whose bytes another group has been lent is in no one's hands either: ``"in a sector of group 1"``.
    """
    found: Owners = {}
    names: dict[tuple[Tier, int], dict[int, list[str]]] = {}
    for hold in holds(view):
        for group, pages in enumerate(hold.pages):
            own = names.setdefault((hold.tier, group), {})
            for index, page in enumerate(pages):
                known = own.setdefault(page, [])
                name = hold.name(group, index)
                if name not in known:
                    known.append(name)
    for tier, pools, lent in ((Tier.DEVICE, view.device, view.device_lent), (Tier.HOST, view.host, view.host_lent)):
        for group, pool in enumerate(pools):
            own, cached = names.get((tier, group), {}), set(pool.cached)
            per_sector = view.pages_per_sector[group]
            words: dict[int, tuple[str, ...]] = {}
            for page in range(len(pool.owners)):
                has = lent[page // per_sector] if lent else None
                if page in own:
                    words[page] = tuple(own[page])
                elif page in cached:
                    words[page] = ("cached",)
                else:
                    words[page] = ("free",) if has in (None, group) else (f"in a sector of group {has}",)
            found[tier, group] = words
    return found
