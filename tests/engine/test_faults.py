"""What goes wrong is seen: a schedule that is not run as written, a lane that fails or dies, a gradient that is not finite."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from analysis.compare import ForeignTrace, compare
from megatrain.engine import executor as executor_module
from megatrain.engine.backend import Backend, Ran
from megatrain.engine.clock import Cancelled, Deadlock, RealClock, Signal, VirtualClock
from megatrain.engine.engine import Engine
from megatrain.engine.executor import Executor, Issue, LaneError, PartRun, run_schedule
from megatrain.engine.memory import Memory
from megatrain.engine.null import NullBackend
from megatrain.hardware import H200
from megatrain.plan import Placement, Plan, UpdatePolicy
from megatrain.schedule import LANES, Access, Lane, Op, Part, lower
from megatrain.schedule.nouns import Kind
from sim.simulate import simulate
from tests.engine.small import Disturbed, Joining, poisoned, random_batches, random_weights, small_model, small_recipe, train

PLAN = Plan(weight_slots=2, chunk_bytes=4096, update="next_forward")
EARLY = Plan(weight_slots=2, chunk_bytes=4096, update="during_backward", placement={"2": "resident"})
PASSING = Plan(
    placement={"default": "streamed_adam"}, activations={"default": "offload"}, weight_slots=2, chunk_bytes=4096,
    update="next_forward",
)  # fmt: skip
KINDS: list[tuple[Kind, str | None, Plan]] = [
    *((kind, None, {"constants": EARLY, "stash": PASSING, "fetch": PASSING}.get(kind, PLAN)) for kind in get_args(Kind)),
    ("load", "state", PASSING), ("update", None, PASSING), ("save", "state", PASSING),
]  # fmt: skip
"""Every kind, with a plan that has it; and those that a block's state passes through the device by."""

AT_ONCE_S = 20
"""Two seconds is the promise, which takes a core to keep; a wait that nothing ends takes for ever."""


def run_and_compare(plan: Plan = PLAN) -> None:
    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, plan, random_weights(model)) as engine:
        for batch in random_batches(model, recipe, 3):
            engine.step(batch)
        compare(engine.schedule, simulate(engine.schedule, H200, steps=3), engine.trace())


def test_an_engine_that_runs_the_schedule_passes_compare() -> None:
    run_and_compare()
    run_and_compare(PASSING)


def test_an_engine_that_swaps_two_ops_fails_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PartRun.order_of

    def swapped(self: PartRun, lanes: Sequence[Lane]) -> list[int]:
        order = honest(self, lanes)
        if "d2h" in lanes and self.part.name == "body":
            order[-2], order[-3] = order[-3], order[-2]  # two chunks of the last gradient: nothing else would notice
        return order

    monkeypatch.setattr(PartRun, "order_of", swapped)
    with pytest.raises(ForeignTrace, match="body"):
        run_and_compare()


def test_an_engine_that_drops_an_op_fails_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Executor._run_op

    def dropping(self: Executor, run: PartRun, i: int) -> None:
        if run.part.ops[i].name == "update[3.1]":
            run.issued[i].mark = self.backend.lanes.mark("cpu", timed=True)
            self.clock.signal(run.issued[i])
        else:
            honest(self, run, i)

    monkeypatch.setattr(Executor, "_run_op", dropping)
    with pytest.raises(ForeignTrace, match="body"):
        run_and_compare()


