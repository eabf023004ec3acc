"""The pages of a device cache as a transport sees them: bytes, a token at a time or whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from kvstate.ops import FetchBegin

PIECE_BYTES_MAX = 8 << 20
"""Between two pieces of this size a fetch looks whether its peer is still there, and whether it was cancelled."""


@attrs.frozen(eq=False)
class Pages:
    """A view of a page-major cache.

    Parameters
    ----------
    tokens
        uint8, ``(pages, planes, page_size, token_bytes)``: a plane is K or V of one layer. A page is contiguous, so a
        run of pages is one copy; a part of a page is one copy of `planes` pieces.
    """

    tokens: torch.Tensor

    @classmethod
    def of(cls, storage: torch.Tensor) -> Pages:
        """Return the pages of a storage ``(pages, layers, 2, page_size, kv_heads, head_dim)``."""
        pages, layers, two, page_size = storage.shape[:4]
        flat = storage.view(torch.uint8) if storage.dtype != torch.uint8 else storage
        return cls(flat.view(pages, layers * two, page_size, -1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(planes, page_size, token_bytes): what two caches must agree on."""
        _, planes, page_size, token_bytes = self.tokens.shape
        return planes, page_size, token_bytes

    def copy(self, source: Pages, op: FetchBegin, stop: int) -> Iterator[int]:
        """Copy tokens ``op.start … stop`` of a fetch from its publisher's pages, a piece at a time.

        Yields
        ------
        The tokens of each piece, after it was copied. Behind `stop` the rest of a page may move with it.

        Raises
        ------
        ValueError
            When the record does not name the pages that its length needs.
        """
        size = op.page_size
        last = -(-stop // size)
        [read], [write] = op.record.pages, op.tables
        if len(read) < last or not all(0 <= page < len(source.tokens) for page in read[:last]):
            raise ValueError(f"the record of {op.record.address!r} does not name the pages of {stop} tokens")
        place, slot = divmod(op.start, size)
        first = place
        if slot and place < last:
            high = min(size, stop - place * size)
            self.tokens[write[0], :, slot:high].copy_(source.tokens[read[place], :, slot:high])
            yield high - slot
            place += 1
        most = max(1, PIECE_BYTES_MAX // (self.tokens[0].numel() or 1))
        while place < last:
            count = _run(read, write[place - first :], place, min(last - place, most))
            begin, at = write[place - first], read[place]
            self.tokens[begin : begin + count].copy_(source.tokens[at : at + count])
            yield min(count * size, stop - place * size)
            place += count

    def spoil(self, op: FetchBegin) -> None:
        """Write garbage to the first half of a fetch's tokens, at least to one."""
        size = op.page_size
        base = op.start // size * size
        for token in range(op.start, op.start + -(-(op.stop - op.start) // 2)):
            place, slot = divmod(token - base, size)
            self.tokens[op.tables[0][place], :, slot] = 0xA5


def _run(read: Sequence[int], write: Sequence[int], place: int, most: int) -> int:
    """Return how many pages from `place` on are consecutive on both sides; `write` begins there."""
    count = 1
    while count < most and read[place + count] == read[place] + count and write[count] == write[0] + count:
        count += 1
    return count
