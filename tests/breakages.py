"""Ways to break the core for one test: the checks of the checkers need something to find."""

from typing import Any

import pytest

from kvstate.arena import Pool
from kvstate.ordering import NOTHING, Clock
from kvstate.transitions import retention
from kvstate.types import RetentionPolicy


def greedy_retention(patch: pytest.MonkeyPatch) -> None:
    """Let retention take a page too many."""
    healthy = retention.pages_outside

    def greedy(length: int, policy: RetentionPolicy, page_size: int) -> tuple[int, int]:
        first, count = healthy(length, policy, page_size)
        return first, count + 1 if count else 0

    patch.setattr(retention, "pages_outside", greedy)


def forgetful_drop(patch: pytest.MonkeyPatch) -> None:
    """Let a dropped ownership leave no use behind."""
    healthy = Pool.drop

    def drop(self: Pool, pages: Any, uses: Clock) -> int:
        return healthy(self, pages, NOTHING)

    patch.setattr(Pool, "drop", drop)


def uncounted_sharing(patch: pytest.MonkeyPatch) -> None:
    """Let a shared page have one owner."""
    patch.setattr(Pool, "share", lambda self, pages: list(pages).clear())