def test_an_engine_that_copies_to_the_wrong_slot_fails_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Memory.bind

    def misrouted(self: Memory, access: Access) -> Tensor:
        storage = self.storages[access.storage]
        if storage.name == "slot.layer.1":
            # Every use of the second slot goes to the first: consistent, and wrong.
            return honest(self, access._replace(storage=next(i for i, s in enumerate(self.storages) if s.name == "slot.layer.0")))
        return honest(self, access)

    monkeypatch.setattr(Memory, "bind", misrouted)
    with pytest.raises(ForeignTrace, match="prologue"):
        run_and_compare()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("pack[4]", PLAN), ("backward[2.0]", PLAN), ("load[3.1]", PLAN), ("clip", PLAN), ("fetch[2.1]", PASSING),
        ("load[state.4.0]", PASSING), ("save[state.4.0]", PASSING),
    ],
)  # fmt: skip
def test_an_engine_that_forgets_a_wait_fails_compare(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PartRun.deps_of
    forgotten: list[str] = []

    def forgetful(self: PartRun, i: int) -> list[tuple[str, Issue]]:
        deps = honest(self, i)
        if self.outline.names[i] == name and deps:
            forgotten.append(deps[-1][0])
            return deps[:-1]
        return deps

    monkeypatch.setattr(PartRun, "deps_of", forgetful)
    with pytest.raises(ForeignTrace):
        run_and_compare(plan)
    assert forgotten


# ---- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "what", "plan"), KINDS)
def test_an_exception_in_a_kernel_ends_the_run_and_names_the_op(kind: Kind, what: str | None, plan: Plan) -> None:
    failed_at: list[tuple[float, str]] = []

    def failing(inner: Any) -> Backend:
        seen = 0

        def before(op: Op) -> None:
            nonlocal seen
            meant = op.kind == kind and what in (None, op.what)
            seen += meant
            if meant and seen == 5:
                failed_at.append((time.monotonic(), op.name))
                raise OSError("no more of it")

        return Disturbed(inner=inner, before=before)

    model, recipe = small_model(), small_recipe(clip_norm=None if plan is EARLY else 0.5)
    with Engine(model, recipe, plan, random_weights(model), wrap=failing) as engine:
        with pytest.raises(LaneError, match="no more of it") as error:
            for batch in random_batches(model, recipe, 20):
                engine.step(batch)
            engine.flush()
        when, name = failed_at[0]
        assert time.monotonic() - when < AT_ONCE_S
        assert f":{name} on " in str(error.value)
        assert isinstance(error.value.__cause__, OSError)
        with pytest.raises(LaneError, match="no more of it"):
            engine.step(random_batches(model, recipe, 1)[0])


def test_updates_that_a_series_left_out_end_the_run() -> None:
    class Short(Joining):
        def run_series(self, ops: Sequence[Op], step: Any, count: int) -> Sequence[tuple[Any, Ran, Any]]:
            return super().run_series(ops, step, count)[:-1]

    model, recipe = small_model(), small_recipe()
    engine = Engine(model, recipe, PLAN, random_weights(model), wrap=lambda inner: Short(inner=inner))
    with engine, pytest.raises(LaneError, match=r"update\[.*: left out"):
        for batch in random_batches(model, recipe, 20):
            engine.step(batch)


@pytest.mark.parametrize("end", ["SystemExit", "KeyboardInterrupt", "return"])
@pytest.mark.parametrize("lane", LANES)
def test_a_lane_thread_that_dies_ends_the_run(lane: Lane, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends in the middle of a run: by an exception meant to end a program, or by returning without a last word."""
    honest_op, honest_lanes = Executor._run_op, Executor._run_lanes
    died: list[float] = []

    def dying(self: Executor, run: PartRun, i: int) -> None:
        if run.part.ops[i].lane == lane and run.number == 1 and end != "return":
            died.append(time.monotonic())
            raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[end]
        honest_op(self, run, i)

    def returning(self: Executor, lanes: tuple[Lane, ...]) -> None:
        if lane not in lanes or end != "return":
            honest_lanes(self, lanes)
            return
        self.backend.lanes.enter(lanes)
        run = self._mail[lanes].take()
        for i in run.order_of(lanes):
            self._run_op(run, i)
        died.append(time.monotonic())

    monkeypatch.setattr(Executor, "_run_op", dying)
    monkeypatch.setattr(Executor, "_run_lanes", returning)
    model, recipe = small_model(), small_recipe()
    message = f"thread lane {lane} died" if end == "return" else f"body .* on {lane}: {end}"
    with Engine(model, recipe, PLAN, random_weights(model)) as engine:
        with pytest.raises(LaneError, match=message):
            for batch in random_batches(model, recipe, 20):
                engine.step(batch)
            engine.flush()
        assert time.monotonic() - died[0] < AT_ONCE_S


@pytest.mark.parametrize("clock", [RealClock, VirtualClock])
def test_a_thread_that_vanishes_is_noticed(clock: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even its cleanup runs: the waits themselves find out."""
    honest = Executor._run_lanes

    def vanishing(self: Executor, lanes: tuple[Lane, ...]) -> None:
        if "d2h" not in lanes:
            honest(self, lanes)

    monkeypatch.setattr(executor_module.Executor, "_run_lanes", vanishing)
    schedule = lower(small_model(), small_recipe(), PLAN)
    started = time.monotonic()
    with pytest.raises(LaneError, match="lane d2h died"):
        run_schedule(schedule, NullBackend(schedule, lambda op: 10, clock()), 2)
    assert time.monotonic() - started < AT_ONCE_S


def test_all_waiting_and_nothing_due_names_the_ops() -> None:
    """Two ops that wait for each other cannot be written down, so the schedule is broken by hand behind check's back."""
    load = Op(kind="load", lane="h2d", block=3, chunk=1, deps=(1,))
    forward = Op(kind="forward", lane="compute", block=3, micro=0, deps=(0,))
    schedule = lower(small_model(), small_recipe(), PLAN)
    executor = Executor(NullBackend(schedule, lambda op: 10))
    try:
        executor.submit(Part(name="body", ops=(load, forward)))
        with pytest.raises(LaneError) as error:
            executor.drain()
        assert isinstance(error.value.__cause__, Deadlock)
        assert "0:load[3.1] waits for 1:forward[3.0]; 1:forward[3.0] waits for 0:load[3.1]" in str(error.value)
    finally:
        executor.close()


def test_waits_after_a_failure_do_not_start() -> None:
    for clock in (RealClock(), VirtualClock()):
        clock.cancel(ValueError("first"))
        clock.cancel(ValueError("second"))
        with pytest.raises(Cancelled, match="first"):
            clock.wait(Signal("never"), "somebody")
        with pytest.raises(Cancelled, match="first"):
            clock.sleep(10**12, "somebody")


# ---- gradients that are not finite -------------------------------------------------------------------------------------


def corrupted(inner: Any, value: float, step_number: int) -> Backend:
    """One element of one layer's accumulated gradient becomes `value` in the given step."""
    seen = 0

    def before(op: Op) -> None:
        nonlocal seen
        if op.name == "pack[4]":
            seen += 1
            if seen == step_number:
                inner.memory.bind(op.reads[0]).view(torch.float32)[40] = value

    return Disturbed(inner=inner, before=before)


@pytest.mark.parametrize("placement", ["streamed", "resident", "streamed_adam"])
@pytest.mark.parametrize("policy", ["after", "next_forward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(policy: str, placement: str, value: float) -> None:
    """Every bit of state stays, the step count and learning rate do not advance, the next batch is the next batch."""
    model, recipe = small_model(), small_recipe(precision="bf16")
    activations = {"default": "offload" if placement == "streamed_adam" else "recompute"}
    plan = Plan(placement={"default": placement}, activations=activations, update=policy, chunk_bytes=2048)  # type: ignore[dict-item, arg-type]
    batches = random_batches(model, recipe, 3)
    with (
        Engine(model, recipe, plan, random_weights(model), wrap=lambda b: corrupted(b, value, 2)) as engine,
        Engine(model, recipe, plan, random_weights(model)) as clean,
    ):
        results = [engine.step(batch) for batch in batches]
        for batch in (batches[0], batches[2]):
            clean.step(batch)
        assert [r.skipped for r in results] == [None, "non-finite gradient in model.layers.3.self_attn.q_proj.weight", None]
        assert engine.applied_updates == clean.applied_updates == 2
        ours, theirs = engine.state_dict(), clean.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        mine, others = engine.moments(), clean.moments()
        assert all(torch.equal(mine[n].m, others[n].m) and torch.equal(mine[n].v, others[n].v) for n in mine)


@pytest.mark.parametrize("policy", ["after", "next_forward"])
def test_a_skipped_step_writes_back_what_it_brought(policy: str) -> None:
    """State still passes through the device in a step that is skipped: it comes down as it went up, padding included."""
    model, recipe = small_model(tied=True), small_recipe(precision="bf16")
    plan = replace(PASSING, update=policy, state_slots=1)  # type: ignore[arg-type]
    batches, moved = random_batches(model, recipe, 3), 0

    def counting(inner: Any) -> Backend:
        def before(op: Op) -> None:
            nonlocal moved
            moved += op.kind == "save" and op.what == "state"

        return Disturbed(inner=corrupted(inner, float("nan"), 3), before=before)

    with Engine(model, recipe, plan, random_weights(model), wrap=counting) as engine:
        planes = [f"{what}[{b.index}]" for b in model.blocks for what in ("weights", "lo", "m", "v")]
        for batch in batches[:2]:
            engine.step(batch)
        engine.flush()
        before, moved_before = {name: engine.memory.named(name).clone() for name in planes}, moved
        assert engine.step(batches[2]).skipped is not None
        engine.flush()
        assert moved > moved_before
        assert [name for name in planes if not torch.equal(before[name], engine.memory.named(name))] == []
        assert engine.applied_updates == 2


@pytest.mark.parametrize("placement", ["streamed", "streamed_adam"])
def test_during_backward_stops_on_a_gradient_that_is_not_finite(placement: Placement) -> None:
    model, recipe = small_model(), small_recipe(clip_norm=None)
    plan = Plan(placement={"default": placement}, update="during_backward")
    with (
        Engine(model, recipe, plan, random_weights(model), wrap=lambda b: corrupted(b, float("nan"), 1)) as engine,
        pytest.raises(LaneError, match=r"clip on cpu: NonFiniteGradient: .*layers\.3.*start again from saved weights"),
    ):
        engine.step(random_batches(model, recipe, 1)[0])
        engine.flush()


@pytest.mark.parametrize("placement", ["streamed", "streamed_adam"])
@pytest.mark.parametrize("policy", ["after", "next_forward", "during_backward"])
def test_a_batch_without_a_valid_token_changes_nothing(policy: UpdatePolicy, placement: Placement) -> None:
    model = small_model()
    recipe = small_recipe(clip_norm=None)
    batch = random_batches(model, recipe, 1)[0]
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    plan = Plan(placement={"default": placement}, update=policy)
    with Engine(model, recipe, plan, random_weights(model)) as engine:
        before = engine.state_dict()
        result = engine.step(batch)
        assert result.skipped == "no valid token in the batch"
        assert result.loss == 0
        after = engine.state_dict()
        assert engine.applied_updates == 0
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("plan", "op_name", "slots"),
    [
        (PLAN, "backward[3.0]", ("slot.layer.0", "slot.layer.1")),
        (PASSING, "backward[3.0]", ("slot.layer.0", "slot.layer.1")),
        (PASSING, "backward[3.0]", ("islot.0", "islot.1")),
    ],
)
def test_poison_that_comes_too_early_is_seen(plan: Plan, op_name: str, slots: tuple[str, ...]) -> None:
    """The harness of the bitwise tests bites: poison put down one op too early changes the result."""

    def too_early(inner: Any) -> Backend:
        def before(op: Op) -> None:
            if op.name == op_name:
                for slot in slots:
                    inner.memory.named(slot).fill_(0xFF)

        return Disturbed(inner=inner, before=before)

    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, plan, random_weights(model), wrap=too_early) as engine:
        assert engine.step(random_batches(model, recipe, 1)[0]).skipped is not None


def test_poison_in_state_on_its_way_is_seen() -> None:
    """Between the update of a chunk and its way down: the moments that arrive are NaN."""

    def too_early(inner: Any) -> Backend:
        def before(op: Op) -> None:
            if op.name == "save[state.3.1]":
                for a in op.reads:
                    inner.memory.bind(a).fill_(0xFF)

        return Disturbed(inner=inner, before=before)

    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, PASSING, random_weights(model), wrap=too_early) as engine:
        engine.step(random_batches(model, recipe, 1)[0])
        assert any(bool(m.isnan().any()) for m, _ in engine.moments().values())


@pytest.mark.parametrize("update", ["after", "next_forward", "during_backward"])
def test_poison_is_really_put_into_slots(update: UpdatePolicy) -> None:
    """After a flush nothing that a slot was given is left in it."""
    model, recipe = small_model(), small_recipe(clip_norm=None)
    pools = ("slot.layer.", "slot.vocab.", "gslot.layer.", "islot.", "state.")
    with Engine(model, recipe, replace(PASSING, update=update), random_weights(model), wrap=poisoned) as engine:
        assert engine.step(random_batches(model, recipe, 1)[0]).loss
        engine.flush()
        slots = [s.name for s in engine.schedule.storages if s.space == "device" and s.name.startswith(pools)]
        assert all(any(name.startswith(pool) for name in slots) for pool in pools)
        assert [name for name in slots if not bool((engine.memory.named(name) == 0xFF).all())] == []


# ---- the user's side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["compute", "cpu", "d2h"])
@pytest.mark.parametrize("call", ["flush", "evaluate", "state_dict"])
def test_an_interrupted_wait_loses_no_order(call: str, lane: Lane) -> None:
    """Ctrl-C while a flush is under way, caught, and training goes on: the next step must not overtake what is pending."""
    model, recipe = small_model(), small_recipe()
    batches = random_batches(model, recipe, 4)

    class Impatient:
        """A clock whose first wait of the calling thread, once armed, is interrupted."""

        def __init__(self) -> None:
            self.inner, self.armed = RealClock(), False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def wait(self, signal: Signal, who: str) -> None:
            if self.armed and who == "the caller":
                self.armed = False
                raise KeyboardInterrupt
            self.inner.wait(signal, who)

    clock = Impatient()

    def slow(inner: Any) -> Backend:
        return Disturbed(inner=inner, before=lambda op: inner.clock.sleep(300_000 * (op.lane == lane), op.name))

    with (
        Engine(model, recipe, PLAN, random_weights(model), clock=clock, wrap=slow) as engine,
        Engine(model, recipe, PLAN, random_weights(model)) as clean,
    ):
        engine.step(batches[0])
        clock.armed = True
        with pytest.raises(KeyboardInterrupt):
            getattr(engine, call)(*([batches[0]] if call == "evaluate" else []))
        for batch in batches[1:]:
            engine.step(batch)
        for batch in batches:
            clean.step(batch)
        ours, theirs = engine.state_dict(), clean.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_interrupt_while_submitting_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, puts = executor_module._Mailbox.put, 0

    def interrupted(self: Any, run: PartRun) -> None:
        nonlocal puts
        puts += 1
        if puts == 3:
            raise KeyboardInterrupt
        honest(self, run)

    monkeypatch.setattr(executor_module._Mailbox, "put", interrupted)
    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, PLAN, random_weights(model)) as engine:
        batch = random_batches(model, recipe, 1)[0]
        with pytest.raises(KeyboardInterrupt):
            engine.step(batch)
        with pytest.raises(LaneError, match="prologue: interrupted while it was submitted"):
            engine.step(batch)


