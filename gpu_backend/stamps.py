"""Stamps in real K and V: one whole number per token, in every layer, in every byte.

A token's K or V in one layer is a few 64-bit words. Each holds the stamp xor a constant of its own (of its layer, of K
or V, of its place), so a token that lost, swapped or mixed any word with another layer or token does not agree with
itself, and one that was replaced whole has another stamp.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_backend.layout import CacheLayout, PageLayout

_WORD_BYTES = 8


class Undefined(enum.Enum):
    """What is read of a token that holds no stamp."""

    POISON = "poison"
    TORN = "torn"

    def __repr__(self) -> str:
        return self.name


class StampCode:
    """Writes and reads stamps of one group.

    Parameters
    ----------
    layout
        Of its pages, or of a cache with one group; K of one token in one layer must be whole words.
    device
        Of the device tier.
    group
        Its number: a page that another group wrote holds no stamp of this one.

    Raises
    ------
    ValueError
        When it is not.
    """

    def __init__(self, layout: CacheLayout | PageLayout, device: torch.device, group: int = 0) -> None:
        if layout.token_bytes % _WORD_BYTES:
            raise ValueError(
                f"{layout.name}: stamps need whole words of {_WORD_BYTES} bytes, and one token's K has "
                f"{layout.token_bytes} ({layout.heads} heads of {layout.head_dim} {layout.dtype}); use a larger "
                "head_dim"
            )
        self.page_size = layout.page_size
        self._shape = (layout.layers * 2, layout.page_size, layout.token_bytes // _WORD_BYTES)
        chunks, _, words = self._shape
        constants = torch.arange(1, chunks * words + 1, dtype=torch.int64).view(chunks, words) + (group << 40)
        # Fibonacci hashing (Knuth, TAOCP 6.4): consecutive numbers become far apart.
        self._constants = (constants * -7046029254386353131).to(device)

    def words(self, memory: Tensor) -> Tensor:
        """Return bytes `(pages, page_bytes)` as words `(pages, layers × 2, page_size, words)`, no copy."""
        return memory.view(torch.int64).view(-1, *self._shape)

    def put(self, words: Tensor, pages: Tensor, slots: Tensor, stamps: Sequence[Any]) -> None:
        """Write one stamp per (page, slot). What is no whole number is written as poison."""
        whole = [stamp if isinstance(stamp, int) else None for stamp in stamps]
        values = torch.tensor([0 if stamp is None else stamp for stamp in whole], dtype=torch.int64)
        coded = values.to(words.device)[:, None, None] ^ self._constants
        spoiled = [place for place, stamp in enumerate(whole) if stamp is None]
        if spoiled:
            coded[spoiled] = -1
        words[pages, :, slots] = coded

    def get(self, words: Tensor, tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[Any]]:
        """Return the stamps of the first tokens of several page tables, by one gather.

        Raises
        ------
        IndexError
            When a table ends before its length.
        """
        size = self.page_size
        pages: list[int] = []
        bases: list[int] = []
        for table, length in zip(tables, lengths, strict=True):
            count = -(-length // size)
            if count > len(table):
                raise IndexError(f"{len(table)} pages of {size} tokens do not hold token {length - 1}")
            bases.append(len(pages) * size)
            pages.extend(table[:count])
        found = words[torch.tensor(pages, dtype=torch.int64, device=words.device)]
        plain = found ^ self._constants.to(found.device)[:, None, :]
        first = plain[:, 0, :, 0]
        agree = (plain == first[:, None, :, None]).all(dim=3).all(dim=1)
        values: list[Any] = first.flatten().tolist()
        stamps = [values[base : base + length] for base, length in zip(bases, lengths, strict=True)]
        broken = (~agree).flatten().nonzero().flatten().tolist()
        if broken:
            self._name_broken(found, broken, bases, stamps)
        return stamps

    def _name_broken(self, found: Tensor, broken: list[int], bases: list[int], stamps: list[list[Any]]) -> None:
        """Put in what tokens hold whose words do not agree."""
        table = 0
        for place in broken:
            while table + 1 < len(bases) and bases[table + 1] <= place:
                table += 1
            token = place - bases[table]
            if token < len(stamps[table]):
                page, slot = divmod(place, self.page_size)
                poisoned = bool((found[page, :, slot] == -1).all())
                stamps[table][token] = Undefined.POISON if poisoned else Undefined.TORN
