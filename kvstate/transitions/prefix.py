"""Prefix cache: sealed pages get content keys, by which other requests find them.

Who starts on findable pages owns them from `admit` on (``Segment.prefix``, see reserve); a lookup claims nothing. Pages
that nobody owns stay findable until somebody needs the memory (see arena).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvstate.prefix import Key, chain, root
from kvstate.refusals import NotStored, Refusal, StreamNotOnDevice
from kvstate.state import Fetching, State
from kvstate.transitions.claim import away, known, off_device
from kvstate.types import MAIN


@attrs.frozen
class Keyed:
    """Content that was given keys: `pages` of it are findable now, for `taken` others some group had their key."""

    request: str
    pages: int
    taken: int


def match(state: State, keys: Sequence[Key]) -> int:
    """Return how many leading pages of `keys` a request could start on: each group has what it needs at that border."""
    return state.device.match(keys, state.geometry)


def key(state: State, request: str, tokens: Sequence[int], label: str = MAIN) -> Keyed | Refusal:
    """Key the pages that hold `tokens`, which continue the stream's keyed ones; whole, stored pages only.

    OnDevice → same

    Nothing is keyed on a stream that stores content of older weights, or whose front has left.
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    stream = found.streams.get(label)
    if stream is None:
        residency = away(found)
        if residency is not None:
            return StreamNotOnDevice(request=request, label=label, residency=residency)
        return NotStored(request=request, label=label, stored=0) if tokens else Keyed(request, 0, 0)
    refusal = off_device(stream)
    if refusal is not None:
        return refusal
    size = state.page_size
    stored = stream.length - len(stream.keys) * size
    if stream.stale or stream.released:
        return Keyed(request, 0, 0)
    if len(tokens) > stored:
        return NotStored(request=request, label=label, stored=stored)
    # Effect.
    parent = stream.keys[-1] if stream.keys else root(found.config.cache_salt)
    pages = taken = 0
    for start in range(0, len(tokens) - size + 1, size):
        content = tuple(tokens[start : start + size])
        mine = chain(parent, content)
        place = len(stream.keys)
        before = parent if place else None
        free = True
        for pool, table in zip(state.device.pools, stream.residency.tables, strict=True):
            if place >= table.skip and not pool.key(table[place], mine, stream.written, before, content):
                free = False
        pages, taken = pages + free, taken + (not free)
        stream.keys.append(mine)
        parent = mine
    return Keyed(request, pages, taken)


def reset_prefix_cache(state: State) -> int:
    """Forget every key, because the weights change: no page is found any more, cached ones are free.

    any → same

    What is stored, being fetched or about to be stored stays as it is, and gets no keys until its request is reset.

    Returns
    -------
    Pages that could be found, over all groups.
    """
    # Effect.
    state.key_epoch += 1
    for found in state.requests.values():
        for stream in found.streams.values():
            if stream.length or stream.rows or isinstance(stream.residency, Fetching):
                stream.stale = True
                stream.keys = []
    return state.device.forget_keys()
