"""A decoder with full and sliding-window layers continues a prompt as it would alone, whatever happens to its pages.

What is compared, and how strictly:

exact    Beside the pages every stream has a contiguous cache. Each step runs the same rows through the same weights
         once over the pages and once over those; K and V that attention is given have the same shapes then, so logits
         are compared bit by bit, at every step of every test here. Where a page was found by its key, the contiguous
         cache takes the K and V of whoever computed that page: another batch may have given other last bits.
tokens   At the end each continuation is compared with that of the whole history without any cache, one token after the
         other, by a softmax written out. There sums run in another order: tokens must be equal, logits are within 1e-3.

All bytes that belong to nobody are NaN, in both tiers: freed pages, the sectors that no group has, and the sinks.
"""

import random
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

import attrs
from torch import Tensor

from gpu_backend.attention import paged_attention
from kvstate import Segment, Step, StreamFork, StreamId
from kvstate.ops import Plan, PlanView, Tier
from kvstate.ordering import Queue
from kvstate.prefix import Key, page_keys
from kvstate.refusals import PagesExhausted, PrefixLost, Refusal
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.prefix import Keyed
from kvstate.transitions.step import Committed
from kvstate.view import StateView

from .decoder import Decoder, History, Model
from .rig import Rig

PAGE = 4
WINDOW = 6
MIXED = Model(windows=(WINDOW, None, WINDOW, WINDOW, None))
"""Pages of 1536 bytes for the windows and of 1024 for the others: a sector is two of these or three of those."""
KINDS = {
    "full": Model(windows=(None, None)),
    "windows and full": MIXED,
    "a window of one page": Model(windows=(None, PAGE, None, PAGE)),
    "a window of one token": Model(windows=(1, None)),
    "two windows": Model(windows=(9, 3, None, 3)),
}


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

    def __init__(self, model: Model = MIXED, **sizes: Any) -> None:
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
        if isinstance(self.kv.reload(name), Refusal):
            return False
        keyed = next(stream.keyed for stream in self.kv.view().streams if stream.request == name)
        self.take_over(name, self.keys(name)[:keyed], before)
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
        assert own.generated == self.model.continued(own.prompt, len(own.generated)), name
        if own.logits:
            whole = self.model.without_cache(own.words[: own.kv.length])
            for found, expected in zip(own.logits, whole, strict=True):
                assert found is None or torch.allclose(found, expected, atol=1e-3, rtol=0)
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


PROMPT = [7, 3, 99, 12, 12, 54, 0, 31, 8, 77, 21, 5, 66]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(), (4, 4, 4), (3, 1, 5), (5, 6), (1, 1, 1, 1), (12,)], ids=str)
def test_a_prompt_in_chunks_is_continued_as_it_would_be_alone(kind: str, chunks: tuple[int, ...]) -> None:
    """Chunks end inside and at the border of pages, and inside and outside of the windows."""
    serving = Serving(KINDS[kind])
    serving.ingest("a", PROMPT)
    serving.prefill("a", *chunks)
    serving.decode("a", count=14)
    assert len(set(serving.requests["a"].generated)) > 7, "a model that repeats itself shows nothing"
    serving.check()


