"""A small decoder as models are built today, with random weights, and the plainest ways to keep its K and V.

Rotary positions, RMS norms, grouped-query attention, a gated MLP; each layer attends to everything or to a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from gpu_backend import CacheLayout, GroupLayout

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v), each ``(tokens, heads, head_dim)`` → what attention gives, ``(tokens, heads, head_dim)``."""


@attrs.frozen
class Model:
    """Sizes. `windows` has one entry per layer; None attends to everything."""

    windows: tuple[int | None, ...] = (None, None)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocabulary: int = 100
    hidden: int = 48

    def layout(self, *, page_size: int = 4, dtype: str = "float32", **sizes: int) -> CacheLayout:
        """Return a cache with one group per kind of layer, in the order of their first layers."""
        groups = [
            GroupLayout(
                "full" if window is None else f"window of {window}",
                [layer for layer, own in enumerate(self.windows) if own == window],
                self.kv_heads,
                self.head_dim,
                window,
            )
            for window in dict.fromkeys(self.windows)
        ]
        return CacheLayout(groups=groups, page_size=page_size, dtype=dtype, **sizes)


class Decoder:
    """Weights, the same ones for the same sizes and seed."""

    def __init__(self, sizes: Model, seed: int = 0) -> None:
        self.sizes = sizes
        width, kept = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        draw = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) * (2 / rows) ** 0.5

        self.words = torch.randn(sizes.vocabulary, width, generator=draw) / 2
        self.layers = [
            (
                weights(width, width + 2 * kept), weights(width, width),
                weights(width, 2 * sizes.hidden), weights(sizes.hidden, width),
            )
            for _ in sizes.windows
        ]  # fmt: skip
        self.out = weights(width, sizes.vocabulary)
        self.turns = 10_000.0 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)

    def __call__(self, words: Sequence[int], positions: Sequence[int], attend: Attend) -> Tensor:
        """Return the logits behind each of `words`, ``(words, vocabulary)``."""
        sizes = self.sizes
        x = self.words[list(words)]
        angles = torch.tensor(list(positions), dtype=torch.float32)[:, None, None] * self.turns
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            rows = (_normed(x) @ qkv).view(len(words), -1, sizes.head_dim)
            q, k, v = rows.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
            found = attend(layer, _turned(q, angles), _turned(k, angles), v)
            x = x + found.reshape(len(words), -1) @ out
            gate, value = (_normed(x) @ up).chunk(2, dim=1)
            x = x + (functional.silu(gate) * value) @ down
        return _normed(x) @ self.out

    def without_cache(self, words: Sequence[int]) -> Tensor:
        """Return the logits of a whole history at once, by a softmax written out: other sums than with any cache."""
        sizes = self.sizes
        behind = torch.arange(len(words))[:, None] - torch.arange(len(words))[None, :]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (rows.repeat_interleave(sizes.heads // sizes.kv_heads, dim=1) for rows in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / sizes.head_dim**0.5
            hidden = (behind < 0) | (behind >= (sizes.windows[layer] or len(words)))
            return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(dim=2), v)

        return self(words, range(len(words)), attend)

    def continued(self, words: Sequence[int], count: int, place: int = 0) -> list[int]:
        """Return the next `count` words, each `place` behind the likeliest, computed without any cache."""
        history = list(words)
        for _ in range(count):
            history.append(likeliest(self.without_cache(history)[-1], place))
        return history[len(words) :]


def likeliest(logits: Tensor, place: int = 0) -> int:
    """Return the word that is `place` places behind the likeliest one."""
    return int(logits.topk(place + 1).indices[place])


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def _turned(rows: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of elements by their position (Su et al., RoFormer, 2021)."""
    even, odd = rows[..., ::2], rows[..., 1::2]
    return torch.stack(
        (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), dim=-1
    ).flatten(-2)


@attrs.define
class History:
    """One stream, contiguous: K and V of every token per layer, those that a window has left too."""

    sizes: Model
    dtype: torch.dtype = torch.float32
    k: list[Tensor] = attrs.field(init=False)
    v: list[Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        empty = torch.empty(0, self.sizes.kv_heads, self.sizes.head_dim, dtype=self.dtype)
        self.k, self.v = ([empty] * len(self.sizes.windows) for _ in range(2))

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.k[-1])

    def copy(self) -> History:
        """Return another stream with the same tokens."""
        other = History(self.sizes, self.dtype)
        other.k, other.v = list(self.k), list(self.v)
        return other

    def keep(self, first: int, stop: int | None = None) -> None:
        """Forget the tokens behind the first `first`, or those from `first` up to `stop`."""
        for rows in (self.k, self.v):
            rows[:] = [own[:first] if stop is None else torch.cat((own[:first], own[stop:])) for own in rows]

    def lengthen(self, length: int) -> None:
        """Begin with `length` tokens that are still to be put in."""
        rows = torch.full((length, *self.k[0].shape[1:]), float("nan"), dtype=self.dtype)
        self.k, self.v = ([rows] * len(self.sizes.windows) for _ in range(2))

    def put(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Replace the tokens from `first` on of one layer."""
        for rows, own in ((self.k, k), (self.v, v)):
            rows[layer] = torch.cat((rows[layer][:first], own, rows[layer][first + len(own) :]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append K and V of the tokens of `q`, and let these see what they see."""
        self.k[layer] = torch.cat((self.k[layer], k.to(self.dtype)))
        self.v[layer] = torch.cat((self.v[layer], v.to(self.dtype)))
        length, window = len(self.k[layer]), self.sizes.windows[layer]
        places = torch.arange(length - len(q), length)[:, None]
        first = 0 if window is None else max(0, length - len(q) - window + 1)
        seen = torch.arange(first, length)[None, :] <= places
        if window is not None:
            seen &= torch.arange(first, length)[None, :] > places - window
        keys, values = (
            rows[layer][first:]
            .to(q.dtype)
            .transpose(0, 1)
            .repeat_interleave(self.sizes.heads // self.sizes.kv_heads, 0)
            for rows in (self.k, self.v)
        )
        found = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
        return found.transpose(0, 1)
