"""The pages of a device cache as a transport sees them: bytes, whole pages or the tokens of one, per group."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
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
class GroupPages:
    """The pages of one group.

    Parameters
    ----------
    bytes
        uint8, ``(pages + 1, page_bytes)``; the last one is the sink.
    page_shape
        ``(layers, 2, page_size, heads, head_dim)``.
    """

    bytes: Tensor
    page_shape: tuple[int, ...]

    def __str__(self) -> str:
        layers, _, page_size, heads, head_dim = self.page_shape
        return f"{layers} layers, {page_size} tokens per page, {heads} heads of {head_dim}"

    def tokens(self) -> Tensor:
        """Return the bytes as ``(pages, layers * 2, page_size, token_bytes)``: a token is strided inside its page."""
        layers, two, page_size = self.page_shape[:3]
        return self.bytes.view(len(self.bytes), layers * two, page_size, -1)

    def copy(self, source: GroupPages, part: _Part, stop: int) -> Iterator[int]:
        """Copy the tokens of `part` in front of `stop`, a piece at a time; see `Pages.copy`."""
        size = self.page_shape[2]
        low, slot = divmod(part.start, size)
        last = max(low, -(-stop // size))
        read, write = part.sources[low:last], part.targets[low - part.first : last - part.first]
        if slot and read:
            high = min(size, stop - low * size)
            moved = source.tokens()[read[0], :, slot:high]
            self.tokens()[write[0], :, slot:high].copy_(moved)
            yield moved.numel()
            read, write = read[1:], write[1:]
        most = max(1, PIECE_BYTES_MAX // self.bytes.shape[1])
        for begin in range(0, len(read), most):
            yield self._move(source, read[begin : begin + most], write[begin : begin + most])

    def _move(self, source: GroupPages, read: tuple[int, ...], write: tuple[int, ...]) -> int:
        """Copy whole pages; on the host by memmove, since Tensor.copy_ costs microseconds and a crew per thread."""
        page_bytes = self.bytes.shape[1]
        for begin, at, count in runs_of(read, write):
            if self.bytes.is_cpu and source.bytes.is_cpu:
                to, origin = self.bytes.data_ptr() + at * page_bytes, source.bytes.data_ptr() + begin * page_bytes
                ctypes.memmove(to, origin, count * page_bytes)
            else:
                self.bytes[at : at + count].copy_(source.bytes[begin : begin + count])
        return len(read) * page_bytes

    def spoil(self, part: _Part, stop: int) -> None:
        """Write garbage to the first half of the tokens of `part`, at least to one."""
        tokens = self.tokens()
        for token in range(part.start, part.start + -(-(stop - part.start) // 2)):
            page, slot = divmod(token, self.page_shape[2])
            tokens[part.targets[page - part.first], :, slot] = GARBAGE_BYTE


@attrs.frozen
class _Part:
    """What a fetch asks of one group: tokens from `start` on, out of the publisher's table `sources`.

    The consumer's `targets` begin with the table's page `first`: what its window needs, if it has one.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    first: int
    start: int


@attrs.frozen(eq=False)
class Pages:
    """The bytes of a page-major cache, and what they mean.

    Parameters
    ----------
    groups
        The pages of each group; with several, all in the same memory.
    dtype
        Name of the dtype of the elements.
    """

    groups: tuple[GroupPages, ...]
    dtype: str

    @classmethod
    def of(cls, cache: DeviceCache) -> Pages:
        """Return the pages of `cache`, the sinks included."""
        return cls(tuple(GroupPages(own.bytes, own.layout.page_shape) for own in cache.groups), cache.layout.dtype)

    @classmethod
    def over(cls, memory: Tensor, description: Mapping[str, Any]) -> Pages:
        """Return the pages that another process has described, over the memory that it handed over."""
        groups = []
        for shape, count, page_bytes in description["groups"]:
            groups.append(GroupPages(memory[: count * page_bytes].view(count, page_bytes), tuple(shape)))
        return cls(tuple(groups), description["dtype"])

    def described(self) -> dict[str, Any]:
        """Return what another process must know of these pages."""
        return {"groups": [(own.page_shape, *own.bytes.shape) for own in self.groups], "dtype": self.dtype}

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.groups[0].bytes.device

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.groups))} {self.dtype}"

    def fits(self, other: Pages) -> bool:
        """Tell whether a page means the same in both."""
        mine, theirs = ([(own.page_shape, own.bytes.shape[1]) for own in pages.groups] for pages in (self, other))
        return (mine, self.dtype) == (theirs, other.dtype)

    def copy(self, source: Pages, op: FetchBegin, stop: int) -> Iterator[int]:
        """Copy tokens ``op.start … stop`` of a fetch out of its publisher's pages, a piece at a time, group by group.

        A first page that holds tokens of its own keeps them; with the last page everything behind `stop` moves.

        Yields
        ------
        The bytes of each piece, once they were copied.

        Raises
        ------
        ValueError
            When the record does not name the pages that its length needs. Nothing was copied.
        """
        parts = _parts(op)
        for theirs, part in zip(source.groups, parts, strict=True):
            named = part.sources[part.start // op.page_size : -(-stop // op.page_size)]
            wanted = max(0, -(-stop // op.page_size) - part.start // op.page_size)
            if len(named) < wanted or not all(0 <= page < len(theirs.bytes) - 1 for page in named):
                raise ValueError(
                    f"the record of {op.record.address!r} does not name pages for {stop} tokens of its "
                    f"{len(theirs.bytes) - 1}"
                )
        for own, theirs, part in zip(self.groups, source.groups, parts, strict=True):
            yield from own.copy(theirs, part, stop)

    def spoil(self, op: FetchBegin) -> None:
        """Write garbage to the first half of a fetch's tokens in each group, at least to one."""
        for own, part in zip(self.groups, _parts(op), strict=True):
            own.spoil(part, op.stop)


def _parts(op: FetchBegin) -> list[_Part]:
    return [
        _Part(sources, targets, first, max(op.start, first * op.page_size))
        for sources, targets, first in zip(op.record.pages, op.tables, op.firsts, strict=True)
    ]