def test_a_window_slides_over_page_borders_and_lets_its_pages_go() -> None:
    serving = Serving()
    serving.ingest("a", PROMPT[:3])
    serving.prefill("a")
    for length in range(4, 60):
        serving.decode("a")
        window, full = serving.held("a")
        assert full == -(-length // PAGE)
        assert window == full - max(0, length - WINDOW + 1) // PAGE <= 3
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_one_batch_are_continued_each_for_itself(kind: str) -> None:
    serving = Serving(KINDS[kind])
    for name, prompt in (("a", PROMPT), ("b", PROMPT[2:5]), ("c", PROMPT[::-1])):
        serving.ingest(name, prompt)
    serving.step({"a": 5, "b": 3})
    serving.step({"b": 1, "c": 9, "a": 8})
    serving.step({"c": 4, "a": 1})
    serving.decode("c", "a", "b", count=9)
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
def test_offload_and_reload_in_the_middle_of_a_prompt_and_of_an_answer(kind: str) -> None:
    serving = Serving(KINDS[kind])
    for name, prompt in (("a", PROMPT), ("b", PROMPT[1:])):
        serving.ingest(name, prompt)
        serving.step({name: 5})
    for _ in range(3):
        serving.away_and_back("b", "a")
        serving.step({"a": 2, "b": 2})
    serving.prefill("a")
    serving.prefill("b")
    for turn in range(8):
        serving.decode("a", "b")
        serving.away_and_back(*("ab", "ba", "a")[turn % 3])
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [6, 8, 12], ids=["a partly filled page", "full pages", "windows have left pages"])
def test_a_fork_goes_its_own_way(kind: str, prompt: int) -> None:
    serving = Serving(KINDS[kind])
    serving.ingest("a", PROMPT[:prompt])
    serving.prefill("a")
    serving.ingest("b", [])
    serving.step({"a": 1}, post_forks=[StreamFork(StreamId("a"), StreamId("b"))])
    source, fork = serving.requests["a"], serving.requests["b"]
    fork.kv, fork.logits = source.kv.copy(), list(source.logits)
    fork.words = [*source.words[:-1], (source.words[-1] + 1) % 100]
    fork.prompt = list(fork.words)
    serving.decode("b", "a", count=3)
    serving.away_and_back("a", "b")
    serving.decode("a", "b", count=6)
    assert source.words[-9:] != fork.words[-9:]
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_was_reset_computes_its_prompt_and_its_answer_again(kind: str) -> None:
    serving = Serving(KINDS[kind])
    serving.ingest("a", PROMPT)
    serving.prefill("a", 5)
    serving.decode("a", count=7)
    before = list(serving.requests["a"].words)
    serving.kv.reset("a")
    own = serving.requests["a"]
    own.kv, own.logits = History(serving.model.sizes), []
    serving.spoil()
    serving.prefill("a", 7, 6)
    assert own.words[: len(before)] == before
    serving.decode("a", count=6)
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_a_rejected_draft_leaves_nothing_behind(kind: str, right: int) -> None:
    """Of four drafted words the first `right` are what the model says; the windows slide by what was stored."""
    serving = Serving(KINDS[kind])
    serving.ingest("a", PROMPT)
    serving.prefill("a")
    expected = serving.model.continued(PROMPT, 40)
    for _ in range(5):
        made = len(serving.requests["a"].generated)
        draft = expected[made : made + 4]
        draft[right:] = [(word + 1) % 100 for word in draft[right:]]
        serving.step({"a": 1}, drafts={"a": draft})
        assert len(serving.requests["a"].generated) == made + right + 1
    assert serving.requests["a"].generated == expected[: 5 * (right + 1) + 1]
    serving.check()


def handed_over(serving: Serving) -> int:
    """How often a device sector went from one group to another."""
    count = 0
    for sector in zip(*(view.device_lent for view in serving.lent), strict=True):
        groups = [group for group in sector if group is not None]
        count += sum(earlier != later for earlier, later in pairwise(groups))
    return count


@pytest.mark.parametrize("seed", range(3))
def test_under_pressure_sectors_change_groups_and_nothing_is_mixed_up(seed: int) -> None:
    """Requests come and go, and send each other away. A long chunk takes pages that its window then leaves."""
    draw = random.Random(seed)
    serving = Serving(pages=8, host_pages=60)
    away: list[str] = []
    refused = ended = 0

    for turn in range(120):
        if len(serving.requests) < 5:
            serving.ingest(f"r{turn}", [draw.randrange(100) for _ in range(draw.randint(1, 24))])
        name = draw.choice(list(serving.requests))
        own = serving.requests[name]
        if name in away:
            while not serving.reload(name):
                serving.make_room(draw, name, away)
            away.remove(name)
        span = min(len(own.words) - own.kv.length, draw.choice((5, 16)))
        while isinstance(lease := serving.kv.admit(serving.wanted({name: span})), PagesExhausted):
            refused += 1
            serving.make_room(draw, name, away)
        plan = serving.kv.plan(lease)
        assert isinstance(plan, Plan)
        serving.run(plan)
        if len(own.generated) > 8:
            serving.end(name)
            ended += 1
    assert refused > 5 and ended > 3 and handed_over(serving) > 10
    serving.check()


