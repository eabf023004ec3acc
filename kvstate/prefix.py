"""Content keys: what a full page holds, in 32 bytes; and the events that tell other processes which are here.

A page's key chains the key in front of it with the page's own tokens, so equal keys mean equal histories, not just
equal pages. The hash is SHA-256: a false hit would serve one request the context of another, and no probability of that
which an adversary can raise is acceptable (cheap hashes have been attacked: CVE-2025-25183).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import attrs

Key = bytes
"""SHA-256 over the parent's key and the tokens of a page."""

KEY_BYTES = 32


def root(salt: str = "") -> Key:
    """Return the key in front of a stream's first page; streams of different salts share nothing."""
    return hashlib.sha256(b"kvstate\0" + salt.encode()).digest()


def chain(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a page that holds `tokens` behind the page of `parent`.

    Raises
    ------
    OverflowError, TypeError
        When a token is no whole number of 64 bits.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> tuple[Key, ...]:
    """Return the keys of the whole pages of `tokens`.

    >>> keys = page_keys(range(10), page_size=4)
    >>> len(keys), keys == page_keys(range(8), page_size=4), keys[0] == page_keys(range(4), page_size=4, salt="a")[0]
    (2, True, False)
    """
    key = root(salt)
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        key = chain(key, tokens[start : start + page_size])
        keys.append(key)
    return tuple(keys)


@attrs.frozen
class BlockStored:
    """Pages became findable, in the order of a chain. Field names as in vLLM's `kv_events`; a block is a page.

    `token_ids` is empty where pages came back from the host, which keeps keys and no tokens.
    """

    block_hashes: tuple[Key, ...]
    parent_block_hash: Key | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    group_idx: int = 0


@attrs.frozen
class BlockRemoved:
    """Pages are no longer findable."""

    block_hashes: tuple[Key, ...]
    medium: str = "GPU"
    group_idx: int = 0


@attrs.frozen
class AllBlocksCleared:
    """Nothing is findable any more: the weights changed, or the cache was cleared."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def findable(events: Iterable[CacheEvent]) -> dict[tuple[int, Key], Key | None]:
    """Return what is findable after `events`: the parent of each (group, key).

    Raises
    ------
    ValueError
        When a key is stored twice, or removed where it is not: the events are not all, or not in order.
    """
    found: dict[tuple[int, Key], Key | None] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.clear()
            continue
        parent = event.parent_block_hash if isinstance(event, BlockStored) else None
        for key in event.block_hashes:
            place = (event.group_idx, key)
            if isinstance(event, BlockStored) == (place in found):
                word = "stored twice" if place in found else "removed and was not there"
                raise ValueError(f"block {key.hex()[:16]} of group {event.group_idx} was {word}")
            if isinstance(event, BlockStored):
                found[place] = parent
                parent = key
            else:
                del found[place]
    return found
