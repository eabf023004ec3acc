"""The worked examples of docs/ordering.md, run on the machine: the tables of the page are what these tests read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvstate.ops import Access, CopyIn, Op, StepBegin, StepEnd, Tier
from kvstate.ordering import NOTHING, Clock, Queue
from kvstate.refusals import Refusal
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.subject import MachineSubject
from kvstate.testing.transport import Network
from kvstate.types import Geometry, Segment, Step, StreamFork, StreamId
from kvstate.view import StateView

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ordering.md"
PAGE_SIZE = 4
NONE = "–"

Table = list[dict[str, str]]


class Machine:
    """The bare State over the memory backend; moments are looked at by the words that the page uses for them."""

    def __init__(self, pages: int, host_pages: int) -> None:
        self.geometry = Geometry(pages=pages, page_size=PAGE_SIZE, host_pages=host_pages)
        self.subject = MachineSubject(self.geometry, Network(), "kv")
        self.backend = self.subject.backend
        self.backend.record = True
        self.moments: dict[str, StateView] = {}

    def do(self, verb: str, *args: Any) -> Any:
        result = self.subject.apply(verb, *args)
        assert not isinstance(result, Refusal), result
        return result

    def look(self, when: str) -> None:
        self.moments[when] = self.subject.snapshot()

    def admit(self, request: str, span: int, **kwargs: Any) -> Any:
        self.do("ingest", request)
        return self.do("admit", Step([Segment(request, span=span)], **kwargs))

    def finish(self, lease: Any) -> None:
        """Plan, launch and commit."""
        self.do("launch_enter", self.do("plan", lease))
        self.do("launch_exit", lease)
        self.do("commit", lease)

    def run(self, request: str, span: int, **kwargs: Any) -> None:
        self.finish(self.admit(request, span, **kwargs))

    def offload(self, request: str) -> None:
        self.do("commit_offload", self.do("claim_offload", request))

    def reload(self, request: str) -> None:
        self.do("commit_reload", self.do("claim_reload", request))

    @property
    def ops(self) -> list[Op]:
        return self.backend.ops


def a_step_then_an_offload() -> Machine:
    m = Machine(pages=2, host_pages=2)
    m.run("r", 6)
    m.do("claim_offload", "r")
    return m


def a_page_handed_on_after_the_offload() -> Machine:
    m = Machine(pages=2, host_pages=2)
    m.run("r", 6)
    m.offload("r")
    m.look("the offload has committed")
    lease = m.admit("s", 3)
    m.look("s is admitted")
    m.finish(lease)
    return m


def a_reload_then_a_step() -> Machine:
    m = a_page_handed_on_after_the_offload()
    m.do("remove", "s")
    m.look("s has been removed")
    m.reload("r")
    m.look("the reload has committed")
    m.run("r", 1)
    m.offload("r")
    return m


def a_shared_page() -> Machine:
    m = Machine(pages=2, host_pages=2)
    m.do("ingest", "r")
    m.do("ingest", "s")
    m.run("r", 4, post_forks=[StreamFork(StreamId("r"), StreamId("s"))])
    m.run("s", 1)
    m.look("s has decoded")
    claim = m.do("claim_offload", "r")
    m.look("the offload is claimed")
    m.do("commit_offload", claim)
    m.look("the offload has committed")
    m.do("remove", "s")
    m.look("s has been removed")
    lease = m.admit("t", 4)
    m.look("t is admitted")
    m.finish(lease)
    return m


def _up_to_the_claim(fails: bool) -> tuple[Machine, Any]:
    m = Machine(pages=1, host_pages=2)
    for request in ("q", "r"):
        m.run(request, 4)
        m.offload(request)
    m.look("both are on the host")
    lease = m.admit("s", 4)
    m.look("s is admitted")
    m.do("abort", lease)
    m.look("s is aborted")
    if fails:
        m.backend.fail_next(CopyIn)
    claim = m.do("claim_reload", "q")
    m.look("the reload is claimed")
    return m, claim


def a_grant_that_is_never_used() -> Machine:
    return _up_to_the_claim(fails=False)[0]


def a_grant_that_is_never_used_and_a_copy_that_failed() -> Machine:
    m, claim = _up_to_the_claim(fails=True)
    m.do("abandon_reload", claim)
    m.look("the reload is abandoned")
    m.run("s", 4)
    return m


@attrs.frozen
class Example:
    """Tables `tables` of section `section`; the ops before `first` are told by an earlier example."""

    section: str
    run: Callable[[], Machine]
    tables: slice
    first: int = 1


EXAMPLES = [
    Example("1. A step, then an offload", a_step_then_an_offload, slice(0, 1)),
    Example("2. A page handed on after the offload", a_page_handed_on_after_the_offload, slice(0, 2)),
    Example("3. A reload, then a step", a_reload_then_a_step, slice(0, 2), first=6),
    Example("4. A shared page", a_shared_page, slice(0, 2)),
    Example("5. A grant that is never used", a_grant_that_is_never_used, slice(0, 2)),
    Example("5. A grant that is never used", a_grant_that_is_never_used_and_a_copy_that_failed, slice(2, 4), first=7),
]
NAMES = [example.run.__name__ for example in EXAMPLES]


# -- the page


def sections() -> dict[str, list[Table]]:
    """Return the tables per example of the page."""
    text = PAGE.read_text(encoding="utf-8").split("\n## Five examples\n")[1]
    found: dict[str, list[Table]] = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found[title] = [table(lines) for lines in re.findall(r"(?:^\|.*\|\n)+", body, re.MULTILINE)]
    return found


def table(lines: str) -> Table:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines()]
    head, _, *body = rows
    return [dict(zip(head, row, strict=True)) for row in body]


# -- the machine, in the words of the page


def clock(after: Clock) -> str:
    return ", ".join(f"{queue.name.lower()} {after[queue]}" for queue in Queue if after[queue]) or NONE


def accesses(found: list[Access]) -> str:
    return ", ".join(f"{a.tier.value} {a.page} [{a.start}:{a.stop})" for a in found) or NONE


def without_own_writes(reads: list[Access], writes: list[Access]) -> Iterator[Access]:
    """Yield `reads` less the tokens of `writes`, which lie at the end of what a step reads of a page."""
    written = {(a.tier, a.page): a.start for a in writes}
    for read in reads:
        stop = min(read.stop, written.get((read.tier, read.page), read.stop))
        if stop > read.start:
            yield read._replace(stop=stop)


def told(op: Op, skipped: set[int]) -> dict[str, str]:
    reads, writes = list(op.reads()), list(op.writes())
    if isinstance(op, StepEnd):
        reads = list(without_own_writes(reads, writes))
    empty = op.number in skipped
    assert op.queue is not None
    return {
        "op": str(op.number),
        "kind": type(op).__name__,
        "queue": op.queue.name.lower(),
        "reads": f"{NONE} (empty)" if empty else accesses(reads),
        "writes": f"{NONE} (empty)" if empty else accesses(writes),
        "after": clock(op.after),
    }


def owners(now: StateView, tier: Tier, page: int) -> str:
    names = [
        stream.request
        for stream in now.streams
        for pages in (stream.device if tier is Tier.DEVICE else stream.host)
        if page in pages
    ]
    for claim in now.claims:
        if page in (claim.device(0) if tier is Tier.DEVICE else claim.host(0)):
            names.append(f"a claim of {claim.request}")
    for lease in now.leases:
        names += [f"a lease of {row.request}" for row in lease.rows if tier is Tier.DEVICE and page in row.takes[0]]
    pools = now.device if tier is Tier.DEVICE else now.host
    assert len(names) == pools[0].owners[page]
    return ", ".join(names) or NONE


# -- the comparison


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_page_shows_the_ops_that_the_machine_emits(example: Example) -> None:
    machine = example.run()
    ops_table = sections()[example.section][example.tables][0]
    assert ops_table == [told(op, machine.backend.skipped) for op in machine.ops if op.number >= example.first]
    assert [op.number for op in machine.ops] == list(range(1, len(machine.ops) + 1))


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_page_shows_owners_and_fences_as_the_machine_has_them(example: Example) -> None:
    machine = example.run()
    for row in (row for rows in sections()[example.section][example.tables][1:] for row in rows):
        now = machine.moments[row["when"]]
        name, number = row["page"].split()
        tier, page = Tier(name), int(number)
        pool = (now.device if tier is Tier.DEVICE else now.host)[0]
        assert (row["owners"], row["fence"]) == (owners(now, tier, page), clock(pool.fences[page])), row


def test_no_table_of_the_examples_goes_unread() -> None:
    found = sections()
    assert list(found) == list(dict.fromkeys(example.section for example in EXAMPLES))
    for title, tables in found.items():
        read = [place for e in EXAMPLES if e.section == title for place in range(len(tables))[e.tables]]
        assert read == list(range(len(tables)))


def conflicts(machine: Machine, stripped: frozenset[int] = frozenset()) -> list[Any]:
    """Return what the judge says of the run when the ops in `stripped` follow nothing."""
    judge = EdgeJudge(PAGE_SIZE, MemoryBackend.sinks_of(machine.geometry))
    for op in machine.ops:
        if op.number in stripped:
            op = attrs.evolve(op, after=NOTHING)
        (judge.skip if op.number in machine.backend.skipped else judge.observe)(op)
    return judge.conflicts


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_every_op_that_follows_something_would_conflict_without_it(example: Example) -> None:
    machine = example.run()
    assert not conflicts(machine)
    for op in machine.ops:
        if any(op.after) and op.number not in machine.backend.skipped and not isinstance(op, StepBegin):
            begin = {op.begin} if isinstance(op, StepEnd) else set()
            assert conflicts(machine, frozenset({op.number, *begin})), op


# -- what the prose says


def test_a_failed_copy_leaves_the_fences_and_an_abandoned_one_is_in_them() -> None:
    machine, claim = _up_to_the_claim(fails=False)
    machine.do("abandon_reload", claim)
    [fence] = machine.subject.snapshot().device[0].fences
    assert clock(fence) == "compute 5, copy_out 6, copy_in 7"


def test_the_free_pages_after_s_was_removed_are_1_then_0() -> None:
    assert a_reload_then_a_step().moments["s has been removed"].device[0].free == (1, 0)
