"""Publish and retrieve: rows P1–P9 of the known bugs, and their siblings. `pub` publishes, `con` fetches from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstate.backend import Failed, Landed
from kvstate.manager import KVManager
from kvstate.ops import FetchBegin, Op
from kvstate.refusals import (
    ClaimEnded,
    FetchFailed,
    FetchPending,
    LayoutMismatch,
    OnRemoteHost,
    StreamBusy,
    WorldSizeMismatch,
)
from kvstate.state import Fetch, Lease
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions import retrieve
from kvstate.transitions.offload import Offloaded
from kvstate.types import Geometry, LabelFork, Publication, RetentionPolicy, Segment, StreamFork, StreamId


@pytest.fixture
def pub(machines: Callable[..., Any]) -> Any:
    """Return a publisher that stores 5 tokens of r."""
    kv = machines(address="pub")
    kv.ingest("r")
    kv.run(Segment("r", span=5))
    return kv


@pytest.fixture
def con(machines: Callable[..., Any]) -> Any:
    """Return a consumer on which r is ingested and empty."""
    kv = machines(address="con")
    kv.ingest("r")
    return kv


def only(kv: Any, publication: Publication, **kwargs: Any) -> Fetch:
    """Start the one fetch of r that there is to start."""
    [fetch] = kv.claim_retrieve("r", publication, **kwargs).fetches
    return fetch


def land(kv: Any, fetch: Fetch) -> Any:
    """Let a fetch run to its end; return what the poll said."""
    kv.transport.copy(fetch)
    kv.transport.finish(fetch)
    return [outcome for _, outcome in kv.poll()]


# -- P1


def test_P1_a_publication_after_offload_says_on_host_and_is_not_read_as_empty(pub: Any, con: Any) -> None:
    before = pub.publish("r")
    pub.offload("r")
    after = pub.publish("r")

    record = after.ranks[0]["main"]
    assert (record.length, record.pages, record.on_host) == (5, (), True)
    for seen in (after, before.merge(after)):
        assert con.claim_retrieve("r", seen) == OnRemoteHost(request="r", label="main")
    assert con.stream("r").length == 0 and con.claims() == ()


def test_P1_an_older_or_shorter_record_overwrites_nothing(pub: Any, con: Any) -> None:
    old = pub.publish("r")
    pub.run(Segment("r", span=2))
    new = pub.publish("r")

    assert old.merge(new) == new.merge(old) == new
    pub.offload("r")
    pub.reload("r")
    newest = pub.publish("r")
    assert new.merge(newest).ranks[0]["main"] == newest.merge(new).ranks[0]["main"] == newest.ranks[0]["main"]
    assert land(con, only(con, newest)) == [Landed()]
    assert con.tokens("r") == pub.tokens("r")


def test_P1_sibling_a_shorter_record_of_a_new_life_replaces_the_old_one(pub: Any) -> None:
    old = pub.publish("r")
    pub.remove("r")
    pub.ingest("r")
    pub.run(Segment("r", span=1))
    new = pub.publish("r")

    assert old.merge(new).ranks[0]["main"] == new.merge(old).ranks[0]["main"] == new.ranks[0]["main"]


def test_P1_sibling_labels_and_ranks_are_merged_apart(machines: Callable[..., Any]) -> None:
    ranks = []
    for rank in range(2):
        kv = machines(address=f"pub{rank}")
        kv.manager._state.rank, kv.manager._state.world_size = rank, 2
        kv.ingest("r")
        kv.run(Segment("r", span=3 + rank), Segment("r", "cfg", 1))
        ranks.append(kv.publish("r"))
    both = ranks[0].merge(ranks[1])

    assert both == ranks[0].merge(ranks[1]).merge(ranks[0])
    assert {rank: {label: r.length for label, r in labels.items()} for rank, labels in both.ranks.items()} == {
        0: {"main": 3, "cfg": 1},
        1: {"main": 4, "cfg": 1},
    }


# -- P2


def test_P2_a_publication_between_claim_and_commit_names_no_page(pub: Any, con: Any) -> None:
    claim = pub.claim_offload("r")
    assert pub.publish("r").ranks[0]["main"].pages == ()
    pub.commit_claim(claim)
    claim = pub.claim_reload("r")
    assert pub.publish("r").ranks[0]["main"].pages == ()
    pub.commit_claim(claim)
    assert land(con, only(con, pub.publish("r"))) == [Landed()]
    assert con.tokens("r") == pub.tokens("r")


@pytest.mark.parametrize("verb", ["offload", "reset", "claim_offload"])
def test_P2_what_moves_away_during_a_publish_is_published_as_it_is(pub: Any, verb: str) -> None:
    noted = pub.snapshot("r")
    getattr(pub, verb)("r")
    published = pub.publish_noted(noted)

    for record in published.ranks[0].values():
        assert record.on_host and record.pages == ()


def test_P2_a_publish_during_which_the_request_is_removed_says_nothing(pub: Any) -> None:
    noted = pub.snapshot("r")
    pub.remove("r")
    assert pub.publish_noted(noted) is None
    pub.ingest("r")
    pub.run(Segment("r", span=5))
    assert pub.publish_noted(noted) is None, "it noted another life"


def test_P2_sibling_only_committed_bytes_are_published(pub: Any) -> None:
    lease = pub.launched(Segment("r", span=2), Segment("r", "new", 1))
    assert {label: r.length for label, r in pub.publish("r").ranks[0].items()} == {"main": 5}
    pub.commit(lease)
    assert {label: r.length for label, r in pub.publish("r").ranks[0].items()} == {"main": 7, "new": 1}


def test_P2_sibling_a_publish_waits_for_the_step_that_wrote_it(pub: Any) -> None:
    lease = pub.launched(Segment("r"))
    pub.commit(lease)
    assert pub.snapshot("r").after == (lease.number, 0, 0)


# -- P3


def test_P3_pages_of_a_remote_write_stay_when_its_request_is_removed(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    con.remove("r")

    assert con.device_free == 5, "three pages are still written"
    con.ingest("s")
    con.run(Segment("s", span=2 * con.device_free))
    s = con.tokens("s")
    con.transport.copy(fetch)
    assert con.tokens("s") == s
    con.transport.finish(fetch)
    con.poll()
    assert con.device_free == 3


@pytest.mark.parametrize("verb", ["remove", "reset", "offload"])
def test_P3_a_reader_of_pages_that_left_is_told_so(pub: Any, con: Any, verb: str) -> None:
    fetch = only(con, pub.publish("r"))
    con.transport.copy(fetch, 2)
    getattr(pub, verb)("r")
    pub.ingest("s")
    pub.run(Segment("s", span=2 * pub.device_free))

    [outcome] = land(con, fetch)
    assert isinstance(outcome, Failed) and "epoch" in outcome.error
    assert (con.stream("r").length, con.stream("r").residency) == (0, "FetchFailed")


def test_P3_sibling_a_reader_of_pages_that_retention_let_go_is_told_so(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    pub.run(Segment("r"), retention={"main": RetentionPolicy(context_budget=2)})

    assert isinstance(land(con, fetch)[0], Failed)


def test_P3_sibling_a_reader_of_pages_that_a_fork_replaced_is_told_so(pub: Any, con: Any) -> None:
    pub.ingest("other")
    pub.run(Segment("other", span=1))
    fetch = only(con, pub.publish("r"))
    pub.run(Segment("other"), post_forks=[StreamFork(StreamId("other"), StreamId("r"))])

    assert isinstance(land(con, fetch)[0], Failed)


def test_P3_sibling_a_reader_may_go_on_while_the_stream_grows(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    five = pub.tokens("r")
    pub.run(Segment("r", span=3))

    assert land(con, fetch) == [Landed()]
    assert con.tokens("r") == five


# -- P4


def test_P4_nothing_of_a_pending_fetch_is_served(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=1))
    con.ingest("s")
    own = con.tokens("r")
    fetch = only(con, pub.publish("r"))
    here = StreamId("r")

    pending = FetchPending(request="r", label="main")
    assert con.stream("r").length == 1
    assert con.admit(Segment("r")) == pending
    assert con.admit(Segment("s"), pre_forks=[StreamFork(here, StreamId("s"))]) == pending
    assert con.admit(Segment("s"), post_forks=[StreamFork(here, StreamId("s"))]) == pending
    assert con.admit(Segment("s"), post_forks=[StreamFork(StreamId("s"), here)]) == pending
    assert con.offload("r") == pending
    assert con.claim_retrieve("r", pub.publish("r")) == pending
    assert con.publish("r").ranks[0] == {}
    assert con.readiness("r").pending == ("main",)
    con.transport.copy(fetch)
    assert con.stream("r").length == 1, "the host has not seen the bytes"
    con.transport.finish(fetch)
    con.poll()
    assert con.readiness("r").ready
    assert con.tokens("r") == own + pub.tokens("r")[1:]
    assert isinstance(con.admit(Segment("r")), Lease)


def test_P4_sibling_one_pending_label_holds_the_request_but_not_its_other_labels(
    machines: Callable[..., Any], con: Any
) -> None:
    pub = machines(address="two labels")
    pub.ingest("r")
    pub.run(Segment("r", span=2), Segment("r", "cfg", 2))
    con.run(Segment("r", span=1))
    fetch = only(con, pub.publish("r"), labels=["cfg"])

    assert isinstance(con.admit(Segment("r")), Lease)
    assert con.offload("r") == FetchPending(request="r", label="cfg")
    assert con.admit(Segment("r"), pre_forks=[LabelFork("cfg", "main")]) == FetchPending(request="r", label="cfg")
    assert land(con, fetch) == [Landed()]
    assert con.tokens("r", "cfg") == pub.tokens("r", "cfg")


def test_P4_sibling_a_step_under_way_holds_off_a_fetch(pub: Any, con: Any) -> None:
    lease = con.launched(Segment("r"))
    assert con.claim_retrieve("r", pub.publish("r")) == StreamBusy(request="r", label="main")
    con.reset("r")
    assert con.claim_retrieve("r", pub.publish("r")) == StreamBusy(request="r", label="main")
    con.commit(lease)
    assert only(con, pub.publish("r")).stop == 5


def test_P4_sibling_what_landed_is_offloaded_and_comes_back(pub: Any, con: Any) -> None:
    land(con, only(con, pub.publish("r")))
    assert con.offload("r") == Offloaded("r", 3)
    con.reload("r")
    assert con.tokens("r") == pub.tokens("r")


def test_P4_sibling_what_does_not_fit_the_own_tokens_is_refused(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=7))
    assert con.claim_retrieve("r", pub.publish("r")).fetches == (), "own tokens are not shorter"
    con.reset("r")
    con.run(Segment("r", span=7), retention={"main": RetentionPolicy(context_budget=2)})
    assert con.stream("r").length < 5
    assert con.claim_retrieve("r", pub.publish("r")) == LayoutMismatch(request="r", label="main")
    other = Publication("r", 2, pub.publish("r").ranks)
    assert con.claim_retrieve("r", other) == WorldSizeMismatch(request="r", published=2, expected=1)
    assert pub.claim_retrieve("r", pub.publish("r")).fetches == (), "its own publication"
    assert con.claim_retrieve("r", None).fetches == ()


# -- P5


def test_P5_a_reset_clears_a_failed_fetch(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=1))
    own = con.tokens("r")
    con.transport.fail(only(con, pub.publish("r")), "link down")
    con.poll()

    failed = FetchFailed(request="r", label="main", error="link down")
    for verb in (con.admit(Segment("r")), con.offload("r"), con.claim_retrieve("r", pub.publish("r"))):
        assert verb == failed
    assert con.readiness("r").failed == (("main", "link down"),)
    assert (con.tokens("r"), con.device_free) == (own, 7)
    con.reset("r")
    assert con.readiness("r").ready
    assert land(con, only(con, pub.publish("r"))) == [Landed()]
    assert con.tokens("r") == pub.tokens("r")


def test_P5_sibling_a_fetch_that_cannot_start_is_a_failed_one(pub: Any, con: Any) -> None:
    con.transport.refuse = lambda op: True
    con.claim_retrieve("r", pub.publish("r"))

    assert isinstance(con.admit(Segment("r")), FetchFailed)
    assert (con.device_free, con.claims()) == (8, ())
    con.transport.refuse = lambda op: False
    con.reset("r")
    assert land(con, only(con, pub.publish("r"))) == [Landed()]


def test_P5_sibling_a_reset_while_the_fetch_runs_does_not_inherit_its_failure(pub: Any, con: Any) -> None:
    old = only(con, pub.publish("r"))
    con.reset("r")
    new = only(con, pub.publish("r"))
    con.transport.fail(old, "of the old content")

    assert land(con, new)[-1] == Landed()
    assert con.tokens("r") == pub.tokens("r")


# -- P6


def test_P6_a_fetch_that_never_ends_costs_an_offload_nothing_but_a_refusal(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=2))
    fetch = only(con, pub.publish("r"))

    assert con.offload("r") == FetchPending(request="r", label="main")
    assert (con.claims(), con.reclaimable("r")) == ((fetch,), 0)
    assert con.stream("r").residency == "Fetching"
    con.reset("r")
    con.run(Segment("r", span=2))
    assert con.offload("r") == Offloaded("r", 1), "the request goes on without its old fetch"


def test_P6_sibling_a_cancel_ends_when_the_transport_says_so(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=1))
    own = con.tokens("r")
    fetch = only(con, pub.publish("r"))
    assert con.cancel_retrieve("r") == (fetch,)

    assert con.admit(Segment("r")) == FetchPending(request="r", label="main")
    assert con.device_free == 5
    con.transport.confirm_cancel(fetch)
    assert con.reclaimable("r") == 1
    assert (con.tokens("r"), con.device_free) == (own, 7)
    assert isinstance(con.admit(Segment("r")), Lease)


class Gate(MemoryBackend):
    """Stops inside the submit of a FetchBegin until it is opened."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.reached, self.opened = threading.Event(), threading.Event()

    def submit(self, op: Op) -> None:
        if isinstance(op, FetchBegin):
            self.reached.set()
            assert self.opened.wait(60)
        super().submit(op)


