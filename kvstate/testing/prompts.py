"""Prompts that requests of a program share: where equal tokens come from, and with them equal keys and hits.

What a model writes into a page depends on its weights, on the token, and on everything in front of it. So does a stamp
here: the same stamp means the same history under the same weights, and a hit that returns anything else shows.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from kvstate.prefix import Key, page_keys

PROMPTS = (1, 2, 3)
"""2 begins as 1 does and goes on differently inside its second page; 3 shares nothing."""

PAGES = 4
"""Whole pages of a prompt; it has one token more."""

FRESH = 10**6
"""Tokens from here on are nobody else's."""


def token(prompt: int, position: int, page_size: int) -> int | None:
    """Return the token of `prompt` at `position`; None behind its end, and for prompt 0, which has none."""
    if not prompt or position > PAGES * page_size:
        return None
    if prompt == 2 and position <= page_size:
        prompt = 1
    return 1000 * prompt + position


def tokens(prompt: int, page_size: int) -> list[int]:
    """Return the tokens of `prompt`."""
    found = [token(prompt, position, page_size) for position in range(PAGES * page_size + 1)]
    return [one for one in found if one is not None]


@cache
def keys(prompt: int, pages: int, page_size: int, salt: str = "") -> tuple[Key, ...]:
    """Return the keys of the first `pages` pages of `prompt`."""
    return page_keys(tokens(prompt, page_size), page_size, salt)[:pages]


class Stamps:
    """What the model writes: one number per history under one set of weights."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        # Per stamp, the token and the weights that it stands for.
        self._spelled: list[tuple[int, int]] = []

    def write(self, weights: int, before: int | None, token: int | None) -> int:
        """Return the stamp of `token` behind the history that stamp `before` ends; None is a token of its own."""
        if token is not None:
            known = self._known.setdefault((weights, before, token), len(self._spelled))
            if known < len(self._spelled):
                return known
        stamp = len(self._spelled)
        self._spelled.append((FRESH + stamp if token is None else token, weights))
        return stamp

    def token(self, stamp: int) -> int:
        """Return the token that a stamp stands for."""
        return self._spelled[stamp][0]

    def weights(self, stamp: int) -> int:
        """Return the weights under which it was written."""
        return self._spelled[stamp][1]
