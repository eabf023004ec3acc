"""Promises: what always holds, as predicates over the view, one English sentence each.

Hypothesis, explorers, debug mode, replay and docs/semantics.md read this one list. A predicate returns None when it
holds and otherwise says what it saw. Those that speak of change get the view before the transition and the verb.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import attrs

from kvstate.errors import PromiseBroken
from kvstate.ordering import covers
from kvstate.view import LeaseView, RowView, StateView, StreamView

Predicate = Callable[[StateView], str | None]
Change = Callable[[StateView, StateView, str], str | None]


@attrs.frozen
class Promise:
    """One promise: its name, its sentence, and how to see whether it holds."""

    name: str
    sentence: str
    holds: Change


PROMISES: list[Promise] = []


def _add(function: Callable[..., str | None], holds: Change) -> None:
    PROMISES.append(Promise(function.__name__, " ".join((function.__doc__ or "").split()), holds))


def always(function: Predicate) -> Predicate:
    """Register a promise about every view."""
    _add(function, lambda before, now, verb: function(now))
    return function


def change(function: Change) -> Change:
    """Register a promise about every transition."""
    _add(function, function)
    return function


def check(now: StateView, before: StateView | None = None, verb: str = "") -> None:
    """Check every promise.

    Raises
    ------
    PromiseBroken
        Naming the first promise that does not hold.
    """
    for promise in PROMISES:
        detail = promise.holds(before if before is not None else now, now, verb)
        if detail is not None:
            raise PromiseBroken(promise.name, promise.sentence, detail)


def _everyone(view: StateView) -> Iterator[StreamView]:
    yield from view.streams
    yield from view.detached


def _live(view: StateView) -> Iterator[tuple[LeaseView, RowView]]:
    """Yield the rows that still count."""
    for lease in view.leases:
        for row in lease.rows:
            if not row.void:
                yield lease, row


def _written(view: StateView, row: RowView, group: int) -> tuple[int, ...]:
    size, skip = view.page_size, row.skipped[group]
    if row.stop <= row.start:
        return ()
    return row.reads[group][max(0, row.start // size - skip) : max(0, -(-row.stop // size) - skip)]


def _read(view: StateView, row: RowView, group: int) -> tuple[int, ...]:
    return row.reads[group][: max(0, -(-row.stop // view.page_size) - row.skipped[group])]


def _content(view: StateView, stream: StreamView, table: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Return the pages of `table` that hold the stream's tokens."""
    skip = stream.skipped[group] if stream.skipped else 0
    return table[: max(0, -(-stream.length // view.page_size) - skip)]


@always
def pages_conserve(view: StateView) -> str | None:
    """Per tier and group a page is free, cached, or owned by exactly those that list it, or its sector is not lent."""
    for tier, pools in (("device", view.device), ("host", view.host)):
        for group, pool in enumerate(pools):
            listed: Counter[int] = Counter()
            for stream in _everyone(view):
                listed.update(_of(stream.device if tier == "device" else stream.host, group))
                if tier == "device":
                    for _, pages in stream.held:
                        listed.update(pages[group])
            for claim in view.claims:
                listed.update(claim.device(group) if tier == "device" else claim.host(group))
            if tier == "device":
                for lease in view.leases:
                    for row in lease.rows:
                        listed.update(row.takes[group])
                        listed.update(row.temps[group])
            free = Counter(pool.free) + Counter(pool.cached)
            lent = view.device_lent if tier == "device" else view.host_lent
            strange = sorted((set(listed) | set(free)) - set(range(len(pool.owners))))
            if strange:
                return f"{tier} page {strange[0]} is free or owned, and the pool has {len(pool.owners)} pages"
            for page, owners in enumerate(pool.owners):
                if listed[page] != owners:
                    return f"{tier} page {page} counts {owners} owners and {listed[page]} list it"
                here = not lent or lent[page // view.pages_per_sector[group]] == group
                if free[page] != (1 if owners == 0 and here else 0):
                    return f"{tier} page {page} has {owners} owners and is {free[page]} times free or cached"
    return None


def _of(pages: tuple[tuple[int, ...], ...], group: int) -> tuple[int, ...]:
    return pages[group] if pages else ()


@always
def one_page_one_writer(view: StateView) -> str | None:
    """A device page is written by at most one stream's open steps, one fetch or one reload, never by two of them."""
    for group in range(len(view.device)):
        writers: dict[int, str] = {}
        for _, row in _live(view):
            who = f"{row.request}/{row.label} (incarnation {row.incarnation})"
            for page in _written(view, row, group):
                if writers.setdefault(page, who) != who:
                    return f"device page {page} is written by {writers[page]} and by {who}"
        for claim in view.claims:
            if claim.fills:
                for page in sorted(set(claim.fills[group])):
                    who = f"{claim.kind} {claim.serial}"
                    if writers.setdefault(page, who) != who:
                        return f"device page {page} is written by {writers[page]} and by {who}"
    return None


@always
def nothing_writes_a_sealed_or_shared_page(view: StateView) -> str | None:
    """No open step that still counts writes a page that is sealed, or that another stream has."""
    for group, pool in enumerate(view.device):
        holders: dict[int, set[tuple[int, str]]] = {}
        for stream in view.streams:
            for page in _of(stream.device, group):
                holders.setdefault(page, set()).add((stream.incarnation, stream.label))
        for _, row in _live(view):
            for page in _written(view, row, group):
                if pool.sealed[page]:
                    return f"{row.request}/{row.label} writes sealed page {page}"
                if holders.get(page, set()) - {(row.incarnation, row.label)}:
                    return f"{row.request}/{row.label} writes page {page}, which another stream has"
    return None


@always
def full_pages_are_sealed(view: StateView) -> str | None:
    """A device page that a stream on the device has filled is sealed; of the pages without owner, the cached ones."""
    for group, pool in enumerate(view.device):
        for stream in view.streams:
            if stream.residency in ("OnDevice", "Fetching", "FetchFailed"):
                full = max(0, stream.length // view.page_size - stream.skipped[group])
                for page in _of(stream.device, group)[:full]:
                    if page < len(pool.sealed) and not pool.sealed[page]:
                        return f"page {page} of {stream.request}/{stream.label} is full and not sealed"
        cached = set(pool.cached)
        for page, owners in enumerate(pool.owners):
            if not owners and pool.sealed[page] != (page in cached):
                return f"page {page} has no owner and is {'' if pool.sealed[page] else 'not '}sealed"
    return None


@always
def keys_find_sealed_pages(view: StateView) -> str | None:
    """A content key finds one device page, which is sealed and has no other key; a cached page has a key."""
    for tier, pools in (("device", view.device), ("host", view.host)):
        for pool in pools:
            known = Counter(page for page, _ in pool.keys)
            for page, key in pool.keys:
                if tier == "host":
                    return f"key {key[:16]} finds host page {page}, and host copies are private"
                if known[page] > 1:
                    return f"page {page} has {known[page]} keys"
                if not pool.sealed[page]:
                    return f"key {key[:16]} finds page {page}, which is not sealed"
            for page in pool.cached:
                if not known[page]:
                    return f"{tier} page {page} is cached and has no key"
    return None


@always
def a_sector_is_one_groups(view: StateView) -> str | None:
    """A sector is lent exactly while a page of it is owned or cached, and no page of another group is."""
    for tier, pools, lent in (
        ("device", view.device, view.device_lent),
        ("host", view.host, view.host_lent),
    ):
        for group, pool in enumerate(pools if lent else ()):
            cached = set(pool.cached)
            held = {
                page // view.pages_per_sector[group]
                for page, owners in enumerate(pool.owners)
                if owners or page in cached
            }
            for sector, borrower in enumerate(lent):
                if (sector in held) != (borrower == group):
                    has = "has" if sector in held else "has no"
                    return f"{tier} sector {sector} is lent to group {borrower} and {has} pages of group {group}"
    return None


@always
def windows_have_left_what_they_passed(view: StateView) -> str | None:
    """A window group holds no page in front of what the next token attends to, and every page that a step writes."""
    for stream in view.streams:
        for group, (skipped, window) in enumerate(zip(stream.skipped, view.windows, strict=True)):
            passed = 0 if window is None else max(0, (stream.length - window + 1) // view.page_size)
            if skipped < passed or skipped > (stream.length // view.page_size if window is not None else 0):
                return (
                    f"{stream.request}/{stream.label} of {stream.length} tokens holds group {group} from page "
                    f"{skipped} on, and its window has passed {passed} pages"
                )
    for _, row in _live(view):
        for group, skipped in enumerate(row.skipped):
            if row.stop > row.start and skipped > row.start // view.page_size:
                return f"a step writes {row.request}/{row.label} in page {row.start // view.page_size} of group {group}"
    return None


@always
def keys_are_of_stored_pages(view: StateView) -> str | None:
    """A stream has keys of whole stored pages only, and none of content that older weights computed."""
    for stream in view.streams:
        name = f"{stream.request}/{stream.label}"
        if stream.keyed * view.page_size > stream.length:
            return f"{name} stores {stream.length} tokens and has {stream.keyed} keys"
        if stream.stale and stream.keyed:
            return f"{name} is stale and has {stream.keyed} keys"
    return None


@always
def tables_cover_lengths(view: StateView) -> str | None:
    """The table of a stream, and of an open step's row that counts, has a page for every token it stores."""
    for stream in view.streams:
        pages = -(-stream.length // view.page_size)
        for group, table in enumerate(stream.device if stream.residency != "OnHost" else stream.host):
            if stream.skipped[group] + len(table) < pages:
                return f"{stream.request}/{stream.label} stores {stream.length} tokens in {len(table)} pages"
    for _, row in _live(view):
        for skip, table in zip(row.skipped, row.reads, strict=True):
            if (skip + len(table)) * view.page_size < row.stop:
                return f"a step reaches token {row.stop} of {row.request}/{row.label} in {len(table)} pages"
    return None


@always
def residency_agrees(view: StateView) -> str | None:
    """A stream's pages, host copies and claim are those its residency says, and a request's streams move together."""
    claims = {claim.serial: claim for claim in view.claims}
    kinds = {"Offloading": "offload", "Reloading": "reload", "Fetching": "retrieve"}
    together: dict[int, str] = {}
    for stream in view.streams:
        name = f"{stream.request}/{stream.label}"
        if stream.residency in kinds:
            claim = claims.get(stream.holder)
            if claim is None or claim.kind != kinds[stream.residency] or claim.incarnation != stream.incarnation:
                return f"{name} is {stream.residency} without an open claim of that kind"
        pages = -(-stream.length // view.page_size)
        if any(stream.host) != (stream.residency == "OnHost" and any(pages > skip for skip in stream.skipped)):
            return f"{name} is {stream.residency} and has host pages {stream.host}"
        if stream.residency in ("OnHost", "Offloading", "Reloading") and any(stream.device):
            return f"{name} is {stream.residency} and has device pages {stream.device}"
        if stream.residency == "Gone":
            return f"{name} is gone and listed"
        where = stream.residency if stream.residency in ("OnHost", "Offloading", "Reloading") else "device"
        if together.setdefault(stream.incarnation, where) != where:
            return f"{name} is {where} while another stream of its request is {together[stream.incarnation]}"
    return None


@always
def a_leased_page_is_neither_free_nor_claimed(view: StateView) -> str | None:
    """No open step that counts reads a page free or still being filled, writes a claimed one, or runs off device."""
    residencies = {(stream.incarnation, stream.label): stream.residency for stream in view.streams}
    for group, pool in enumerate(view.device):
        claimed = {page for claim in view.claims for page in claim.device(group)}
        filling = {page for claim in view.claims if claim.fills for page in claim.fills[group]}
        for _, row in _live(view):
            name = f"{row.request}/{row.label}"
            residency = residencies.get((row.incarnation, row.label))
            if residency != "OnDevice":
                return f"{name} is {residency} under an open step"
            for page in _read(view, row, group):
                if not pool.owners[page]:
                    return f"page {page} of {name} is free under an open step"
                if page in filling:
                    return f"page {page} of {name} is still being filled under an open step"
            for page in _written(view, row, group):
                if page in claimed:
                    return f"page {page} of {name} is claimed and an open step writes it"
    return None


@always
def a_launched_step_keeps_its_pages(view: StateView) -> str | None:
    """No page that a launched step reads or writes is free before that step has ended, void or not."""
    for lease in view.leases:
        if lease.status in ("launching", "launched"):
            for row in lease.rows:
                for group, pool in enumerate(view.device):
                    for page in _read(view, row, group):
                        if not pool.owners[page]:
                            return (
                                f"page {page} of {row.request}/{row.label} is free under launched step {lease.serial}"
                            )
    return None


@always
def idle_means_empty(view: StateView) -> str | None:
    """Without requests, leases and claims nobody owns a page of any tier."""
    if view.requests or view.leases or view.claims:
        return None
    for tier, pools in (("device", view.device), ("host", view.host)):
        for pool in pools:
            owned = sum(1 for owners in pool.owners if owners)
            if owned:
                return f"idle, and {owned} {tier} pages have an owner"
    return None


MOVES_LENGTHS = frozenset({"commit", "landed", "reset", "op_failed", "abandon_offload"})


def _same_streams(before: StateView, now: StateView) -> Iterator[tuple[StreamView, StreamView]]:
    old = {(stream.incarnation, stream.label): stream for stream in before.streams}
    for stream in now.streams:
        was = old.get((stream.incarnation, stream.label))
        if was is not None and was.opened:
            yield was, stream


@change
def lengths_change_only_in_commit_landing_and_reset(before: StateView, now: StateView, verb: str) -> str | None:
    """A stream's length and released tokens change in commit, landing, reset, and where a fork's copy failed."""
    if verb in MOVES_LENGTHS:
        return None
    for was, stream in _same_streams(before, now):
        if (was.length, was.released) != (stream.length, stream.released):
            return f"{verb} moved {stream.request}/{stream.label} from {was.length} to {stream.length} tokens"
    return None


@change
def generations_rise(before: StateView, now: StateView, verb: str) -> str | None:
    """A stream's generation and epoch never fall, and its generation rises when its length or its pages change."""
    for was, stream in _same_streams(before, now):
        name = f"{stream.request}/{stream.label}"
        if stream.generation < was.generation or stream.epoch < was.epoch:
            return f"{verb} took {name} back from generation {was.generation}, epoch {was.epoch}"
        if stream.generation == was.generation and (was.length, was.released) != (stream.length, stream.released):
            return f"{verb} changed the length of {name} at generation {stream.generation}"
    return None


@change
def epochs_rise_before_pages_leave(before: StateView, now: StateView, verb: str) -> str | None:
    """When a page that held content leaves a stream on the device, or its offload, the stream's epoch has risen."""
    parts = {(claim.serial, part.label): part for claim in before.claims for part in claim.parts}
    for was, stream in _same_streams(before, now):
        part = parts.get((was.holder, was.label)) if was.residency == "Offloading" else None
        for group, table in enumerate(was.device if part is None else part.device):
            here = set(_content(now, stream, _of(stream.device, group), group))
            moved = stream.residency in ("OnDevice", "Fetching", "FetchFailed", "OnHost")
            if moved and set(_content(before, was, table, group)) - here and stream.epoch == was.epoch:
                return f"{verb} took pages from {stream.request}/{stream.label} at epoch {stream.epoch}"
    return None


@change
def fences_never_shrink(before: StateView, now: StateView, verb: str) -> str | None:
    """What the next owner of a page must wait for is never forgotten."""
    for old_pools, pools in ((before.device, now.device), (before.host, now.host)):
        for old, pool in zip(old_pools, pools, strict=True):
            for page, (was, fence) in enumerate(zip(old.fences, pool.fences, strict=True)):
                if not covers(fence, was):
                    return f"{verb} took the fence of page {page} from {was} to {fence}"
    return None
