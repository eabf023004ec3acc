"""What one page is made of. Page-major: all layers of a page lie in one contiguous range, in both tiers.

Imports no torch, so sizes can be had, and refused, on a machine without it.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvstate.types import Geometry, Group

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of every dtype that a cache may have."""

FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Stored as bytes: torch indexes neither."""


def _at_least(low: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{attribute.name} must be a whole number of at least {low}, got {value!r}")

    return check


@attrs.frozen(kw_only=True)
class CacheLayout:
    """Shapes and sizes of one paged cache on one rank.

    Parameters
    ----------
    name
        Used in messages and metrics.
    layers
        Layers that share the page table.
    kv_heads
        Heads of K (as many of V) of the whole model; this rank stores `heads` of them.
    head_dim
        Elements per head.
    page_size
        Tokens per page.
    pages
        Device pages, the sink not counted.
    host_pages
        Host pages; 0 means that there is no host pool.
    max_seq_len
        Tokens of the longest sequence: the width of the page tables. None: as many as the pages hold.
    dtype
        One of `DTYPE_BYTES`.
    world_size
        Ranks that share the heads (tensor parallelism).

    Raises
    ------
    ValueError
        When a size is out of range, or the heads cannot be divided over the ranks.

    Examples
    --------
    >>> layout = CacheLayout(layers=2, kv_heads=8, head_dim=64, page_size=16, pages=100, world_size=2)
    >>> layout.page_shape, layout.page_bytes
    ((2, 2, 16, 4, 64), 32768)
    """

    name: str = attrs.field(default="kv", validator=attrs.validators.instance_of(str))
    layers: int = attrs.field(validator=_at_least(1))
    kv_heads: int = attrs.field(validator=_at_least(1))
    head_dim: int = attrs.field(validator=_at_least(1))
    page_size: int = attrs.field(default=16, validator=_at_least(1))
    pages: int = attrs.field(validator=_at_least(1))
    host_pages: int = attrs.field(default=0, validator=_at_least(0))
    max_seq_len: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))
    dtype: str = attrs.field(default="bfloat16", validator=attrs.validators.in_(DTYPE_BYTES))
    world_size: int = attrs.field(default=1, validator=_at_least(1))

    @world_size.validator
    def _divides(self, _: attrs.Attribute[Any], value: int) -> None:
        if self.kv_heads % value and value % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.kv_heads} heads of K and V cannot be shared evenly by {value} ranks; "
                "one number must divide the other"
            )

    @property
    def heads(self) -> int:
        """Heads that this rank stores; with more ranks than heads, each head is stored by several."""
        return max(1, self.kv_heads // self.world_size)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, 2, page_size, heads, head_dim)``: K is 0, V is 1."""
        return (self.layers, 2, self.page_size, self.heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K, or V, in one layer."""
        return self.heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in either tier."""
        return self.layers * 2 * self.page_size * self.token_bytes

    @property
    def storage_dtype(self) -> str:
        """The dtype of the storage: bytes for 8-bit floats."""
        return "uint8" if self.dtype in FLOAT8 else self.dtype

    @property
    def sink(self) -> int:
        """The device page that padding writes to: the one behind the last."""
        return self.pages

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence."""
        return self.pages if self.max_seq_len is None else -(-self.max_seq_len // self.page_size)

    def geometry(self) -> Geometry:
        """Return what a KVManager wants to know of this cache."""
        return Geometry(
            pages=self.pages,
            page_size=self.page_size,
            host_pages=self.host_pages,
            groups=(Group(page_bytes=self.page_bytes),),
            name=self.name,
        )
