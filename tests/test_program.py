"""Programs as files and as text: what a violation leaves behind runs again, and reads as a person would write it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvstate import types
from kvstate.testing import program, walk
from kvstate.testing.world import Call, Handle, Sizes, Violation, World
from kvstate.transitions import retention
from kvstate.types import LabelFork, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId

SIZES = Sizes(pages=8, host_pages=6, page_size=2)
NAMES = {
    name: getattr(types, name)
    for name in ("LabelFork", "Publication", "Record", "RequestConfig", "RetentionPolicy", "Segment", "Step",
                 "StreamFork", "StreamId")
}  # fmt: skip


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let retention take a page too many, from now on."""

    def apply() -> None:
        healthy = retention.pages_outside

        def greedy(length: int, policy: RetentionPolicy, page_size: int) -> tuple[int, int]:
            first, count = healthy(length, policy, page_size)
            return first, count + 1 if count else 0

        monkeypatch.setattr(retention, "pages_outside", greedy)

    return apply


def a_violation() -> Violation:
    """Run a program that has more in it than it takes; the core is broken."""
    world = World(SIZES)
    a = world.a
    with pytest.raises(Violation) as raised:
        a.ingest("s")
        a.ingest("r", RequestConfig(labels=("main", "cfg"), retention={"cfg": RetentionPolicy(3)}))
        lease = a.admit(Step([Segment("s", span=3), Segment("r", span=2)]))
        a.launch_enter(a.plan(lease))
        a.launch_exit(lease)
        a.reset("t", free=False)
        a.commit(lease, (2, 2))
        lease = a.admit(
            Step(
                [Segment("s", span=2), Segment("r", span=5)],
                post_forks=[LabelFork("main", "beam")],
                retention={"main": RetentionPolicy(3)},
            )
        )
        a.offload = a.publish("s")
        a.launch_enter(a.plan(lease))
        a.run(lease)
        a.launch_exit(lease)
        a.commit(lease)
    return raised.value


# -- running again

INTERESTING = ("fork copy failed", "post-fork copy failed", "offload copy failed", "fetch cancelled", "reset kept pages")


def _walked(reached: str) -> World:
    """Return the first program of a walk that reached something."""
    for index in range(3000):
        world = walk.program(5, index, walk.SIZES[index % len(walk.SIZES)])
        if world.seen[reached]:
            return world
    pytest.fail(f"never reached: {reached}")


@pytest.fixture(scope="module")
def walked() -> Callable[[str], World]:
    worlds: dict[str, World] = {}

    def get(reached: str) -> World:
        if reached not in worlds:
            worlds[reached] = _walked(reached)
        return worlds[reached]

    return get


@pytest.mark.parametrize("reached", INTERESTING)
def test_a_program_replays_as_it_ran(walked: Callable[[str], World], reached: str) -> None:
    world = walked(reached)
    again, violation = program.run(world.sizes, world.program)
    assert violation is None
    assert again.program == world.program
    assert again.a.now == world.a.now and again.b.now == world.b.now
    assert again.seen == world.seen


@pytest.mark.parametrize("reached", INTERESTING)
def test_the_text_of_a_program_runs_as_that_program(walked: Callable[[str], World], reached: str) -> None:
    world = walked(reached)
    again = World(world.sizes)
    exec(program.text(world.program), {**NAMES, "a": again.a, "b": again.b})
    assert again.program == world.program


def test_many_programs_of_the_walk_replay_as_they_ran() -> None:
    for index in range(3 * len(walk.SIZES)):
        world = walk.program(9, index, walk.SIZES[index % len(walk.SIZES)])
        again, violation = program.run(world.sizes, world.program)
        assert violation is None
        assert program.text(again.program) == program.text(world.program)


def test_calls_whose_handle_was_never_made_are_left_out() -> None:
    calls = [Call("a", "ingest", ("r",), "ingest1"), Call("a", "commit", (Handle("admit2"),), "commit3")]
    world, violation = program.run(SIZES, calls)
    assert violation is None
    assert [call.verb for call in world.program] == ["ingest", "remove"]


# -- shrinking