def test_a_batch_may_be_reused_as_soon_as_step_returns() -> None:
    model, recipe = small_model(), small_recipe()
    batches = random_batches(model, recipe, 5)
    buffer = torch.empty_like(batches[0]["input_ids"])

    def slow(inner: Any) -> Backend:
        return Disturbed(inner=inner, before=lambda op: inner.clock.sleep(3_000_000 * (op.kind == "input"), op.name))

    with Engine(model, recipe, PLAN, random_weights(model), wrap=slow) as engine:
        results = []
        for batch in batches:
            buffer.copy_(batch["input_ids"])
            results.append(engine.step({"input_ids": buffer}))
        losses = [r.loss for r in results]
    assert losses == train(model, recipe, PLAN).losses


def test_results_outlive_the_engine_and_a_failure() -> None:
    model, recipe = small_model(), small_recipe()
    batches = random_batches(model, recipe, 3)

    def failing(inner: Any) -> Backend:
        count = 0

        def before(op: Op) -> None:
            nonlocal count
            count += op.kind == "loss"
            if count > 2 * recipe.micro_batches:
                raise OSError("gone")

        return Disturbed(inner=inner, before=before)

    with Engine(model, recipe, PLAN, random_weights(model), wrap=failing) as engine:
        results = [engine.step(batch) for batch in batches]
        with pytest.raises(LaneError):
            engine.flush()
        assert [r.loss for r in results[:2]] == train(model, recipe, PLAN, steps=2).losses
        with pytest.raises(LaneError, match="gone"):
            _ = results[2].loss


