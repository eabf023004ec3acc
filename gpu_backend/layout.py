"""What one page is made of. Page-major: all layers of a page lie in one contiguous range, in both tiers.

Imports no torch, so sizes can be had, and refused, on a machine without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
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


def _layers(value: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(value, int):
        _at_least(1)(None, attrs.fields(GroupLayout).layers, value)
        return tuple(range(value))
    return tuple(value)


@attrs.frozen
class GroupLayout:
    """Layers of one attention type: they share a page table, and their K and V of a token lie in one page.

    Parameters
    ----------
    name
        Used in messages and metrics.
    layers
        The model's numbers of these layers; one whole number n means layers ``0 … n``.
    kv_heads
        Heads of K (as many of V) of the whole model.
    head_dim
        Elements per head.
    window
        Tokens that a token attends to, itself included; None: all before it.

    Raises
    ------
    ValueError
        When a size is out of range.
    """

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    layers: tuple[int, ...] = attrs.field(converter=_layers)
    kv_heads: int = attrs.field(validator=_at_least(1))
    head_dim: int = attrs.field(validator=_at_least(1))
    window: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))

    @layers.validator
    def _some(self, attribute: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
        if not value:
            raise ValueError(f"group {self.name!r} has no layers")
        for layer in value:
            _at_least(0)(self, attribute, layer)


@attrs.frozen
class PageLayout:
    """One page of one group on one rank.

    Parameters
    ----------
    name
        Of the cache, or of the cache and the group; used in messages.
    layers, heads, head_dim
        Layers of the group, heads that this rank stores, elements per head.
    page_size
        Tokens per page.
    dtype
        One of `DTYPE_BYTES`.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    page_size: int
    dtype: str

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


def _groups(values: Iterable[GroupLayout]) -> tuple[GroupLayout, ...]:
    groups = tuple(values)
    for group in groups:
        if not isinstance(group, GroupLayout):
            raise ValueError(f"groups are made of GroupLayouts, got {group!r}")
    return groups


