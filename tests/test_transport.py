"""A fetch lands only with every byte of the published epoch; whatever else happens, it ends, and says how."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstate.backend import Backend, Cancelled, Failed, Landed, Transport
from kvstate.errors import SubmitError
from kvstate.ops import FetchBegin, Plan, StepBegin
from kvstate.state import Fetch, Lease, OnDevice, State
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import GARBAGE, MemoryBackend
from kvstate.testing.transport import Network, StepTransport, ThreadTransport
from kvstate.transitions import lifecycle, retrieve, step
from kvstate.types import Geometry, Group, Publication, Segment, Step

GEOMETRY = Geometry(pages=8, page_size=4, host_pages=8)


class Worker:
    """A state and its backend on a network, driven by hand."""

    def __init__(self, network: Network, address: str, geometry: Geometry = GEOMETRY) -> None:
        self.state = State(geometry, address)
        self.judge = EdgeJudge.of(geometry)
        self.backend = MemoryBackend(geometry, judge=self.judge)
        self.transport: Transport | None = None
        network.join(address, self.backend, self.holds)
        lifecycle.ingest(self.state, "r")

    def holds(self, incarnation: int, label: str, epoch: int) -> bool:
        stream = self.state.requests["r"].streams[label]
        return stream.request.incarnation == incarnation and stream.epoch == epoch

    def drain(self) -> None:
        while self.state.outbox:
            op = self.state.outbox.pop(0)
            if isinstance(op, FetchBegin) and self.transport is not None:
                self.transport.start(op)
            self.backend.submit(op)

    def compute(self, stamps: str) -> None:
        lease = step.admit(self.state, Step((Segment("r", span=len(stamps)),)))
        assert isinstance(lease, Lease)
        planned = step.plan(self.state, lease)
        assert isinstance(planned, Plan)
        assert isinstance(step.launch_enter(self.state, planned), StepBegin)
        self.drain()
        self.backend.write(planned, 0, stamps)
        step.launch_exit(self.state, lease)
        assert isinstance(step.commit(self.state, lease), step.Committed)
        self.drain()

    def publish(self) -> Publication:
        noted = retrieve.snapshot(self.state, "r")
        assert noted is not None
        published = retrieve.publish(self.state, noted)
        assert published is not None
        return published

    def retrieve(self, published: Publication) -> Fetch:
        claimed = retrieve.claim_retrieve(self.state, "r", published)
        assert isinstance(claimed, retrieve.Retrieval)
        self.drain()
        [fetch] = claimed.fetches
        return fetch

    def stored(self, fetch: Fetch) -> list[Any]:
        """What the fetch's pages hold, from the page of its first token on."""
        assert fetch.op is not None
        base = fetch.start // GEOMETRY.page_size * GEOMETRY.page_size
        return self.backend.read(fetch.op.tables[0], fetch.stop - base)

    def content(self) -> str:
        stream = self.state.requests["r"].streams["main"]
        assert isinstance(stream.residency, OnDevice)
        return "".join(map(str, self.backend.read(list(stream.residency.tables[0]), stream.length)))


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def publisher(network: Network) -> Worker:
    worker = Worker(network, "publisher")
    worker.compute("abcdefghij")
    return worker


@pytest.fixture
def consumer(network: Network) -> Worker:
    return Worker(network, "consumer")


def stepped(network: Network, consumer: Worker) -> StepTransport:
    transport = StepTransport(network, "consumer")
    consumer.transport = transport
    return transport


def test_the_kit_fits_the_protocols(network: Network) -> None:
    backend: Backend = MemoryBackend(GEOMETRY)
    transports: list[Transport] = [StepTransport(network, "consumer")]
    with ThreadTransport(network, "consumer") as threaded:
        transports.append(threaded)
        assert [transport.poll() for transport in transports] == [[], []]
    assert backend.completed() == (0, 0, 0)


def test_a_copied_fetch_lands_and_is_reported_once(network: Network, publisher: Worker, consumer: Worker) -> None:
    transport = stepped(network, consumer)
    fetch = consumer.retrieve(publisher.publish())
    assert transport.waiting == [fetch]
    transport.copy(fetch)
    assert transport.poll() == []
    transport.finish(fetch)
    assert transport.poll() == [(fetch, Landed())]
    assert transport.poll() == []
    retrieve.landed(consumer.state, fetch)
    assert consumer.content() == "abcdefghij"


def test_a_fetch_writes_behind_the_tokens_that_are_there(network: Network, publisher: Worker, consumer: Worker) -> None:
    transport = stepped(network, consumer)
    consumer.compute("ABCDEF")
    fetch = consumer.retrieve(publisher.publish())
    transport.copy(fetch)
    transport.finish(fetch)
    retrieve.landed(consumer.state, fetch)
    consumer.drain()
    assert consumer.content() == "ABCDEFghij"
    consumer.compute("k")
    assert consumer.content() == "ABCDEFghijk"
    assert consumer.judge.violations == []


