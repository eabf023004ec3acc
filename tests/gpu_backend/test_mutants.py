"""Mutants: known bugs of copiers and page tables, put into the torch backend one by one; a named test objects.

A patch is taken back before the same test must pass, so that it passes shows too that nothing of the mutant is left.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    pytest.importorskip("torch")

import attrs

from gpu_backend.backend import TorchBackend, cpu_backend
from gpu_backend.copier import Copier, runs_of
from gpu_backend.kv_io import KVAccess
from gpu_backend.page_tables import Changed, PageTables, Table
from gpu_backend.plan_tensors import Addressing
from gpu_backend.queues import Staging
from gpu_backend.stamps import StampCode
from kvstate.manager import KVManager
from kvstate.ops import Plan, PlanView
from kvstate.testing import contract
from tests.mutants.registry import Patch, edit

from . import test_backend, test_copier, test_kv_io, test_page_tables, test_plan_tensors


@attrs.frozen
class Mutant:
    """A patch, and the test that must fail under it."""

    id: str
    what: str
    patch: Patch
    caught_by: Callable[..., None]


def example(test: Any, *values: Any) -> Callable[[], None]:
    """Return one example of a test that Hypothesis gives its values: nothing is searched, nothing is shrunk."""
    return partial(test.hypothesis.inner_test, *values)


def named(test: Any) -> str:
    """Return the name of a test, with values or without."""
    while isinstance(test, partial):
        test = test.func
    name: str = test.__name__
    return name


@contextmanager
def reckoned_when_planned() -> Iterator[None]:
    """A row's delta is reckoned from the plan before, launched or not; a launch uploads what was reckoned."""
    reckoned: dict[int, tuple[int, tuple[Table, ...]]] = {}
    make, row_of = KVManager.plan, PageTables._row_of

    def plan(self: KVManager, lease: Any) -> Any:
        made = make(self, lease)
        backend = self.backend
        if isinstance(made, Plan) and isinstance(backend, TorchBackend):
            tables = backend.memory.tables
            for view in made.in_step_order:
                place = tables._of.get((view.request, view.label))
                if place is not None and view.sources:
                    row = tables._rows[place]
                    held = 0 if row.tables is None else row.tables[0].count
                    reckoned[id(view.sources)] = (held, view.sources)
                    row.tables = view.sources
        return made

    def enter(self: PageTables, view: PlanView, changed: Changed) -> int:
        place = self._of.get((view.request, view.label))
        if place is None or id(view.sources) not in reckoned:
            return row_of(self, view, changed)
        start, tables = reckoned[id(view.sources)]
        for group, table in enumerate(tables):
            changed[group, place] = (start, table)
        return place

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KVManager, "plan", plan))
        stack.enter_context(mock.patch.object(PageTables, "_row_of", enter))
        yield


FORKS_LATE = edit(
    TorchBackend._run,
    (
        "if isinstance(op, (ForkCopy, CopyOut, CopyIn)):",
        "if isinstance(op, ForkCopy):\n"
        "            self.__dict__.setdefault('put_off', []).append(op)\n"
        "        elif isinstance(op, StepEnd):\n"
        "            for late in self.__dict__.pop('put_off', []):\n"
        "                for copies in late.copies:\n"
        "                    pages = self.memory.pages(Tier.DEVICE)\n"
        "                    self.copier.copy(late.queue, pages, pages, copies)\n"
        "        elif isinstance(op, (CopyOut, CopyIn)):",
    ),
)

APART = [(9, 6), (4, 1), (5, 2), (6, 3)]
"""Page copies in two runs, with room behind both."""
DECODE = ([3, 4, 9], ["b", "a", "c"])
"""Lengths, and who decodes: "b" begins a page, "a" fills one."""

between_tiers = partial(example, test_copier.test_copies_between_tiers_equal_a_naive_loop_and_touch_nothing_else)
decode_and_packed = partial(example, test_plan_tensors.test_decode_and_packed_addressing_agree, *DECODE)
tail = partial(example, test_plan_tensors.test_the_tail_of_static_buffers_is_at_the_sink)

