"""Managers over torch caches that fetch from each other, in this process or from a child of it.

``Kv`` is the one of tests/bugs with real bytes and a transport that does what the test says, when it says so. ``Child``
is a process that holds such managers; what it hands out here are ``Far`` objects, which stand for its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported: the server of forks does.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

from gpu_backend.backend import cpu_backend
from gpu_backend.transports import (
    FetchTransport,
    InProcessTransport,
    Network,
    Pages,
    Publisher,
    SharedMemoryTransport,
    share,
    shared_memory,
)
from gpu_backend.transports.fetches import Job
from kvstate.backend import Cancelled, Failed, Outcome
from kvstate.errors import SubmitError
from kvstate.manager import KVManager
from kvstate.ops import FetchBegin, Plan, Tier
from kvstate.prefix import CacheEvent
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import nobodys
from kvstate.types import Geometry
from tests.bugs import conftest as memory_kit

WAIT_S = 60.0
"""Longer than anything takes here: a wait that ends by it is a failure."""

TIMEOUT_S = 30.0
"""Of a transport whose publisher always answers."""

STAMPS_PER_PROCESS = 1 << 32

# Several test runs on one machine use the same addresses at the same time.
NAMESPACE = f"\0kvstate-tests/{os.getpid()}/"
shared_memory._NAMESPACE = NAMESPACE


class Conductor(FetchTransport):
    """A real transport whose fetches do in their threads what a test says, as ``StepTransport`` would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse: Callable[[FetchBegin], bool] = lambda op: False
        self.cancels: list[Any] = []
        self._orders: dict[Any, list[Callable[[Job], Outcome | None]]] = {}
        self._told = threading.Condition()

    # -- what a test says; each returns when it is done

    def copy(self, fetch: Any, tokens: int | None = None) -> None:
        """Copy the first `tokens` tokens (None: all); the fetch ends at once if its publisher is not reached."""

        def order(job: Job) -> Outcome | None:
            FetchTransport.copy(self, job, tokens)
            return None

        self._order(fetch, order)

    def finish(self, fetch: Any) -> None:
        """Ask the publisher about the epoch; the fetch lands, or fails."""
        self._order(fetch, self.verdict)

    def fail(self, fetch: Any, error: str) -> None:
        """Fail the fetch, with garbage in its pages."""

        def order(job: Job) -> Outcome:
            self.pages.spoil(job.op)
            return Failed(error)

        self._order(fetch, order)

    def confirm_cancel(self, fetch: Any) -> None:
        """Confirm a cancel that was asked for."""
        assert fetch in self.cancels, f"nobody asked for the cancel of {fetch!r}"
        super().cancel(fetch)
        self._order(fetch, lambda job: Cancelled())

    def _order(self, fetch: Any, order: Callable[[Job], Outcome | None]) -> None:
        with self._changed:
            job = self._jobs.get(fetch)
        if job is None:
            return  # ended already, as a fetch of this transport may at any time
        with self._told:
            orders = self._orders.setdefault(fetch, [])
            orders.append(order)
            self._told.notify_all()
            done = self._told.wait_for(lambda: order not in orders or not job.thread.is_alive(), WAIT_S)
        assert done

    # -- what the transport does

    def start(self, op: FetchBegin) -> None:
        if self.refuse(op):
            raise SubmitError(f"#{op.number} FetchBegin was made to fail")
        super().start(op)

    def cancel(self, fetch: Any) -> None:
        """Note that the fetch is to end."""
        if fetch not in self.cancels:
            self.cancels.append(fetch)

    def _work(self, job: Job) -> None:
        super()._work(job)
        with self._told:
            self._orders.setdefault(job.op.fetch, []).clear()
            self._told.notify_all()

    def _run(self, job: Job) -> Outcome:
        with self._told:
            orders = self._orders.setdefault(job.op.fetch, [])
        while True:
            with self._told:
                assert self._told.wait_for(lambda: orders, WAIT_S), "the test forgot a fetch"
            outcome = orders[0](job)
            if outcome is not None:
                return outcome
            with self._told:
                del orders[0]
                self._told.notify_all()