def test_a_fetch_fails_when_the_epoch_is_over_after_the_copy(
    network: Network, publisher: Worker, consumer: Worker
) -> None:
    transport = stepped(network, consumer)
    fetch = consumer.retrieve(publisher.publish())
    transport.copy(fetch)
    lifecycle.reset(publisher.state, "r")
    transport.finish(fetch)
    [(ended, outcome)] = transport.poll()
    assert ended is fetch
    assert isinstance(outcome, Failed) and "changed the content during the copy" in outcome.error


def test_a_failed_fetch_leaves_garbage_behind(network: Network, publisher: Worker, consumer: Worker) -> None:
    transport = stepped(network, consumer)
    consumer.compute("AB")
    fetch = consumer.retrieve(publisher.publish())
    transport.fail(fetch, "link down")
    assert transport.poll() == [(fetch, Failed("link down"))]
    assert consumer.stored(fetch)[:6] == ["A", "B", GARBAGE, GARBAGE, GARBAGE, GARBAGE]


def test_a_cancel_ends_a_fetch_only_when_the_transport_confirms(
    network: Network, publisher: Worker, consumer: Worker
) -> None:
    transport = stepped(network, consumer)
    fetch = consumer.retrieve(publisher.publish())
    with pytest.raises(ValueError, match="nobody asked"):
        transport.confirm_cancel(fetch)
    transport.cancel(fetch)
    transport.cancel(fetch)
    assert (transport.poll(), transport.cancels) == ([], [fetch])
    transport.confirm_cancel(fetch)
    assert transport.poll() == [(fetch, Cancelled())]
    transport.cancel(fetch)
    with pytest.raises(ValueError, match="ended already"):
        transport.finish(fetch)


def test_a_cancel_may_come_too_late(network: Network, publisher: Worker, consumer: Worker) -> None:
    transport = stepped(network, consumer)
    fetch = consumer.retrieve(publisher.publish())
    transport.copy(fetch)
    transport.cancel(fetch)
    transport.finish(fetch)
    assert transport.poll() == [(fetch, Landed())]


def test_a_publisher_that_left_fails_the_fetch(network: Network, publisher: Worker, consumer: Worker) -> None:
    transport = stepped(network, consumer)
    fetches = [consumer.retrieve(publisher.publish())]
    network.leave("publisher")
    transport.copy(fetches[0])
    assert transport.poll() == [(fetches[0], Failed("nobody is reached at 'publisher'"))]


def test_a_start_can_be_refused(network: Network, publisher: Worker, consumer: Worker) -> None:
    consumer.transport = StepTransport(network, "consumer", refuse=lambda op: True)
    with pytest.raises(SubmitError, match="made to fail"):
        consumer.retrieve(publisher.publish())
    consumer.transport = StepTransport(network, "stranger")
    lifecycle.reset(consumer.state, "r")
    retrieve.cancelled(consumer.state, next(iter(consumer.state.claims.values())))  # type: ignore[arg-type]
    with pytest.raises(SubmitError, match="has not joined the network"):
        consumer.retrieve(publisher.publish())


# -- several groups, one of them with a window

SHARED = Geometry(pages=12, page_size=4, groups=(Group("full", 256), Group("window", 128, window=6)))


def in_groups(worker: Worker) -> list[str]:
    """Return what each group holds of the stream, from the first page on that it holds."""
    stream = worker.state.requests["r"].streams["main"]
    assert isinstance(stream.residency, OnDevice)
    return [
        "".join(map(str, worker.backend.read(list(table), stream.length - table.skip * 4, group)))
        for group, table in enumerate(stream.residency.tables)
    ]


def test_a_fetch_copies_to_each_group_what_it_will_hold(network: Network) -> None:
    publisher, consumer = Worker(network, "publisher", SHARED), Worker(network, "consumer", SHARED)
    transport = stepped(network, consumer)
    publisher.compute("abcdefghij")
    publisher.compute("klmn")
    fetch = consumer.retrieve(publisher.publish())
    assert fetch.op is not None and fetch.op.firsts == (0, 2)
    transport.copy(fetch)
    transport.finish(fetch)
    retrieve.landed(consumer.state, fetch)
    consumer.drain()
    assert in_groups(consumer) == in_groups(publisher) == ["abcdefghijklmn", "ijklmn"]
    consumer.compute("op")
    assert in_groups(consumer) == ["abcdefghijklmnop", "ijklmnop"]
    assert consumer.judge.violations == []


def test_a_fetch_of_groups_writes_behind_the_tokens_that_are_there(network: Network) -> None:
    publisher, consumer = Worker(network, "publisher", SHARED), Worker(network, "consumer", SHARED)
    transport = stepped(network, consumer)
    publisher.compute("abcdefgh")
    consumer.compute("ABCDEF")
    fetch = consumer.retrieve(publisher.publish())
    transport.copy(fetch)
    transport.finish(fetch)
    retrieve.landed(consumer.state, fetch)
    consumer.drain()
    assert in_groups(consumer) == ["ABCDEFgh", "ABCDEFgh"]
    assert consumer.judge.violations == []


