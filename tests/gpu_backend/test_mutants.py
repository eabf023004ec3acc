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

from gpu_backend.attention import paged_attention
from gpu_backend.backend import TorchBackend, _layout_for, cpu_backend
from gpu_backend.copier import Copier, runs_of
from gpu_backend.device_cache import DeviceCache
from gpu_backend.host_pool import HostPool
from gpu_backend.kv_io import KVAccess
from gpu_backend.page_tables import Changed, PageTables, Table
from gpu_backend.plan_tensors import Addressing
from gpu_backend.queues import Staging
from gpu_backend.stamps import StampCode
from kvstate.manager import KVManager
from kvstate.ops import Plan, PlanView
from kvstate.testing import contract
from tests.mutants.registry import Patch, edit

from . import (
    test_attention,
    test_backend,
    test_copier,
    test_decoder,
    test_group_steps,
    test_groups,
    test_kv_io,
    test_page_tables,
    test_plan_tensors,
)


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


def together(*patches: Patch) -> Patch:
    """Return the patch that applies all of them."""

    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            yield

    return patched


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

SLIDING = (4, [[("a", "main", 7)], [("a", "main", 7)], [("a", "main", 1)]], False)
"""Page size and steps: the window leaves two pages."""

between_tiers = partial(example, test_copier.test_copies_between_tiers_equal_a_naive_loop_and_touch_nothing_else)
decode_and_packed = partial(example, test_plan_tensors.test_decode_and_packed_addressing_agree, *DECODE)


