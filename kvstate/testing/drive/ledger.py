"""What a drive has generated, beside what it must; and what is left when all have ended."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter

from kvstate.manager import KVManager
from kvstate.scheduler.requests import Finish, Output
from kvstate.testing.drive.arrivals import key_of, samples_of
from kvstate.testing.drive.chain import Scripts


class Ledger:
    """What every sample has generated, beside what it must.

    Attributes
    ----------
    wrong
        What is not as it must be, in words.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._outputs: dict[tuple[int, int], tuple[str, bytes]] = {}
        self._right: Counter[int] = Counter()
        self.wrong: list[str] = []

    @property
    def ended(self) -> int:
        """Samples that have ended."""
        return len(self._outputs)

    def take(self, output: Output) -> None:
        """Compare an output that is final."""
        script = self._scripts[key_of(output)]
        self._outputs[script.index, output.sample] = str(output.finish), array("q", output.tokens).tobytes()
        if output.finish is not Finish.LENGTH:
            self.wrong.append(f"{key_of(output)} {output.finish}: {output.error}")
        elif list(output.tokens) != script.tokens:
            pairs = enumerate(zip(output.tokens, script.tokens, strict=False))
            place = next((i for i, (got, want) in pairs if got != want), min(len(output.tokens), len(script.tokens)))
            self.wrong.append(f"{key_of(output)} has generated another token {place} than with all memory")
        else:
            self._right[script.index] += 1
        if all((script.index, sample) in self._outputs for sample in range(samples_of(script.index))):
            self._scripts.drop(output.request)

    def finished(self, index: int) -> bool:
        """Tell whether all samples of a request have generated exactly their tokens."""
        return self._right[index] == samples_of(index)

    def digest(self) -> str:
        """Return a checksum over everything that was generated."""
        return hashlib.sha256(repr(sorted(self._outputs.items())).encode()).hexdigest()[:16]


def leaks_of(manager: KVManager) -> tuple[str, ...]:
    """Idle means empty: return what is left of a manager whose requests have all ended."""
    leaks = []
    geometry = manager.geometry
    totals = {"device": geometry.group_pages, "host": geometry.host_group_pages}
    for tier, available in manager.pages_available().items():
        if available != totals[tier]:
            had, of = (", ".join(map(str, pages)) for pages in (available, totals[tier]))
            leaks.append(f"{tier} has {had} of {of} pages available")
    left = manager.view()
    for what, there in (("requests", left.requests), ("leases", left.leases), ("claims", left.claims)):
        if there:
            leaks.append(f"{len(there)} {what} are open")
    return tuple(leaks)