def test_a_script_may_end_without_closing() -> None:
    code = (
        "from tests.engine.small import *\nfrom tests.engine.test_faults import PLAN\n"
        "m, r = small_model(), small_recipe()\n"
        "e = Engine(m, r, PLAN, random_weights(m))\n"
        "[e.step(b) for b in random_batches(m, r, 3)]\nraise SystemExit(5)"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600).returncode == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 13)}, r"batch.attention_mask: is not read; .* segments \(recipe.attention_mask"),
        ({"label": torch.ones(2, 13)}, "batch.label: is not read"),
        ({"input_ids": torch.zeros(3, 13, dtype=torch.int64)}, r"batch.input_ids: must be \(2, 13\)"),
    ],
)
def test_a_batch_with_what_nobody_reads_is_refused(change: dict[str, Tensor], message: str) -> None:
    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, PLAN, random_weights(model)) as engine:
        with pytest.raises(ValueError, match=message):
            engine.step(random_batches(model, recipe, 1)[0] | change)
        with pytest.raises(ValueError, match="gradients: no step has run"):
            engine.gradients()
        engine.step(random_batches(model, recipe, 1)[0])


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match=r"plan.adam_threads: must be at most the \d+ cores there are, got 100000"):
        Engine(small_model(), small_recipe(), Plan(adam_threads=100_000), random_weights(small_model()))


