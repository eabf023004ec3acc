"""A value that exists is valid: whatever cannot be meant is refused where it is built, with a message that says why."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.types import (
    Geometry,
    Group,
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

A, B, C = StreamId("a"), StreamId("b"), StreamId("c")

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # Sizes.
    "no pages": (lambda: Geometry(pages=0), "pages must be a whole number of at least 1, got 0"),
    "page size 0": (lambda: Geometry(pages=1, page_size=0), "page_size must be a whole number of at least 1, got 0"),
    "negative host pool": (lambda: Geometry(pages=1, host_pages=-1), "host_pages must be .* at least 0, got -1"),
    "a bool for pages": (lambda: Geometry(pages=True), "pages must be a whole number .* got True"),
    "a bool for host pages": (lambda: Geometry(pages=1, host_pages=True), "host_pages must be .* got True"),
    "a float for pages": (lambda: Geometry(pages=4.0), "pages must be a whole number .* got 4.0"),  # type: ignore[arg-type]
    "no name": (lambda: Geometry(pages=1, name=""), "name must be a non-empty string, got ''"),
    "two groups of one name": (
        lambda: Geometry(pages=1, groups=(Group("full"), Group("full")), name="both"),
        "geometry 'both' has two groups of one name: full, full; rename one",
    ),
    "no group": (lambda: Geometry(pages=1, groups=()), "has no groups; give one per attention type"),
    "a window of nothing": (lambda: Group(window=0), "window must be a whole number of at least 1"),
    "a key that is none": (lambda: Segment("r", prefix=(b"short",)), "a key is 32 bytes"),
    "a prefix and nothing to compute": (
        lambda: Segment("r", span=0, prefix=(bytes(32),)),
        "a segment with a prefix computes at least one token",
    ),
    "a prefix behind other tokens": (
        lambda: Step([Segment("r"), Segment("r", prefix=(bytes(32),))]),
        "the prefix of r/main must be in the first segment of its stream, in a step that commits",
    ),
    "a prefix that does not commit": (
        lambda: Step([Segment("r", prefix=(bytes(32),))], commit=False),
        "the prefix of r/main must be in the first segment of its stream, in a step that commits",
    ),
    "something else as a group": (lambda: Geometry(pages=1, groups=("full",)), "full"),  # type: ignore[arg-type]
    "a group without a name": (lambda: Group(""), "name must be a non-empty string"),
    "a page of no bytes": (lambda: Group(page_bytes=0), "page_bytes must be a whole number of at least 1"),
    # Names.
    "no request": (lambda: StreamId(""), "request must be a non-empty string, got ''"),
    "no label": (lambda: StreamId("r", ""), "label must be a non-empty string, got ''"),
    "a number as a request": (lambda: StreamId(7), "request must be a non-empty string, got 7"),  # type: ignore[arg-type]
    # Retention.
    "no budget": (lambda: RetentionPolicy(0), "context_budget must be a whole number of at least 1"),
    "a bool as a budget": (lambda: RetentionPolicy(True), "context_budget must be .* got True"),
    "negative prefix": (lambda: RetentionPolicy(1, -1), "protected_prefix must be .* at least 0, got -1"),
    "retention of a config is a number": (
        lambda: RequestConfig(retention={"main": 8}),  # type: ignore[dict-item]
        "retention of label 'main' must be a RetentionPolicy, got 8",
    ),
    "retention of a step is a number": (
        lambda: Step([Segment("r")], retention={"main": 8}),  # type: ignore[dict-item]
        "retention of label 'main' must be a RetentionPolicy, got 8",
    ),
    # Config.
    "labels as one string": (
        lambda: RequestConfig(labels="main"),
        r"expected several labels, got the one string 'main'; write \('main',\)",
    ),
    "labels of a node as one string": (
        lambda: RequestConfig(node_labels={"decoder": "cfg"}),  # type: ignore[dict-item]
        "expected several labels, got the one string 'cfg'",
    ),
    "labels of a walk as one string": (
        lambda: RequestConfig(walk_labels={("decoder", "w"): "cfg"}),  # type: ignore[dict-item]
        "expected several labels, got the one string 'cfg'",
    ),
    "an empty label": (lambda: RequestConfig(labels=("main", "")), "a label must be a non-empty string, got ''"),
    "a number as a label": (lambda: RequestConfig(labels=(1,)), "a label must be a non-empty string, got 1"),  # type: ignore[arg-type]
    "a word as priority": (lambda: RequestConfig(offload_priority="high"), "offload_priority.*'high'"),  # type: ignore[arg-type]
    "a bool as priority": (lambda: RequestConfig(offload_priority=True), "offload_priority.*True"),
    # Segments.
    "negative span": (lambda: Segment("r", span=-1), "span must be a whole number of at least 0, got -1"),
    "a bool as a span": (lambda: Segment("r", span=True), "span must be .* got True"),
    "a float as a span": (lambda: Segment("r", span=1.5), "span must be .* got 1.5"),  # type: ignore[arg-type]
    "a segment of nobody": (lambda: Segment(""), "request must be a non-empty string, got ''"),
    "a segment without a label": (lambda: Segment("r", ""), "label must be a non-empty string"),
    # Forks.
    "fork of a label onto itself": (lambda: LabelFork("main", "main"), "a fork needs two labels, got 'main' twice"),
    "fork of a stream onto itself": (lambda: StreamFork(A, A), "a fork needs two streams, got a/main twice"),
    "fork of names": (lambda: StreamFork("a", "b"), "StreamId"),  # type: ignore[arg-type]
    # Steps.
    "a step of names": (lambda: Step(["r"]), "a step is made of Segments, got 'r'"),  # type: ignore[list-item]
    "a pair as a fork": (
        lambda: Step([Segment("r")], pre_forks=[("main", "cfg")]),  # type: ignore[list-item]
        r"a fork is a LabelFork or a StreamFork, got \('main', 'cfg'\)",
    ),
    "a number as commit": (lambda: Step([Segment("r")], commit=1), "commit.*bool"),  # type: ignore[arg-type]
    "two pre-forks onto one stream": (
        lambda: Step([Segment("a")], pre_forks=[StreamFork(A, C), StreamFork(B, C)]),
        "c/main is the target of two forks at once; a stream takes one source",
    ),
    "two post-forks onto one stream": (
        lambda: Step([Segment("a")], post_forks=[StreamFork(A, C), StreamFork(B, C)]),
        "c/main is the target of two forks at once",
    ),
    "a label fork and a stream fork onto one stream": (
        lambda: Step([Segment("a")], pre_forks=[LabelFork("main", "cfg"), StreamFork(B, StreamId("a", "cfg"))]),
        "a/cfg is the target of two forks at once",
    ),
    "combined labels as one string": (
        lambda: Step([Segment("r")], combined_labels={"main": "all"}),  # type: ignore[dict-item]
        "expected several labels, got the one string 'main'",
    ),
    "combined label without a segment": (
        lambda: Step([Segment("r")], combined_labels={("main", "cfg"): "all"}),
        "combined label 'cfg' of 'all' has no segment in this step; leave it out",
    ),
    "a label combined twice": (
        lambda: Step([Segment("r"), Segment("r", "cfg")], combined_labels={("main", "cfg"): "one", ("cfg",): "two"}),
        "label 'cfg' is combined twice; a label goes into one plan label",
    ),
    "a label twice in one plan label": (
        lambda: Step([Segment("r")], combined_labels={("main", "main"): "one"}),
        "label 'main' is combined twice",
    ),
    "a plan label that is another label": (
        lambda: Step([Segment("r"), Segment("r", "cfg")], combined_labels={("main",): "cfg"}),
        "plan label 'cfg' is already taken in this step; choose another name",
    ),
    "one plan label twice": (
        lambda: Step([Segment("r"), Segment("r", "cfg")], combined_labels={("main",): "x", ("cfg",): "x"}),
        "plan label 'x' is already taken in this step",
    ),
    "an empty plan label": (
        lambda: Step([Segment("r")], combined_labels={("main",): ""}),
        "a plan label must be a non-empty string, got ''",
    ),
    # Publications.
    "a record of fewer than no tokens": (lambda: record(-1), "length must be .* at least 0, got -1"),
    "a record of pages of no tokens": (lambda: record(1, page_size=0), "page_size must be .* at least 1, got 0"),
    "a world of nobody": (lambda: publication({}, world_size=0), "world_size must be .* at least 1, got 0"),
    "a rank that is not in the world": (lambda: publication({2: {}}), "rank 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_where_it_is_built(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        build()


@pytest.mark.parametrize("cls", [Geometry, Group, LabelFork, Publication, Record, RequestConfig, Segment, Step])
def test_values_are_frozen(cls: type) -> None:
    value = VALUES[cls]
    name = attrs.fields(cls)[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


def test_what_is_meant_is_accepted() -> None:
    assert Geometry(pages=1, host_pages=0).host_pages == 0
    assert Segment("r", span=0).span == 0
    # A plan label may be called like one of the labels it is made of.
    step = Step([Segment("r"), Segment("r", "cfg")], combined_labels={("main", "cfg"): "main"})
    assert step.combined_labels == {("main", "cfg"): "main"}
    # A stream may be a target in both phases.
    Step([Segment("a")], pre_forks=[StreamFork(A, C)], post_forks=[StreamFork(A, C)])


def test_sequences_are_copied_where_a_value_is_built() -> None:
    labels = ["main"]
    retention = {"main": RetentionPolicy(4)}
    config = RequestConfig(labels=labels, retention=retention)  # type: ignore[arg-type]
    labels.append("cfg")
    retention["cfg"] = RetentionPolicy(8)
    assert config == RequestConfig(retention={"main": RetentionPolicy(4)})


def test_padding_belongs_to_nobody() -> None:
    step = Step([Segment.padding(3), Segment("r"), Segment("s"), Segment("r", "cfg")])
    assert step.segments[0] == Segment(None, "main", 3)
    assert step.requests() == ("r", "s")


def test_a_label_fork_is_written_out_for_each_request_of_the_step() -> None:
    step = Step([Segment("r"), Segment.padding(), Segment("s")])
    assert step.stream_forks([LabelFork("main", "cfg"), StreamFork(A, B)]) == [
        StreamFork(StreamId("r"), StreamId("r", "cfg")),
        StreamFork(StreamId("s"), StreamId("s", "cfg")),
        StreamFork(A, B),
    ]


@pytest.mark.parametrize(
    ("step", "plain"),
    [
        (Step([Segment("r"), Segment("s", span=9), Segment("r", "cfg")]), True),
        (Step([Segment("r"), Segment("r")]), False),
        (Step([Segment("r", span=0)]), False),
        (Step([Segment.padding()]), False),
        (Step([Segment("r")], commit=False), False),
        (Step([Segment("r")], pre_forks=[StreamFork(A, B)]), False),
        (Step([Segment("r")], post_forks=[StreamFork(A, B)]), False),
        (Step([Segment("r")], retention={"main": RetentionPolicy(1)}), False),
    ],
)
def test_a_plain_step_only_adds_tokens_to_distinct_streams(step: Step, plain: bool) -> None:
    assert step.plain is plain


# -- labels needed


@pytest.mark.parametrize(
    ("node", "walk", "needed"),
    [
        (None, None, ("main",)),
        (None, "w", ("main",)),
        ("encoder", None, ("main",)),
        ("encoder", "w", ("main",)),
        ("decoder", None, ("cfg",)),
        ("decoder", "other", ("cfg",)),
        ("decoder", "w", ("main", "beam")),
        ("sink", "w", ()),
    ],
)
def test_the_most_specific_labels_win(node: str | None, walk: str | None, needed: tuple[str, ...]) -> None:
    config = RequestConfig(
        node_labels={"decoder": ("cfg",)}, walk_labels={("decoder", "w"): ("main", "beam"), ("sink", "w"): ()}
    )
    assert config.labels_needed(node, walk) == needed


def test_a_default_of_the_request_comes_before_main() -> None:
    assert RequestConfig(labels=("cfg",)).labels_needed("decoder", "w") == ("cfg",)
    assert RequestConfig().labels_needed("decoder") == ("main",)


# -- publications


def record(length: int, *, incarnation: int = 1, epoch: int = 0, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "released": 0,
        "page_size": 4,
        "pages": ((),),
        "on_host": False,
        "address": "a",
        **changes,
    }
    return Record(length, incarnation=incarnation, epoch=epoch, **values)


def publication(ranks: dict[int, dict[str, Record]], request: str = "r", world_size: int = 2) -> Publication:
    return Publication(request, world_size, ranks)


VALUES: dict[type, Any] = {
    Geometry: Geometry(pages=1),
    Group: Group(),
    LabelFork: LabelFork("main", "cfg"),
    Publication: publication({}),
    Record: record(1),
    RequestConfig: RequestConfig(),
    Segment: Segment("r"),
    Step: Step([Segment("r")]),
}


@pytest.mark.parametrize(
    ("mine", "theirs", "kept"),
    [
        (record(4), record(6), "theirs"),
        (record(6), record(4), "mine"),
        (record(4), record(4, pages=((1,),)), "theirs"),
        (record(4, epoch=2), record(9, epoch=1), "mine"),
        (record(4, epoch=1), record(4, epoch=2), "theirs"),
        # What a later epoch stores is what there is, be it shorter (retention, reset); so is a new life of the request.
        (record(4, epoch=1), record(3, epoch=2), "theirs"),
        (record(9, incarnation=1, epoch=7), record(1, incarnation=2), "theirs"),
        (record(1, incarnation=2), record(9, incarnation=1, epoch=7), "mine"),
    ],
)
def test_neither_an_older_record_nor_a_shorter_one_of_its_content_overwrites(
    mine: Record, theirs: Record, kept: str
) -> None:
    merged = publication({0: {"main": mine}}).merge(publication({0: {"main": theirs}}))
    assert merged.ranks[0]["main"] is {"mine": mine, "theirs": theirs}[kept]


def test_publications_merge_per_rank_and_label() -> None:
    one = publication({0: {"main": record(4), "cfg": record(9)}})
    two = publication({0: {"main": record(6), "cfg": record(8)}, 1: {"main": record(2)}})
    assert one.merge(two) == publication({0: {"main": record(6), "cfg": record(9)}, 1: {"main": record(2)}})
    assert one == publication({0: {"main": record(4), "cfg": record(9)}}), "merging changes neither of the two"


def test_publications_of_different_requests_or_worlds_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"cannot merge 'r' \(world size 2\) with 's' \(world size 2\)"):
        publication({}).merge(publication({}, request="s"))
    with pytest.raises(ValueError, match=r"cannot merge 'r' \(world size 2\) with 'r' \(world size 4\)"):
        publication({}).merge(publication({}, world_size=4))


records = st.builds(record, st.integers(0, 5), incarnation=st.integers(1, 3), epoch=st.integers(0, 3))
publications = st.builds(
    publication, st.dictionaries(st.integers(0, 1), st.dictionaries(st.sampled_from(["main", "cfg"]), records))
)


@given(publications, publications)
def test_merging_again_changes_nothing(one: Publication, two: Publication) -> None:
    merged = one.merge(two)
    assert merged.merge(two) == merged
    assert merged.merge(one) == merged
    assert one.merge(one) == one


@given(publications, publications)
def test_a_merge_never_loses_the_newest_record(one: Publication, two: Publication) -> None:
    merged = one.merge(two)
    for rank in {*one.ranks, *two.ranks}:
        mine, theirs = one.ranks.get(rank, {}), two.ranks.get(rank, {})
        assert set(merged.ranks[rank]) == {*mine, *theirs}
        for label, kept in merged.ranks[rank].items():
            met = [labels[label] for labels in (mine, theirs) if label in labels]
            assert kept in met
            assert kept.incarnation == max(r.incarnation for r in met)
            for other in met:
                if other.incarnation == kept.incarnation:
                    assert (kept.epoch, kept.length) >= (other.epoch, other.length)


@given(st.lists(publications, min_size=1, max_size=4))
def test_what_is_heard_later_makes_no_record_older_or_shorter(heard: list[Publication]) -> None:
    merged = heard[0]
    for late in heard[1:]:
        before, merged = merged, merged.merge(late)
        for rank, labels in before.ranks.items():
            for label, was in labels.items():
                now = merged.ranks[rank][label]
                assert (now.incarnation, now.epoch, now.length) >= (was.incarnation, was.epoch, was.length)
