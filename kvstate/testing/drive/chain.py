"""What a served workload must be: the stamp of every token, and every token that is generated.

The "keys and values" of a token are one number, its stamp, which chains the stamp in front of it with the token. So a
page depends on its whole history, as real keys and values do. The next token is a function of the last stamp. Both are
known before anything runs: a `Script` is made of the prompt alone, and touches no page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvstate.scheduler.requests import GenerationRequest

GENESIS = 1
"""The stamp in front of a prompt."""
VOCABULARY = 1 << 16
"""Generated tokens are below this; those of a prompt are what the workload makes them."""

# A Mersenne prime, so that a stamp fits into a signed word of 64 bits and all its bits depend on all of the history.
_PRIME = (1 << 61) - 1
_FACTOR = 1_181_783_497_276_652_981
_SPREAD = 2_862_933_555_777_941_757


def _next(stamp: int, token: int) -> int:
    return (stamp * _FACTOR + token) % _PRIME


def chain(before: int, tokens: Iterable[int]) -> list[int]:
    """Return the stamps of tokens that follow the one with the stamp `before`.

    >>> stamps = chain(GENESIS, [7, 8, 9])
    >>> chain(stamps[0], [8, 9]) == stamps[1:], chain(GENESIS, [9])[0] in stamps
    (True, False)
    """
    stamps = list(accumulate(tokens, _next, initial=before))
    del stamps[0]
    return stamps


def draw(stamps: Iterable[int], sample: int) -> int:
    """Return the token behind a context whose last token has `stamps`, one per group. Samples of one prompt differ."""
    return ((sum(stamps) + sample) * _SPREAD % _PRIME) >> 45


class Script:
    """What one sample of a request generates, and the stamp of each of its tokens.

    Attributes
    ----------
    index
        Place of its request in the workload.
    prompt
        Tokens of the prompt.
    tokens
        What it generates.
    stamps
        Of the prompt, and of `tokens`.
    """

    __slots__ = ("index", "prompt", "stamps", "tokens")

    def __init__(self, index: int, prompt: Sequence[int], sample: int, tokens_max: int, groups: int) -> None:
        self.index = index
        self.prompt = len(prompt)
        self.stamps = list(prompt)
        self.tokens: list[int] = []
        stamp = prompt[-1]
        for _ in range(tokens_max):
            token = draw((stamp,) * groups, sample)
            stamp = _next(stamp, token)
            self.tokens.append(token)
            self.stamps.append(stamp)


class Scripts(dict[str, Script]):
    """The scripts of a workload's samples, under the names that the manager knows them by; each made when asked for.

    Parameters
    ----------
    groups
        How many the model reads.

    Attributes
    ----------
    cost_s
        CPU seconds that making them took.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.cost_s = 0.0
        self._groups = groups
        self._requests: dict[str, tuple[int, GenerationRequest]] = {}

    def add(self, index: int, request: GenerationRequest) -> None:
        """Note a request, at place `index` of the workload."""
        for key in request.keys:
            self._requests[key] = index, request

    def __missing__(self, key: str) -> Script:
        index, request = self._requests[key]
        began = time.thread_time()
        prompt = chain(GENESIS, request.prompt)
        for sample in range(request.samples):
            self[request.key(sample)] = Script(index, prompt, sample, request.tokens_max, self._groups)
        self.cost_s += time.thread_time() - began
        return self[key]

    def drop(self, request: str) -> None:
        """Forget a request whose samples have all ended."""
        for key in self._requests[request][1].keys:
            del self._requests[key]
            self.pop(key, None)