@attrs.frozen(init=False, slots=False)
class CacheLayout:
    """Shapes and sizes of one paged cache on one rank.

    All layers attend alike: give `layers`, `kv_heads` and `head_dim`. Some have a sliding window or other heads: give
    `groups`. Several groups share the memory in sectors of ``lcm(page bytes of every group, 128)`` bytes, which belong
    to one group at a time.

    Parameters
    ----------
    name
        Used in messages and metrics.
    layers
        Layers of the model.
    kv_heads
        Heads of K (as many of V) of the whole model; this rank stores ``max(1, kv_heads // world_size)`` of them.
    head_dim
        Elements per head.
    groups
        In place of these three: the layers by attention type, each layer in one group.
    page_size
        Tokens per page, of every group.
    pages
        Device pages, the sink not counted; with several groups, device sectors.
    host_pages
        Host pages, or sectors; 0 means that there is no host pool.
    max_seq_len
        Tokens of the longest sequence: the width of the page tables. None: as many as the pages hold.
    dtype
        One of `DTYPE_BYTES`.
    world_size
        Ranks that share the heads (tensor parallelism).

    Raises
    ------
    ValueError
        When a size is out of range, the heads cannot be divided over the ranks, or a layer is in no group or in two.

    Examples
    --------
    >>> layout = CacheLayout(layers=2, kv_heads=8, head_dim=64, page_size=16, pages=100, world_size=2)
    >>> layout.page_shape, layout.page_bytes
    ((2, 2, 16, 4, 64), 32768)

    Every fourth layer attends to all tokens, the others to 128. A sector is one page of these or three of those:

    >>> mixed = CacheLayout(
    ...     groups=[GroupLayout("full", [3, 7], 8, 64), GroupLayout("window", [0, 1, 2, 4, 5, 6], 8, 64, window=128)],
    ...     pages=100,
    ... )
    >>> [part.page_bytes for part in mixed.parts], mixed.sector_bytes, mixed.geometry().pages_per_sector
    ([65536, 196608], 196608, (3, 1))
    >>> mixed.place_of(4)
    (1, 3)
    """

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    groups: tuple[GroupLayout, ...] = attrs.field(converter=_groups)
    page_size: int = attrs.field(validator=_at_least(1))
    pages: int = attrs.field(validator=_at_least(1))
    host_pages: int = attrs.field(validator=_at_least(0))
    max_seq_len: int | None = attrs.field(validator=attrs.validators.optional(_at_least(1)))
    dtype: str = attrs.field(validator=attrs.validators.in_(DTYPE_BYTES))
    world_size: int = attrs.field(validator=_at_least(1))

    def __init__(
        self,
        *,
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        groups: Sequence[GroupLayout] = (),
        name: str = "kv",
        page_size: int = 16,
        pages: int,
        host_pages: int = 0,
        max_seq_len: int | None = None,
        dtype: str = "bfloat16",
        world_size: int = 1,
    ) -> None:
        if not groups:
            if layers is None or kv_heads is None or head_dim is None:
                raise TypeError("a cache layout needs layers, kv_heads and head_dim; or groups, when layers differ")
            groups = [GroupLayout("full", layers, kv_heads, head_dim)]
        elif (layers, kv_heads, head_dim) != (None, None, None):
            raise TypeError("groups say what layers, kv_heads and head_dim say; give the one or the other")
        self.__attrs_init__(name, groups, page_size, pages, host_pages, max_seq_len, dtype, world_size)

    @groups.validator
    def _each_layer_once(self, _: attrs.Attribute[Any], value: tuple[GroupLayout, ...]) -> None:
        names = [group.name for group in value]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two groups have one name ({', '.join(names)}); rename one")
        layers = sorted(layer for group in value for layer in group.layers)
        twice = [layer for layer in layers if layers.count(layer) > 1]
        if twice:
            raise ValueError(f"{self.name}: layer {twice[0]} is in two groups; a layer has one place for its K and V")
        if layers != list(range(len(layers))):
            missing = next(layer for layer in range(len(layers)) if layer not in layers)
            raise ValueError(f"{self.name}: layer {missing} is in no group, and layer {layers[-1]} is")

    @world_size.validator
    def _divides(self, _: attrs.Attribute[Any], value: int) -> None:
        for group in self.groups:
            if group.kv_heads % value and value % group.kv_heads:
                raise ValueError(
                    f"{self.name}: {group.kv_heads} heads of K and V cannot be shared evenly by {value} ranks; "
                    "one number must divide the other"
                )

    def __attrs_post_init__(self) -> None:
        if self.max_seq_len is None and all(group.window is not None for group in self.groups):
            raise ValueError(
                f"{self.name}: with a window in every group sequences may be longer than the pages hold; "
                "give max_seq_len"
            )

    @cached_property
    def parts(self) -> tuple[PageLayout, ...]:
        """What a page is made of, per group."""
        return tuple(
            PageLayout(
                name=self.name if len(self.groups) == 1 else f"{self.name}, group {group.name}",
                layers=len(group.layers),
                heads=max(1, group.kv_heads // self.world_size),
                head_dim=group.head_dim,
                page_size=self.page_size,
                dtype=self.dtype,
            )
            for group in self.groups
        )

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each layer of the model has its K and V: (group, place among the layers of the group)."""
        found = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return (group, place among its layers) of a layer of the model.

        Raises
        ------
        IndexError
            When there is no such layer. Negative ones do not wrap around: that would be another layer's cache.
        """
        if not 0 <= layer < len(self.places):
            raise IndexError(f"{self.name} has layers 0 … {len(self.places) - 1}, not {layer}")
        return self.places[layer]

    @property
    def sector_bytes(self) -> int:
        """Bytes of what `pages` and `host_pages` count."""
        return self.geometry().sector_bytes

    @property
    def sinks(self) -> tuple[int, ...]:
        """The device page that padding writes to, per group: the one behind its last."""
        return self.geometry().group_pages

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence. A window lets pages go, so only the groups without one limit it."""
        if self.max_seq_len is not None:
            return -(-self.max_seq_len // self.page_size)
        return min(sink for sink, group in zip(self.sinks, self.groups, strict=True) if group.window is None)

    # -- of a cache with one group

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.places)

    @property
    def kv_heads(self) -> int:
        """Heads of K of the whole model, of the only group."""
        return self.groups[self._only].kv_heads

    @property
    def heads(self) -> int:
        """Heads that this rank stores; with more ranks than heads, each head is stored by several."""
        return self.parts[self._only].heads

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.parts[self._only].head_dim

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """See `PageLayout.page_shape`."""
        return self.parts[self._only].page_shape

    @property
    def token_bytes(self) -> int:
        """See `PageLayout.token_bytes`."""
        return self.parts[self._only].token_bytes

    @property
    def page_bytes(self) -> int:
        """See `PageLayout.page_bytes`."""
        return self.parts[self._only].page_bytes

    @property
    def sink(self) -> int:
        """The device page that padding writes to: the one behind the last."""
        return self.sinks[self._only]

    @property
    def _only(self) -> int:
        if len(self.groups) > 1:
            raise ValueError(f"{self.name} has {len(self.groups)} groups; ask its `parts`, one per group")
        return 0

    def geometry(self) -> Geometry:
        """Return what a KVManager wants to know of this cache."""
        return self._geometry

    @cached_property
    def _geometry(self) -> Geometry:
        return Geometry(
            pages=self.pages,
            page_size=self.page_size,
            host_pages=self.host_pages,
            groups=tuple(
                Group(group.name, part.page_bytes, group.window)
                for group, part in zip(self.groups, self.parts, strict=True)
            ),
            name=self.name,
        )
