"""Promises of lowering, over drawn models, recipes and plans, and over a few fixed ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe
from megatrain.schedule import Op, ScheduleError, check, lower, lower_evaluation
from tests.schedule.fixtures import build, tiny_model
from tests.schedule.mutations import each_dep, is_barrier
from tests.schedule.oracle import harm
from tests.strategies import cases

Case = tuple[ModelSpec, Recipe, Plan]


@settings(max_examples=30, deadline=None)
@given(cases())
def test_what_lowering_makes_passes_check_and_oracle(case: Case) -> None:
    schedule = lower(*case)
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
        body = [op for op in schedule.body.ops if op.kind != "update"]
        assert [_bound(op) for op in schedule.prologue.ops] == [_bound(op) for op in body]
        updates = [op for op in schedule.body.ops if op.kind == "update"]
        assert [_bound(op) for op in schedule.epilogue.ops] == [_bound(op) for op in updates]
    else:
        assert schedule.prologue.ops == tuple(replace(op, prev=()) for op in schedule.body.ops)
        assert schedule.epilogue.ops == ()


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_block_is_loaded_again_only_when_no_slot_holds_it(case: Case) -> None:
    model, _, plan = case
    schedule = lower(*case)
    streamed = [b for b in model.blocks if plan.placement_of(b.kind, b.layer) == "streamed"]
    staying = [b.index for b in model.blocks if plan.placement_of(b.kind, b.layer) == "device_weights"]
    layers = [b.index for b in streamed if b.kind == "layer"]
    for part in (schedule.prologue, schedule.body):
        loads = Counter(op.block for op in part.ops if op.kind == "load" and op.what is None and op.chunk == 0)
        # Forward fills the slots with the last layers; backward meets these first and finds them there.
        again = len(layers) - min(plan.weight_slots, len(layers))
        assert sum(loads[b] for b in layers) == len(layers) + again
        assert [b for b in layers if loads[b] == 2] == layers[:again]
        # Embedding and head are needed once: backward of the embedding scatters, the head's is part of the loss.
        assert all(loads[b.index] == 1 for b in streamed if b.kind != "layer")
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
        resident = plan.placement_of(block.kind, block.layer) == "resident"
        for kind, what, itemsize in (("update", "weights", weight), ("load", "weights", weight), ("save", "grad", link)):
            ops = [op for op in schedule.body.ops if op.kind == kind and op.block == block.index and op.nth == 1]
            ranges = [(a.start, a.stop) for op in ops for a in op.writes if a.tag.what == what]
            if resident and kind != "update":
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


def test_resident_everywhere_moves_no_weights_and_no_gradients() -> None:
    schedule = build(placement={"default": "resident"}, update="after")
    copies = {op.name for op in schedule.body.ops if op.lane in ("h2d", "d2h")}
    assert copies == {"input[0]", "input[1]", "save[loss]", "save[norm]", "load[constants]"}
    assert all(op.lane == "compute" for op in schedule.body.ops if op.kind == "update")


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
