"""The worlds of random schedules, and the requests in them: drawn from (seed, index), small, so that all is scarce."""

from __future__ import annotations

import random
from typing import Literal

import attrs

from kvstate.scheduler.requests import GenerationRequest, Output
from kvstate.testing.engine import VOCABULARY, expected
from kvstate.types import Geometry, Group


@attrs.frozen
class Setup:
    """The world of one schedule."""

    seed: int
    index: int
    geometry: Geometry
    budget: int
    batch: int
    policy: Literal["decode-first", "prefill-first"]
    prefix_cache: bool
    asynchronous: bool
    logprobs: bool
    requests: int
    trouble: float
    debug: bool
    device: str = "memory"


GROUPS = (
    (Group("full", 128),),
    (Group("full", 256), Group("window", 128, window=3)),
    (Group("full", 128), Group("window", 128, window=5)),
    (Group("window", 128, window=4),),
)


def setup(seed: int, index: int) -> Setup:
    """Draw the world of a schedule."""
    draw = random.Random(f"setup/{seed}/{index}")
    groups = GROUPS[0] if draw.random() < 0.7 else draw.choice(GROUPS[1:])
    pages = draw.randint(3, 12) + 2 * (len(groups) - 1)
    return Setup(
        seed,
        index,
        Geometry(
            pages=pages, page_size=draw.randint(1, 4), host_pages=draw.choice((0, 2, 3, 5, pages, 3 * pages)),
            groups=groups,
        ),
        budget=draw.choice((1, 2, 3, 5, 8, 64)),
        batch=draw.choice((1, 2, 3, 4, 16)),
        policy="prefill-first" if draw.random() < 0.3 else "decode-first",
        prefix_cache=draw.random() < 0.5,
        asynchronous=draw.random() < 0.6,
        logprobs=draw.random() < 0.3,
        requests=draw.randint(1, 12),
        trouble=draw.choice((0.0, 0.0, 0.1, 0.3)),
        debug=draw.random() < 0.2,
    )  # fmt: skip


class Life:
    """One life of a request: what was asked for, and what came of it."""

    def __init__(self, request: GenerationRequest, geometry: Geometry) -> None:
        self.request = request
        self.expected = expected(request, geometry)
        self.outputs: dict[int, Output] = {}


def request(draw: random.Random, id: str, prompt: int, tokens: int) -> GenerationRequest:
    """Draw a request; many prompts begin alike, so that prefixes are found."""
    words = [draw.randrange(VOCABULARY) for _ in range(prompt)]
    if draw.random() < 0.6:
        words[: draw.randrange(prompt + 1)] = [draw.randrange(2)] * draw.randrange(prompt + 1)
        words = words[:prompt] or [0]
    stop = range(draw.randrange(97), VOCABULARY, 97) if draw.random() < 0.3 else ()
    return GenerationRequest(id, words, tokens, samples=draw.choice((1, 1, 1, 2, 3)), stop=tuple(stop))


def what_is_refused(draw: random.Random, live: tuple[str, ...]) -> GenerationRequest:
    """Draw a request that no scheduler may take; `live` are ids of live samples."""
    bad = [GenerationRequest("x", (), 3), GenerationRequest("x", (1,), 0), GenerationRequest("x", (1,), 1, 0)]
    bad += [GenerationRequest(id, (1,), 1) for id in live]
    return draw.choice(bad)