def window(views: list[tuple[int, int]], size: int) -> Callable[[], None]:
    """Return a test of attention over views of (stored tokens, span) in pages of 4."""
    return example(
        test_attention.test_a_token_sees_the_last_tokens_of_its_window_and_no_page_that_it_left, 4, views, size, 0
    )


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
    # Several groups in one memory.
    Mutant(
        "copied-into-another-group",
        "A copy writes the pages that the first group has under these numbers.",
        edit(TorchBackend._run, ("memory.pages(op.target_tier, group)", "memory.pages(op.target_tier)")),
        test_groups.test_copies_go_between_the_pages_of_their_own_group,
    ),
    Mutant(
        "copied-out-of-another-group",
        "A copy reads the pages that the first group has under these numbers.",
        edit(TorchBackend._run, ("memory.pages(op.source_tier, group)", "memory.pages(op.source_tier)")),
        test_groups.test_copies_go_between_the_pages_of_their_own_group,
    ),
    Mutant(
        "first-group-copied-only",
        "An op copies the pages of its first group; nobody misses those of a window at once.",
        edit(TorchBackend._run, ("in enumerate(op.copies)", "in enumerate(op.copies[:1])")),
        test_group_steps.test_offload_and_reload_keep_what_each_group_holds_and_copy_no_more,
    ),
    Mutant(
        "first-group-copied-only-in-the-decoder",
        "The same, found by what a model says.",
        edit(TorchBackend._run, ("in enumerate(op.copies)", "in enumerate(op.copies[:1])")),
        partial(test_decoder.test_offload_and_reload_in_the_middle_of_a_prompt_and_of_an_answer, "windows and full"),
    ),
    Mutant(
        "host-sectors-of-one-page",
        "The host pool takes memory for pages of the first group, not for sectors.",
        edit(HostPool.__init__, ("host_pages * layout.sector_bytes", "host_pages * layout.parts[0].page_bytes")),
        test_groups.test_every_sink_lies_at_the_beginning_of_the_extra_sector,
    ),
    Mutant(
        "host-pages-of-the-device",
        "The host pool is divided into as many pages as the device has.",
        edit(HostPool.__init__, ("layout.geometry().host_group_pages", "layout.sinks")),
        test_groups.test_every_sink_lies_at_the_beginning_of_the_extra_sector,
    ),
    Mutant(
        "sinks-forgotten",
        "The device has no page behind the last one of a group.",
        edit(DeviceCache.move, ("[sink + 1 for", "[sink for")),
        test_groups.test_every_sink_lies_at_the_beginning_of_the_extra_sector,
    ),
    Mutant(
        "tail-at-the-sink-of-another-group",
        "The spare rows of static buffers go to the page that the first group's sink has the number of.",
        edit(Addressing._values, ("zip(self._windows, self._sinks,", "zip(self._windows, self._sinks[:1] * 2,")),
        test_group_steps.test_static_buffers_of_every_group_keep_their_address_and_end_at_its_own_sink,
    ),
    Mutant(
        "padding-at-the-sink-of-another-group",
        "The row that is all sink names that of the first group in every table.",
        edit(PageTables.__init__, ("tensor.fill_(sink)", "tensor.fill_(sinks[0])")),
        test_group_steps.test_one_changed_group_takes_a_running_row_away_from_its_stream_in_all,
    ),
    Mutant(
        "rows-of-the-first-table",
        "The rows of every group are uploaded into the table of the first.",
        edit(PageTables._upload, ("(group * len(self._rows) + place)", "place")),
        test_group_steps.test_rows_hold_what_each_table_holds_wherever_its_window_is,
    ),
    Mutant(
        "held-pages-at-the-front",
        "What a table holds is uploaded to where it would be had no page left.",
        edit(PageTables._upload, ("start = max(start, table.skip)", "pass")),
        test_group_steps.test_rows_hold_what_each_table_holds_wherever_its_window_is,
    ),
    Mutant(
        "row-that-begins-later-believed",
        "A table that still holds what its row's table had left is taken to be in the row.",
        edit(PageTables._extend, ("if older.skip > table.skip:", "if False:")),
        test_group_steps.test_a_table_that_reaches_further_back_than_its_row_is_uploaded_again,
    ),
    Mutant(
        "decode-page-of-another-group",
        "Decode writes every group's token to the page of the first.",
        edit(Addressing._values, ("view.tables[group][-1]", "view.tables[0][-1]")),
        example(
            test_group_steps.test_decode_and_packed_addressing_agree_in_every_group, [3, 4, 9], ["b", "a", "c"], False
        ),
    ),
    Mutant(
        "pages-from-the-first-on",
        "The pages of a view are taken from the beginning of its row, whatever the window has left.",
        edit(Addressing._page_indices, ("place = own.skipped[view] + place", "pass")),
        example(test_group_steps.test_tensors_agree_with_the_plan_in_every_group, *SLIDING),
    ),
    Mutant(
        "left-pages-named",
        "The pages of a view are named with those that its window has left.",
        edit(Addressing._values, ("if window is not None:", "if False:")),
        example(test_group_steps.test_tensors_agree_with_the_plan_in_every_group, *SLIDING),
    ),
    Mutant(
        "left-pages-read",
        "They are gathered as well, and masked: what is there is NaN, and 0 times NaN is NaN.",
        together(
            edit(Addressing._values, ("if window is not None:", "if False:")),
            edit(paged_attention, ("begin = 0 if window is None else", "begin = 0 * ")),
        ),
        partial(test_decoder.test_a_prompt_in_chunks_is_continued_as_it_would_be_alone, "windows and full", (4, 4, 4)),
    ),
    Mutant(
        "window-one-too-wide",
        "A token of a chunk sees one token more than its window has, the first one of the chunk excepted.",
        edit(
            paged_attention,
            ("seen.triu(length - begin - span + 1 - window)", "seen.triu(length - begin - span - window)"),
        ),
        window([(9, 5)], 4),
    ),
    Mutant(
        "window-one-too-narrow",
        "A token sees one token less than its window has.",
        edit(
            paged_attention,
            ("seen.triu(length - begin - span + 1 - window)", "seen.triu(length - begin - span + 2 - window)"),
        ),
        window([(9, 5)], 4),
    ),
    Mutant(
        "window-begins-late",
        "What the first token of a view sees begins one token late.",
        edit(paged_attention, ("length - span + 1 - window)\n", "length - span + 2 - window)\n")),
        window([(9, 1)], 4),
    ),
    Mutant(
        "window-not-masked",
        "What is gathered is seen, by the last token of a chunk as by the first.",
        edit(paged_attention, ("    seen = seen.triu", "    seen.triu")),
        window([(9, 5)], 4),
    ),
    Mutant(
        "window-from-the-first-held-page",
        "A view's tokens are counted from the first page that it holds, and taken from the first of all.",
        edit(paged_attention, ("length - held, begin - held", "length - held, begin")),
        window([(19, 1)], 4),
    ),
    Mutant(
        "tensors-of-the-first-group",
        "A layer is addressed as the first group is.",
        edit(KVAccess.tensors, ("[group]", "[0]")),
        test_group_steps.test_the_default_layer_chooses_the_group_of_every_call,
    ),
    Mutant(
        "layer-of-the-model-in-its-group",
        "K and V go to the place in their group that the layer has in the model.",
        edit(KVAccess.write_kv, ("tensors.token_slot, place\n", "tensors.token_slot, (layer or 0) % 2\n")),
        test_group_steps.test_k_and_v_of_a_layer_go_to_its_group_and_nowhere_else,
    ),
    Mutant(
        "stamps-of-the-first-group",
        "A step's stamps are written into the first group only.",
        edit(TorchBackend.write, ("in enumerate(self.layout.groups)", "in enumerate(self.layout.groups[:1])")),
        partial(contract.every_group_reads_back_what_steps_write, cpu_backend),
    ),
    Mutant(
        "stamps-alike-in-all-groups",
        "What one group wrote reads as a stamp of another.",
        edit(StampCode.__init__, ("(group << 40)", "0")),
        test_groups.test_stamps_are_read_of_their_own_group_only,
    ),
    Mutant(
        "poison-in-another-group",
        "Freed pages are spoiled where the first group has these numbers.",
        edit(TorchBackend.poison, ("group(tier, group)", "group(tier, 0)")),
        test_groups.test_pages_are_poisoned_read_and_loaded_per_group,
    ),
    Mutant(
        "sectors-of-the-layout",
        "A geometry's sectors are taken for the smaller ones that its pages would need here.",
        edit(_layout_for, ("pages=geometry.pages * sectors", "pages=geometry.pages")),
        partial(test_groups.test_a_geometry_keeps_its_page_numbers_and_what_shares_its_bytes, (1, 2)),
    ),
)


def test_no_two_mutants_share_an_id() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
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