class Conducted(Conductor, InProcessTransport):
    """In this process, as a test says."""


class ConductedSharedMemory(Conductor, SharedMemoryTransport):
    """From another process, as a test says."""


class Streets:
    """Who publishes where, when that is over shared memory."""

    def __init__(self) -> None:
        self.publishers: dict[str, Publisher] = {}

    def leave(self, address: str) -> None:
        """Make `address` unreachable."""
        self.publishers.pop(address).close()


class Kv(memory_kit.Kv):
    """A KVManager over a torch cache, its judge and transport; verbs take and return what the manager's do.

    Parameters
    ----------
    reach
        A Network: fetch in this process. Streets: over shared memory.
    transport
        Made of pages and wait; None: one that a test conducts.
    """

    def __init__(
        self,
        reach: Network | Streets,
        counter: Iterator[int],
        *,
        address: str = "kv",
        transport: Callable[..., FetchTransport] | None = None,
        head_dim: int = 8,
        layers: int = 2,
        **sizes: Any,
    ) -> None:
        given: dict[str, Any] = {"pages": 8, "page_size": 2, "host_pages": 8, **sizes}
        self.geometry = Geometry(**given)
        self.judge = EdgeJudge.of(self.geometry)
        self.backend: Any = cpu_backend(self.geometry, judge=self.judge, head_dim=head_dim, layers=layers)
        cache = self.backend.memory.cache
        if isinstance(reach, Streets):
            memory = share(cache)
        pages = Pages.of(cache)
        if transport is None:
            made: Any = (
                ConductedSharedMemory(pages, self.backend.wait, timeout_s=TIMEOUT_S)
                if isinstance(reach, Streets)
                else Conducted(reach, pages, self.backend.wait)
            )
            made.network = reach
        else:
            made = transport(pages, self.backend.wait)
        self.transport: Any = made
        self.ended: dict[Any, Outcome] = {}
        self._poll, made.poll = made.poll, self._noted
        self.events: list[CacheEvent] = []
        self.manager = KVManager(
            self.geometry, self.backend, transport=made, address=address, debug=True, clock=lambda: 0.0,
            events=self.events,
        )  # fmt: skip
        if isinstance(reach, Streets):
            reach.publishers[address] = Publisher(address, memory, pages, self.manager.epoch_holds)
        else:
            reach.join(address, pages, self.manager.epoch_holds)
        self._reach = reach
        self._address = address
        self._counter = counter

    def _noted(self) -> list[tuple[Any, Outcome]]:
        outcomes: list[tuple[Any, Outcome]] = self._poll()
        for fetch, outcome in outcomes:
            assert fetch not in self.ended, "a fetch ends once"
            self.ended[fetch] = outcome
        return outcomes

    def outcome_of(self, fetch: Any) -> Outcome:
        """Wait for the end of a fetch; return how it ended. Any verb may have taken note of it before."""
        self.manager.poll()
        while fetch not in self.ended:
            assert self.transport.wait(timeout_s=WAIT_S), f"{fetch!r} hangs"
            self.manager.poll()
        self.spoil()
        return self.ended[fetch]

    def compute(self, plan: Plan) -> list[list[Any]]:
        """Write new stamps for every computed token; return what each segment had in front of them."""
        contexts = []
        for place, planned in enumerate(plan.in_step_order):
            contexts.append([] if planned.sink else self.read(planned.tables, planned.start, planned.skipped))
            self.backend.write(plan, place, list(itertools.islice(self._counter, planned.span)))
        return contexts

    def die_when_asked(self) -> None:
        """Kill this process when the next reader asks whether its epoch holds, before it is answered."""
        reach: Any = self._reach
        reach.publishers[self._address]._holds = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def spoiled(self) -> bool:
        """Tell whether no byte of a free device page was written since it was spoiled."""
        groups = self.backend.memory.cache.groups
        return all(
            bool((groups[group].bytes[list(pages)] == 0xFF).all())
            for tier, group, pages in nobodys(self.manager.view())
            if tier is Tier.DEVICE
        )

    def finish(self) -> None:
        """End everything; then nothing may be missing, no conflict seen, and nothing written that was free."""
        try:
            super().finish()
            self.spoil()
            self.transport.close()
            assert self.spoiled()
        finally:
            self.transport.close()
            if isinstance(self._reach, Streets) and self._address in self._reach.publishers:
                self._reach.leave(self._address)


