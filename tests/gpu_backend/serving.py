"""A decoder that serves requests over pages, and over a contiguous cache per request; every step compares both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from gpu_backend.attention import paged_attention
from kvstate import Segment, Step
from kvstate.ops import Plan, PlanView, Tier
from kvstate.prefix import Key, page_keys
from kvstate.refusals import Refusal
from kvstate.state import ReloadClaim
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.prefix import Keyed
from kvstate.transitions.step import Committed
from kvstate.view import StateView

from .decoder import Decoder, History, Model
from .rig import Rig

PAGE = 4


@attrs.define
class Request:
    """A request: its prompt and what followed; a contiguous cache; the logits behind every stored token."""

    prompt: list[int]
    words: list[int]
    kv: History
    logits: list[Tensor | None] = attrs.field(factory=list)
    """None where the token was not computed for this request."""

    @property
    def generated(self) -> list[int]:
        return self.words[len(self.prompt) :]


class Serving:
    """Greedy decoding over pages, with a contiguous cache per request beside it."""

    def __init__(self, model: Model, **sizes: Any) -> None:
        self.rig = Rig(model.layout(page_size=PAGE, **{"pages": 40, "host_pages": 40, **sizes}))
        self.kv, self.backend = self.rig.manager, self.rig.backend
        self.model = Decoder(model)
        self.requests: dict[str, Request] = {}
        self.compared = 0
        self.lent: list[StateView] = []
        self.found: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        """(group, key) → K and V of that page, per layer of the group, of whoever computed it."""
        self.backend.memory.cache.bytes.fill_(0xFF)
        self.backend.memory.pool.bytes.fill_(0xFF)

    def ingest(self, name: str, prompt: Sequence[int]) -> None:
        self.kv.ingest(name)
        self.requests[name] = Request(list(prompt), list(prompt), History(self.model.sizes))

    # -- one step

    def step(self, spans: Mapping[str, int], drafts: Mapping[str, Sequence[int]] | None = None, **options: Any) -> Plan:
        """Compute the next tokens of each request, and its draft behind them; store what the model agrees with."""
        plan = self.rig.plan(self.wanted(spans, drafts, **options))
        self.run(plan, drafts or {})
        return plan

    def wanted(
        self,
        spans: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]] | None = None,
        prefixes: Mapping[str, Sequence[Key]] | None = None,
        **options: Any,
    ) -> Step:
        rows = [
            Segment(name, span=span + len((drafts or {}).get(name, ())), prefix=(prefixes or {}).get(name, ()))
            for name, span in spans.items()
        ]
        return Step(rows, **options)

    def run(self, plan: Plan, drafts: Mapping[str, Sequence[int]] | None = None) -> None:
        """Launch, compare, and commit a step."""
        drafts = drafts or {}
        views = plan.in_step_order
        fed = []
        for view in views:
            own = self.requests[str(view.request)]
            known = [*own.words, *drafts.get(str(view.request), ())]
            fed.append(known[view.start : view.length])
            assert view.start == own.kv.length and len(fed[-1]) == view.span
        words = [word for row in fed for word in row]
        positions = [view.position + place for view in views for place in range(view.span)]
        with self.kv.launch(plan):
            access = self.backend.bind(plan)

            def paged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                access.write_kv(k, v, layer=layer)
                return paged_attention(q, access.layer_view(layer), access.tensors(layer=layer))

            def contiguous(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                rows = [len(row) for row in fed]
                caches = [self.requests[str(view.request)].kv for view in views]
                parts = zip(caches, q.split(rows), k.split(rows), v.split(rows), strict=True)
                return torch.cat([cache.attend(layer, *part) for cache, *part in parts])

            logits, expected = self.model(words, positions, paged), self.model(words, positions, contiguous)
        assert not logits.isnan().any()
        assert torch.equal(logits, expected)
        self.compared += len(words)
        accepted = []
        for view, row, found in zip(views, fed, logits.split([len(row) for row in fed]), strict=True):
            accepted.append(self.judged(view, row, found, len(drafts.get(str(view.request), ()))))
        assert isinstance(self.kv.commit(plan.lease, accepted), Committed)
        for view, stored in zip(views, accepted, strict=True):
            own = self.requests[str(view.request)]
            own.kv.keep(view.start + stored)
            assert len(own.logits) == own.kv.length
        self.spoil()

    def judged(self, view: PlanView, row: list[int], logits: Tensor, drafted: int) -> int:
        """Note what a request's tokens say; return how many of them are stored: a draft up to the first wrong word."""
        own = self.requests[str(view.request)]
        stored = view.span - drafted
        if view.start + stored == len(own.words):
            own.words.append(int(logits[stored - 1].argmax()))
            while stored < view.span and row[stored] == own.words[-1]:
                own.words.append(int(logits[stored].argmax()))
                stored += 1
        own.logits[view.start :] = logits[:stored].unbind()
        return stored

    def spoil(self) -> None:
        """Fill with NaN what belongs to nobody."""
        view = self.kv.view()
        self.lent.append(view)
        for tier, pools, lent in ((Tier.DEVICE, view.device, view.device_lent), (Tier.HOST, view.host, view.host_lent)):
            for group, pool in enumerate(pools):
                self.backend.poison(tier, group, pool.free)
            memory = self.backend.memory.cache if tier is Tier.DEVICE else self.backend.memory.pool
            memory.bytes[[sector for sector, group in enumerate(lent) if group is None]] = 0xFF
        self.backend.memory.cache.bytes[-1] = 0xFF

    # -- longer stretches

    def prefill(self, name: str, *chunks: int) -> None:
        """Store all that is known of a request, in chunks; the last one takes what is left."""
        for chunk in chunks:
            self.step({name: chunk})
        left = len(self.requests[name].words) - self.requests[name].kv.length
        self.step({name: left})

    def decode(self, *names: str, count: int = 1) -> None:
        for _ in range(count):
            self.step(dict.fromkeys(names, 1))

    def away_and_back(self, *names: str) -> None:
        """Offload all, then reload in the order given: onto other pages."""
        for name in reversed(names):
            assert isinstance(self.kv.offload(name), Offloaded)
            self.spoil()
        for name in names:
            assert self.reload(name)

    # -- pages that are found by what they hold

    def keys(self, name: str) -> tuple[Key, ...]:
        """Return the keys of what a request stores; behind the prompt's last word nothing is worth looking up."""
        own = self.requests[name]
        return page_keys(own.words[: own.kv.length or len(own.words) - 1], PAGE)

    def findable(self) -> set[tuple[int, str]]:
        return {(group, key) for group, pool in enumerate(self.kv.view().device) for _, key in pool.keys}

    def start(self, name: str, prompt: Sequence[int], chunk: int = 99) -> int:
        """Begin a request on what others have computed; return how many pages that were."""
        self.ingest(name, prompt)
        keys = self.keys(name)
        prefix = keys[: self.kv.match(keys)]
        stored = len(prefix) * PAGE
        step = self.wanted({name: min(chunk, len(prompt) - stored)}, prefixes={name: prefix})
        own = self.requests[name]
        own.kv.lengthen(stored)
        own.logits = [None] * stored
        self.take_over(name, prefix, self.findable())
        self.run(self.rig.plan(step))
        return len(prefix)

    def key(self, name: str) -> int:
        """Let others find what a request stores; return how many pages became findable."""
        own = self.requests[name]
        before = self.findable()
        keyed = next(stream.keyed for stream in self.kv.view().streams if stream.request == name)
        answer = self.kv.key(name, own.words[keyed * PAGE : own.kv.length])
        assert isinstance(answer, Keyed)
        self.note(name, before)
        return answer.pages

    def teach(self, name: str, prompt: Sequence[int]) -> None:
        """Begin a request and let others find each page of it, before a window leaves it."""
        self.start(name, prompt, chunk=PAGE)
        self.key(name)
        while len(prompt) > self.requests[name].kv.length:
            self.step({name: min(PAGE, len(prompt) - self.requests[name].kv.length)})
            self.key(name)

    def note(self, name: str, before: set[tuple[int, str]]) -> None:
        """Note the content of pages that a request has made findable."""
        own, keys = self.requests[name], [key.hex() for key in self.keys(name)]
        for group, key in sorted(self.findable() - before):
            rows = slice(keys.index(key) * PAGE, (keys.index(key) + 1) * PAGE)
            layers = self.rig.layout.groups[group].layers
            self.found[group, key] = [
                (own.kv.k[layer][rows].clone(), own.kv.v[layer][rows].clone()) for layer in layers
            ]

    def take_over(self, name: str, keys: Sequence[Key], findable: set[tuple[int, str]]) -> None:
        """Let a request's contiguous cache hold what the pages of `keys` hold, where they are findable."""
        own = self.requests[name]
        for place, key in enumerate(keys):
            for group, layout in enumerate(self.rig.layout.groups):
                if (group, key.hex()) in findable:
                    for layer, (k, v) in zip(layout.layers, self.found[group, key.hex()], strict=True):
                        own.kv.put(layer, place * PAGE, k, v)

    def reload(self, name: str) -> bool:
        """Reload a request; pages whose content the device has are not copied, but owned."""
        before = self.findable()
        pages = [{key: page for page, key in pool.keys} for pool in self.kv.view().device]
        claim = self.kv.claim_reload(name)
        if isinstance(claim, Refusal):
            return False
        assert isinstance(claim, ReloadClaim) and claim.op is not None
        copied = [{target for _, target, _ in copies} for copies in claim.op.copies]
        assert not isinstance(self.kv.commit_claim(claim), Refusal)
        keyed = next(stream.keyed for stream in self.kv.view().streams if stream.request == name)
        # Where found pages lie in too many sectors, those that nobody owns are copied all the same.
        owned = {(group, key) for group, key in before if pages[group][key] not in copied[group]}
        self.take_over(name, self.keys(name)[:keyed], owned)
        self.note(name, before)
        self.spoil()
        return True

    # -- pressure

    def make_room(self, draw: random.Random, asking: str, away: list[str]) -> None:
        """Send another request away."""
        victim = draw.choice([name for name in self.requests if name not in (*away, asking)])
        assert isinstance(self.kv.offload(victim), Offloaded)
        away.append(victim)
        self.spoil()

    def roomy(self, name: str, prompt: Sequence[int]) -> bool:
        """Tell whether a prompt that nobody has computed could start now."""
        self.kv.ingest(name)
        return self.kv.probe(Step([Segment(name, span=len(prompt))])) is None

    # -- at the end

    def held(self, name: str) -> list[int]:
        """How many device pages a request holds, per group."""
        [stream] = (stream for stream in self.kv.view().streams if stream.request == name)
        return [len(pages) for pages in stream.device]

    def end(self, name: str) -> None:
        """Remove a request whose answer is that of its whole history without any cache."""
        own = self.requests.pop(name)
        if own.logits:
            whole = self.model.without_cache(own.words[: own.kv.length])
            for found, expected in zip(own.logits, whole, strict=True):
                assert found is None or torch.allclose(found, expected, atol=1e-3, rtol=0)
            # Every word is the likeliest behind those before it: so would be the whole answer, word by word.
            first = len(own.prompt)
            assert own.generated[:1] == [] or own.words[first:] == whole[first - 1 :].argmax(dim=1).tolist()
        self.kv.remove(name)
        self.spoil()

    def check(self) -> None:
        """End every request; no edge was missing, and nothing is left over."""
        for name in list(self.requests):
            self.end(name)
        self.kv.reset_prefix_cache()
        assert self.rig.judge.violations == []
        view = self.kv.view()
        assert set(view.device_lent) <= {None} and set(view.host_lent) <= {None}


def handed_over(serving: Serving) -> int:
    """How often a device sector went from one group to another."""
    count = 0
    for sector in zip(*(view.device_lent for view in serving.lent), strict=True):
        groups = [group for group in sector if group is not None]
        count += sum(earlier != later for earlier, later in pairwise(groups))
    return count
