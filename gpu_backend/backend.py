"""TorchBackend: runs the machine's ops on tensors.

Every op runs on its queue behind what its ``after`` names, which the queues take care of; here stands only what each op
does. On the CPU everything has run when ``submit`` returns, by the same code.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from gpu_backend.copier import Copier
from gpu_backend.device_cache import DeviceCache, GroupMemory
from gpu_backend.host_pool import HostPool
from gpu_backend.kv_io import KVAccess
from gpu_backend.layout import CacheLayout, GroupLayout
from gpu_backend.page_tables import PageTables
from gpu_backend.plan_tensors import Addressing
from gpu_backend.queues import Queues, Staging, queues_for
from gpu_backend.stamps import StampCode
from kvstate.errors import KVStateError, Poisoned, SubmitError
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, StepBegin, StepEnd, Tier
from kvstate.ordering import Clock, Queue
from kvstate.types import Geometry

_LONGEST_TOKENS = 4096
"""Of sequences in a cache of windows only, at least."""


class Judge(Protocol):
    """Is shown every op, in number order."""

    def observe(self, op: Op) -> None:
        """Judge an op that was submitted."""

    def skip(self, op: Op) -> None:
        """Note an op that failed at submit."""


class BackendClosed(KVStateError):
    """The memory of this backend was released."""


class NotEntered(KVStateError):
    """K and V are reached inside ``with manager.launch(plan):`` only: before it the page tables are not up to date."""


@attrs.define(eq=False)
class _Launch:
    """A launch that was entered and not left: its plan, the page-table row per segment, and how it is addressed."""

    plan: Plan
    rows: tuple[int, ...]
    access: KVAccess
    bound: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    places: list[tuple[str, int]] | None = None


class _Memory:
    """All that `close` releases."""

    def __init__(self, layout: CacheLayout, queues: Queues, rows: int) -> None:
        self.cache = DeviceCache(layout, queues.device)
        self.pool = HostPool(layout, queues)
        staging = Staging(queues)
        self.tables = PageTables(rows, layout.pages_per_sequence, layout.sinks, queues, staging)
        self.addressing = Addressing(self.tables, queues, staging, layout)
        self.slots: dict[str, KVAccess] = {}

    def group(self, tier: Tier, group: int) -> GroupMemory:
        """Return the memory of a group in a tier.

        Raises
        ------
        IndexError
            When there is no such group.
        """
        groups = self.cache.groups if tier is Tier.DEVICE else self.pool.groups
        if not 0 <= group < len(groups):
            layout = self.cache.layout
            names = ", ".join(f"{number} ({own.name})" for number, own in enumerate(layout.groups))
            raise IndexError(f"cache {layout.name!r} has groups {names}, not {group}")
        return groups[group]

    def pages(self, tier: Tier, group: int = 0) -> Tensor:
        """Return the bytes of the pages of a group in a tier that copies may name: the sink is none of them."""
        own = self.group(tier, group).bytes
        return own[:-1] if tier is Tier.DEVICE else own


class TorchBackend:
    """A kvstate Backend on torch tensors.

    Parameters
    ----------
    layout
        Shapes and sizes; give ``layout.geometry()`` to the manager.
    device
        Where the cache is; this version drives "cpu".
    judge
        Is shown every op.
    rows
        Streams whose page tables are kept on the device; a step may have as many.
    queues
        In place of the device's own, for tests.

    Attributes
    ----------
    copier
        Counts what was copied, per queue; ``queues.copy_s`` has the seconds.

    Notes
    -----
    `submit` and `skip` are called one at a time. `bind`, `write` and the readers may be called from several threads,
    for different plans and slots.
    """

    def __init__(
        self,
        layout: CacheLayout,
        device: str | torch.device = "cpu",
        judge: Judge | None = None,
        *,
        rows: int = 1024,
        queues: Queues | None = None,
    ) -> None:
        self.layout = layout
        self.geometry = layout.geometry()
        self.judge = judge
        self.queues = queues if queues is not None else queues_for(torch.device(device))
        self.copier = Copier(self.queues)
        self._memory: _Memory | None = _Memory(layout, self.queues, rows)
        self._launches: dict[int, _Launch] = {}
        self._numbers: dict[int, int] = {}
        self._failing: list[tuple[type[Op] | None, bool]] = []
        self._lost: str | None = None
        self._closed = False
        # Guards the launches and the release of the memory: models bind while others launch and close.
        self._lock = threading.Lock()
        self._codes: tuple[StampCode, ...] = ()

    # -- the Backend protocol

    def submit(self, op: Op) -> None:
        """Submit one op; see `kvstate.backend.Backend`."""
        if self._lost is not None:
            raise Poisoned(self._lost)
        if not self._closed:
            self._maybe_fail(op)
            try:
                self._run(op)
                if self.judge is not None:
                    self.judge.observe(op)
            except SubmitError:
                raise
            except BackendClosed:
                pass  # Closed meanwhile: the op does nothing, and completes.
            except Exception as error:
                self.lose(f"#{op.number} {type(op).__name__} failed: {type(error).__name__}: {error}")
                raise Poisoned(self._lost) from error
        if isinstance(op, StepEnd):
            self._end(op)
        self._complete(op)

    def skip(self, op: Op) -> None:
        """Keep the place of an op that failed at submit."""
        if self.judge is not None:
            self.judge.skip(op)
        if op.queue is not None:
            self.queues.follow(op.queue, op.after)
        self._complete(op)

    def completed(self) -> Clock:
        """Return the newest op per queue that the host has seen complete."""
        return self.queues.completed()

    def wait(self, clock: Clock) -> None:
        """Block until everything that `clock` names has completed."""
        self.queues.wait(clock)

    def close(self) -> None:
        """Release the memory; when launches are running, once the last of them ends."""
        self._closed = True
        with self._lock:
            if not self._launches:
                self._memory = None

    def _run(self, op: Op) -> None:
        if op.queue is not None and not isinstance(op, StepEnd):
            self.queues.follow(op.queue, op.after)
        if isinstance(op, (ForkCopy, CopyOut, CopyIn)):
            memory = self.memory
            for group, copies in enumerate(op.copies):
                target, source = memory.pages(op.target_tier, group), memory.pages(op.source_tier, group)
                self.copier.copy(op.queue, target, source, copies)
        elif isinstance(op, StepBegin):
            self._begin(op)

    def _begin(self, op: StepBegin) -> None:
        """Upload what the step's page tables have beyond what their rows hold."""
        plan: Plan | None = getattr(op.owner, "plan", None)
        if plan is None:
            return
        memory = self.memory
        rows = memory.tables.enter(plan.in_step_order)
        with self._lock:
            self._launches[id(plan)] = _Launch(plan, rows, KVAccess(memory.cache))
            self._numbers[op.number] = id(plan)

    def _end(self, op: StepEnd) -> None:
        with self._lock:
            launch = self._launches.pop(self._numbers.pop(op.begin, 0), None)
            if launch is not None and self._memory is not None:
                self._memory.tables.leave(launch.rows)
            if self._closed and not self._launches:
                self._memory = None

    def _complete(self, op: Op) -> None:
        if op.queue is not None:
            self.queues.record(op.queue, op.number)

    def lose(self, why: str) -> None:
        """Hear that nothing follows any more: whoever waits hears Poisoned."""
        self._lost = self._lost or why
        self.queues.lose(self._lost)

    @property
    def memory(self) -> _Memory:
        """The tensors.

        Raises
        ------
        BackendClosed
            When they were released.
        """
        memory = self._memory
        if memory is None:
            raise BackendClosed(f"the cache {self.layout.name!r} is closed; build a new backend")
        return memory

    # -- failures on demand

    def fail_next(self, kind: type[Op] | None = None, *, fatal: bool = False) -> None:
        """Make the next submit of a `kind` (None: any) fail; `fatal`: the device is lost with it."""
        self._failing.append((kind, fatal))

    def fail_none(self) -> int:
        """Forget the failures asked for by `fail_next` that did not happen yet; return how many those were."""
        waiting = len(self._failing)
        self._failing.clear()
        return waiting

    def _maybe_fail(self, op: Op) -> None:
        for place, (kind, fatal) in enumerate(self._failing):
            if kind is None or isinstance(op, kind):
                del self._failing[place]
                if fatal:
                    self.lose(f"the device was lost at #{op.number}, as asked for")
                    raise Poisoned(self._lost)
                raise SubmitError(f"#{op.number} {type(op).__name__} was made to fail")

    # -- what models use

    def register(self, slot: str, length: int) -> None:
        """Announce a CUDA graph of `length` rows in `slot`; see `Addressing.register`."""
        self.memory.addressing.register(slot, length)

    def bind(self, plan: Plan, slot: str | None = None, bucket: int | None = None) -> KVAccess:
        """Return K and V of a launched plan. Called inside its launch; the result is good until the launch is left.

        Parameters
        ----------
        plan
            The plan being launched.
        slot
            Use the static buffers of this slot. It belongs to one thread at a time, and always gives the same object.
        bucket
            The captured length to fill; None: the smallest registered one that fits.

        Raises
        ------
        NotEntered
            When the plan is not being launched.
        CaptureLengthError
            When it does not fit into the slot.
        """
        launch, memory = self._launch(plan), self.memory
        if slot is None:
            with launch.lock:
                if not launch.bound:
                    launch.access.rebind(memory.addressing.make(plan, launch.rows))
                    launch.bound = True
            return launch.access
        tensors = memory.addressing.make(plan, launch.rows, slot, bucket)
        with self._lock:
            access = memory.slots.setdefault(slot, KVAccess(memory.cache))
        access.rebind(tensors)
        return access

    def layer_view(self, layer: int) -> Tensor:
        """Return ``(pages + 1, 2, page_size, heads, head_dim)`` of a layer; see `DeviceCache.layer_view`."""
        return self.memory.cache.layer_view(layer)

    def page_tables(self, group: int = 0) -> Tensor:
        """Return a group's page-table rows, for kernels that take block tables; ``PlanTensors.rows`` says which."""
        return self.memory.tables.tensors[group]

    def _launch(self, plan: Plan) -> _Launch:
        with self._lock:
            launch = self._launches.get(id(plan))
        if launch is None:
            raise NotEntered("this plan is not being launched; reach K and V inside `with manager.launch(plan):`")
        return launch

    # -- stamps, for `kvstate run` and `kvstate check`

    @property
    def codes(self) -> tuple[StampCode, ...]:
        """How stamps are written, per group; made when first asked for: layouts of odd sizes have none."""
        if not self._codes:
            parts = enumerate(self.layout.parts)
            self._codes = tuple(StampCode(part, self.queues.device, group) for group, part in parts)
        return self._codes

    def _words(self, group: int, tier: Tier = Tier.DEVICE) -> Tensor:
        memory = self.memory.group(tier, group)
        return self.codes[group].words(memory.bytes)

    def write(self, plan: Plan, place: int, stamps: Sequence[Any]) -> None:
        """Write what segment `place` of a launched step computes, one stamp per token, where the plan's tensors say.

        Every group gets the same stamps.

        Raises
        ------
        ValueError
            When there is not one stamp per token of the segment's span.
        """
        view = plan.in_step_order[place]
        if len(stamps) != view.span:
            raise ValueError(f"segment {place} computes {view.span} tokens, got {len(stamps)} stamps")
        launch = self._launch(plan)
        access = self.bind(plan)
        if launch.places is None:
            launch.places = _places(plan)
        label, first = launch.places[place]
        chosen = slice(first, first + view.span)
        with self.queues.on(Queue.COMPUTE):
            for group, own in enumerate(self.layout.groups):
                tensors = access.tensors(label, layer=own.layers[0])
                pages, slots = tensors.token_page[chosen], tensors.token_slot[chosen]
                self.codes[group].put(self._words(group), pages, slots, stamps)

    def read(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the device stamps of tokens ``0 … length`` of a page table."""
        return self.load(group, table, 0, length)

    def read_host(self, table: Sequence[int], length: int, group: int = 0) -> list[Any]:
        """Return the host stamps of tokens ``0 … length`` of a page table, whose copy has completed."""
        return self.load(group, table, 0, length, Tier.HOST)

    def moved(self) -> dict[str, tuple[int, float]]:
        """Return the bytes moved and the seconds that took, per direction."""
        return {
            name: (self.copier.bytes[queue], self.queues.copy_s[queue])
            for name, queue in (("out", Queue.COPY_OUT), ("in", Queue.COPY_IN))
        }

    def read_many(self, tables: Sequence[Sequence[int]], lengths: Sequence[int], group: int = 0) -> list[list[Any]]:
        """Return what `read` gives of each table, by one gather."""
        with self.queues.on(Queue.COMPUTE):
            words = self._words(group)
            return self.codes[group].get(words, tables, lengths)

    def load(self, group: int, table: Sequence[int], start: int, stop: int, tier: Tier = Tier.DEVICE) -> list[Any]:
        """Return the stamps of tokens ``start … stop``; token 0 is the first of ``table[0]``.

        Pages in front of token `start` are not read.

        Raises
        ------
        IndexError
            When the table ends before `stop`, or names a page that does not exist.
        """
        size = self.layout.page_size
        passed = start // size
        with self.queues.on(Queue.COMPUTE):
            words = self._words(group, tier)
            [stamps] = self.codes[group].get(words, [table[passed:]], [stop - passed * size])
        return stamps[start - passed * size :]

    def store(self, group: int, table: Sequence[int], start: int, stamps: Sequence[Any]) -> None:
        """Write device stamps from token `start` on; token 0 is the first of ``table[0]``."""
        size = self.layout.page_size
        tokens = range(start, start + len(stamps))
        with self.queues.on(Queue.COMPUTE):
            words = self._words(group)
            device = self.queues.device
            pages = torch.tensor([table[token // size] for token in tokens], dtype=torch.int32, device=device)
            slots = torch.tensor([token % size for token in tokens], dtype=torch.int32, device=device)
            self.codes[group].put(words, pages, slots, stamps)

    def poison(self, tier: Tier, group: int, pages: Iterable[int]) -> None:
        """Spoil `pages`, which became free or are about to be given back."""
        with self.queues.on(Queue.COMPUTE):
            self.memory.group(tier, group).poison(pages)
        # Whoever is granted the pages next writes them on any queue, and no edge names a harness.
        self.queues.mark(Queue.COMPUTE).wait()


def _places(plan: Plan) -> list[tuple[str, int]]:
    """Return, per segment in the step's order, its plan label and where its tokens begin there."""
    found: dict[int, tuple[str, int]] = {}
    for label, views in plan.views.items():
        first = 0
        for view in views:
            found[id(view)] = (label, first)
            first += view.span
    return [found[id(view)] for view in plan.in_step_order]


def cpu_backend(
    geometry: Geometry, *, judge: Judge | None = None, layers: int = 2, kv_heads: int = 2, head_dim: int = 8
) -> TorchBackend:
    """Return a TorchBackend in plain memory: the backend called "cpu" of `kvstate run` and `kvstate check`.

    Parameters
    ----------
    geometry
        Pages, page size and windows. Its page bytes are replaced by those of the layout; those of several groups keep
        their ratio, so a sector holds as many pages of each.
    judge
        Is shown every op.
    layers, kv_heads, head_dim
        Small by default: what is checked is where bytes go, not how many. Of several groups, those with larger pages
        have more layers.
    """
    return TorchBackend(_layout_for(geometry, layers, kv_heads, head_dim), "cpu", judge)


def _layout_for(geometry: Geometry, layers: int, kv_heads: int, head_dim: int) -> CacheLayout:
    """Return a layout with the page numbers of `geometry`: as many pages of each group, at the same places."""
    share = math.gcd(*(group.page_bytes for group in geometry.groups))
    groups = []
    first = 0
    for group in geometry.groups:
        last = first + layers * group.page_bytes // share
        groups.append(GroupLayout(group.name, range(first, last), kv_heads, head_dim, group.window))
        first = last
    # Windows alone bound no sequence; the page tables must.
    bounded = any(group.window is None for group in geometry.groups)
    longest = None if bounded else max(_LONGEST_TOKENS, 8 * max(geometry.group_pages) * geometry.page_size)
    small = CacheLayout(
        name=geometry.name,
        groups=groups,
        page_size=geometry.page_size,
        pages=geometry.pages,
        host_pages=geometry.host_pages,
        max_seq_len=longest,
    )
    # The layout's own sectors may be smaller, by the same number for every group.
    sectors = geometry.pages_per_sector[0] // small.geometry().pages_per_sector[0]
    return attrs.evolve(small, pages=geometry.pages * sectors, host_pages=geometry.host_pages * sectors)
