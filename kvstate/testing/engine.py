"""A model that shows whatever its pages have lost, and what it must generate, computed without a page.

The "keys and values" of a token are one stamp of the token and its position. The next token is a hash of every stamp
that attention would read back: of the whole request, in each group its window. So a page that was lost, swapped, stale
or torn changes what is generated, and `expected` says what that must be.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from kvstate.ops import Plan, PlanView
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.loop import Sampled
from kvstate.scheduler.requests import Finish, GenerationRequest
from kvstate.testing.backends import StampedBackend
from kvstate.types import Geometry

VOCABULARY = 1 << 16

KEPT = 16
"""Batches whose samples a model remembers: those in flight, and aborted ones among them."""


def stamp(token: int, position: int) -> int:
    """Return what is stored for a token at a position: never the same for two of them."""
    return position << 16 | token % VOCABULARY


def next_token(contexts: Sequence[Sequence[Any]], sample: int) -> int:
    """Return the token that follows what was read of each group; samples of one prompt differ."""
    return zlib.crc32(repr((sample, [list(context) for context in contexts])).encode()) % VOCABULARY


def logprob_of(token: int) -> float:
    """Return the log-probability that the model gives with a token."""
    return -float(token % 97)


def expected(request: GenerationRequest, geometry: Geometry) -> tuple[tuple[tuple[int, ...], Finish], ...]:
    """Return what each sample of a request generates and how it ends, with all the memory in the world."""
    outputs = []
    for sample in range(request.samples):
        stamps = [stamp(token, position) for position, token in enumerate(request.prompt)]
        tokens: list[int] = []
        finish = Finish.LENGTH
        while len(tokens) < request.tokens_max:
            contexts = [stamps[_first(group.window, len(stamps)) :] for group in geometry.groups]
            token = next_token(contexts, sample)
            tokens.append(token)
            stamps.append(stamp(token, len(stamps)))
            if token in request.stop:
                finish = Finish.STOP
                break
        outputs.append((tuple(tokens), finish))
    return tuple(outputs)


def _first(window: int | None, length: int) -> int:
    """Return the first of `length` tokens that the last one attends to."""
    return 0 if window is None else max(0, length - window)


class StampModel:
    """A Model over a backend with stamps. It feeds a token that is in flight from what it has sampled itself."""

    def __init__(self, backend: StampedBackend, geometry: Geometry, *, logprobs: bool = False) -> None:
        self.backend = backend
        self.geometry = geometry
        self.logprobs = logprobs
        # What was sampled by each batch that is in flight, and by the one before: the device still has it.
        self._sampled: dict[int, list[int]] = {}
        self.launched = 0

    def launch(self, batch: Batch, plan: Plan) -> None:
        """Write the stamps of everything that is fed, then read the contexts back and draw."""
        entries = batch.entries
        before = self._sampled.get(batch.previous.serial, []) if batch.previous is not None else []
        for place, (entry, view) in enumerate(zip(entries, plan.in_step_order, strict=True)):
            if view.sink:
                continue
            tokens = [
                before[entry.feeds] if token is None and entry.feeds is not None else token for token in entry.tokens
            ]
            stamps = [stamp(token, entry.start + at) for at, token in enumerate(tokens) if token is not None]
            self.backend.write(plan, place, stamps)
        sampled: list[int] = []
        for entry, view in zip(entries, plan.in_step_order, strict=True):
            contexts = self._contexts(view) if entry.draws and not view.sink else ()
            # A forked sample is the one after the last that its prompt has given a token so far: they come in order.
            sampled += [next_token(contexts, entry.sample + drawn) for drawn in range(entry.draws)]
        self._sampled[batch.serial] = sampled
        for serial in sorted(self._sampled)[:-KEPT]:
            del self._sampled[serial]
        self.launched += 1

    def result(self, batch: Batch) -> Sampled:
        """Return what a batch sampled."""
        tokens = self._sampled[batch.serial]
        return Sampled(tokens, [logprob_of(token) for token in tokens] if self.logprobs else None)

    def _contexts(self, view: PlanView) -> list[list[Any]]:
        return [
            self.backend.load(group, table, _first(self.geometry.groups[group].window, view.length), view.length)
            for group, table in enumerate(view.tables)
        ]
