"""Both transports end every fetch, say how, and land only what the publisher confirms; real bytes, real processes."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("torch")

from gpu_backend.stamps import Undefined
from gpu_backend.transports import (
    Faults,
    FetchTransport,
    InProcessTransport,
    Network,
    Pages,
    PeerLost,
    Publisher,
    SharedMemory,
    SharedMemoryTransport,
    pages,
    share,
    shared_memory,
    unique_address,
)
from gpu_backend.transports.fetches import Source
from kvstate.backend import Cancelled, Failed, Landed, Outcome, Transport
from kvstate.ops import FetchBegin
from kvstate.types import Group, Publication, Record, Segment
from tests.bugs import test_publish_rows
from tests.gpu_backend.transport_kit import STAMPS_PER_PROCESS, TIMEOUT_S, WAIT_S, Child, Kv, Streets

KINDS = ["in-process", "shared-memory"]

# Every test of rows P1–P9, here with real bytes over each transport: their `machines`, `pub` and `con` are those below.
globals().update({name: test for name, test in vars(test_publish_rows).items() if name.startswith("test_P")})


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Return a process for the publishers of all tests that kill none."""
    made = Child()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Name the transport."""
    kind: str = request.param
    return kind


@pytest.fixture
def machines(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make managers that reach each other; over shared memory, all but those called con live in the child."""
    reach: Network | Streets = Network() if kind == "in-process" else Streets()
    firsts = itertools.count(1, STAMPS_PER_PROCESS)
    made: list[Any] = []

    def make(**kwargs: Any) -> Any:
        if kind == "in-process" or kwargs["address"].startswith("con"):
            kv: Any = Kv(reach, itertools.count(next(firsts)), **kwargs)
            if kind == "shared-memory":
                kv.transport.network = request.getfixturevalue("child")
        else:
            kv = request.getfixturevalue("child").make(next(firsts), **kwargs)
        made.append(kv)
        return kv

    yield make
    for kv in made:
        kv.finish()


pub = test_publish_rows.pub
con = test_publish_rows.con
only = test_publish_rows.only


# -- a transport that nobody conducts


