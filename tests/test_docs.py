"""The documentation is true: generated pages are current, links resolve, examples run, nothing local has leaked in."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstate.backend import Failed, Landed
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, ForkCopy
from kvstate.prefix import page_keys
from kvstate.refusals import Refusal
from kvstate.testing import walk, world
from kvstate.testing.subject import MachineSubject
from kvstate.testing.transport import Network
from kvstate.transitions import VERBS
from kvstate.types import Geometry, LabelFork, Publication, Record, RequestConfig, RetentionPolicy, Segment, Step

ROOT = Path(__file__).resolve().parents[1]
NAMED = ("README.md", "CHANGELOG.md", "spec/README.md", "models/README.md")
PAGES = sorted([*(ROOT / page for page in NAMED), *(ROOT / "docs").rglob("*.md")])


def name(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the generated page


def test_the_generated_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_not_current_is_noticed_and_rewritten(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "semantics.md"
    monkeypatch.setattr(generate, "PAGE", page)

    def run(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        return int(generate.main())

    assert run("--check") == 1 and not page.exists()
    assert run() == 0
    assert run("--check") == 0
    page.write_text(text_of(page) + "by hand\n", encoding="utf-8")
    assert run("--check") == 1


def test_every_verb_but_op_failed_says_its_arrow(generate: ModuleType) -> None:
    assert [verb for verb in VERBS if generate.arrow(verb) == "–"] == ["op_failed"]


def test_the_manager_has_the_verbs_that_the_page_speaks_of(generate: ModuleType) -> None:
    named = set(re.findall(r"`(\w+)`", generate.AFTER_TRANSITIONS)) - {"KVManager", "Refused", "op_failed"}
    named -= {"landed", "failed", "cancelled", "ManagerPoisoned", "ManagerClosed"}
    same = set(VERBS) - {"landed", "failed", "cancelled", "op_failed"}
    same -= {f"{end}_{way}" for end in ("commit", "abandon") for way in ("offload", "reload", "fetch")}
    for verb in named | same:
        assert callable(getattr(KVManager, verb)), verb


# -- which refusals a verb can return: the code (an upper bound), programs, and walks against what is declared


class Reachable:
    """Which refusals the functions of ``kvstate.transitions`` construct, directly or through what they call.

    Methods are told from functions by a dot in front: ``x.remove()`` is not ``remove()``.
    """

    def __init__(self) -> None:
        self.makes: dict[str, set[str]] = {}
        self.calls: dict[str, set[str]] = {}
        for path in sorted((ROOT / "kvstate" / "transitions").glob("*.py")):
            tree = ast.parse(text_of(path))
            aliases = {
                alias.asname or alias.name: alias.name
                for node in tree.body
                if isinstance(node, ast.ImportFrom) and node.module == "kvstate.refusals"
                for alias in node.names
            }
            for owner in ast.walk(tree):
                for node in (node for node in ast.iter_child_nodes(owner) if isinstance(node, ast.FunctionDef)):
                    self._read("." * isinstance(owner, ast.ClassDef) + node.name, node, aliases)

    def _read(self, known_as: str, function: ast.FunctionDef, aliases: dict[str, str]) -> None:
        made, called = self.makes.setdefault(known_as, set()), self.calls.setdefault(known_as, set())
        for what in (node.func for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(what, ast.Attribute):
                called.add(f".{what.attr}")
            elif isinstance(what, ast.Name) and what.id in aliases:
                made.add(aliases[what.id])
            elif isinstance(what, ast.Name):
                called.add(what.id)

    def of(self, function: str) -> set[str]:
        found: set[str] = set()
        todo, seen = [function], {function}
        while todo:
            at = todo.pop()
            found |= self.makes.get(at, set())
            more = (self.calls.get(at, set()) & self.makes.keys()) - seen
            seen |= more
            todo += more
        return found


# A reload simulates its next step as if the request were back, so the checks of where its streams are do not run.
NOT_UNDER_A_RELOAD = {"FetchPending", "FetchFailed", "StreamNotOnDevice", "ForkPending", "NotEmpty", "PrefixLost"}


def test_no_verb_declares_a_refusal_that_its_code_cannot_make_and_none_is_left_out(generate: ModuleType) -> None:
    assert list(generate.REFUSALS) == list(VERBS)
    reachable = Reachable()
    for verb, function in VERBS.items():
        declared = set(generate.REFUSALS[verb])
        hints = typing.get_type_hints(function)
        if not any(one is Refusal for one in typing.get_args(hints["return"])):
            assert not declared, verb
            continue
        surplus = NOT_UNDER_A_RELOAD if verb == "claim_reload" else set()
        assert reachable.of(function.__name__) == declared | surplus, verb


Seen = set[tuple[str, str]]


def declared_pairs(generate: ModuleType) -> Seen:
    return {(verb, refusal) for verb, refusals in generate.REFUSALS.items() for refusal in refusals}


class Machine:
    """A State over a memory backend that notes which verb was refused with what."""

    def __init__(self, seen: Seen, pages: int = 4, host_pages: int = 4) -> None:
        self.subject = MachineSubject(Geometry(pages=pages, page_size=2, host_pages=host_pages), Network(), "kv")
        self.seen = seen

    def do(self, verb: str, *args: Any) -> Any:
        result = self.subject.apply(verb, *args)
        if isinstance(result, Refusal):
            self.seen.add((verb, type(result).__name__))
        return result

    def admit(self, request: str, span: int = 1, label: str = "main", **kwargs: Any) -> Any:
        return self.do("admit", Step([Segment(request, label, span)], **kwargs))

    def launch(self, lease: Any) -> Any:
        plan = self.do("plan", lease)
        self.do("launch_enter", plan)
        self.do("launch_exit", lease)
        return plan

    def run(self, request: str, span: int, **kwargs: Any) -> None:
        self.do("ingest", request)
        lease = self.admit(request, span, **kwargs)
        self.launch(lease)
        self.do("commit", lease)

    def fetch(self, request: str, **changes: Any) -> Any:
        record = {"length": 3, "released": 0, "page_size": 2, "pages": ((0, 1),), "on_host": False, "address": "far"}
        world_size = changes.pop("world_size", 1)
        published = Record(**{**record, "incarnation": 1, "epoch": 0, **changes})
        return self.do("claim_retrieve", request, Publication(request, world_size, {0: {"main": published}}))


def unknown_requests(seen: Seen) -> None:
    m = Machine(seen)
    m.admit("nobody")
    m.fetch("nobody")
    for verb in ("claim_offload", "claim_reload", "cancel_retrieve", "reset", "remove"):
        m.do(verb, "nobody")
    m.do("ingest", "r")
    m.do("ingest", "r", RequestConfig(retention={"main": RetentionPolicy(2)}))


def leases_in_the_wrong_order(seen: Seen) -> None:
    m = Machine(seen)
    m.do("ingest", "r")
    first, second = m.admit("r"), m.admit("r")
    m.do("commit", first)
    m.do("launch_exit", first)
    m.do("launch_enter", m.do("plan", second))
    plan = m.launch(first)
    m.do("plan", first)
    m.do("launch_enter", plan)
    m.launch(second)
    m.do("commit", second)
    m.do("commit", first)
    ended = (("commit", first), ("abort", first), ("plan", first), ("launch_enter", plan), ("launch_exit", first))
    for verb, what in ended:
        m.do(verb, what)


def no_room(seen: Seen) -> None:
    m = Machine(seen, host_pages=1)
    m.run("r", 4)
    m.do("ingest", "s")
    m.admit("s", 5)
    m.admit("s", 9)
    m.do("claim_offload", "r")
    m.fetch("s", length=6)
    m.fetch("s", length=9)
    m = Machine(seen)
    m.run("r", 6)
    m.do("commit_offload", m.do("claim_offload", "r"))
    m.do("claim_reload", "r", Step([Segment("r", span=3)]))
    m.run("s", 4)
    m.do("claim_reload", "r")
    Machine(seen, host_pages=0).do("claim_offload", "r")
    m = Machine(seen, host_pages=0)
    m.do("ingest", "r")
    m.do("claim_offload", "r")


def requests_that_are_elsewhere(seen: Seen) -> None:
    m = Machine(seen)
    m.run("r", 1)
    m.do("claim_reload", "r")
    lease = m.admit("r", post_forks=[LabelFork("main", "cfg")])
    m.admit("r", label="cfg")
    m.do("claim_offload", "r")
    m.fetch("r")
    m.do("abort", lease)
    claim = m.do("claim_offload", "r")
    m.admit("r")
    m.do("claim_offload", "r")
    m.fetch("r")
    m.do("abandon_offload", claim)
    m.do("commit_offload", claim)
    m.do("abandon_offload", claim)
    m.do("commit_offload", m.do("claim_offload", "r"))
    claim = m.do("claim_reload", "r")
    m.do("commit_reload", claim)
    m.do("commit_reload", claim)
    m.do("abandon_reload", claim)


def copies_that_fail(seen: Seen) -> None:
    m = Machine(seen)
    m.run("r", 1)
    m.subject.fail_next(CopyOut)
    m.do("commit_offload", claim := m.do("claim_offload", "r"))
    m.do("abandon_offload", claim)
    m.do("commit_offload", m.do("claim_offload", "r"))
    m.subject.fail_next(CopyIn)
    m.do("commit_reload", claim := m.do("claim_reload", "r"))
    m.do("abandon_reload", claim)
    m.do("commit_reload", m.do("claim_reload", "r"))
    lease = m.admit("r", label="cfg", pre_forks=[LabelFork("main", "cfg")])
    m.subject.fail_next(ForkCopy)
    m.launch(lease)
    m.do("commit", lease)


def fetches(seen: Seen) -> None:
    m = Machine(seen, pages=8)
    m.run("r", 1)
    m.fetch("r", world_size=2)
    m.fetch("r", on_host=True)
    m.fetch("r", page_size=4)
    for outcome in (Landed, Failed):
        m.do("ingest", outcome.__name__)
        [fetch] = m.fetch(outcome.__name__).fetches
        for _ in ("pending", "ended"):
            m.admit(outcome.__name__)
            m.do("claim_offload", outcome.__name__)
            m.fetch(outcome.__name__)
            m.do("key", outcome.__name__, (1, 2))
            m.do(*(("landed", fetch) if outcome is Landed else ("failed", fetch, "lost")))
        m.do("cancelled", fetch)
        m.do("abandon_fetch", fetch)


def prefixes(seen: Seen) -> None:
    m = Machine(seen)
    m.do("key", "r", (1, 2))
    m.run("r", 2)
    m.do("key", "r", (1, 2, 3))
    m.do("ingest", "s")
    keys = page_keys((1, 2), 2)
    for request in ("r", "s"):
        m.do("admit", Step([Segment(request, prefix=keys)]))
    m.do("claim_offload", "r")
    m.do("key", "r", (1, 2))


PROGRAMS = (
    unknown_requests,
    leases_in_the_wrong_order,
    no_room,
    requests_that_are_elsewhere,
    copies_that_fail,
    fetches,
    prefixes,
)


def test_every_refusal_that_is_declared_is_returned_by_some_program_and_no_other(generate: ModuleType) -> None:
    seen: Seen = set()
    for program in PROGRAMS:
        program(seen)
    assert seen == declared_pairs(generate)


@pytest.mark.slow
def test_a_walk_sees_no_refusal_that_is_not_declared(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Seen = set()
    apply = world.Node._apply

    def noted(node: world.Node, call: world.Call, verb: str, *args: Any) -> Any:
        result = apply(node, call, verb, *args)
        if isinstance(result, Refusal):
            seen.add((verb, type(result).__name__))
        return result

    monkeypatch.setattr(world.Node, "_apply", noted)
    for index in range(60):
        walk.program(0, index, walk.SIZES[index % len(walk.SIZES)])
    assert len(seen) > 20
    assert seen <= declared_pairs(generate)


# -- links


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text_of(path), flags=re.M | re.S)):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name(page)} links out of the repository: {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)} links to {link}"


def test_the_index_links_every_page_of_the_documentation() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in links(index)}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index} <= linked


def test_decisions_have_their_three_parts_and_consecutive_numbers() -> None:
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [path.name[:4] for path in decisions] == [f"{place:04}" for place in range(1, len(decisions) + 1)]
    for path in decisions:
        text = text_of(path)
        assert text.startswith(f"# {path.name[:4]} ")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Cost"], path.name


# -- examples


def python_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{name(page)}-{place}")
        for page in PAGES
        for place, block in enumerate(re.findall(r"^```(?:python|py)\n(.*?)^```$", text_of(page), re.M | re.S))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("block", python_blocks())
def test_a_block_of_python_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- what documentation does not say

LOCAL = {
    "an issue number": r"(?<![\w&/])#\d+\b|\bissues? \d+\b|\bpart \d+\b",
    "a path of some machine": r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|opt|srv)\b|\b[A-Z]:\\\\",
    "a registry or a local host": r"pypi\.|pythonhosted|artifactory|nexus|index-url|localhost|\b\d+\.\d+\.\d+\.\d+\b",
}


@pytest.mark.parametrize("page", PAGES, ids=name)
@pytest.mark.parametrize("what", LOCAL)
def test_a_page_does_not_mention(what: str, page: Path) -> None:
    found = re.search(LOCAL[what], text_of(page), re.IGNORECASE)
    assert found is None, f"{name(page)} mentions {what}: {found.group()!r}"


@pytest.mark.parametrize("text", ["see issue 12", "fixed in #12", "as /home/me/x", "from pypi.example.org", "10.0.0.1"])
def test_such_a_mention_would_be_seen(text: str) -> None:
    assert any(re.search(pattern, text, re.IGNORECASE) for pattern in LOCAL.values())