@pytest.mark.parametrize("verb", ["reset", "remove", "cancel_retrieve"])
def test_P6_sibling_a_cancel_asked_for_before_the_fetch_has_started_reaches_it(pub: Any, verb: str) -> None:
    network, geometry = Network(), Geometry(pages=8, page_size=2)
    backend = Gate(geometry)
    transport = StepTransport(network, "late")
    con = KVManager(geometry, backend, transport=transport, address="late", debug=True)
    network.join("late", backend, con.epoch_holds)
    con.ingest("r")
    publication = pub.publish("r")
    starter = threading.Thread(target=con.claim_retrieve, args=("r", publication))
    starter.start()
    assert backend.reached.wait(60)
    getattr(con, verb)("r")
    backend.opened.set()
    starter.join()
    con.poll()

    [fetch] = transport.waiting
    assert transport.cancels == [fetch], "or its pages are taken until a fetch ends that never will"
    transport.confirm_cancel(fetch)
    con.poll()
    assert con.pages_free()["device"] == (8,)


# -- P7


def test_P7_a_fetch_that_ended_without_all_bytes_does_not_count(pub: Any, con: Any) -> None:
    con.run(Segment("r", span=1))
    own = con.tokens("r")
    fetch = only(con, pub.publish("r"))
    con.transport.copy(fetch, 3)
    con.transport.fail(fetch, "short read")
    con.poll()

    assert (con.stream("r").length, con.tokens("r")) == (1, own)
    assert not con.readiness("r").ready
    assert con.publish("r").ranks[0] == {}


