"""A trace is enough to run everything again, and says where it does not come out as recorded."""

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import manager as manager_module
from kvstate import trace
from kvstate.manager import KVManager
from kvstate.ops import CopyOut, ForkCopy, Plan
from kvstate.refusals import Refusal
from kvstate.state import Lease, OffloadClaim
from kvstate.testing import walk
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.subject import ManagerSubject
from kvstate.testing.transport import Network, StepTransport
from kvstate.testing.world import World
from kvstate.trace import Event, Header, TraceMismatch, decode, dumps, encode, replay
from kvstate.transitions import VERBS
from kvstate.types import (
    Geometry,
    LabelFork,
    Publication,
    Record,
    RequestConfig,
    RetentionPolicy,
    Segment,
    Step,
    StreamFork,
    StreamId,
)
from kvstate.view import view

GEOMETRY = Geometry(pages=8, page_size=2, host_pages=8, name="traced")


def recorded(world: World) -> list[tuple[ManagerSubject, list[Event]]]:
    """Turn the trace of both managers of a new world on."""
    traces = []
    for node in world.nodes.values():
        assert isinstance(node.subject, ManagerSubject)
        events: list[Event] = []
        node.subject.manager._trace = events
        node.subject.manager._watched = True
        traces.append((node.subject, events))
    return traces


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[World, list[tuple[ManagerSubject, list[Event]]]]]:
    """Run a program of the walk with the traces of its managers on."""

    def run(index: int) -> tuple[World, list[tuple[ManagerSubject, list[Event]]]]:
        traces: list[tuple[ManagerSubject, list[Event]]] = []

        def world(sizes: Any) -> World:
            made = World(sizes)
            traces.extend(recorded(made))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(walk, "World", world)
            sizes = attrs.evolve(walk.SIZES[index % len(walk.SIZES)], subject="manager")
            return walk.program(7, index, sizes), traces

    return run


@pytest.mark.parametrize("index", range(len(walk.SIZES) * 2))
def test_a_trace_of_a_walk_replays_to_the_same_view(walked: Any, index: int) -> None:
    _, traces = walked(index)
    for subject, events in traces:
        text = dumps(Header(subject.geometry, subject.manager.address), events)
        assert len(text.splitlines()) == len(events) + 1
        state = replay(text)
        assert view(state) == subject.snapshot()
        assert view(state).digest() == subject.snapshot().digest()


BY_HAND = {"abandon_fetch", "clear"}
"""Verbs that no walk calls."""


@pytest.mark.slow
def test_every_verb_is_in_some_trace(walked: Any) -> None:
    met: set[str] = set()
    for index in range(100):
        for _, events in walked(index)[1]:
            met.update(event.verb for event in events)
        if met == set(VERBS) - BY_HAND:
            return
    pytest.fail(f"never recorded: {set(VERBS) - met - BY_HAND}")


class Traced:
    """A manager with its trace on, driven by its public verbs."""

    def __init__(self, **options: Any) -> None:
        network = Network()
        self.events: list[Event] = []
        self.backend = MemoryBackend(GEOMETRY)
        self.manager = KVManager(
            GEOMETRY, self.backend, transport=StepTransport(network, "here"), address="here", debug=False,
            **{"trace": self.events, **options},
        )  # fmt: skip
        network.join("here", self.backend, self.manager.epoch_holds)
        self.manager.ingest("r")

    def run(self, step: Step) -> None:
        lease = self.manager.admit(step)
        assert isinstance(lease, Lease), lease
        plan = self.manager.plan(lease)
        assert isinstance(plan, Plan)
        with self.manager.launch(plan):
            pass
        assert not isinstance(self.manager.commit(lease), Refusal)

    def text(self, **changes: Any) -> str:
        return dumps(attrs.evolve(Header(GEOMETRY, "here"), **changes), self.events)


