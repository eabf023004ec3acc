"""Every test of rows D1–D15, here with real bytes: the manager drives torch caches on the CPU device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstate.ops import Op
from kvstate.testing.transport import Network
from tests.bugs import test_device_rows
from tests.gpu_backend.transport_kit import Kv

# A bare State without a manager has no device of its own: that test stays with the in-memory backend.
globals().update(
    {
        name: test
        for name, test in vars(test_device_rows).items()
        if name.startswith("test_D") and "bare" not in test.__code__.co_varnames
    }
)


class Recorded(Kv):
    """A manager over a torch cache whose ops are kept, as the in-memory backend keeps them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = self.backend
        backend.ops, backend.skipped = [], set()
        submit, skip = backend.submit, backend.skip

        def submitted(op: Op) -> None:
            submit(op)
            backend.ops.append(op)

        def skipped(op: Op) -> None:
            skip(op)
            backend.skipped.add(op.number)
            if not backend.ops or backend.ops[-1] is not op:
                backend.ops.append(op)

        backend.submit, backend.skip = submitted, skipped


@pytest.fixture
def machines() -> Iterator[Callable[..., Any]]:
    """Make managers over torch caches that reach each other; at the end everything ends and nothing may be missing."""
    network, counter = Network(), itertools.count(1)
    made: list[Any] = []

    def make(**kwargs: Any) -> Any:
        made.append(Recorded(network, counter, **kwargs))
        return made[-1]

    yield make
    for kv in made:
        kv.finish()


@pytest.fixture
def kv(machines: Callable[..., Any]) -> Any:
    """Return one manager over a torch cache."""
    return machines()
