"""A decoder with full and sliding-window layers continues a prompt as it would alone, whatever happens to its pages.

What is compared, and how strictly:

exact    Beside the pages every stream has a contiguous cache. Each step runs the same rows through the same weights
         once over the pages and once over those; K and V that attention is given have the same shapes then, so logits
         are compared bit by bit, at every step of every test here. Where a page was found by its key, the contiguous
         cache takes the K and V of whoever computed that page: another batch may have given other last bits.
tokens   At the end each history is computed once more, whole, without any cache, by a softmax written out. There sums
         run in another order: tokens must be equal, logits are within 1e-3.

All bytes that belong to nobody are NaN, in both tiers: freed pages, the sectors that no group has, and the sinks.
"""

import random
import warnings

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    pytest.importorskip("torch")

from kvstate import StreamFork, StreamId
from kvstate.ops import Plan
from kvstate.ordering import Queue
from kvstate.refusals import PagesExhausted, PrefixLost
from kvstate.transitions.offload import Offloaded

from .decoder import Decoder, History, Model
from .serving import PAGE, Serving, handed_over

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
    serving = Serving(MIXED)
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_under_pressure_sectors_change_groups_and_nothing_is_mixed_up(seed: int) -> None:
    """Requests come and go, and send each other away. A long chunk takes pages that its window then leaves."""
    draw = random.Random(seed)
    serving = Serving(MIXED, pages=8, host_pages=60)
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
    serving = Serving(MIXED)
    serving.teach("a", PROMPT)
    serving.end("a")
    serving.kv.reset_prefix_cache()
    serving.model = Decoder(MIXED, seed=1)
    serving.teach("b", PROMPT)
    assert serving.start("c", PROMPT) == 3
    serving.decode("b", "c", count=5)
    serving.check()


def test_a_match_that_was_lost_meanwhile_is_looked_up_again() -> None:
    serving = Serving(MIXED)
    serving.teach("a", PROMPT)
    keys = serving.keys("a")
    serving.end("a")
    serving.ingest("b", PROMPT)
    step = serving.wanted({"b": 1}, prefixes={"b": keys[: serving.kv.match(keys)]})
    serving.kv.reset_prefix_cache()
    assert isinstance(serving.kv.admit(step), PrefixLost)
    serving.prefill("b")
    serving.check()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pages"), [("windows and full", 11), ("two windows", 16), ("full", 15)])
@pytest.mark.parametrize("seed", range(1, 4))
def test_prefixes_under_pressure(kind: str, pages: int, seed: int) -> None:
    """Conversations that begin alike, on fewer pages than they need; cached pages leave when others need them."""
    draw = random.Random(seed)
    serving = Serving(KINDS[kind], pages=pages, host_pages=60)
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
    assert hits > 1 and ended > 5 and serving.backend.copier.pages[Queue.COPY_OUT]
    serving.check()