def a_bit_of_everything(traced: Traced) -> None:
    manager = traced.manager
    manager.ingest("s", RequestConfig(labels=("main", "cfg"), walk_labels={("n", "w"): ("cfg",)}, offload_priority=3))
    traced.run(
        Step(
            [Segment("r", span=5), Segment("r", "cfg"), Segment.padding()],
            post_forks=[StreamFork(StreamId("r"), StreamId("s"))],
            retention={"main": RetentionPolicy(2)},
            combined_labels={("main", "cfg"): "all"},
        )
    )
    lease = manager.admit(Step([Segment("r", span=2)], pre_forks=[LabelFork("main", "beam")], commit=False))
    assert isinstance(lease, Lease)
    manager.offload("r", discard_in_flight=True)
    manager.abort(lease)
    manager.reload("r", Step([Segment("r", span=9)]))
    manager.reload("r")
    manager.publish("r")
    manager.claim_offload("s")
    manager.admit(Step([Segment("nobody")]))


def test_a_trace_of_public_verbs_replays_also_through_clear() -> None:
    traced = Traced()
    a_bit_of_everything(traced)
    assert view(replay(traced.text())) == traced.manager.view()
    traced.manager.clear()
    assert view(replay(traced.text())) == traced.manager.view()


def test_a_plan_that_was_replaced_is_told_from_the_newest() -> None:
    traced = Traced()
    lease = traced.manager.admit(Step([Segment("r")]))
    assert isinstance(lease, Lease)
    old = traced.manager.plan(lease)
    assert isinstance(old, Plan) and isinstance(traced.manager.plan(lease), Plan)
    assert isinstance(traced.manager.launch_enter(old), Refusal)
    assert view(replay(traced.text())) == traced.manager.view()


def test_ops_that_failed_at_submit_are_in_the_trace() -> None:
    traced = Traced()
    traced.run(Step([Segment("r", span=3)]))
    traced.backend.fail_next(CopyOut)
    traced.manager.offload("r")
    traced.backend.fail_next(ForkCopy)
    traced.run(Step([Segment("r", span=2)], post_forks=[LabelFork("main", "cfg"), LabelFork("main", "beam")]))
    assert [event.verb for event in traced.events].count("op_failed") == 2
    assert view(replay(traced.text())) == traced.manager.view()


def test_rank_and_world_size_are_part_of_the_header() -> None:
    traced = Traced(rank=1, world_size=2)
    traced.run(Step([Segment("r", span=3)]))
    traced.manager.publish("r")
    assert view(replay(traced.text(rank=1, world_size=2))) == traced.manager.view()
    with pytest.raises(TraceMismatch, match="publish gave"):
        replay(traced.text())


def test_one_event_is_one_critical_section() -> None:
    traced = Traced()
    traced.run(Step([Segment("r", span=3)]))
    traced.manager.offload("r")
    assert [event.verb for event in traced.events] == [
        "ingest", "admit", "plan", "launch_enter", "launch_exit", "commit", "claim_offload", "commit_offload",
    ]  # fmt: skip


# -- what does not come out as recorded


def test_a_tampered_result_is_named_by_its_line() -> None:
    traced = Traced()
    a_bit_of_everything(traced)
    lines = traced.text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line).get("verb") == "commit_offload")
    entry = json.loads(lines[place])
    entry["result"]["Offloaded"]["pages_released"] += 1
    lines[place] = json.dumps(entry)
    with pytest.raises(TraceMismatch, match=f"line {place + 1}: commit_offload gave .*recorded was") as raised:
        replay("\n".join(lines))
    assert raised.value.line == place + 1


def test_a_line_left_out_is_noticed_where_it_makes_a_difference() -> None:
    traced = Traced()
    traced.run(Step([Segment("r", span=3)]))
    traced.manager.reset("r")
    traced.manager.offload("r")
    lines = traced.text().splitlines()
    del lines[next(i for i, line in enumerate(lines) if '"reset"' in line)]
    with pytest.raises(TraceMismatch) as raised:
        replay("\n".join(lines))
    assert raised.value.line > 2


def test_another_geometry_is_noticed() -> None:
    traced = Traced()
    traced.run(Step([Segment("r", span=3)]))
    traced.manager.offload("r")
    with pytest.raises(TraceMismatch):
        replay(traced.text(geometry=attrs.evolve(GEOMETRY, page_size=1)))