def test_shrinking_leaves_out_what_it_does_not_take_and_makes_the_rest_simpler(broken: Callable[[], None]) -> None:
    broken()
    violation = a_violation()
    assert len(violation.program) == 15
    shortest = program.shrink(SIZES, violation.program, violation.witness)
    assert program.text(shortest) == "\n".join(
        [
            "a.ingest('r')",
            "admit10 = a.admit(Step([Segment('r', span=5)], retention={'main': RetentionPolicy(3)}))",
            "plan12 = a.plan(admit10)",
            "a.launch_enter(plan12)",
            "a.run(admit10)",
            "a.launch_exit(admit10)",
            "a.commit(admit10)",
        ]
    )
    _, again = program.run(SIZES, shortest)
    assert again is not None and again.witness == violation.witness
    for place in range(len(shortest)):
        _, other = program.run(SIZES, [*shortest[:place], *shortest[place + 1 :]])
        assert other is None or other.witness != violation.witness, "every call that is left is needed"


def test_shrinking_stops_after_so_many_tries(broken: Callable[[], None]) -> None:
    broken()
    violation = a_violation()
    assert program.shrink(SIZES, violation.program, violation.witness, tries_max=0) == list(violation.program)


# -- files


def test_a_replay_file_comes_back_as_it_was(broken: Callable[[], None], tmp_path: Path) -> None:
    broken()
    violation = a_violation()
    file = tmp_path / "violation.json"
    program.save(file, SIZES, violation)
    sizes, calls, witness = program.load(file)
    assert (sizes, tuple(calls), witness) == (SIZES, violation.program, violation.witness)


@pytest.mark.parametrize("reached", INTERESTING)
def test_every_kind_of_argument_survives_a_file(
    walked: Callable[[str], World], reached: str, tmp_path: Path
) -> None:
    world = walked(reached)
    file = tmp_path / "walk.json"
    program.save(file, world.sizes, Violation("nobody", "nothing", world.program))
    sizes, calls, _ = program.load(file)
    assert sizes == world.sizes
    assert calls == world.program


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "7",
        "{}",
        '{"kvstate": 1}',
        '{"kvstate_trace": 1}',
        '{"kvstate": 1, "sizes": {"acres": 3}, "witness": "judge", "detail": "", "program": []}',
        '{"kvstate": 1, "sizes": {}, "witness": "judge", "detail": "", "program": [{"node": "a"}]}',
        '{"kvstate": 1, "sizes": {}, "witness": "judge", "detail": "", "program": 7}',
    ],
)
def test_what_is_no_replay_file_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json: not a replay file .* `kvstate check` writes them"):
        program.load(file)


def test_bytes_that_are_no_text_are_no_replay_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"bad\.json: not a replay file"):
        program.load(file)


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    file.write_text('{"kvstate": 99}')
    with pytest.raises(ValueError, match=r"new\.json: format 99; this version reads format 1"):
        program.load(file)


GOOD: dict[str, Any] = {
    "kvstate": 1, "sizes": {}, "witness": "judge", "detail": "",
    "program": [{"node": "a", "verb": "ingest", "args": ["r"], "gives": "ingest1"}],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": {"pages": 0}},
        {"sizes": {"subject": "somebody"}},
        {"program": [{"node": "z", "verb": "ingest", "args": ["r"], "gives": "ingest1"}]},
        {"program": [{"node": "a", "verb": "divine", "args": [], "gives": "divine1"}]},
        {"program": [{"node": "a", "verb": "finish", "args": [], "gives": "finish1"}]},
        {"program": [{"node": "a", "verb": "admit", "args": [{"is": "Poem"}], "gives": "admit1"}]},
        {"program": [{"node": "a", "verb": "admit", "args": [{"is": "Segment", "span": -1}], "gives": "admit1"}]},
        {"program": [{"node": "a", "verb": "ingest", "args": [], "gives": "ingest1"}]},
        {"program": [{"node": "a", "verb": "ingest", "args": ["r"], "gives": "ingest"}]},
    ],
)
def test_a_file_whose_program_cannot_be_run_is_refused_when_it_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(ValueError, match=r"bad\.json"):
        program.load(file)


# -- text

