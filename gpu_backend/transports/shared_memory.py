"""Fetches between processes of one machine: the publisher's cache lies in shared memory, and a socket tells the rest.

A publisher keeps its pages in a memfd, which has no name: the kernel frees it with the last process that maps it, so
nothing is left behind by a process that was killed. The socket is a Unix one in the abstract namespace, which goes
with its process as well. For each fetch a consumer connects, is handed the memory, maps it, copies, and asks::

    consumer                            publisher
    connect                      →
                                 ←      {"groups", "dtype", "bytes"} + the memfd
    {"incarnation", "label", "epoch"} →
                                 ←      {"holds": true or false} or {"error": text}

The end of the publisher closes the socket, which the consumer sees between two pieces of the copy and while it waits
for an answer; whatever it waits for, it waits for no longer than `timeout_s`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from gpu_backend.transports.fetches import EpochHolds, Faults, FetchTransport, PeerLost
from gpu_backend.transports.memory import SharedMemory, mapped
from gpu_backend.transports.pages import Pages
from kvstate.ordering import Clock
from kvstate.types import Record

_MESSAGE_BYTES_MAX = 1 << 16
_BACKLOG = 128
_NAMESPACE = "\0kvstate/"


def _name(address: str) -> str:
    """Name of the socket: abstract, so it needs no directory and nobody has to remove it."""
    return _NAMESPACE + address


def _uid(connection: socket.socket) -> int:
    """Return whose process is at the other end: abstract sockets have no permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


class Publisher:
    """Hands the pages of this process to others and answers their questions, in a thread. Close it, or use ``with``.

    Parameters
    ----------
    address
        Unique for this life of the process, see ``unique_address``; the manager's.
    memory
        What `share` gave for the cache.
    pages
        Of the cache.
    holds
        The manager's ``epoch_holds``.

    Raises
    ------
    OSError
        When somebody has this address already.
    """

    def __init__(self, address: str, memory: SharedMemory, pages: Pages, holds: EpochHolds) -> None:
        self.address = address
        self._memory = memory
        self._hello = json.dumps({**pages.described(), "bytes": memory.bytes.numel()}).encode()
        self._holds = holds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_name(address))
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._worker = threading.Thread(target=self._work, name=f"kvstate-publisher-{address}", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Leave: fetches that are under way fail. Twice is harmless."""
        if self._worker.is_alive():
            self._wake.send(b"x")
            self._worker.join()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- in the thread

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        for other in list(selector.get_map().values()):
                            other.fileobj.close()  # type: ignore[union-attr]
                        return
                    key.data(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        try:
            if _uid(connection) != os.getuid():
                raise OSError("another user")
            socket.send_fds(connection, [self._hello], [self._memory.fd])
        except OSError:
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            asked = connection.recv(_MESSAGE_BYTES_MAX)
            if not asked:
                raise OSError("the consumer has what it wanted")
            connection.send(json.dumps(self._reply(asked)).encode())
        except OSError:
            selector.unregister(connection)
            connection.close()

    def _reply(self, asked: bytes) -> dict[str, Any]:
        try:
            question = json.loads(asked)
            return {"holds": self._holds(question["incarnation"], question["label"], question["epoch"])}
        except Exception as error:  # the thread serves others too
            return {"error": f"{type(error).__name__}: {error}"}


class _Far:
    """A publisher in another process, as one fetch reached it: a connection of its own, the memory mapped."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._pages: Pages | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.connect(_name(address))
            if _uid(self._connection) != os.getuid():
                raise PeerLost(address, f"{address!r} is a process of another user")
        except OSError as error:
            self._connection.close()
            raise PeerLost(address, f"nobody is reached at {address!r} ({error})") from error
        except BaseException:
            self._connection.close()
            raise
        # A socket that is shut down by another thread does not wake the one that waits on it.
        self._interrupt, self._interrupted = socket.socketpair()
        self._news = select.poll()
        self._news.register(self._connection, select.POLLIN)
        self._news.register(self._interrupted, select.POLLIN)

    def open(self) -> Pages:
        """Map the memory that the publisher hands over."""
        if self._pages is None:
            message, fds = self._receive(fds=1)
            try:
                if len(fds) != 1:
                    raise PeerLost(self._address, f"{self._address!r} handed over no memory")
                self._pages = Pages.over(mapped(fds[0], message["bytes"]), message)
            finally:
                for fd in fds:
                    os.close(fd)
        return self._pages

    def _receive(self, fds: int = 0) -> tuple[dict[str, Any], list[int]]:
        news = self._news.poll(self._timeout_s * 1000)
        if not news:
            raise PeerLost(
                self._address, f"{self._address!r} did not answer within {self._timeout_s} s; it hangs or was stopped"
            )
        if any(fd == self._interrupted.fileno() for fd, _ in news):
            raise PeerLost(self._address, f"nobody waits for {self._address!r} any more")
        try:
            text, handed, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES_MAX, fds)
        except OSError as error:
            raise self._gone() from error
        if not text:
            raise self._gone()
        message: dict[str, Any] = json.loads(text)
        return message, handed

    def _gone(self) -> PeerLost:
        return PeerLost(
            self._address, f"{self._address!r} ended before it had confirmed the copy; retrieve from another publisher"
        )

    def check(self) -> None:
        # A publisher says nothing that it was not asked: news are its end, or a cancel.
        if self._news.poll(0):
            raise self._gone()

    def holds(self, incarnation: int, label: str, epoch: int) -> bool:
        question = {"incarnation": incarnation, "label": label, "epoch": epoch}
        try:
            self._connection.send(json.dumps(question).encode())
        except OSError as error:
            raise self._gone() from error
        answer, _ = self._receive()
        if "error" in answer:
            raise PeerLost(self._address, f"{self._address!r} could not say whether the epoch holds: {answer['error']}")
        return answer["holds"] is True

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._interrupt.send(b"x")

    def close(self) -> None:
        for end in (self._connection, self._interrupt, self._interrupted):
            end.close()
        self._pages = None


class SharedMemoryTransport(FetchTransport):
    """Fetches from publishers in other processes of this machine.

    Parameters
    ----------
    pages, wait, faults
        See FetchTransport.
    timeout_s
        How long a publisher may take to take a connection, to hand over its memory, to answer a question.
    """

    def __init__(
        self,
        pages: Pages,
        wait: Callable[[Clock], None],
        faults: Faults | None = None,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        super().__init__(pages, wait, faults)
        self.timeout_s = timeout_s

    def reach(self, record: Record) -> _Far:
        return _Far(record.address, self.timeout_s)
