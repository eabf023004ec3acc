"""Fetches between caches of one process: each is copied by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from gpu_backend.transports.fetches import EpochHolds, Faults, FetchTransport, PeerLost
from gpu_backend.transports.pages import Pages
from kvstate.ordering import Clock
from kvstate.types import Record


@attrs.frozen(eq=False)
class Peer:
    """A manager that others reach: its pages, and whom to ask after a copy."""

    pages: Pages
    holds: EpochHolds


class Network:
    """Peers by address. One dict, so it needs no lock."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def join(self, address: str, pages: Pages, holds: EpochHolds) -> None:
        """Make a manager reachable under `address`; a second one takes the place of the first."""
        self._peers[address] = Peer(pages, holds)

    def leave(self, address: str) -> None:
        """Make `address` unreachable: fetches from it fail, those under way too."""
        self._peers.pop(address, None)

    def find(self, address: str) -> Peer | None:
        """Return who is reached at `address`."""
        return self._peers.get(address)


class _Near:
    """A peer of this process, as one fetch reached it."""

    def __init__(self, network: Network, address: str) -> None:
        peer = network.find(address)
        if peer is None:
            raise PeerLost(address, f"nobody is reached at {address!r}")
        self._network = network
        self._address = address
        self._peer = peer

    def open(self) -> Pages:
        return self._peer.pages

    def check(self) -> None:
        if self._network.find(self._address) is not self._peer:
            raise PeerLost(self._address, f"nobody is reached at {self._address!r} any more")

    def holds(self, incarnation: int, label: str, epoch: int) -> bool:
        self.check()
        return self._peer.holds(incarnation, label, epoch)

    def interrupt(self) -> None:
        """A question of this process waits for nobody else."""

    def close(self) -> None:
        """There is nothing to let go of but references."""


class InProcessTransport(FetchTransport):
    """Fetches from the peers of a network in this process.

    Parameters
    ----------
    network
        Where publishers are found.
    pages, wait, faults
        See FetchTransport.
    """

    def __init__(
        self, network: Network, pages: Pages, wait: Callable[[Clock], None], faults: Faults | None = None
    ) -> None:
        super().__init__(pages, wait, faults)
        self.network = network

    def reach(self, record: Record) -> _Near:
        return _Near(self.network, record.address)