@pytest.fixture
def alone(kind: str, machines: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Make a consumer whose transport runs by itself: ``alone(faults, timeout_s=…)``."""

    def make(faults: Faults | None = None, *, timeout_s: float = TIMEOUT_S, **sizes: Any) -> Any:
        def transport(own: Pages, wait: Any) -> FetchTransport:
            if kind == "in-process":
                return InProcessTransport(reached[0], own, wait, faults)
            return SharedMemoryTransport(own, wait, faults, timeout_s=timeout_s)

        reached: list[Any] = []
        if kind == "in-process":
            # The network of the publishers, which were made first.
            probe = machines(address="con probe")
            reached.append(probe.transport.network)
        kv = machines(address="con alone", transport=transport, **sizes)
        kv.ingest("r")
        return kv

    return make


def yes(_: FetchBegin) -> bool:
    return True


def test_both_fit_the_protocol(alone: Any) -> None:
    transport: Transport = alone().transport
    assert transport.poll() == []


@pytest.mark.parametrize("own", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("piece_bytes_max", [1, 1 << 20])
def test_every_byte_behind_the_own_tokens_lands_and_none_in_front(
    pub: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, own: int, piece_bytes_max: int
) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES_MAX", piece_bytes_max)
    con = alone()
    if own:
        con.run(Segment("r", span=own))
    kept = con.tokens("r") if own else []
    assert con.outcome_of(only(con, pub.publish("r"))) == Landed()
    assert con.tokens("r") == kept + pub.tokens("r")[own:]
    con.run(Segment("r", span=3))
    assert con.tokens("r")[:5] == kept + pub.tokens("r")[own:]


GROUPS: dict[str, Any] = {
    "pages": 16,
    "host_pages": 0,
    "groups": (Group("full", 192), Group("window", 128, window=5), Group("narrow", 128, window=1)),
}
"""Sectors of two pages of the first group, or three of one of the others."""


@pytest.mark.parametrize("own", [0, 1, 4, 7, 10])
@pytest.mark.parametrize("piece_bytes_max", [1, 1 << 20])
def test_every_group_lands_from_the_first_page_that_its_window_needs(
    machines: Callable[..., Any], alone: Any, monkeypatch: pytest.MonkeyPatch, own: int, piece_bytes_max: int
) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES_MAX", piece_bytes_max)
    pub = machines(address="pub", **GROUPS)
    pub.ingest("r")
    for span in (3, 1, 7):
        pub.run(Segment("r", span=span))
    con = alone(**GROUPS)
    if own:
        con.run(Segment("r", span=own))
    kept = con.tokens("r") if own else []
    fetch = only(con, pub.publish("r"))
    assert con.outcome_of(fetch) == Landed()
    assert fetch.op.firsts[0] == own // 2 and fetch.op.firsts[1] >= 3, "pages that no window needs do not travel"
    assert con.tokens("r") == kept + pub.tokens("r")[own:]
    for _ in range(4):
        con.run(Segment("r", span=3))
    assert con.tokens("r")[:11] == kept + pub.tokens("r")[own:]


def test_a_fetch_that_fails_spoils_every_group(machines: Callable[..., Any], alone: Any) -> None:
    pub = machines(address="pub", **GROUPS)
    pub.ingest("r")
    pub.run(Segment("r", span=11))
    con = alone(Faults(fail=yes), **GROUPS)
    con.spoil()
    fetch = only(con, pub.publish("r"))
    assert con.transport.wait(timeout_s=WAIT_S)
    for group, table in enumerate(fetch.op.tables):
        stop = len(table) * 2
        assert con.backend.load(group, table, 0, 1) == [Undefined.TORN], "garbage"
        assert con.backend.load(group, table, stop - 1, stop) == [Undefined.POISON]
    assert isinstance(con.outcome_of(fetch), Failed)


def test_a_publisher_with_other_groups_is_a_failure(pub: Any, alone: Any) -> None:
    con = alone(**GROUPS)
    record = pub.publish("r").ranks[0]["main"]
    named = attrs.evolve(record, pages=record.pages * 3, skipped=(0, 0, 0))
    outcome = con.outcome_of(only(con, Publication("r", 1, {0: {"main": named}})))
    assert isinstance(outcome, Failed) and "keeps pages of another geometry" in outcome.error


def test_a_record_that_names_a_sink_is_a_failure(machines: Callable[..., Any], alone: Any) -> None:
    pub = machines(address="pub", **GROUPS)
    pub.ingest("r")
    pub.run(Segment("r", span=11))
    con = alone(**GROUPS)
    record = pub.publish("r").ranks[0]["main"]
    # What a publisher with a narrower window publishes.
    table = record.pages[1]
    named = attrs.evolve(record, pages=(record.pages[0], (*table[:4], 48, *table[5:]), record.pages[2]))
    outcome = con.outcome_of(only(con, Publication("r", 1, {0: {"main": named}})))
    assert isinstance(outcome, Failed) and "does not name pages for 11 tokens of its 48" in outcome.error


def test_pages_that_lie_apart_land_in_order(pub: Any, alone: Any) -> None:
    for kv in (pub, con := alone()):
        kv.ingest("a", "b")
        for _ in range(2):
            kv.run(Segment("a", span=1))
            kv.run(Segment("b", span=2))
        kv.remove("a")
    pub.run(Segment("r", span=4))
    assert con.outcome_of(only(con, pub.publish("r"))) == Landed()
    assert con.tokens("r") == pub.tokens("r")
    assert len(con.tokens("r")) == 9


@pytest.mark.parametrize(
    ("faults", "error", "tokens"),
    [(Faults(fail=yes), "was made to fail", 0), (Faults(short=yes), "short read: 2 of 5 tokens", 2)],
    ids=["fail", "short"],
)
def test_a_fetch_that_fails_half_way_has_written_something_and_counts_for_nothing(
    pub: Any, alone: Any, faults: Faults, error: str, tokens: int
) -> None:
    con = alone(faults)
    fetch = only(con, pub.publish("r"))
    assert con.transport.wait(timeout_s=WAIT_S)
    written = con.backend.read(fetch.op.tables[0], 5)
    assert written[:tokens] == pub.tokens("r")[:tokens] and written[tokens:] != pub.tokens("r")[tokens:]
    outcome = con.outcome_of(fetch)
    assert isinstance(outcome, Failed) and error in outcome.error
    assert (con.stream("r").length, con.stream("r").residency, con.device_free) == (0, "FetchFailed", 8)


@pytest.mark.parametrize("faults", [Faults(never=yes), Faults(delay_s=3600.0)], ids=["never", "delayed"])
def test_a_fetch_that_does_not_end_by_itself_is_ended_by_a_cancel(pub: Any, alone: Any, faults: Faults) -> None:
    con = alone(faults)
    fetch = only(con, pub.publish("r"))
    con.cancel_retrieve("r")
    assert con.outcome_of(fetch) == Cancelled()
    assert (con.stream("r").length, con.device_free) == (0, 8)


def test_a_fetch_that_never_ends_holds_up_no_other(pub: Any, alone: Any) -> None:
    started: list[int] = []

    def first(op: FetchBegin) -> bool:
        started.append(op.number)
        return op.number == min(started)

    con = alone(Faults(never=first))
    lost = only(con, pub.publish("r"))
    con.transport.cancel, cancel = lambda fetch: None, con.transport.cancel
    con.reset("r")
    assert con.outcome_of(only(con, pub.publish("r"))) == Landed()
    cancel(lost)
    assert con.outcome_of(lost) == Cancelled()


def test_a_start_that_is_refused_leaves_nothing_to_report(pub: Any, alone: Any) -> None:
    con = alone(Faults(refuse=yes))
    con.claim_retrieve("r", pub.publish("r"))
    assert con.stream("r").residency == "FetchFailed"
    assert con.transport.poll() == [] and con.device_free == 8


def test_closing_confirms_what_is_left_and_refuses_what_comes(pub: Any, alone: Any) -> None:
    con = alone(Faults(never=yes))
    fetch = only(con, pub.publish("r"))
    con.transport.close()
    con.transport.close()
    assert con.outcome_of(fetch) == Cancelled()
    con.claim_retrieve("r", pub.publish("r"))
    assert con.readiness("r").failed == (("main", "the transport is closed"),)
    con.transport.cancel(fetch)
    assert not con.transport.wait(timeout_s=0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_is_written_or_reported_before_what_the_fetch_follows_has_completed(
    pub: Any, alone: Any, cancelled: bool
) -> None:
    con = alone()
    waiting, completed = threading.Event(), threading.Event()
    asked: list[Any] = []

    def wait(clock: Any) -> None:
        asked.append(clock)
        waiting.set()
        assert completed.wait(WAIT_S)

    con.transport.wait_for = wait
    fetch = only(con, pub.publish("r"))
    if cancelled:
        con.cancel_retrieve("r")
    assert waiting.wait(WAIT_S)
    con.spoil()
    before = con.backend.memory.cache.bytes.clone()
    assert (con.poll(), con.device_free, asked) == ((), 5, [fetch.op.after])
    assert bool((con.backend.memory.cache.bytes == before).all())
    completed.set()
    assert con.outcome_of(fetch) == (Cancelled() if cancelled else Landed())


def test_a_cancel_ends_a_copy_after_the_piece_it_is_at(pub: Any, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES_MAX", 1)
    con = alone()
    copied: list[int] = []
    move = pages.GroupPages._move

    def moved(own: Any, source: Any, read: Any, write: Any) -> int:
        copied.append(len(read))
        con.transport.cancel(fetch)
        return move(own, source, read, write)

    started, held = threading.Event(), con.transport.wait_for
    con.transport.wait_for = lambda clock: (started.wait(WAIT_S), held(clock))[1]
    monkeypatch.setattr(pages.GroupPages, "_move", moved)
    fetch = only(con, pub.publish("r"))
    started.set()
    assert con.outcome_of(fetch) == Cancelled()
    assert copied == [1]


def test_a_publisher_whose_pages_mean_something_else_is_a_failure(pub: Any, alone: Any) -> None:
    con = alone(head_dim=16)
    outcome = con.outcome_of(only(con, pub.publish("r")))
    assert isinstance(outcome, Failed)
    assert "'pub' keeps pages of another geometry: 2 layers, 2 tokens per page, 2 heads of 8 bfloat16" in outcome.error
    assert "here are 2 layers, 2 tokens per page, 2 heads of 16 bfloat16" in outcome.error


@pytest.mark.parametrize("named", [(), (0, 1), (0, 1, 99), (0, -1, 1)], ids=str)
def test_a_record_that_does_not_name_its_pages_is_a_failure(pub: Any, alone: Any, named: tuple[int, ...]) -> None:
    con = alone()
    record = attrs.evolve(pub.publish("r").ranks[0]["main"], pages=(named,))
    outcome = con.outcome_of(only(con, Publication("r", 1, {0: {"main": record}})))
    assert isinstance(outcome, Failed) and "does not name pages for 5 tokens" in outcome.error


def test_a_publisher_that_cannot_answer_is_a_failure_and_serves_the_next_fetch(
    kind: str, alone: Any, request: pytest.FixtureRequest
) -> None:
    con = alone()
    broken = [True]

    def holds(*_: Any) -> bool:
        if broken[0]:
            raise OSError("cable")
        return True

    own = Kv(Network(), itertools.count(1), address="con broken")
    own.ingest("r")
    own.run(Segment("r", span=3))
    memory = share(own.backend.memory.cache)
    if kind == "in-process":
        con.transport.network.join("con broken", Pages.of(own.backend.memory.cache), holds)
        publisher: Any = None
    else:
        publisher = Publisher("con broken", memory, Pages.of(own.backend.memory.cache), holds)
    published = own.publish("r")
    outcome = con.outcome_of(only(con, published))
    assert isinstance(outcome, Failed) and "OSError: cable" in outcome.error
    broken[0] = False
    con.reset("r")
    assert con.outcome_of(only(con, published)) == Landed()
    if publisher is not None:
        publisher.close()
    memory.close()
    own.finish()


def test_a_publisher_that_leaves_between_the_copy_and_the_question_is_a_failure(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    con.transport.copy(fetch)
    con.transport.network.leave("pub")
    con.transport.finish(fetch)
    outcome = con.outcome_of(fetch)
    assert isinstance(outcome, Failed) and "'pub'" in outcome.error
    assert (con.stream("r").residency, con.device_free) == ("FetchFailed", 8)


# -- between processes only


@pytest.fixture
def shared() -> Iterator[Callable[..., Kv]]:
    """Make consumers over shared memory: ``shared(timeout_s=…)``."""
    made: list[Kv] = []

    def make(timeout_s: float = TIMEOUT_S, transport: Any = SharedMemoryTransport, **sizes: int) -> Kv:
        kv = Kv(
            Network(),
            itertools.count(STAMPS_PER_PROCESS),
            address="con",
            transport=lambda own, wait: transport(own, wait, timeout_s=timeout_s),
            **sizes,
        )
        kv.ingest("r")
        made.append(kv)
        return kv

    yield make
    for kv in made:
        kv.finish()


class Victim:
    """A child that publishes r, to be stopped or killed."""

    def __init__(self, tokens: int = 5, **sizes: int) -> None:
        self.child = Child()
        self.address = unique_address("victim")
        self.kv = self.child.make(1, address=self.address, **sizes)
        self.kv.ingest("r")
        self.kv.run(Segment("r", span=tokens))
        self.publication: Publication = self.kv.publish("r")
        self.stamps: list[int] = self.kv.tokens("r")


@pytest.fixture
def victim() -> Iterator[Victim]:
    """Return a publisher that may come to harm."""
    made = Victim()
    yield made
    made.child.close()


def handles() -> tuple[list[str], list[str]]:
    """Return what this process maps of shared memory, and its open files of the kinds that the transport opens."""
    gc.collect()  # Managers of earlier tests are in cycles, and their caches are shared memory.
    maps = [line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:kvstate" in line]
    fds = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:kvstate")):
            fds.append(target)
    return sorted(maps), sorted(fds)


def test_a_publisher_that_was_stopped_is_given_up_in_time(shared: Any, victim: Victim) -> None:
    con = shared(timeout_s=0.05)
    victim.child.stop()
    outcome = con.outcome_of(only(con, victim.publication))
    assert isinstance(outcome, Failed) and "did not answer within 0.05 s" in outcome.error
    assert con.device_free == 8


def test_a_cancel_does_not_wait_for_a_publisher_that_was_stopped(shared: Any, victim: Victim) -> None:
    con = shared(timeout_s=3600.0)
    victim.child.stop()
    fetch = only(con, victim.publication)
    con.cancel_retrieve("r")
    assert con.outcome_of(fetch) == Cancelled()
    assert con.device_free == 8


def test_a_publisher_that_hangs_holds_up_no_other(shared: Any, victim: Victim, child: Child) -> None:
    con = shared(timeout_s=3600.0)
    con.ingest("s")
    victim.child.stop()
    hanging = only(con, victim.publication)
    other = child.make(1, address="other")
    other.ingest("s")
    other.run(Segment("s", span=2))
    [fetch] = con.claim_retrieve("s", other.publish("s")).fetches
    assert con.outcome_of(fetch) == Landed()
    assert con.tokens("s") == other.tokens("s")
    other.finish()
    con.cancel_retrieve("r")
    assert con.outcome_of(hanging) == Cancelled()


def test_nothing_of_a_publisher_is_kept_once_its_fetch_has_ended(shared: Any, victim: Victim) -> None:
    con = shared()
    before = handles()
    for _ in range(3):
        assert con.outcome_of(only(con, victim.publication)) == Landed()
        assert handles() == before
        con.reset("r")


def test_a_publisher_goes_on_when_a_consumer_was_killed(shared: Any, victim: Victim, child: Child) -> None:
    killed = Child()
    far = killed.make(1, address="far")
    far.ingest("r")
    far.claim_retrieve("r", victim.publication)
    [fetch] = far.claims()
    far.transport.copy(fetch)
    killed.close()
    con = shared()
    assert con.outcome_of(only(con, victim.publication)) == Landed()
    assert con.tokens("r") == victim.stamps


def test_an_address_is_taken_once(child: Child) -> None:
    memory = SharedMemory(4096)
    own = Pages((pages.GroupPages(memory.bytes.view(1, 4096), (1, 2, 2, 1, 512)),), "bfloat16")
    before = handles()
    with Publisher("taken", memory, own, lambda *_: True), pytest.raises(OSError, match="in use"):
        Publisher("taken", memory, own, lambda *_: True)
    assert handles() == before
    with Publisher("taken", memory, own, lambda *_: True) as again:
        again.close()
    memory.close()
    memory.close()
    assert unique_address("a") != unique_address("a")


def test_shared_memory_does_not_shrink_under_its_readers() -> None:
    memory = SharedMemory(8192)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 4096)
    memory.close()


def test_memory_of_another_user_is_not_taken(shared: Any, victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_uid", lambda connection: -1)
    con = shared()
    outcome = con.outcome_of(only(con, victim.publication))
    assert isinstance(outcome, Failed) and "is a process of another user" in outcome.error


# -- a publisher is killed


class Watched:
    """A source that says what is about to happen to it."""

    def __init__(self, source: Source, moment: Callable[[str], None]) -> None:
        self._source = source
        self._moment = moment

    def open(self) -> Pages:
        self._moment("before its memory is handed over")
        return self._source.open()

    def check(self) -> None:
        self._moment("between two pieces")
        self._source.check()

    def holds(self, incarnation: int, label: str, epoch: int) -> bool:
        self._moment("before it is asked")
        return self._source.holds(incarnation, label, epoch)

    def interrupt(self) -> None:
        self._source.interrupt()

    def close(self) -> None:
        self._source.close()


class Shooting(SharedMemoryTransport):
    """Calls `moment` at every step of a fetch."""

    moment: Callable[[str], None] = staticmethod(lambda name: None)

    def reach(self, record: Record) -> Source:
        self.moment("before it is reached")
        return Watched(super().reach(record), self.moment)


MOMENTS = [
    "before it is reached",
    "before its memory is handed over",
    "between two pieces",
    "before it is asked",
    "while it answers",
    "at some time",
]
TOKENS, SIZES = 46, {"pages": 20, "page_size": 4, "layers": 4, "head_dim": 1024}
CLEAR = ("nobody is reached at", "ended before it had confirmed the copy")


class Range:
    """A consumer whose publishers are killed, one after the other; what it finds is counted in `seen`."""

    def __init__(self, con: Kv, seed: int) -> None:
        self.con = con
        self.random = random.Random(seed)
        self.seen: dict[str, int] = {}
        con.ingest("neighbour")
        con.run(Segment("neighbour", span=6))
        self.neighbour = con.tokens("neighbour")
        self.free = con.device_free
        con.spoil()
        self.before = handles()

    def kill_one(self, moment: str, meanwhile: str, own: int) -> Outcome:
        """Retrieve from a new process, kill it at `moment`; return what became of it once everything was checked."""
        con = self.con
        assert con.spoiled(), "somebody wrote to a page that was free since the last one"
        victim = Victim(TOKENS, **SIZES)
        con.ingest("r")
        kept: list[Any] = []
        if own:
            con.run(Segment("r", span=own))
            kept = con.tokens("r")
        timer = self._aim(victim, moment)
        fetch = only(con, victim.publication)
        con.ingest("greedy")
        con.run(Segment("greedy", span=con.device_free * SIZES["page_size"]))
        greedy = con.tokens("greedy")
        if meanwhile != "nothing":
            getattr(con, meanwhile)("r")
        # Whatever is free now is written by others, until the fetch has ended and beyond.
        con.ingest("late")
        con.run(Segment("late", span=con.device_free * SIZES["page_size"]))
        late = con.tokens("late")
        outcome = con.outcome_of(fetch)
        if timer is not None:
            timer.join(WAIT_S)
        victim.child.close()
        assert handles() == self.before, "something of the publisher is kept"
        assert (con.tokens("greedy"), con.tokens("late"), con.tokens("neighbour")) == (greedy, late, self.neighbour)
        if isinstance(outcome, Landed) and meanwhile == "nothing":
            assert con.tokens("r") == kept + victim.stamps[own:]
        elif isinstance(outcome, Failed):
            assert any(clear in outcome.error for clear in CLEAR) and victim.address in outcome.error, outcome.error
            if meanwhile == "nothing":
                assert con.readiness("r").failed == (("main", outcome.error),)
                assert (con.tokens("r") if own else []) == kept
        con.remove("r")
        con.remove("greedy")
        con.remove("late")
        assert con.device_free == self.free
        con.spoil()
        self._count(moment, outcome)
        return outcome

    def _aim(self, victim: Victim, moment: str) -> threading.Timer | None:
        transport: Any = self.con.transport
        pieces = itertools.count()
        piece = self.random.randrange(12)  # 46 tokens less own ones: 11 pages or 12, and one look before the first

        def reached(name: str) -> None:
            if name == moment and (name != "between two pieces" or next(pieces) == piece):
                victim.child.kill()
                victim.child.process.join(WAIT_S)

        transport.moment = reached
        if moment == "while it answers":
            victim.kv.die_when_asked()
        if moment == "at some time":
            timer = threading.Timer(self.random.uniform(0, 0.02), victim.child.kill)
            timer.start()
            return timer
        return None

    def _count(self, moment: str, outcome: Outcome) -> None:
        key = f"{moment}: {type(outcome).__name__}"
        self.seen[key] = self.seen.get(key, 0) + 1


@pytest.fixture
def shooting(shared: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kv]:
    """Return a consumer that copies a page at a time."""
    monkeypatch.setattr(pages, "PIECE_BYTES_MAX", 1)
    con = shared(transport=Shooting, **SIZES)
    yield con
    con.transport.moment = lambda name: None


@pytest.mark.parametrize("moment", MOMENTS[:-1])
def test_a_publisher_killed_during_a_retrieve_is_a_clear_error(shooting: Kv, moment: str) -> None:
    outcome = Range(shooting, 0).kill_one(moment, "nothing", own=3)
    assert isinstance(outcome, Failed)


def test_a_copy_ends_at_the_piece_at_which_its_publisher_dies(
    shared: Any, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES_MAX", 1)
    copied: list[int] = []
    move = pages.GroupPages._move

    def moved(own: Any, source: Any, read: Any, write: Any) -> int:
        copied.append(len(read))
        victim.child.kill()
        victim.child.process.join(WAIT_S)
        return move(own, source, read, write)

    monkeypatch.setattr(pages.GroupPages, "_move", moved)
    con = shared()
    outcome = con.outcome_of(only(con, victim.publication))
    assert isinstance(outcome, Failed) and "ended before it had confirmed the copy" in outcome.error
    assert copied == [1]


@pytest.mark.slow
def test_publishers_killed_at_a_hundred_random_moments_leave_nothing_behind(shooting: Kv) -> None:
    ground = Range(shooting, 1)
    for _ in range(100):
        moment = ground.random.choice(MOMENTS)
        meanwhile = ground.random.choice(["nothing", "nothing", "nothing", "reset", "remove"])
        ground.kill_one(moment, meanwhile, own=ground.random.choice([0, 3, 4]))
    print(dict(sorted(ground.seen.items())))
    assert {key.partition(":")[0] for key in ground.seen} == set(MOMENTS)
    assert sum(count for key, count in ground.seen.items() if "Failed" in key) >= 40


def test_peer_lost_names_who() -> None:
    assert PeerLost("pub", "why").address == "pub"
