"""A small decoder gives the same logits over our pages, whatever happened to them, as over plain contiguous caches.

Both run the same arithmetic on the same rows, so logits are compared bit by bit. At the end of a program in float32,
every stream that retention left alone is computed once more, whole and without a cache, by a softmax written out. There
sums run in another order: within 1e-4 of logits of size 5. Freed pages are filled with NaN.
"""

import random
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

import attrs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpu_backend.attention import gather_kv, paged_attention
from gpu_backend.device_cache import dtype_of
from gpu_backend.plan_tensors import PlanTensors
from kvstate import LabelFork, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId
from kvstate.ops import Plan, PlanView, Tier
from kvstate.refusals import StalePlan
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.transitions.step import Committed

from .decoder import Decoder, History, Model
from .rig import DTYPES, Rig, layout

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 8, 4
MODEL = Model(windows=(None, None), heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


@attrs.define
class Stream:
    """One stream: its K and V; word and logits of every token, those that retention dropped too."""

    kv: History
    words: list[int] = attrs.field(factory=list)
    logits: list[Tensor] = attrs.field(factory=list)
    released: int = 0

    def copy(self) -> "Stream":
        return Stream(self.kv.copy(), list(self.words), list(self.logits), self.released)

    def keep(self, length: int) -> None:
        """Forget the tokens behind the first `length` stored ones."""
        self.kv.keep(length)
        del self.words[self.released + length :], self.logits[self.released + length :]

    def retain(self, policy: RetentionPolicy) -> None:
        """Drop the tokens of every page that lies outside the budget and the protected prefix."""
        first = -(-policy.protected_prefix // PAGE) * PAGE
        stop = (self.kv.length - policy.context_budget) // PAGE * PAGE
        if stop > first:
            self.kv.keep(first, stop)
            self.released += stop - first


class Both:
    """A KVManager on a TorchBackend, and contiguous caches beside it; every launch runs and compares both."""

    def __init__(self, dtype: str = "float32", **sizes: Any) -> None:
        sizes = {"pages": 40, "host_pages": 40, **sizes}
        self.rig = Rig(MODEL.layout(page_size=PAGE, dtype=dtype, **sizes))
        self.manager, self.backend = self.rig.manager, self.rig.backend
        self.dtype = dtype_of(self.rig.layout)
        self.model = Decoder(MODEL)
        self.draw = random.Random(0)
        self.histories: dict[tuple[str, str], Stream] = {}
        self.configs: dict[str, RequestConfig] = {}
        self.compared = 0
        self.backend.memory.cache.bytes.fill_(0xFF)
        self.backend.memory.pool.bytes.fill_(0xFF)

    def ingest(self, request: str, config: RequestConfig | None = None) -> None:
        self.manager.ingest(request, config)
        self.configs[request] = config or RequestConfig()

    def of(self, view: PlanView) -> Stream:
        assert view.request is not None
        return self.histories.setdefault((view.request, view.label), Stream(History(MODEL, self.dtype)))

    def fork(self, step: Step, forks: Sequence[LabelFork | StreamFork]) -> None:
        for fork in step.stream_forks(forks):
            source = self.histories.get((fork.source.request, fork.source.label))
            if source is not None:
                self.histories[fork.target.request, fork.target.label] = source.copy()

    def step(self, *segments: Segment, accepted: Sequence[int] | None = None, **options: Any) -> Plan:
        plan = self.rig.plan(Step(segments, **options))
        self.launch(plan)
        self.commit(plan, accepted)
        return plan

    def launch(self, plan: Plan, slot: str | None = None) -> None:
        self.fork(plan.lease.step, plan.lease.step.pre_forks)
        with self.manager.launch(plan):
            for label, views in plan.views.items():
                self.run(plan, label, views, slot)

    def run(self, plan: Plan, label: str, views: Sequence[PlanView], slot: str | None) -> None:
        kv = self.backend.bind(plan, slot)
        tensors = kv.tensors(label)
        words = [self.draw.randrange(MODEL.vocabulary) for _ in range(tensors.bucket)]
        positions: list[int] = []
        begun: dict[int, int] = {}
        for view in views:
            start = 0
            if not view.sink:
                own = self.of(view)
                start = begun.get(id(own), own.kv.length)
                begun[id(own)] = start + view.span
                assert view.start == start
            first = 0 if view.sink else self.of(view).released + start
            positions.extend(range(first, first + view.span))
        assert tensors.token_position[: len(positions)].tolist() == positions
        positions += [0] * (len(words) - len(positions))

        def paged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv.write_kv(k, v, layer=layer, label=label)
            return paged_attention(q, kv.layer_view(layer), tensors)

        def contiguous(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = torch.zeros_like(q)
            first = 0
            for view in views:
                rows = slice(first, first + view.span)
                first += view.span
                if view.sink:
                    continue
                found[rows] = self.of(view).kv.attend(layer, q[rows], k[rows], v[rows])
            return found

        logits, expected = self.model(words, positions, paged), self.model(words, positions, contiguous)
        first = 0
        for view in views:
            rows = slice(first, first + view.span)
            first += view.span
            if not view.sink:
                assert torch.equal(logits[rows], expected[rows]), f"{view.request}/{view.label}"
                assert not logits[rows].isnan().any()
                own = self.of(view)
                own.words += words[rows]
                own.logits += logits[rows].unbind()
                self.compared += view.span

    def commit(self, plan: Plan, accepted: Sequence[int] | None = None) -> None:
        step = plan.lease.step
        assert isinstance(self.manager.commit(plan.lease, accepted), Committed)
        for place, view in enumerate(plan.in_step_order):
            if not view.sink:
                stored = view.span if accepted is None else accepted[place]
                if stored < view.span or not step.commit:
                    self.of(view).keep(view.start + (stored if step.commit else 0))
        self.fork(step, step.post_forks)
        for view in plan.in_step_order:
            if not view.sink:
                assert view.request is not None
                policy = step.retention.get(view.label, self.configs[view.request].retention.get(view.label))
                if policy is not None:
                    self.of(view).retain(policy)
        self.spoil()

    def spoil(self) -> None:
        """Fill what is free with NaN."""
        for tier, arena in ((Tier.DEVICE, self.manager._state.device), (Tier.HOST, self.manager._state.host)):
            self.backend.poison(tier, 0, list(arena.pools[0].free))

    def away_and_back(self, *requests: str) -> None:
        """Offload all, then reload in the order given: onto other pages."""
        for request in reversed(requests):
            assert isinstance(self.manager.offload(request), Offloaded)
            self.spoil()
        for request in requests:
            assert isinstance(self.manager.reload(request), Reloaded)
            self.spoil()

    def check(self) -> None:
        """Compare with whole histories that were computed without a cache."""
        for stream, own in self.histories.items():
            if own.words and not own.released:
                expected = self.model.without_cache(own.words)
                torch.testing.assert_close(torch.stack(own.logits), expected, atol=1e-4, rtol=0, msg=str(stream))


@pytest.mark.slow
def test_chunked_prefill_and_decode() -> None:
    both = Both()
    both.ingest("a")
    both.ingest("b")
    for chunk in (5, 1, 9, 8):
        both.step(Segment("a", span=chunk), Segment("b"), Segment.padding(3))
    both.step(Segment("a", span=2), Segment("a", span=3))
    for _ in range(6):
        both.step(Segment("b"), Segment("a"))
    both.step(Segment("a"), Segment("b", span=2), commit=False)
    both.step(Segment("a"), Segment("b"))
    both.check()
    assert both.compared == 23 + 4 + 5 + 12 + 3 + 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [6, 8], ids=["a partly filled page", "a full page"])
def test_forks_before_and_after_a_step(dtype: str, prompt: int) -> None:
    both = Both(dtype)
    both.ingest("a")
    both.ingest("child")
    both.step(Segment("a", span=prompt))
    both.step(
        Segment("a"), Segment("a", "cfg", 2),
        pre_forks=(LabelFork("main", "cfg"),), post_forks=(LabelFork("main", "beam"),),
    )  # fmt: skip
    both.step(Segment("a"), post_forks=(StreamFork(StreamId("a", "cfg"), StreamId("child")),))
    for span in (1, 3, 1, 1):
        both.step(*(Segment("a", label, span) for label in ("main", "cfg", "beam")), Segment("child", span=span))
    if dtype == "float32":
        both.check()


def test_offload_and_reload_with_shared_pages() -> None:
    both = Both()
    for request in "ab":
        both.ingest(request)
        both.step(Segment(request, span=7), post_forks=(LabelFork("main", "cfg"),))
    before = both.rig.table("a")
    for _ in range(5):
        both.away_and_back("b", "a")
        both.step(*(Segment(request, label) for request in "ab" for label in ("main", "cfg")))
    assert both.rig.table("a")[: len(before)] != before, "reloaded onto other pages"
    both.check()


def test_retention_leaves_what_a_cache_without_those_tokens_gives() -> None:
    both = Both()
    both.ingest("a", RequestConfig(retention={"main": RetentionPolicy(context_budget=9, protected_prefix=3)}))
    both.ingest("b")
    both.step(Segment("a", span=7), Segment("b", span=30))
    for turn in range(24):
        both.step(Segment("a", span=1 + turn % 3))
        if turn % 7 == 3:
            both.away_and_back("a")
    both.step(Segment("b"), retention={"main": RetentionPolicy(context_budget=12)})
    both.step(Segment("b", span=2))
    assert both.histories["a", "main"].released > 20 and both.histories["b", "main"].released == 16


def test_combined_labels_are_one_batch() -> None:
    both = Both()
    for request in "ab":
        both.ingest(request)
        both.step(Segment(request, span=6), post_forks=(LabelFork("main", "cfg"),))
    for span in (1, 1, 4):
        rows = [Segment(request, label, span) for request in "ab" for label in ("cfg", "main")]
        plan = both.step(*rows, Segment.padding(label="cfg"), combined_labels={("main", "cfg"): "guided"})
        assert list(plan.views) == ["guided"]
    both.check()


@pytest.mark.parametrize("commit_first", [True, False], ids=["commit, launch", "launch, commit"])
def test_steps_planned_ahead(commit_first: bool) -> None:
    both = Both()
    both.ingest("a")
    both.step(Segment("a", span=6))
    ahead = both.rig.admit(Step((Segment("a"),)))
    for _ in range(8):
        lease, ahead = ahead, both.rig.admit(Step((Segment("a"),)))
        plan = both.manager.plan(lease)
        assert isinstance(plan, Plan)
        both.launch(plan)
        if commit_first:
            both.commit(plan)
        else:
            following = both.manager.plan(ahead)
            assert isinstance(following, Plan)
            both.launch(following)
            both.commit(plan)
            both.commit(following)
            ahead = both.rig.admit(Step((Segment("a"),)))
    both.manager.abort(ahead)
    both.check()


def test_rejected_tokens_void_the_step_planned_ahead_and_its_rows_go_to_the_sink() -> None:
    both = Both()
    for request in "ab":
        both.ingest(request)
        both.step(Segment(request, span=6))
    plan = both.rig.plan(Step((Segment("a", span=4), Segment("b"))))
    ahead = both.rig.admit(Step((Segment("a", span=3), Segment("b"))))
    both.launch(plan)
    both.commit(plan, (2, 1))
    assert isinstance(both.manager.plan(ahead), StalePlan)
    again = both.manager.plan(ahead)
    assert isinstance(again, Plan) and [view.sink for view in again.in_step_order] == [True, False]
    both.launch(again)
    both.commit(again)
    both.step(Segment("a", span=2), Segment("b"))
    both.check()
    assert len(both.histories["a", "main"].words) == 10


def test_static_buffers_give_the_same_and_zeros_in_the_tail() -> None:
    both = Both()
    both.backend.register("graph", 8)
    for request in "abc":
        both.ingest(request)
        both.step(Segment(request, span=5))
    for _ in range(5):
        plan = both.rig.plan(Step(tuple(Segment(request) for request in "abc")))
        both.launch(plan, "graph")
        both.commit(plan)
    with both.rig.step(Segment("a")) as plan:
        kv = both.backend.bind(plan, "graph")
        rows = torch.ones(8, KV_HEADS, HEAD_DIM)
        kv.write_kv(rows, rows)
        found = paged_attention(torch.ones(8, HEADS, HEAD_DIM), kv.layer_view(), kv.tensors())
    assert found[0].any() and not found[1:].any()
    both.check()


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once(seed: int) -> None:
    both = Both(pages=120, host_pages=120)
    both.draw = draw = random.Random(seed)
    requests = "abcd"
    labels = ("main", "cfg")
    for request in requests:
        kept = RequestConfig(retention={"main": RetentionPolicy(16, 4)}) if request == "d" else None
        both.ingest(request, kept)
        both.step(Segment(request, span=draw.randint(1, 9)), post_forks=(LabelFork("main", "cfg"),))
    for _ in range(12):
        rows = [Segment(r, label, draw.choice((1, 1, 1, 5))) for r in draw.sample(requests, 3) for label in labels]
        options: dict[str, Any] = draw.choice(
            (
                {},
                {"combined_labels": {labels: "guided"}},
                {"pre_forks": (StreamFork(StreamId(rows[0].request or "", "main"), StreamId("e", "cfg")),)},
                {"post_forks": (StreamFork(StreamId(rows[0].request or "", "cfg"), StreamId("e")),)},
                {"accepted": [draw.randint(1, row.span) for row in rows]},
            )
        )
        if "pre_forks" in options or "post_forks" in options:
            both.ingest("e")
        both.step(*rows, **options)
        if draw.random() < 0.5:
            both.away_and_back(*draw.sample(requests, draw.randint(1, 4)))
    both.check()


def test_the_comparison_sees_a_wrong_page() -> None:
    both = Both()
    both.ingest("a")
    both.step(Segment("a", span=10))
    with both.rig.step(Segment("a")) as plan:
        kv = both.backend.bind(plan)
        tensors = kv.tensors()
        query = torch.randn(1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        kv.write_kv(query[:, :KV_HEADS], query[:, :KV_HEADS])
        right = paged_attention(query, kv.layer_view(), tensors)
        wrong = attrs.evolve(tensors, page_indices=tensors.page_indices[[0, 0, 2]])
        assert not torch.allclose(right, paged_attention(query, kv.layer_view(), wrong), atol=1e-3)
        assert not torch.equal(right, paged_attention(query, kv.layer_view(), tensors, scale=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_are_those_of_the_pages(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    kind = dtype_of(sizes)
    view = torch.randn(5, 2, PAGE, 2, 8, generator=torch.Generator().manual_seed(0)).to(kind)
    k, v = gather_kv(view, torch.tensor([3, 0], dtype=torch.int32), 6)
    assert k.dtype == kind
    for which, rows in enumerate((k, v)):
        expected = torch.cat((view[3, which].float(), view[0, which, :2].float()))
        assert torch.equal(rows.float(), expected)


@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 3, 8), (3, 4, 4), (3, 32)])
def test_a_query_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    both = Both()
    both.ingest("a")
    with both.rig.step(Segment("a", span=3)) as plan:
        kv = both.backend.bind(plan)
        with pytest.raises(ValueError, match=r"'main' takes at least 3 rows of \(a multiple of 2, 8\)"):
            paged_attention(torch.zeros(shape), kv.layer_view(), kv.tensors())


# -- windows


def windowed(
    page_size: int, starts: Sequence[int], spans: Sequence[int], window: int, kept: int | None = None
) -> tuple[Tensor, Tensor, PlanTensors]:
    """A label of several views in a group of `kept` tokens: query, layer view, addressing. Nobody needs what is NaN.

    NaN are the pages that the window has left, which the addressing does not name, and those that nobody has.
    """
    draw = torch.Generator().manual_seed(window)
    kept = kept or window
    lengths = [start + span for start, span in zip(starts, spans, strict=True)]
    skipped = [max(0, start - kept + 1) // page_size for start in starts]
    counts = [-(-length // page_size) - left for length, left in zip(lengths, skipped, strict=True)]
    view = torch.full((2 * sum(counts) + 1, 2, page_size, KV_HEADS, HEAD_DIM), float("nan"))
    pages = torch.randperm(len(view), generator=draw)[: sum(counts)]
    view[pages] = torch.randn(len(pages), *view.shape[1:], generator=draw)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    unused = column([])
    tensors = PlanTensors(
        label="main", window=kept, tokens=sum(spans), views=len(spans), bucket=sum(spans), decode=False,
        span_max=max(spans), length_max=max(lengths), query_indptr=column([0, *accumulate(spans)]),
        page_indptr=column([0, *accumulate(counts)]), page_indices=pages.int(), skipped=column(skipped),
        last_page_lengths=unused, rows=unused, lengths=column(lengths), token_page=unused, token_slot=unused,
        token_position=unused,
    )  # fmt: skip
    return torch.randn(sum(spans), HEADS, HEAD_DIM, generator=draw), view, tensors


@pytest.mark.slow
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=3).filter(
        lambda views: any(span for _, span in views)
    ),
    st.integers(1, 40),
    st.integers(0, 9),
)
def test_a_token_sees_the_last_tokens_of_its_window_and_no_page_that_it_left(
    page_size: int, views: list[tuple[int, int]], window: int, wider: int
) -> None:
    starts, spans = zip(*views, strict=True)
    query, view, tensors = windowed(page_size, starts, spans, window, kept=window + wider)
    found = paged_attention(query, view, tensors, window)
    row = first_page = 0
    for (start, span), skipped in zip(views, tensors.skipped.tolist(), strict=True):
        for token in range(start, start + span):
            scores, values = [], []
            for seen in range(max(0, token - window + 1), token + 1):
                page = int(tensors.page_indices[first_page + seen // page_size - skipped])
                k, v = (rows.repeat_interleave(HEADS // KV_HEADS, dim=0) for rows in view[page, :, seen % page_size])
                scores.append((query[row] * k).sum(dim=1) / HEAD_DIM**0.5)
                values.append(v)
            weights = torch.stack(scores).softmax(dim=0)
            expected = (weights[:, :, None] * torch.stack(values)).sum(dim=0)
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)
            row += 1
        first_page += -(-(start + span) // page_size) - skipped
    assert not found.isnan().any()


def test_a_window_that_the_group_does_not_keep_is_refused() -> None:
    query, view, tensors = windowed(4, [9], [3], 6)
    assert torch.equal(paged_attention(query, view, tensors), paged_attention(query, view, tensors, 6))
    for window in (7, 0):
        with pytest.raises(ValueError, match=f"a window of {window} tokens was asked for; this group keeps the last 6"):
            paged_attention(query, view, tensors, window)
    everything = attrs.evolve(tensors, window=None, skipped=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="a token sees at least itself"):
        paged_attention(query, view, everything, 0)


def test_no_page_in_front_of_the_first_token_is_gathered() -> None:
    view = torch.full((3, 2, PAGE, 2, 8), float("nan"))
    view[1] = 1.0
    k, v = gather_kv(view, torch.tensor([0, 1]), 7, first=4)
    assert k.shape == (3, 2, 8) and bool((k == 1).all() and (v == 1).all())
    with pytest.raises(ValueError, match=r"tokens -1 … 7 are not in these pages"):
        gather_kv(view, torch.tensor([0, 1]), 7, first=-1)
