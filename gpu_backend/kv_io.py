"""Reading and writing K and V through a plan: what a model's attention layers call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_backend.device_cache import DeviceCache, dtype_of
from gpu_backend.plan_tensors import PlanTensors
from kvstate.errors import KVStateError
from kvstate.types import MAIN


class LabelNotPlanned(KVStateError, KeyError):
    """The current plan has no such plan label.

    Attributes
    ----------
    label
        The one asked for.
    present
        Those of the plan.
    """

    def __init__(self, label: str, present: tuple[str, ...]) -> None:
        self.label = label
        self.present = present
        super().__init__(
            f"the current plan has no plan label {label!r}; it has {', '.join(map(repr, present)) or 'none'}"
            + ("; call set_label, or pass label=" if present else "")
        )

    def __str__(self) -> str:
        return str(self.args[0])


# A custom op, so that torch.compile sees one call that changes `storage` and nothing else: it keeps it where it stands,
# and does not trace into indexing that it might turn into a copy of the cache.
@torch.library.custom_op(
    "kvstate::write_kv",
    mutates_args=("storage",),
    schema="(Tensor(a!) storage, Tensor k, Tensor v, Tensor token_page, Tensor token_slot, int layer) -> ()",
)
def _write_kv(storage: Tensor, k: Tensor, v: Tensor, token_page: Tensor, token_slot: Tensor, layer: int) -> None:
    """Store rows of `k` and `v` in one layer of `storage`, as many as there are addresses; spare rows are ignored."""
    for which, rows in enumerate((k, v)):
        count = min(rows.shape[0], token_page.shape[0])
        storage[:, layer, which].index_put_((token_page[:count], token_slot[:count]), rows[:count])


@_write_kv.register_fake
def _(storage: Tensor, k: Tensor, v: Tensor, token_page: Tensor, token_slot: Tensor, layer: int) -> None:
    return None


class KVAccess:
    """K and V of one plan, by layer and plan label. Every plan starts with layer 0 and label "main".

    Parameters
    ----------
    cache
        The device tier.
    """

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache
        self._places = cache.layout.places
        self._dtype = dtype_of(cache.layout)
        self._tensors: dict[str, tuple[PlanTensors, ...]] = {}
        self._layer = 0
        self._label = MAIN

    def rebind(self, tensors: Mapping[str, tuple[PlanTensors, ...]]) -> None:
        """Turn to another plan; the defaults are what they were at first."""
        self._tensors = dict(tensors)
        self._layer = 0
        self._label = MAIN

    @property
    def labels(self) -> tuple[str, ...]:
        """The plan labels of the current plan."""
        return tuple(self._tensors)

    def set_layer(self, layer: int) -> None:
        """Make `layer` (the model's number) the default until the next plan.

        Raises
        ------
        IndexError
            When there is no such layer.
        """
        self._place(layer)
        self._layer = layer

    def set_label(self, label: str) -> None:
        """Make `label` the default until the next plan.

        Raises
        ------
        LabelNotPlanned
            When the current plan does not have it.
        """
        self._planned(label)
        self._label = label

    def tensors(self, label: str | None = None, *, layer: int | None = None) -> PlanTensors:
        """Return the addressing of a plan label in the group of a layer.

        Raises
        ------
        LabelNotPlanned
            When the current plan does not have it.
        """
        group, _ = self._place(layer)
        return self._planned(label)[group]

    def layer_view(self, layer: int | None = None) -> Tensor:
        """Return ``(pages + 1, 2, page_size, heads, head_dim)`` of a layer: what attention kernels take, no copy."""
        group, place = self._place(layer)
        return self._cache.groups[group].storage[:, place].view(self._dtype)

    def write_kv(
        self, k: Tensor, v: Tensor, *, layer: int | None = None, label: str | None = None, read_back: bool = False
    ) -> Tensor | None:
        """Store the K and V of the tokens that a plan label computes.

        Parameters
        ----------
        k, v
            ``(tokens or more, heads, head_dim)`` of the layer, packed like the label. Of the rows behind the tokens,
            those that a static buffer has addresses for go to the sink, the rest nowhere. Another dtype is converted.
        layer, label
            In place of the defaults.
        read_back
            Return what `read_kv` gives now.

        Raises
        ------
        LabelNotPlanned
            When the current plan does not have the label.
        ValueError
            When a shape does not fit.
        """
        group, place = self._place(layer)
        tensors = self._planned(label)[group]
        memory = self._cache.groups[group]
        heads, head_dim = memory.layout.heads, memory.layout.head_dim
        for name, rows in (("k", k), ("v", v)):
            if rows.shape[1:] != (heads, head_dim) or rows.shape[0] < tensors.tokens:
                raise ValueError(
                    f"{name} has shape {tuple(rows.shape)}; label {tensors.label!r} takes at least {tensors.tokens} "
                    f"rows of ({heads}, {head_dim})"
                )
        torch.ops.kvstate.write_kv(
            memory.storage, self._stored(k), self._stored(v), tensors.token_page, tensors.token_slot, place
        )
        return self.read_kv(layer=layer, label=label) if read_back else None

    def read_kv(self, *, layer: int | None = None, label: str | None = None) -> Tensor:
        """Return ``(bucket, 2, heads, head_dim)``: K and V in the slots that a plan label writes, gathered.

        Raises
        ------
        LabelNotPlanned
            When the current plan does not have the label.
        """
        group, place = self._place(layer)
        tensors = self._planned(label)[group]
        slots = self._cache.groups[group].storage[:, place]
        return slots[tensors.token_page, :, tensors.token_slot].view(self._dtype)

    def _planned(self, label: str | None) -> tuple[PlanTensors, ...]:
        """Return the tensors of `label` or the default, per group."""
        name = self._label if label is None else label
        found = self._tensors.get(name)
        if found is None:
            raise LabelNotPlanned(name, self.labels)
        return found

    def _place(self, layer: int | None) -> tuple[int, int]:
        """Return group and place of `layer` or the default; an index that wraps around would be another's cache."""
        layer = self._layer if layer is None else layer
        if not 0 <= layer < len(self._places):
            raise IndexError(f"{self._cache.layout.name} has layers 0 … {len(self._places) - 1}, not {layer}")
        return self._places[layer]

    def _stored(self, rows: Tensor) -> Tensor:
        return rows.to(self._dtype).view(self._cache.groups[0].storage.dtype)