def test_a_tied_head_must_be_the_embedding() -> None:
    model = small_model(tied=True)
    weights = random_weights(model)
    embedding = weights["model.embed_tokens.weight"]
    Engine(model, small_recipe(), PLAN, weights | {"lm_head.weight": embedding.clone()}).close()
    with pytest.raises(ValueError, match=r"'lm_head.weight' must equal 'model.embed_tokens.weight'"):
        Engine(model, small_recipe(), PLAN, weights | {"lm_head.weight": embedding + 1})


def test_handles_of_kept_layers_are_known_apart() -> None:
    """An engine that gives a backward another micro-batch's activations is seen by its digest."""
    model, recipe = small_model(), small_recipe()
    plan = Plan(activations={"default": "keep"})

    def swapped(inner: Any) -> Backend:
        def before(op: Op) -> None:
            if op.name == "backward[3.0]":
                saved = inner.kernels.saved
                saved["saved[3.0]"], saved["saved[3.1]"] = saved["saved[3.1]"], saved["saved[3.0]"]

        return Disturbed(inner=inner, before=before)

    with Engine(model, recipe, plan, random_weights(model), wrap=swapped) as engine:
        engine.step(random_batches(model, recipe, 1)[0])
        with pytest.raises(ForeignTrace):
            compare(engine.schedule, simulate(engine.schedule, H200, steps=1), engine.trace())