WRITTEN: list[tuple[Any, str]] = [
    (Handle("admit4"), "admit4"),
    (Segment("r"), "Segment('r')"),
    (Segment("r", "cfg", 3), "Segment('r', 'cfg', span=3)"),
    (Segment("r", span=0), "Segment('r', span=0)"),
    (Segment.padding(2), "Segment.padding(2)"),
    (StreamId("r", "main"), "StreamId('r', 'main')"),
    (LabelFork("main", "cfg"), "LabelFork('main', 'cfg')"),
    (StreamFork(StreamId("r"), StreamId("s")), "StreamFork(StreamId('r', 'main'), StreamId('s', 'main'))"),
    (RetentionPolicy(3), "RetentionPolicy(3)"),
    (RetentionPolicy(3, 1), "RetentionPolicy(3, 1)"),
    (RequestConfig(), "RequestConfig()"),
    (
        RequestConfig(labels=("main", "cfg"), retention={"cfg": RetentionPolicy(3)}),
        "RequestConfig(labels=('main', 'cfg'), retention={'cfg': RetentionPolicy(3)})",
    ),
    (Step([]), "Step([])"),
    (
        Step(
            [Segment("r"), Segment.padding()],
            pre_forks=[LabelFork("main", "cfg")],
            post_forks=[LabelFork("cfg", "beam")],
            commit=False,
            retention={"main": RetentionPolicy(1)},
        ),
        "Step([Segment('r'), Segment.padding(1)], pre_forks=[LabelFork('main', 'cfg')], "
        "post_forks=[LabelFork('cfg', 'beam')], commit=False, retention={'main': RetentionPolicy(1)})",
    ),
    ((1, 0), "(1, 0)"),
    (None, "None"),
    (True, "True"),
]


@pytest.mark.parametrize(("value", "written"), WRITTEN, ids=[written[:40] for _, written in WRITTEN])
def test_values_are_written_as_a_person_would(value: Any, written: str) -> None:
    assert program.text([Call("a", "verb", (value,), "verb1")]) == f"a.verb({written})"
    if not isinstance(value, Handle):
        assert eval(written, dict(NAMES)) == value


def test_a_result_gets_a_name_only_where_it_is_used() -> None:
    calls = [
        Call("b", "publish", ("r",), "publish1"),
        Call("a", "claim_retrieve", ("r", Handle("publish1"), ("main", "cfg")), "retrieve2"),
        Call("a", "land", (Handle("retrieve2_cfg"),), "land3"),
        Call("a", "reset", ("r",), "reset4"),
    ]
    assert program.text(calls).splitlines() == [
        "publish1 = b.publish('r')",
        "retrieve2 = a.claim_retrieve('r', publish1, ('main', 'cfg'))",
        "retrieve2_cfg = next(f for f in retrieve2.fetches if f.stream.label == 'cfg')",
        "a.land(retrieve2_cfg)",
        "a.reset('r')",
    ]


# -- the pytest file


def _tests_in(text: str) -> list[Callable[[], None]]:
    names: dict[str, Any] = {}
    exec(compile(text, "test_found.py", "exec"), names)
    return [value for name, value in names.items() if name.startswith("test_")]


def test_the_pytest_file_fails_while_the_violation_is_there_and_passes_afterwards(
    broken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken()
    violation = a_violation()
    shortest = program.shrink(SIZES, violation.program, violation.witness)
    _, shown = program.run(SIZES, shortest)
    assert shown is not None
    for text in (program.as_pytest(SIZES, violation), program.as_pytest(SIZES, shown)):
        [test] = _tests_in(text)
        assert test.__name__ == f"test_{violation.witness}_holds"
        with pytest.raises(Violation) as raised:
            test()
        assert raised.value.witness == violation.witness
    monkeypatch.undo()
    for text in (program.as_pytest(SIZES, violation), program.as_pytest(SIZES, shown)):
        [test] = _tests_in(text)
        test()


def test_the_pytest_file_imports_what_it_names_and_nothing_else(broken: Callable[[], None]) -> None:
    broken()
    violation = a_violation()
    text = program.as_pytest(attrs.evolve(SIZES, subject="machine"), violation)
    assert "from kvstate.types import LabelFork, RequestConfig, RetentionPolicy, Segment, Step\n" in text
    assert "    a = world.a\n" in text and "world.b" not in text
    assert "subject='machine'" in text
    assert text.endswith("\n") and "\n\n\n\n" not in text


@pytest.mark.parametrize("reached", INTERESTING)
def test_the_pytest_file_of_any_program_passes_on_a_healthy_core(walked: Callable[[str], World], reached: str) -> None:
    world = walked(reached)
    [test] = _tests_in(program.as_pytest(world.sizes, Violation("judge", 'said """no""" \\ twice\nover', world.program)))
    assert test.__name__ == "test_judge_holds"
    test()
