"""Programs as files and as text: what a violation leaves behind runs again, and reads as a person would write it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvstate import types
from kvstate.testing import program, walk
from kvstate.testing.prompts import keys
from kvstate.testing.world import Call, Handle, Node, Sizes, Violation, World
from kvstate.transitions import retention
from kvstate.types import Group, LabelFork, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId

SIZES = Sizes(pages=8, host_pages=6, page_size=2)
NAMES = {
    name: getattr(types, name)
    for name in ("LabelFork", "Publication", "Record", "RequestConfig", "RetentionPolicy", "Segment", "Step",
                 "StreamFork", "StreamId")
} | {"keys": keys}  # fmt: skip


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
        a.snapshot("s")
        a.launch_enter(a.plan(lease))
        a.run(lease)
        a.launch_exit(lease)
        a.commit(lease)
    return raised.value


# -- running again

WORLDS: dict[str, Callable[[], World]] = {}


def world(make: Callable[[World], None]) -> Callable[[World], None]:
    """Register a program written by hand, run to its end."""

    def made() -> World:
        one = World(SIZES)
        make(one)
        one.finish()
        return one

    WORLDS[make.__name__] = made
    return make


def _run(node: Node, step: Step, *accepted: int, fail: bool = False) -> None:
    lease = node.admit(step)
    node.launch_enter(node.plan(lease))
    node.launch_exit(lease)
    node.commit(lease, accepted or None, fail=fail)


@world
def the_copy_of_a_pre_fork_fails(one: World) -> None:
    one.a.ingest("r")
    _run(one.a, Step([Segment("r", span=3)]))
    lease = one.a.admit(Step([Segment("r", "cfg")], pre_forks=[LabelFork("main", "cfg")]))
    one.a.launch_enter(one.a.plan(lease), fail=True)
    _run(one.a, Step([Segment("r", "cfg")]))


@world
def the_copy_of_a_post_fork_fails(one: World) -> None:
    one.b.ingest("r")
    one.b.ingest("s")
    _run(one.b, Step([Segment("s", span=3)]))
    _run(one.b, Step([Segment("r", span=5)], post_forks=[StreamFork(StreamId("r"), StreamId("s"))]), fail=True)


@world
def copies_of_an_offload_and_of_a_reload_fail(one: World) -> None:
    one.a.ingest("r", RequestConfig(labels=("main", "cfg")))
    _run(one.a, Step([Segment("r", span=4), Segment.padding(2), Segment("r", "cfg")]), 3, 0, 1)
    claim = one.a.claim_offload("r", True, fail=True)
    one.a.commit_claim(claim)
    one.a.abandon(claim)
    one.a.commit_claim(one.a.claim_offload("r"))
    one.a.abandon(one.a.claim_reload("r", Step([Segment("r")]), fail=True))
    one.a.claim_reload("r", Step([Segment("r", span=2)]))


@world
def a_reset_keeps_its_pages(one: World) -> None:
    one.a.ingest("r")
    _run(one.a, Step([Segment("r", span=5)], retention={"main": RetentionPolicy(2)}))
    one.a.admit(Step([Segment("r", span=2)], commit=False))
    one.a.reset("r", free=False)
    one.a.reset("r")
    one.a.remove("r")


@world
def fetches_end_in_every_way(one: World) -> None:
    for node in (one.a, one.b):
        for request in ("r", "s", "t"):
            node.ingest(request)
    _run(one.a, Step([Segment("r", span=3), Segment("r", "cfg")]))
    publication = one.a.publish(one.a.snapshot("r"))
    assert publication is not None
    main, cfg = one.b.claim_retrieve("r", publication, ("main", "cfg")).fetches
    one.b.copy(main)
    one.b.land(main)
    one.b.fail_fetch(cfg)
    [again] = one.b.claim_retrieve("s", publication, ("main",)).fetches
    one.b.cancel_retrieve("s")
    one.b.confirm_cancel(again)
    foreign = attrs.evolve(publication, world_size=2)
    one.b.claim_retrieve("t", foreign, ("main",))


@world
def requests_share_a_prompt(one: World) -> None:
    one.a.ingest("r", None, 2)
    _run(one.a, Step([Segment("r", span=9)]))
    one.a.key("r", "main", 5)
    one.a.key("r")
    one.a.key("r", "main", 3)
    one.a.remove("r")
    one.a.ingest("s", RequestConfig(cache_salt="tenant"), 2)
    one.a.ingest("t", None, 1)
    one.a.admit(Step([Segment("s", span=1, prefix=keys(2, 2, 2, "tenant"))]))
    _run(one.a, Step([Segment("t", span=2, prefix=keys(1, 1, 2))]))
    one.a.key("t")
    one.a.admit(Step([Segment("t", "cfg", prefix=keys(2, 2, 2)[1:])]))
    one.a.reset_prefix_cache()


CASES = sorted(WORLDS)


@pytest.mark.parametrize("case", CASES)
def test_a_program_replays_as_it_ran(case: str) -> None:
    ran = WORLDS[case]()
    again, violation = program.run(SIZES, ran.program)
    assert violation is None
    assert again.program == ran.program
    assert again.a.now == ran.a.now and again.b.now == ran.b.now
    assert again.seen == ran.seen


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_a_program_runs_as_that_program(case: str) -> None:
    ran, again = WORLDS[case](), World(SIZES)
    exec(program.text(ran.program), {**NAMES, "a": again.a, "b": again.b})
    assert again.program == ran.program


@pytest.mark.slow
def test_many_programs_of_the_walk_replay_as_they_ran() -> None:
    for index in range(len(walk.SIZES)):
        ran = walk.program(9, index, walk.SIZES[index % len(walk.SIZES)])
        again, violation = program.run(ran.sizes, ran.program)
        assert violation is None
        assert again.program == ran.program
        written = World(ran.sizes)
        exec(program.text(ran.program), {**NAMES, "a": written.a, "b": written.b})
        assert written.program == ran.program


def test_a_world_of_several_groups_is_written_and_read_again(tmp_path: Path) -> None:
    groups = (Group("full", 256), Group("window", 128, window=3))
    sizes = attrs.evolve(SIZES, groups=groups)
    ran = World(sizes)
    ran.a.ingest("r", None, 1)
    _run(ran.a, Step([Segment("r", span=7)]))
    violation = Violation("judge", "", ran.program)
    program.save(tmp_path / "seen.json", sizes, violation)
    read, calls, _ = program.load(tmp_path / "seen.json")
    assert (read, calls) == (sizes, ran.program)
    assert program.run(read, calls)[0].a.now.windows == (None, 3)
    text = program.as_pytest(sizes, violation)
    assert "from kvstate.types import Group, Segment, Step\n" in text
    [test] = _tests_in(text)
    test()


def test_calls_whose_handle_was_never_made_are_left_out() -> None:
    calls = [Call("a", "ingest", ("r",), "ingest1"), Call("a", "commit", (Handle("admit2"),), "commit3")]
    world, violation = program.run(SIZES, calls)
    assert violation is None
    assert [call.verb for call in world.program] == ["ingest", "remove"]


# -- shrinking


def test_shrinking_leaves_out_what_it_does_not_take_and_makes_the_rest_simpler(broken: Callable[[], None]) -> None:
    broken()
    violation = a_violation()
    assert len(violation.program) == 16
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
    for place, call in enumerate(shortest):
        _, other = program.run(SIZES, [*shortest[:place], *shortest[place + 1 :]])
        # The model runs at the end of a launch if it has not run before.
        assert other is None or other.witness != violation.witness or call.verb == "run"


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


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_argument_survives_a_file(case: str, tmp_path: Path) -> None:
    ran = WORLDS[case]()
    file = tmp_path / "ran.json"
    program.save(file, SIZES, Violation("nobody", "nothing", ran.program))
    sizes, calls, _ = program.load(file)
    assert sizes == SIZES
    assert calls == ran.program


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
    with pytest.raises(ValueError, match=r"new\.json: .*format 99; this version reads format 1"):
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
        {"program": [{"node": "a", "verb": "admit", "args": [{"is": "Poem"}], "gives": "admit1"}]},
        {"program": [{"node": "a", "verb": "admit", "args": [{"is": "Segment", "span": -1}], "gives": "admit1"}]},
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
        Call("b", "snapshot", ("r",), "snapshot0"),
        Call("b", "publish", (Handle("snapshot0"),), "publish1"),
        Call("a", "claim_retrieve", ("r", Handle("publish1"), ("main", "cfg")), "retrieve2"),
        Call("a", "land", (Handle("retrieve2_cfg"),), "land3"),
        Call("a", "reset", ("r",), "reset4"),
    ]
    assert program.text(calls).splitlines() == [
        "snapshot0 = b.snapshot('r')",
        "publish1 = b.publish(snapshot0)",
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


@pytest.mark.parametrize("case", CASES)
def test_the_pytest_file_of_any_program_passes_on_a_healthy_core(case: str) -> None:
    detail = 'said """no""" \\ twice\nover'
    [test] = _tests_in(program.as_pytest(SIZES, Violation("judge", detail, WORLDS[case]().program)))
    assert test.__name__ == "test_judge_holds"
    test()