# -- pages that are found by what they hold


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", [True, False], ids=["beside the first", "after the first has gone"])
def test_a_prompt_that_was_computed_before_starts_on_its_pages(kind: str, live: bool) -> None:
    """The last word of a prompt is computed in any case: what follows it is asked for."""
    serving = Serving(KINDS[kind])
    serving.teach("a", PROMPT)
    serving.decode("a", count=5)
    expected = serving.requests["a"].generated
    if not live:
        serving.end("a")
    before = serving.compared
    assert serving.start("b", PROMPT) == 3
    assert serving.compared == before + 1
    serving.decode("b", count=12)
    assert serving.requests["b"].generated[: len(expected)] == expected
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_share_what_they_have_in_common_and_no_more(kind: str) -> None:
    serving = Serving(KINDS[kind])
    serving.teach("a", PROMPT)
    assert serving.start("b", [*PROMPT[:9], 1, 2, 3, 4, 5], chunk=4) == 2
    assert serving.start("c", [*PROMPT[:4], 1, *PROMPT[5:]]) == 1
    assert serving.start("d", [*PROMPT[:3], 1, *PROMPT[4:]]) == 0
    assert serving.key("b") == 1
    assert serving.start("e", [*PROMPT[:9], 1, 2, 3, 4, 5], chunk=1) == 3
    serving.prefill("b")
    serving.prefill("e")
    serving.decode(*"abcde", count=8)
    serving.check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_has_is_not_reloaded_and_what_comes_back_is_found_again(kind: str) -> None:
    serving = Serving(KINDS[kind])
    serving.teach("a", PROMPT)
    serving.start("b", PROMPT)
    serving.decode("a", "b", count=3)
    serving.away_and_back("a")
    serving.decode("b", "a", count=3)
    for name in "ab":
        assert isinstance(serving.kv.offload(name), Offloaded)
    serving.spoil()
    # Somebody else needs everything: nothing of it is left on the device.
    serving.start("c", [word % 100 for word in range(70)])
    serving.decode("c", count=10)
    serving.end("c")
    assert serving.reload("b") and serving.reload("a")
    serving.decode("a", "b", count=4)
    serving.check()


def test_other_weights_find_nothing_of_the_old_ones() -> None:
    serving = Serving()
    serving.teach("a", PROMPT)
    serving.end("a")
    serving.kv.reset_prefix_cache()
    serving.model = Decoder(MIXED, seed=1)
    serving.teach("b", PROMPT)
    assert serving.start("c", PROMPT) == 3
    serving.decode("b", "c", count=5)
    serving.check()


def test_a_match_that_was_lost_meanwhile_is_looked_up_again() -> None:
    serving = Serving()
    serving.teach("a", PROMPT)
    keys = serving.keys("a")
    serving.end("a")
    serving.ingest("b", PROMPT)
    step = serving.wanted({"b": 1}, prefixes={"b": keys[: serving.kv.match(keys)]})
    serving.kv.reset_prefix_cache()
    assert isinstance(serving.kv.admit(step), PrefixLost)
    serving.prefill("b")
    serving.check()


@pytest.mark.parametrize("kind", ["windows and full", "two windows", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_prefixes_under_pressure(kind: str, seed: int) -> None:
    """Conversations that begin alike, on fewer pages than they need; cached pages leave when others need them."""
    draw = random.Random(seed)
    serving = Serving(KINDS[kind], pages=22 if kind == "full" else 16, host_pages=60)
    stems = [[draw.randrange(100) for _ in range(12)] for _ in range(2)]
    away: list[str] = []
    hits = ended = 0
    for turn in range(150):
        if len(serving.requests) < 4:
            name, stem = f"r{turn}", draw.choice(stems)
            prompt = stem[: draw.choice((4, 8, 12))] + [draw.randrange(3) for _ in range(draw.randint(1, 6))]
            while not serving.roomy(name, prompt):
                serving.make_room(draw, name, away)
            hits += serving.start(name, prompt, chunk=draw.choice((3, 4))) > 0
            serving.key(name)
            continue
        name = draw.choice(list(serving.requests))
        own = serving.requests[name]
        if name in away:
            while not serving.reload(name):
                serving.make_room(draw, name, away)
            away.remove(name)
        step = serving.wanted({name: min(len(own.words) - own.kv.length, 5)})
        while serving.kv.probe(step) is not None:
            serving.make_room(draw, name, away)
        serving.run(serving.rig.plan(step))
        serving.key(name)
        if len(own.generated) > 8:
            serving.end(name)
            ended += 1
    assert hits > 2 and ended > 5 and serving.backend.copier.pages[Queue.COPY_OUT]
    serving.check()