def test_P7_sibling_a_publisher_that_is_gone_is_a_failure(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    con.transport.network.leave("pub")
    con.transport.copy(fetch)
    con.poll()

    assert (con.stream("r").residency, con.device_free) == ("FetchFailed", 8)


def test_P7_sibling_one_failed_label_is_not_made_good_by_the_other(machines: Callable[..., Any], con: Any) -> None:
    pub = machines(address="two labels")
    pub.ingest("r")
    pub.run(Segment("r", span=2), Segment("r", "cfg", 2))
    main, cfg = con.claim_retrieve("r", pub.publish("r"), labels=["main", "cfg"]).fetches
    con.transport.fail(cfg, "lost")
    land(con, main)

    ready = con.readiness("r", ["main", "cfg"])
    assert (ready.ready, ready.pending, ready.failed) == (False, (), (("cfg", "lost"),))
    assert con.offload("r") == FetchFailed(request="r", label="cfg", error="lost")
    assert con.tokens("r") == pub.tokens("r")


# -- P8


def test_P8_two_fetches_of_a_request_free_their_own_pages_once_each(machines: Callable[..., Any], con: Any) -> None:
    pub = machines(address="two labels")
    pub.ingest("r")
    pub.run(Segment("r", span=3), Segment("r", "cfg", 3))
    main, cfg = con.claim_retrieve("r", pub.publish("r"), labels=["main", "cfg"]).fetches
    assert con.cancel_retrieve("r") == (main, cfg)
    assert con.device_free == 4

    con.transport.confirm_cancel(main)
    con.poll()
    assert con.device_free == 6
    con.transport.confirm_cancel(cfg)
    con.poll()
    assert con.device_free == 8
    assert con.stream("r", "cfg") is None, "nobody opened it"


@pytest.mark.parametrize("first", [0, 1])
def test_P8_sibling_a_fetch_before_and_one_after_a_reset(pub: Any, con: Any, first: int) -> None:
    fetches = [only(con, pub.publish("r"))]
    con.reset("r")
    fetches.append(only(con, pub.publish("r")))
    assert con.device_free == 2
    assert con.transport.cancels == fetches[:1]

    for fetch in (fetches[first], fetches[1 - first]):
        land(con, fetch)
    assert con.device_free == 5
    assert con.tokens("r") == pub.tokens("r")


def test_P8_sibling_a_fetch_ends_once(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    land(con, fetch)
    before = con.manager.view()
    for end in (retrieve.landed, retrieve.cancelled, lambda s, f: retrieve.failed(s, f, "again")):
        assert end(con.manager._state, fetch) == ClaimEnded(request="r", label="main")
    assert con.manager.view() == before


def test_P8_sibling_a_cancel_that_comes_too_late_changes_nothing(pub: Any, con: Any) -> None:
    fetch = only(con, pub.publish("r"))
    con.transport.copy(fetch)
    con.transport.finish(fetch)
    con.cancel_retrieve("r")

    assert con.tokens("r") == pub.tokens("r")
    assert con.cancel_retrieve("r") == ()


# -- P9


@pytest.mark.parametrize(
    "verb",
    [
        lambda con: con.admit(Segment("r")),
        lambda con: con.offload("r"),
        lambda con: con.reclaimable("r"),
        lambda con: con.manager.offload_order(),
        lambda con: con.readiness("r"),
        lambda con: con.publish("r"),
        lambda con: con.claim_offload("r"),
        lambda con: con.claim_reload("r"),
        lambda con: con.claim_retrieve("r", None),
        lambda con: con.reset("other"),
        lambda con: con.remove("other"),
        lambda con: con.cancel_retrieve("other"),
    ],
    ids=[
        "admit", "offload", "reclaimable", "offload_order", "readiness", "publish", "claim_offload", "claim_reload",
        "claim_retrieve", "reset", "remove", "cancel_retrieve",
    ],
)  # fmt: skip
def test_P9_every_verb_that_a_scheduler_stands_still_on_sees_a_fetch_end(pub: Any, con: Any, verb: Any) -> None:
    con.ingest("other")
    fetch = only(con, pub.publish("r"))
    con.transport.copy(fetch)
    con.transport.finish(fetch)
    assert con.stream("r").length == 0
    verb(con)
    assert con.stream("r").length == 5


def test_P9_a_decode_only_phase_gets_the_pages_of_an_orphaned_fetch(pub: Any, con: Any) -> None:
    con.ingest("decoding")
    con.run(Segment("decoding", span=9))
    fetch = only(con, pub.publish("r"))
    con.remove("r")
    assert con.device_free == 0
    con.transport.confirm_cancel(fetch)

    con.run(Segment("decoding"))
    con.run(Segment("decoding"))
    assert (len(con.tokens("decoding")), con.device_free) == (11, 2)