MUTANTS = (
    # The copier.
    Mutant(
        "run-too-long",
        "A run copies one page more than was asked for.",
        edit(runs_of, ("end - begin)", "end - begin + 1)")),
        between_tiers(APART, 0, "out"),
    ),
    Mutant(
        "run-too-short",
        "A run stops one page early.",
        edit(runs_of, ("end - begin)", "end - begin - 1)")),
        between_tiers(APART, 0, "in"),
    ),
    Mutant(
        "last-run-lost",
        "The run behind the last border is not copied.",
        edit(runs_of, ("(*borders, len(keys))", "borders")),
        between_tiers(APART, 0, "out"),
    ),
    Mutant(
        "border-by-source",
        "A run ends where its sources do, wherever the targets go on.",
        edit(runs_of, ("if above != key + 1", "if above & _PAGE != (key & _PAGE) + 1")),
        partial(test_copier.test_a_run_ends_where_either_side_does, [4, 5, 6], [1, 2, 9], [(4, 1, 2), (6, 9, 1)]),
    ),
    Mutant(
        "runs-of-one",
        "Every page is a run of its own.",
        edit(runs_of, ("if above != key + 1", "")),
        example(test_copier.test_runs_cover_every_copy_once_and_are_maximal, APART),
    ),
    Mutant(
        "unsorted",
        "Copies are taken in the order in which they are listed.",
        edit(runs_of, ("keys.sort()", "pass")),
        test_copier.test_the_order_of_the_copies_does_not_matter,
    ),
    Mutant(
        "chain-inside-an-op",
        "A copy inside one storage reads a page after another copy of its op wrote it.",
        edit(Copier.copy, ("and not written.isdisjoint(sources)", "and not written")),
        test_copier.test_copies_whose_order_would_matter_are_refused,
    ),
    Mutant(
        "forks-behind-the-step",
        "A fork's copy reads the partly filled page after the step wrote it.",
        FORKS_LATE,
        partial(contract.forks_copy_the_partly_filled_page, cpu_backend),
    ),
    Mutant(
        "reload-from-the-device",
        "A reload takes its pages from the tier that it writes.",
        edit(TorchBackend._run, ("memory.pages(op.source_tier, group)", "memory.pages(Tier.DEVICE, group)")),
        partial(contract.offload_and_reload_keep_every_token, cpu_backend),
    ),
    # Page-table rows.
    Mutant(
        "delta-missing",
        "What a table has beyond its row is not uploaded.",
        edit(PageTables._extend, ("changed[group, place] = (start, tables[group])", "pass")),
        test_page_tables.test_a_step_uploads_what_its_tables_have_beyond_the_rows,
    ),
    Mutant(
        "delta-begins-late",
        "The delta of a row begins one page late.",
        edit(PageTables._extend, ("else held[group].count", "else held[group].count + 1")),
        test_page_tables.test_a_step_uploads_what_its_tables_have_beyond_the_rows,
    ),
    Mutant(
        "row-kept-after-a-cancelled-plan",
        "The delta is reckoned from the plan before, which was cancelled: the row is not uploaded whole again.",
        reckoned_when_planned,
        test_page_tables.test_d15_a_cancelled_plan_leaves_no_stale_row,
    ),
    Mutant(
        "row-kept-after-a-cancelled-plan-in-the-contract",
        "The same, found by what the step wrote.",
        reckoned_when_planned,
        partial(contract.a_cancelled_plan_leaves_no_stale_table, cpu_backend),
    ),
    Mutant(
        "row-kept-after-a-failed-launch",
        "A table as long as the one in its row is taken for the same.",
        edit(
            PageTables._extend,
            ("older.extends(table)", "older.count >= table.count"),
            ("table.extends(older)", "table.count > older.count"),
        ),
        test_page_tables.test_d15_a_launch_that_failed_leaves_no_stale_row,
    ),
    Mutant(
        "failed-upload-believed",
        "A row is taken to hold what an upload that failed would have put there.",
        edit(PageTables.enter, ("self._rows[place].tables = None", "pass")),
        partial(test_page_tables.test_an_upload_that_failed_is_made_again, 1),
    ),
    Mutant(
        "running-row-rewritten",
        "The row of a running step is rewritten when its request begins again.",
        edit(PageTables._row_of, ("place is None or self._rows[place].readers", "place is None")),
        test_page_tables.test_the_row_of_a_running_step_is_not_rewritten_when_its_request_begins_again,
    ),
    # Plan tensors.
    Mutant(
        "decode-slot-at-the-border",
        "A decoded token that begins a page goes to the slot behind the last one of the page before.",
        edit(Addressing._values, ("view.start % size", "(view.start - 1) % size + 1")),
        test_plan_tensors.test_a_token_at_a_page_border_goes_to_slot_0_of_the_next_page,
    ),
    Mutant(
        "packed-slot-at-the-border",
        "A packed token that begins a page goes to the slot behind the last one of the page before.",
        edit(Addressing._token_addresses, ("token % self._page_size", "(token - 1) % self._page_size + 1")),
        test_plan_tensors.test_a_token_at_a_page_border_goes_to_slot_0_of_the_next_page,
    ),
    Mutant(
        "packed-page-at-the-border",
        "A packed token that begins a page goes to the page before.",
        edit(Addressing._token_addresses, ("token // self._page_size", "(token - 1).relu() // self._page_size")),
        test_plan_tensors.test_a_token_at_a_page_border_goes_to_slot_0_of_the_next_page,
    ),
    Mutant(
        "full-page-has-length-0",
        "The last page of a view counts 0 tokens when it is full.",
        edit(Addressing._values, ("length and (length - 1) % size + 1", "length % size")),
        example(test_plan_tensors.test_tensors_agree_with_the_plan, 4, [[("a", "main", 8)]], False),
    ),
    Mutant(
        "one-page-more-when-full",
        "A view whose last page is full reads one page more.",
        edit(Addressing._values, ("-(-length // size)", "length // size + 1")),
        example(test_plan_tensors.test_tensors_agree_with_the_plan, 4, [[("a", "main", 8), ("b", "main", 3)]], False),
    ),
    Mutant(
        "decode-tail-on-page-0",
        "Decode leaves the spare rows of static buffers on page 0, which is somebody's.",
        edit(Addressing._values, ("for view in views] + [sink] * idle", "for view in views] + zeros")),
        test_plan_tensors.test_static_buffers_keep_their_address_whatever_is_planned,
    ),
    Mutant(
        "packed-tail-on-the-last-view",
        "The spare rows of static buffers write to the pages of the last view.",
        edit(Addressing._values, ("[SINK_ROW] * idle", "rows[-1:] * idle")),
        tail([3, 2], None),
    ),
    Mutant(
        "longer-graph-on-page-0",
        "Behind the bucket, where a longer graph reads, static buffers point to page 0.",
        edit(Addressing._values, ("[sink] * room[1]", "[0] * room[1]")),
        tail([3, 2], None),
    ),
    Mutant(
        "spare-rows-in-no-view",
        "The spare rows of static buffers belong to no view.",
        edit(Addressing._values, ("(view.span for view in views), *ones]", "(view.span for view in views), *zeros]")),
        test_plan_tensors.test_static_buffers_keep_their_address_whatever_is_planned,
    ),
    Mutant(
        "decode-differs-from-packed",
        "Decode takes the page of the token before; the packed path takes the right one.",
        edit(Addressing._values, ("view.tables[group][-1]", "view.tables[group][(view.start - 1) // size]")),
        decode_and_packed(False),
    ),
    Mutant(
        "packed-differs-from-decode",
        "The packed path takes the page of the token behind; decode takes the right one.",
        edit(Addressing._token_addresses, ("token // self._page_size", "(token + 1) // self._page_size")),
        decode_and_packed(False),
    ),
    Mutant(
        "decode-tail-differs-from-packed",
        "Decode puts the spare rows of static buffers into slot 1 of the sink; the packed path takes slot 0.",
        edit(
            Addressing._values,
            ("[view.start % size for view in views] + zeros", "[view.start % size for view in views] + [1] * idle"),
        ),
        decode_and_packed(True),
    ),
    Mutant(
        "packed-not-put-into-static-buffers",
        "What the packed path gathers does not get into the static buffers; decode does.",
        edit(Addressing._label, ("column[:] = found", "pass")),
        decode_and_packed(True),
    ),
    Mutant(
        "fresh-tensors-for-a-slot",
        "A slot's tensors are fresh ones, not its static buffers.",
        edit(Addressing._label, ("None if static is None else static.block", "None")),
        test_plan_tensors.test_static_buffers_keep_their_address_whatever_is_planned,
    ),
    # Staging buffers, and what goes through the tensors.
    Mutant(
        "staging-reused-unasked",
        "A staging buffer is used again without asking whether its upload has run.",
        edit(Staging._take, ("if self._buffers[place][1].reached():", "if True:")),
        test_page_tables.test_d7_a_staging_buffer_is_not_rewritten_before_its_upload_ran,
    ),
    Mutant(
        "staging-reused-unasked-in-a-step",
        "The same, found by the slots of steps that run late.",
        edit(Staging._take, ("if self._buffers[place][1].reached():", "if True:")),
        test_page_tables.test_d7_a_step_that_runs_late_uses_its_own_slots,
    ),
    Mutant(
        "staging-marked-before-its-upload",
        "The mark of a staging buffer is taken in front of its upload, so it is reached too early.",
        edit(
            Staging.upload,
            ("buffer[:count] = values", "buffer[:count] = values; mark = self._queues.mark(Queue.COMPUTE)"),
            ("(buffer, self._queues.mark(Queue.COMPUTE))", "(buffer, mark)"),
        ),
        test_page_tables.test_d7_a_staging_buffer_is_not_rewritten_before_its_upload_ran,
    ),
    Mutant(
        "layer-kept",
        "The default layer stays what it was when the next plan comes.",
        edit(KVAccess.rebind, ("self._layer = 0", "pass")),
        test_kv_io.test_layer_0_and_main_are_the_defaults_until_they_are_set_and_again_with_the_next_plan,
    ),
    Mutant(
        "write-from-the-first-token",
        "A segment's stamps are written where the first segment's tokens go.",
        edit(TorchBackend.write, ("slice(first, first + view.span)", "slice(0, view.span)")),
        test_backend.test_padding_and_void_segments_write_to_the_sink_only,
    ),
    Mutant(
        "stamps-of-one-layer",
        "Reading a stamp looks at the first layer's K only.",
        edit(StampCode.get, (".all(dim=3).all(dim=1)", ".all(dim=3)[:, 0]")),
        partial(test_kv_io.test_a_stamp_covers_every_byte_of_every_layer, "bfloat16"),
    ),
)


def test_no_two_mutants_share_an_id() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_named_test_fails_under_the_mutant_and_passes_without(mutant: Mutant) -> None:
    with mutant.patch():
        # Only what the test says counts: a patch that no longer fits fails here and now.
        try:
            mutant.caught_by()
        except (Exception, pytest.fail.Exception):
            pass
        else:
            raise AssertionError(f"{mutant.what} {named(mutant.caught_by)} did not object")
    mutant.caught_by()
