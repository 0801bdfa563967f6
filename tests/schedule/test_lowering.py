"""Promises of lowering, over drawn models, recipes and plans, and over a few fixed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe
from megatrain.schedule import Op, Schedule, ScheduleError, check, lower, lower_evaluation
from tests.schedule.fixtures import build, tiny_model, tiny_recipe
from tests.schedule.mutations import each_dep, is_barrier
from tests.schedule.oracle import harm
from tests.strategies import cases

Case = tuple[ModelSpec, Recipe, Plan]


@settings(max_examples=30, deadline=None)
@given(cases())
def test_what_lowering_makes_passes_check_and_oracle(case: Case) -> None:
    schedule = lower(*case)
    assert lower(*case, proven=False) == schedule
    check(schedule)
    assert harm(schedule, long=True) is None
    evaluation = lower_evaluation(*case)
    check(evaluation)
    assert harm(evaluation) is None
    assert evaluation.storages == schedule.storages


@settings(max_examples=12, deadline=None)
@given(cases(layers=(2, 3)))
def test_every_dep_is_needed(case: Case) -> None:
    for schedule in (lower(*case), lower_evaluation(*case)):
        for description, mutant in each_dep(schedule):
            if not is_barrier(schedule, description):
                with pytest.raises(ScheduleError):
                    check(mutant)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_prologue_is_the_body_without_what_came_before(case: Case) -> None:
    schedule = lower(*case)
    assert not any(op.prev for op in schedule.prologue.ops)
    if case[2].update == "next_forward":
        # What passes through the device for its update brings its weights with it, in place of their first load.
        passing = {b.index for b in case[0].blocks if case[2].placement_of(b.kind, b.layer) == "streamed_adam"}
        body = [op for op in schedule.body.ops if op.kind != "update" and op.what != "state"]
        prologue = [op for op in schedule.prologue.ops if not (op.kind == "load" and op.block in passing and op.nth == 1)]
        body = [replace(op, nth=2) if op.kind == "load" and op.block in passing else op for op in body]
        assert [_bound(op) for op in prologue] == [_bound(op) for op in body]
        updates = [op for op in schedule.body.ops if op.kind == "update" and op.block not in passing]
        assert [_bound(op) for op in schedule.epilogue.ops if op.block not in passing] == [_bound(op) for op in updates]
    else:
        assert schedule.prologue.ops == tuple(replace(op, prev=()) for op in schedule.body.ops)
        assert schedule.epilogue.ops == ()


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_block_is_loaded_again_only_when_no_slot_holds_it(case: Case) -> None:
    model, _, plan = case
    schedule = lower(*case)
    streamed = [b for b in model.blocks if plan.placement_of(b.kind, b.layer) in ("streamed", "streamed_adam")]
    passing = [b.index for b in streamed if plan.placement_of(b.kind, b.layer) == "streamed_adam"]
    staying = [b.index for b in model.blocks if plan.placement_of(b.kind, b.layer) == "device_weights"]
    layers = [b.index for b in streamed if b.kind == "layer"]
    for part in (schedule.prologue, schedule.body):
        loads = Counter(op.block for op in part.ops if op.kind == "load" and op.what is None and op.chunk == 0)
        if plan.update == "next_forward" and part.name == "body":
            # Updated in the slot that the forward reads: weights and state went up together.
            assert all(op.block in passing for op in part.ops if op.what == "state")
            loads.update(passing)
        # Forward fills the slots with the last layers; backward meets these first and finds them there.
        again = len(layers) - min(plan.weight_slots, len(layers))
        assert sum(loads[b] for b in layers) == len(layers) + again
        assert [b for b in layers if loads[b] == 2] == layers[:again]
        # Embedding and head are needed once: backward of the embedding scatters, the head's is part of the loss. But an update
        # in passing right after that needs the embedding's weights, and the head may have taken their slot.
        vocab = [b.index for b in streamed if b.kind != "layer"]
        displaced = plan.update == "during_backward" and 0 in passing and not model.tied and len(vocab) > plan.vocab_slots
        assert all(loads[b] == 1 + (b == 0 and displaced) for b in vocab)
        assert all(loads[b] == 1 for b in staying), "weights that stay are refreshed once a step"
        assert set(loads) == {b.index for b in streamed} | set(staying)
    evaluated = Counter(op.block for op in lower_evaluation(*case).prologue.ops if op.kind == "load" and op.chunk == 0)
    assert evaluated == dict.fromkeys([*(b.index for b in streamed), *staying], 1)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_micro_batches_pass_a_block_together_and_in_order(case: Case) -> None:
    model, recipe, _ = case
    schedule = lower(*case)
    last, micro_batches = len(model.blocks) - 1, range(recipe.micro_batches)
    passes: list[tuple[str, int | None, int]] = [("forward", b, m) for b in range(last) for m in micro_batches]
    passes += [("loss", None, m) for m in micro_batches]
    passes += [("backward", b, m) for b in reversed(range(last)) for m in micro_batches]
    for part in (schedule.prologue, schedule.body):
        assert [(o.kind, o.block, o.micro) for o in part.ops if o.kind in ("forward", "loss", "backward")] == passes
        packs = [o.block for o in part.ops if o.kind == "pack"]
        assert packs == list(reversed(range(last + 1)))
        order = [(o.kind, o.block) for o in part.ops if o.kind in ("backward", "pack")]
        assert order.index(("pack", last)) < order.index(("backward", last - 1)), "the head's gradient leaves first"


@settings(max_examples=40, deadline=None)
@given(cases())
def test_chunks_cover_every_element_once(case: Case) -> None:
    model, recipe, plan = case
    schedule = lower(*case)
    weight, link = DTYPE_NBYTES[recipe.precision], DTYPE_NBYTES[recipe.gradient_dtype]
    for block in model.blocks:
        placement = plan.placement_of(block.kind, block.layer)
        resident, passing = placement == "resident", placement == "streamed_adam"
        for kind, what, itemsize in (("update", "weights", weight), ("load", "weights", weight), ("save", "grad", link)):
            ops = [op for op in schedule.prologue.ops if op.kind == kind and op.block == block.index and op.nth == 1]
            if kind == "update":
                ops = [op for op in schedule.body.ops if op.kind == kind and op.block == block.index]
            ranges = [(a.start, a.stop) for op in ops if op.what is None for a in op.writes if a.tag.what == what]
            if (resident and kind != "update") or (passing and kind == "save" and plan.update == "during_backward"):
                assert ranges == []
                continue
            assert [r[0] for r in ranges] == [0, *(r[1] for r in ranges[:-1])]
            assert ranges[-1][1] == block.span * itemsize
            longest = max(stop - start for start, stop in ranges) // itemsize
            assert resident or plan.chunk_bytes == 0 or longest * weight <= max(plan.chunk_bytes, 128 * weight)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_load_waits_for_the_last_reader_of_its_slot_and_so_runs_depth_blocks_ahead(depth: int) -> None:
    schedule = build(tiny_model(layers=6), update="after", weight_slots=depth, chunk_bytes=0)
    ops = schedule.prologue.ops
    for layer in range(1, 7):
        load = next(op for op in ops if op.name == f"load[{layer}.0]")
        waits = [ops[d].name for d in load.deps]
        assert waits == ([f"forward[{layer - depth}.1]"] if layer > depth else [])
    # On the way back the slot freed first is that of the layer whose backward ran first.
    for layer in range(1, 7 - depth):
        load = next(op for op in ops if op.name == f"load[{layer}.0]#2")
        assert [ops[d].name for d in load.deps] == [f"backward[{layer + depth}.1]"]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pack_waits_for_the_save_that_used_its_gradient_slot(slots: int) -> None:
    schedule = build(tiny_model(layers=5), update="after", gradient_slots=slots, chunk_bytes=0)
    ops = schedule.prologue.ops
    for layer in range(1, 6):
        pack = next(op for op in ops if op.name == f"pack[{layer}]")
        saves = [ops[d].name for d in pack.deps if ops[d].kind == "save"]
        assert saves == ([f"save[{layer + slots}.0]"] if layer + slots <= 5 else [])


def test_after_begins_a_step_when_every_update_has_ended() -> None:
    schedule = build(update="after", placement={"default": "streamed", "0": "resident"})
    last = {op.lane: op.name for op in schedule.body.ops if op.kind == "update"}
    assert len(last) == 2
    assert set(schedule.body.ops[0].prev) == set(last.values())
    after_barrier, last_on_lane = {0}, {schedule.body.ops[0].lane: 0}
    for i, op in enumerate(schedule.body.ops):
        if after_barrier & {*op.deps, last_on_lane.get(op.lane, -1)}:
            after_barrier.add(i)
        last_on_lane[op.lane] = i
    assert after_barrier == set(range(len(schedule.body.ops))), "no lane runs ahead of the barrier"


def test_next_forward_updates_a_block_just_before_its_forward() -> None:
    order = [(op.kind, op.block) for op in build(tiny_model(layers=3), chunk_bytes=0, update="next_forward").body.ops]
    for block in range(4):
        assert order.index(("update", block)) < order.index(("forward", block))
        assert block == 0 or order.index(("update", block)) > order.index(("forward", block - 1))


def test_during_backward_updates_a_block_when_its_gradient_is_down() -> None:
    recipe = Recipe(micro_batches=2, seq_len=5, clip_norm=None)
    order = [op.name for op in build(recipe=recipe, chunk_bytes=0, update="during_backward").body.ops]
    for block in (2, 1):
        assert order.index(f"save[{block}.0]") < order.index(f"update[{block}.0]") < order.index(f"backward[{block - 1}.0]")


def test_blocks_that_are_updated_last_follow_all_others_in_the_order_of_the_next_forward() -> None:
    recipe = Recipe(seq_len=5, clip_norm=None)
    plan = {"update": "during_backward", "update_order": {"default": "first", "2": "last", "4": "last", "head": "last"}}
    schedule = build(tiny_model(layers=6), recipe=recipe, chunk_bytes=0, **plan)
    assert [op.block for op in schedule.body.ops if op.kind == "update"] == [6, 4, 2, 1, 0, 3, 5, 7]
    assert {s.name for s in schedule.storages if s.name.startswith("grad[")} == {"grad[3]", "grad[5]", "grad[7]"}


def test_resident_everywhere_moves_no_weights_and_no_gradients() -> None:
    schedule = build(placement={"default": "resident"}, update="after")
    copies = {op.name for op in schedule.body.ops if op.lane in ("h2d", "d2h")}
    assert copies == {"input[0]", "input[1]", "save[loss]", "save[norm]", "load[constants]"}
    assert all(op.lane == "compute" for op in schedule.body.ops if op.kind == "update")


# ---- state that passes through the device ----------------------------------------------------------------------------


def _moved(schedule: Schedule, ops: Iterable[Op], kind: str) -> Counter[tuple[str, int | None]]:
    """Host bytes that state copies of one kind touch, by plane and block."""
    moved: Counter[tuple[str, int | None]] = Counter()
    for op in ops:
        if op.kind == kind and op.what == "state":
            for a in (*op.reads, *op.writes):
                if schedule.storages[a.storage].space == "host":
                    moved[a.tag.what, a.tag.block] += a.nbytes
    return moved


@settings(max_examples=40, deadline=None)
@given(cases())
def test_state_that_passes_goes_up_and_down_exactly_once_a_step(case: Case) -> None:
    """Of every plane all bytes, each once. The CPU lane has no update for it; the compute lane has only those and the residents'.
    Its weights go up with it, unless its backward left them on the device."""
    model, recipe, plan = case
    schedule = lower(*case)
    weight, link = DTYPE_NBYTES[recipe.precision], DTYPE_NBYTES[recipe.gradient_dtype]
    planes = {"weights": weight, "m": 4, "v": 4} | ({"lo": 2} if recipe.precision == "bf16" else {})
    early = plan.update == "during_backward"
    up = {what: n for what, n in planes.items() if not (early and what == "weights")} | ({} if early else {"grad": link})
    placements = {b.index: plan.placement_of(b.kind, b.layer) for b in model.blocks}
    passing = [b for b in model.blocks if placements[b.index] == "streamed_adam"]
    late = plan.update == "next_forward"
    for part in (schedule.body, schedule.epilogue if late else schedule.prologue):
        assert _moved(schedule, part.ops, "load") == {(what, b.index): n * b.span for what, n in up.items() for b in passing}
        assert _moved(schedule, part.ops, "save") == {(what, b.index): n * b.span for what, n in planes.items() for b in passing}
        lanes = {b: {op.lane for op in part.ops if op.kind == "update" and op.block == b} for b in placements}
        assert lanes == {b: {"compute" if p in ("streamed_adam", "resident") else "cpu"} for b, p in placements.items()}
    idle = schedule.prologue if late else schedule.epilogue
    assert not any(op.kind == "update" or op.what == "state" for op in idle.ops)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_only_chunks_that_pass_touch_state_slots_and_one_at_a_time(case: Case) -> None:
    """A state slot that is given a chunk is read for its update and its way down before it is given another."""
    schedule = lower(*case)
    for part in (schedule.prologue, schedule.body, schedule.epilogue):
        held: dict[str, tuple[int | None, int | None, str]] = {}
        order = ["load", "update", "save"]
        for op in part.ops:
            for slot in {schedule.storages[a.storage].name.rpartition(".")[0] for a in (*op.reads, *op.writes)}:
                if slot.startswith("state."):
                    block, chunk, stage = held.get(slot, (None, None, "save"))
                    assert op.kind == order[(order.index(stage) + 1) % 3]
                    assert op.kind == "load" or (op.block, op.chunk) == (block, chunk)
                    held[slot] = (op.block, op.chunk, op.kind)
        assert all(stage == "save" for _, _, stage in held.values())


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_state_load_waits_for_the_way_down_of_what_its_slot_held(slots: int) -> None:
    """So `slots` chunks are on their way at a time. Layers of two chunks, each layer with a weight slot of its own."""
    fields = {"placement": {"default": "resident", "0-3": "streamed_adam"}, "weight_slots": 4}
    schedule = build(tiny_model(layers=4), update="after", state_slots=slots, **fields)
    ops = schedule.prologue.ops
    loads = [op for op in ops if op.kind == "load" and op.what == "state"]
    saves = [op.name for op in ops if op.kind == "save" and op.what == "state"]
    assert len(loads) == 8
    for k, load in enumerate(loads[slots:]):
        assert saves[k] in [ops[d].name for d in load.deps]
        assert not set(saves[k + 1 :]) & {ops[d].name for d in load.deps}


def test_next_forward_takes_weights_up_once_for_the_update_and_the_forward() -> None:
    schedule = build(tiny_model(layers=3), update="next_forward", placement={"default": "streamed_adam"}, chunk_bytes=0)
    order = [op.name for op in schedule.body.ops]
    for b in range(4):
        here = [order.index(name) for name in (f"load[state.{b}.0]", f"update[{b}.0]", f"forward[{b}.0]")]
        assert here == sorted(here)
        assert f"load[{b}.0]" not in order[: here[-1]]
        forward = schedule.body.ops[here[-1]]
        (written,) = (a for a in schedule.body.ops[here[1]].writes if a.tag.what == "weights")
        (read,) = (a for a in forward.reads if a.tag.what == "weights")
        assert written == read


# ---- inputs that wait on the host ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(cases())
def test_an_offloaded_input_goes_down_once_and_comes_back_once_unless_a_slot_still_holds_it(case: Case) -> None:
    model, recipe, plan = case
    schedule = lower(*case)
    offloaded = [b.index for b in model.blocks if b.layer is not None and plan.activations_of(b.layer) == "offload"]
    slots = min(plan.input_slots, len(offloaded))
    moved = offloaded[: len(offloaded) - slots]
    nbytes = recipe.tokens_per_micro_batch * model.hidden_size * DTYPE_NBYTES[recipe.precision]
    expected = [(b, m) for b in moved for m in range(recipe.micro_batches)]
    names = {s.name for s in schedule.storages if s.space == "device" and s.name.startswith(("hidden[", "islot."))}
    others = {f"hidden[{b.index}]" for b in model.blocks[1:] if b.index not in offloaded}
    assert names == others | {f"islot.{k}" for k in range(slots)}, "an offloaded input has no place of its own on the device"
    for part in (schedule.prologue, schedule.body):
        for kind, order in (("stash", moved), ("fetch", moved[::-1])):
            ops = [op for op in part.ops if op.kind == kind]
            assert [(op.block, op.micro) for op in ops] == [(b, m) for b in order for m in range(recipe.micro_batches)]
            assert [op.nbytes for op in ops] == [nbytes] * len(expected)
        place = {op.name: i for i, op in enumerate(part.ops)}
        for b, m in expected:
            assert place[f"forward[{b - 1}.{m}]"] < place[f"stash[{b}.{m}]"] < place[f"fetch[{b}.{m}]"]
            assert place[f"fetch[{b}.{m}]"] < place[f"backward[{b}.{m}]"]
    evaluation = lower_evaluation(*case)
    assert not any(op.kind in ("stash", "fetch") for op in evaluation.prologue.ops), "nothing will want it back"


@pytest.mark.parametrize("slots", [2, 3])
def test_a_fetch_waits_for_the_backward_that_frees_its_slot(slots: int) -> None:
    schedule = build(
        tiny_model(layers=6), tiny_recipe(micro_batches=1), update="after", activations={"default": "offload"}, input_slots=slots,
        weight_slots=6,
    )  # fmt: skip
    ops = schedule.prologue.ops
    for layer in range(1, 7 - slots):
        fetch = next(op for op in ops if op.name == f"fetch[{layer}.0]")
        assert [ops[d].name for d in fetch.deps] == [f"backward[{layer + slots}.0]"]


def test_unroll_is_prologue_bodies_epilogue() -> None:
    schedule = build()
    run = schedule.unroll(3)
    parts = [schedule.prologue, schedule.body, schedule.body, schedule.epilogue]
    assert [(p.part, p.position) for p in run] == [(k, i) for k, part in enumerate(parts) for i in range(len(part.ops))]
    assert all(d < me for me, p in enumerate(run) for d in p.deps)
    for placed in run:
        named = [parts[placed.part].ops[d].name for d in placed.op.deps] + list(placed.op.prev)
        assert sorted(run[d].op.name for d in placed.deps) == sorted(named)
        assert {run[d].part for d in placed.deps} <= {placed.part, placed.part - 1}


def _bound(op: Op) -> tuple[object, ...]:
    return op.name, op.lane, op.reads, op.writes
