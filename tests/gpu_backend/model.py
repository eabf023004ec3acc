"""The decoder as the scheduler's model: over pages, alone or as one of several ranks that share the heads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_backend.attention import paged_attention
from gpu_backend.backend import TorchBackend
from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.loop import Sampled, serve
from kvstate.scheduler.requests import Finish, GenerationRequest, Output
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import nobodys

from .decoder import Decoder, Model, likeliest

KEPT = 16
"""Batches whose samples are remembered: those in flight, and aborted ones among them."""


@attrs.frozen
class Share:
    """A rank's share of the heads. Every rank computes everything but attention, so all have the same bits."""

    rank: int = 0
    world: int = 1

    def of(self, heads: Tensor) -> Tensor:
        """Return this rank's heads of ``(tokens, heads, head_dim)``."""
        return heads.chunk(self.world, dim=1)[self.rank].contiguous()

    def joined(self, own: Tensor) -> Tensor:
        """Return all heads; each rank brings its own."""
        if self.world == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim=1)


class DecoderModel:
    """Greedy, but for sample k, which takes the word that is k places behind the likeliest."""

    def __init__(self, decoder: Decoder, backend: TorchBackend, share: Share) -> None:
        self.decoder = decoder
        self.backend = backend
        self.share = share
        self._sampled: dict[int, list[int]] = {}

    def launch(self, batch: Batch, plan: Plan) -> None:
        entries, views = batch.entries, plan.in_step_order
        before = self._sampled.get(batch.previous.serial, []) if batch.previous is not None else []
        words, positions = [], []
        for entry, view in zip(entries, views, strict=True):
            for token in entry.tokens:
                # What a view at the sink computes does not count, so neither does what it is fed.
                in_flight = before[entry.feeds] if entry.feeds is not None and not view.sink else 0
                words.append(in_flight if token is None else token)
            positions.extend(range(view.position, view.position + view.span))
        access = self.backend.bind(plan)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            access.write_kv(self.share.of(k), self.share.of(v), layer=layer)
            own = paged_attention(self.share.of(q), access.layer_view(layer), access.tensors(layer=layer))
            return self.share.joined(own)

        logits = self.decoder(words, positions, attend).split([view.span for view in views])
        self._sampled[batch.serial] = [
            likeliest(found[-1], entry.sample + drawn)
            for entry, found in zip(entries, logits, strict=True)
            for drawn in range(entry.draws)
        ]
        for serial in sorted(self._sampled)[:-KEPT]:
            del self._sampled[serial]

    def result(self, batch: Batch) -> Sampled:
        return Sampled(self._sampled[batch.serial])


class Service:
    """A decoder behind a scheduler. Requests arrive and are cancelled as the seed says."""

    def __init__(
        self,
        sizes: Model,
        seed: int,
        share: Share | None = None,
        *,
        pages: int,
        host_pages: int,
        requests: int = 20,
        **options: bool,
    ) -> None:
        self.share = share if share is not None else Share()
        layout = sizes.layout(pages=pages, host_pages=host_pages, world_size=self.share.world)
        self.judge = EdgeJudge.of(layout.geometry())
        self.backend = TorchBackend(layout, judge=self.judge)
        self.kv = KVManager(layout.geometry(), self.backend, debug=True)
        self.decoder = Decoder(sizes)
        self.scheduler = Scheduler(self.kv, budget=12, batch=6, clock=lambda: 0.0, **options)
        self.model = DecoderModel(self.decoder, self.backend, self.share)
        self.draw = random.Random(seed)
        stems = [[self.draw.randrange(100) for _ in range(12)] for _ in range(2)]
        self.requests = {f"r{turn}": self._request(f"r{turn}", stems) for turn in range(requests)}
        self.backend.memory.cache.bytes.fill_(0xFF)
        self.backend.memory.pool.bytes.fill_(0xFF)

    def _request(self, name: str, stems: list[list[int]]) -> GenerationRequest:
        draw = self.draw
        prompt = [
            *draw.choice(stems)[: draw.choice((0, 4, 8, 12))],
            *(draw.randrange(100) for _ in range(draw.randint(1, 9))),
        ]
        return GenerationRequest(name, prompt, draw.randint(1, 9), samples=draw.choice((1, 1, 1, 2)))

    def run(self, look: Callable[[KVManager], None] = lambda kv: None) -> Iterator[Output]:
        """Serve all requests; `look` sees the manager between any two steps."""
        late = list(self.requests.values())

        def between() -> Iterable[Output]:
            self.spoil()
            look(self.kv)
            cancelled: tuple[Output, ...] = ()
            if self.scheduler.live and self.draw.random() < 0.03:
                cancelled = self.scheduler.cancel(self.draw.choice(self.scheduler.live).request.id)
                look(self.kv)
            while late and (self.draw.random() < 0.4 or not self.scheduler.live):
                self.scheduler.add(late.pop(0))
            look(self.kv)
            return cancelled

        yield from serve(self.scheduler, self.model, between=between)
        assert not late

    def spoil(self) -> None:
        """Fill with NaN what belongs to nobody."""
        for tier, group, pages in nobodys(self.kv.view()):
            self.backend.poison(tier, group, pages)

    def right(self, output: Output) -> bool:
        """Tell whether an output is what the whole history gives without a cache, or the beginning of it."""
        request = self.requests[output.request]
        expected = self.decoder.continued(request.prompt, len(output.tokens), output.sample)
        complete = output.finish is Finish.CANCELLED or len(output.tokens) == request.tokens_max
        return list(output.tokens) == expected and complete