def test_a_failed_fetch_leaves_garbage_in_every_group(network: Network) -> None:
    publisher, consumer = Worker(network, "publisher", SHARED), Worker(network, "consumer", SHARED)
    transport = stepped(network, consumer)
    publisher.compute("abcdefghijklmn")
    fetch = consumer.retrieve(publisher.publish())
    transport.copy(fetch, tokens=5)
    assert fetch.op is not None
    full, window = fetch.op.tables
    assert consumer.backend.read(full, 5) == [*"abcde"]
    assert "i" not in consumer.backend.read(window, 6, 1), "five tokens end in front of the window"
    transport.fail(fetch, "link down")
    assert consumer.backend.read(full, 7) == [GARBAGE] * 7
    assert consumer.backend.read(window, 3, 1) == [GARBAGE] * 3


# -- with a thread


def yes(_: FetchBegin) -> bool:
    return True


def threaded(network: Network, consumer: Worker, **options: Any) -> ThreadTransport:
    transport = ThreadTransport(network, "consumer", **options)
    consumer.transport = transport
    return transport


def test_the_worker_lands_fetches_by_itself(network: Network, publisher: Worker, consumer: Worker) -> None:
    with threaded(network, consumer, delay_s=0.001) as transport:
        fetch = consumer.retrieve(publisher.publish())
        assert transport.wait()
        assert transport.poll() == [(fetch, Landed())]
        assert transport.poll() == []
    retrieve.landed(consumer.state, fetch)
    assert consumer.content() == "abcdefghij"


@pytest.mark.parametrize(
    ("options", "error", "stored"),
    [
        ({"fail": yes}, "was made to fail", [GARBAGE] * 5),
        ({"short": yes}, "short read: 5 of 10 tokens", [*"abcde"]),
    ],
)
def test_a_fetch_that_fails_half_way_has_written_something(
    network: Network, publisher: Worker, consumer: Worker, options: dict[str, Any], error: str, stored: list[Any]
) -> None:
    with threaded(network, consumer, **options) as transport:
        fetch = consumer.retrieve(publisher.publish())
        assert transport.wait()
        [(_, outcome)] = transport.poll()
    assert isinstance(outcome, Failed) and error in outcome.error
    assert consumer.stored(fetch)[:5] == stored
    assert consumer.stored(fetch)[5:] != [*"fghij"]


def test_the_worker_fails_a_fetch_from_nobody(network: Network, publisher: Worker, consumer: Worker) -> None:
    published = publisher.publish()
    network.leave("publisher")
    with threaded(network, consumer) as transport:
        fetch = consumer.retrieve(published)
        assert transport.wait()
        assert transport.poll() == [(fetch, Failed("nobody is reached at 'publisher'"))]


def test_an_error_inside_the_worker_fails_the_fetch_and_the_worker_lives(
    network: Network, publisher: Worker, consumer: Worker
) -> None:
    def broken(*_: Any) -> bool:
        raise OSError("cable")

    holds: Callable[[int, str, int], bool] = publisher.holds
    network.join("publisher", publisher.backend, broken)
    with threaded(network, consumer) as transport:
        fetch = consumer.retrieve(publisher.publish())
        assert transport.wait()
        assert transport.poll() == [(fetch, Failed("OSError: cable"))]
        retrieve.failed(consumer.state, fetch, "cable")
        lifecycle.reset(consumer.state, "r")
        network.join("publisher", publisher.backend, holds)
        again = consumer.retrieve(publisher.publish())
        assert transport.wait()
        assert transport.poll() == [(again, Landed())]


def test_a_fetch_that_never_completes_ends_by_a_cancel_and_holds_up_no_other(
    network: Network, publisher: Worker, consumer: Worker
) -> None:
    stuck: list[int] = []

    def first(op: FetchBegin) -> bool:
        stuck.append(op.number)
        return len(stuck) == 1

    with threaded(network, consumer, never=first) as transport:
        lost = consumer.retrieve(publisher.publish())
        lifecycle.remove(consumer.state, "r")
        lifecycle.ingest(consumer.state, "r")
        fetch = consumer.retrieve(publisher.publish())
        assert transport.wait()
        assert transport.poll() == [(fetch, Landed())]
        transport.cancel(lost)
        assert transport.wait()
        assert transport.poll() == [(lost, Cancelled())]


def test_a_cancel_ends_a_fetch_that_is_not_due_yet(network: Network, publisher: Worker, consumer: Worker) -> None:
    with threaded(network, consumer, delay_s=3600.0) as transport:
        fetch = consumer.retrieve(publisher.publish())
        transport.cancel(fetch)
        assert transport.wait()
        assert transport.poll() == [(fetch, Cancelled())]


def test_closing_confirms_what_is_left_and_refuses_what_comes(
    network: Network, publisher: Worker, consumer: Worker
) -> None:
    transport = threaded(network, consumer, never=yes)
    fetch = consumer.retrieve(publisher.publish())
    transport.close()
    transport.close()
    assert transport.poll() == [(fetch, Cancelled())]
    assert fetch.op is not None
    with pytest.raises(SubmitError, match="closed"):
        transport.start(fetch.op)
    transport.cancel(fetch)
    assert not transport.wait(timeout_s=0)
