"""The pages of a device cache as a transport sees them: bytes, whole pages or the tokens of one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from gpu_backend.copier import runs_of
from kvstate.ops import FetchBegin

if TYPE_CHECKING:
    from gpu_backend.device_cache import DeviceCache

PIECE_BYTES_MAX = 8 << 20
"""Between two pieces of this size a fetch looks whether its peer is still there, and whether it was cancelled."""

GARBAGE_BYTE = 0xA5
"""What a fetch that was made to fail leaves behind."""


@attrs.frozen(eq=False)
class Pages:
    """The bytes of a page-major cache, and what they mean.

    Parameters
    ----------
    bytes
        uint8, ``(pages, page_bytes)``.
    page_shape
        ``(layers, 2, page_size, heads, head_dim)``.
    dtype
        Name of the dtype of the elements.
    """

    bytes: Tensor
    page_shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, cache: DeviceCache) -> Pages:
        """Return the pages of `cache`, the sink included."""
        return cls(cache.bytes, cache.layout.page_shape, cache.layout.dtype)

    def __str__(self) -> str:
        layers, _, page_size, heads, head_dim = self.page_shape
        return f"{layers} layers, {page_size} tokens per page, {heads} heads of {head_dim} {self.dtype}"

    def fits(self, other: Pages) -> bool:
        """Tell whether a page means the same in both."""
        mine = (self.page_shape, self.dtype, self.bytes.shape[1])
        return mine == (other.page_shape, other.dtype, other.bytes.shape[1])

    def tokens(self) -> Tensor:
        """Return the bytes as ``(pages, layers * 2, page_size, token_bytes)``: a token is strided inside its page."""
        layers, two, page_size = self.page_shape[:3]
        return self.bytes.view(len(self.bytes), layers * two, page_size, -1)

    def copy(self, source: Pages, op: FetchBegin, stop: int) -> Iterator[int]:
        """Copy tokens ``op.start … stop`` of a fetch out of its publisher's pages, a piece at a time.

        A first page that holds tokens of its own keeps them; with the last page everything behind `stop` moves.

        Yields
        ------
        The bytes of each piece, once they were copied.

        Raises
        ------
        ValueError
            When the record does not name the pages that its length needs. Nothing was copied.
        """
        size = op.page_size
        first, slot = divmod(op.start, size)
        last = max(first, -(-stop // size))
        [sources], [targets] = op.record.pages, op.tables
        if len(sources) < last or not all(0 <= page < len(source.bytes) for page in sources[first:last]):
            raise ValueError(
                f"the record of {op.record.address!r} does not name pages for {stop} tokens of its {len(source.bytes)}"
            )
        read, write = sources[first:last], targets[: last - first]
        if slot and read:
            high = min(size, stop - first * size)
            part = source.tokens()[read[0], :, slot:high]
            self.tokens()[write[0], :, slot:high].copy_(part)
            yield part.numel()
            read, write = read[1:], write[1:]
        most = max(1, PIECE_BYTES_MAX // self.bytes.shape[1])
        for begin in range(0, len(read), most):
            yield self._move(source, read[begin : begin + most], write[begin : begin + most])

    def _move(self, source: Pages, read: tuple[int, ...], write: tuple[int, ...]) -> int:
        """Copy whole pages; on the host by memmove, since Tensor.copy_ costs microseconds and a crew per thread."""
        page_bytes = self.bytes.shape[1]
        for begin, at, count in runs_of(read, write):
            if self.bytes.is_cpu and source.bytes.is_cpu:
                to, origin = self.bytes.data_ptr() + at * page_bytes, source.bytes.data_ptr() + begin * page_bytes
                ctypes.memmove(to, origin, count * page_bytes)
            else:
                self.bytes[at : at + count].copy_(source.bytes[begin : begin + count])
        return len(read) * page_bytes

    def spoil(self, op: FetchBegin) -> None:
        """Write garbage to the first half of a fetch's tokens, at least to one."""
        base = op.start // op.page_size * op.page_size
        tokens = self.tokens()
        for token in range(op.start, op.start + -(-(op.stop - op.start) // 2)):
            place, slot = divmod(token - base, op.page_size)
            tokens[op.tables[0][place], :, slot] = GARBAGE_BYTE