@pytest.mark.parametrize(
    "text", ["", "\n", "{}", "[1]", "7", '{"kvstate_trace": 99}', '{"kvstate": 1, "program": []}', "not json", "\x00"]
)
def test_what_is_no_trace_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        replay(text)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "7",
        "{}",
        '{"verb": "ingest", "args": ["r"]}',
        '{"verb": "divine", "args": [], "result": null}',
        '{"verb": "commit", "args": [{"lease": 99}], "result": null}',
        '{"verb": "ingest", "args": [], "result": null}',
        '{"verb": "admit", "args": [{"is": "Poem"}], "result": null}',
        '{"verb": "admit", "args": [{"is": "Segment", "span": -1}], "result": null}',
    ],
)
def test_a_line_that_is_no_event_is_named(line: str) -> None:
    text = dumps(Header(GEOMETRY), [])
    with pytest.raises(ValueError, match="line 2"):
        replay(text + line + "\n")


def test_a_header_without_a_geometry_is_named() -> None:
    with pytest.raises(ValueError, match="line 1"):
        replay('{"kvstate_trace": 1, "address": "kv", "rank": 0, "world_size": 1}\n')


# -- off


def test_without_a_trace_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        pytest.fail("an event was made")

    monkeypatch.setattr(manager_module, "Event", made)
    traced = Traced(trace=None)
    a_bit_of_everything(traced)
    assert traced.events == []


# -- encoding

names = st.sampled_from(["main", "cfg", "r"])
policies = st.builds(RetentionPolicy, st.integers(1, 9), st.integers(0, 9))
streams = st.builds(StreamId, names, names)
segments = st.builds(Segment, st.none() | names, names, st.integers(0, 9))
steps = st.builds(
    Step,
    st.lists(segments, max_size=3),
    pre_forks=st.just(()) | st.just((LabelFork("main", "cfg"),)),
    post_forks=st.just(()) | st.just((StreamFork(StreamId("a"), StreamId("b")),)),
    commit=st.booleans(),
    retention=st.dictionaries(names, policies),
)
configs = st.builds(
    RequestConfig,
    labels=st.lists(names),
    node_labels=st.dictionaries(names, st.lists(names)),
    walk_labels=st.dictionaries(st.tuples(names, names), st.lists(names)),
    retention=st.dictionaries(names, policies),
    offload_priority=st.integers(),
)
records = st.builds(
    Record, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.tuples(st.lists(st.integers(0, 9)).map(tuple)),
    st.booleans(), names, st.integers(1, 9), st.integers(0, 9),
)  # fmt: skip
publications = st.builds(
    Publication, names, st.just(2), st.dictionaries(st.integers(0, 1), st.dictionaries(names, records))
)


@given(steps | configs | publications | streams | st.none() | st.lists(segments).map(tuple))
def test_values_come_back_from_json_as_they_were(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_handles_become_their_serials() -> None:
    traced = Traced()
    traced.run(Step([Segment("r", span=3)]))
    lease = traced.manager.admit(Step([Segment("r")]))
    assert isinstance(lease, Lease)
    plan = traced.manager.plan(lease)
    assert isinstance(plan, Plan)
    assert encode(lease) == {"lease": lease.serial}
    assert list(encode(plan)) == ["plan"]
    traced.manager.abort(lease)
    claim = traced.manager.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    assert encode(claim) == {"claim": claim.serial}


def test_what_cannot_be_written_says_so() -> None:
    with pytest.raises(TypeError, match="cannot write <object object"):
        encode(object())


def test_a_value_of_a_newer_version_is_named() -> None:
    with pytest.raises(ValueError, match="unknown value 'Poem' in a trace; was it written by a newer version"):
        decode({"is": "Poem"})


def test_the_module_names_its_format() -> None:
    assert json.loads(dumps(Header(GEOMETRY), []))["kvstate_trace"] == trace.FORMAT