# -- another process


@attrs.frozen
class Ref:
    """Names an object that stays in the child."""

    serial: int


def _plain(value: Any) -> bool:
    """Tell whether a value means the same in another process: it is compared by what it holds."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if value is None or isinstance(value, (str, bytes, int, float)):
        return True
    by_value: bool = attrs.has(type(value)) and type(value).__dict__.get("__eq__") is not None
    return by_value


class _Held:
    """What a child keeps for its parent."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.streets = Streets()
        self.counter: Iterator[int] = itertools.count(1)

    def make(self, first: int, **kwargs: Any) -> Kv:
        """Make a manager whose stamps begin at `first`."""
        self.counter = itertools.count(first)
        return Kv(self.streets, self.counter, **kwargs)

    def leave(self, address: str) -> None:
        """Make a manager unreachable."""
        self.streets.leave(address)

    def wrap(self, value: Any) -> Any:
        """Return what the parent gets."""
        if _plain(value):
            return value
        if isinstance(value, tuple):
            return tuple(map(self.wrap, value))
        self.objects[id(value)] = value
        return Ref(id(value))

    def unwrap(self, value: Any) -> Any:
        """Return what the parent means."""
        return self.objects[value.serial] if isinstance(value, Ref) else value


def serve(pipe: Connection, namespace: str) -> None:
    """Do what the parent says, until it is gone."""
    torch.set_num_threads(1)
    shared_memory._NAMESPACE = namespace
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held = _Held()
    while True:
        try:
            verb, target, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            found: Any = held if target is None else held.unwrap(target)
            if verb == "set":
                setattr(found, name, held.unwrap(args[0]))
                result = None
            else:
                result = getattr(found, name) if name else found
                if verb == "call":
                    arguments = [held.unwrap(arg) for arg in args]
                    result = result(*arguments, **{key: held.unwrap(arg) for key, arg in kwargs.items()})
            answer: tuple[str | None, Any] = (None, held.wrap(result))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


class Far:
    """An object of a child: its verbs are called there, its values are read there."""

    def __init__(self, child: Child, ref: Ref) -> None:
        vars(self).update(_child=child, _ref=ref)

    def __getattr__(self, name: str) -> Any:
        return self._child.ask("get", self._ref, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._child.ask("set", self._ref, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._child.ask("call", self._ref, "", *args, **kwargs)


class Child:
    """A process that holds managers. Forked from a server that has imported torch: a new one costs milliseconds."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, NAMESPACE), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, verb: str, target: Ref | None, name: str, *args: Any, **kwargs: Any) -> Any:
        """Get, set or call something of an object of the child's."""
        sent = [vars(arg)["_ref"] if isinstance(arg, Far) else arg for arg in args]
        self.pipe.send((verb, target, name, sent, kwargs))
        if not self.pipe.poll(WAIT_S):
            raise TimeoutError(f"the child does not answer {name!r}")
        failure, value = self.pipe.recv()
        if failure is not None:
            raise AssertionError(f"in the child:\n{failure}")
        return self._known(value)

    def _known(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._known, value))
        return Far(self, value) if isinstance(value, Ref) else value

    def make(self, first: int, **kwargs: Any) -> Any:
        """Make a manager there."""
        return self.ask("call", None, "make", first, **kwargs)

    def leave(self, address: str) -> None:
        """Make one of its managers unreachable."""
        self.ask("call", None, "leave", address)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def stop(self) -> None:
        """SIGSTOP, and wait until none of its threads runs: the signal does not."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        end_s = time.monotonic() + WAIT_S
        while any(stat.read_text().rpartition(") ")[2][0] != "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
            assert time.monotonic() < end_s
            os.sched_yield()

    def close(self) -> None:
        """End it, however it is, and wait for that."""
        self.pipe.close()
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None
        self.process.close()
