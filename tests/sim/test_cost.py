from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from megatrain.hardware import H200, HardwareProfile, MeasuredOp, conditions
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Op, Schedule, lower, lower_evaluation
from megatrain.schedule.nouns import Kind
from sim.cost import Work, adam_bytes_per_s, alone_ns, copy_ns, durations_ns, works

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}  # fmt: skip


def _body(schedule: Schedule, hardware: HardwareProfile = H200) -> dict[str, Work]:
    """The works of the body's ops (an evaluation's: of its only part) by name."""
    part = schedule.body if schedule.mode == "train" else schedule.prologue
    return {op.name: work for op, work in zip(part.ops, works(schedule, hardware).parts[part.name], strict=True)}


def _compute_s(schedule: Schedule) -> float:
    duration = durations_ns(schedule, H200)
    return sum(duration["body", i] for i, op in enumerate(schedule.body.ops) if op.lane == "compute") / 1e9


# ---- against the machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batches", "size", "keep", "measured_s"),
    [(1, 4, True, 0.302), (1, 16, True, 1.179), (1, 4, False, 0.398), (1, 16, False, 1.539), (4, 16, False, 6.11)],
)
def test_the_spec_source_predicts_measured_forward_and_backward_of_a_7b_model(
    micro_batches: int, size: int, keep: bool, measured_s: float
) -> None:
    """Compiled layers of 7.6e9 parameters in rows of 1,024 tokens, all weights on the GPU; not one number is fitted to these.
    What was measured ran the whole forward again, where a schedule's layers leave out its last product."""
    recipe = Recipe(micro_batches=micro_batches, micro_batch_size=size, seq_len=1024, compiled=True)
    activations = {"default": "keep" if keep else "recompute"}
    schedule = lower(ModelSpec.from_config(QWEN_7B), recipe, Plan(activations=activations, chunk_bytes=0))  # type: ignore[arg-type]
    left_out = 0 if keep else schedule.model.n_layers * schedule.model.last_product_flops_per_token() * recipe.tokens_per_step
    assert _compute_s(schedule) + left_out / H200.compute.flops_per_s["bf16"] == pytest.approx(measured_s, rel=0.06)


def test_the_optimizer_takes_what_was_measured_on_both_sides() -> None:
    for placement, threads, ns_a_parameter in (("streamed", 16, 26 / 118), ("streamed", 1, 26 / 16), ("resident", 1, 0.0064)):
        plan = Plan(placement={"default": placement}, adam_threads=threads, chunk_bytes=0)  # type: ignore[dict-item]
        schedule = lower(ModelSpec.from_config(QWEN_7B), Recipe(), plan)
        updates = [alone_ns(w) for name, w in _body(schedule).items() if name.startswith("update")]
        assert sum(updates) / schedule.model.numel == pytest.approx(ns_a_parameter, rel=0.02)


def test_a_copy_reaches_the_measured_rate_of_its_size() -> None:
    for link in (H200.h2d, H200.d2h):
        for nbytes, rate in link.rates:
            assert nbytes * 1e9 / copy_ns(link, nbytes) == pytest.approx(rate, rel=1e-3)


# ---- copies --------------------------------------------------------------------------------------------------------------


def test_copy_times_are_linear_in_time_between_rows() -> None:
    link = replace(H200.h2d, latency_ns=1000, rates=((1000, 500_000_000), (3000, 10**9)))
    assert [copy_ns(link, n) for n in (0, 500, 1000, 2000, 3000, 6000)] == [1000, 1500, 2000, 2500, 3000, 6000]


def test_a_copys_work_is_its_bytes_at_the_top_rate_and_start_up(schedule: Callable[..., Schedule]) -> None:
    s = schedule(chunk_bytes=0)
    body = _body(s)
    for op in s.body.ops:
        if op.lane in ("h2d", "d2h"):
            link = H200.h2d if op.lane == "h2d" else H200.d2h
            work = body[op.name]
            assert (work.amount, work.traffic, work.rate_per_s) == (op.nbytes, op.lane, link.peak_bytes_per_s)
            assert alone_ns(work) == copy_ns(link, op.nbytes)
            assert (work.threads, work.dram_bytes) == (0, op.nbytes)


def test_adam_threads_are_linear_between_rows_and_end_with_them() -> None:
    machine = replace(H200, adam_rates=((2, 20), (4, 30)))
    assert [adam_bytes_per_s(machine, n) for n in (1, 2, 3, 4, 9)] == [10, 20, 25, 30, 30]


# ---- ops -----------------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_cost(schedule: Callable[..., Schedule]) -> None:
    kinds: set[str] = set()
    for s in (
        schedule(placement={"default": "streamed", "0": "resident"}, update="next_forward"),
        schedule(placement={"default": "resident"}, update="during_backward", recipe={"clip_norm": None}),
        schedule(config={"num_hidden_layers": 4}, placement={"default": "streamed_adam"}, activations={"default": "offload"}),
    ):
        for part in (s.prologue, s.body, s.epilogue):
            for op, work in zip(part.ops, works(s, H200).parts[part.name], strict=True):
                kinds.add(op.kind)
                assert alone_ns(work) > 0, op.name
    assert kinds == set(get_args(Kind))


def test_recomputing_costs_one_forward_but_for_its_last_product(
    schedule: Callable[..., Schedule], host: HardwareProfile
) -> None:
    s = schedule()
    for hardware in (H200, host):
        share = s.recipe.compute_threads / hardware.cores if hardware.compute.on_host else 1
        rate = hardware.compute.flops_per_s[s.recipe.precision] * share
        last_ns = s.recipe.tokens_per_micro_batch * s.model.last_product_flops_per_token() * 1e9 / rate
        keep, recompute = (_body(schedule(activations={"default": a}), hardware) for a in ("keep", "recompute"))
        more = alone_ns(recompute["backward[2.1]"]) - alone_ns(keep["backward[2.1]"])
        assert more == pytest.approx(alone_ns(keep["forward[2.1]"]) - last_ns, abs=3)
        assert keep["forward[2.1]"] == recompute["forward[2.1]"]


def test_only_layers_with_more_tokens_or_parameters_take_longer(schedule: Callable[..., Schedule]) -> None:
    base, longer = _body(schedule()), _body(schedule(recipe={"seq_len": 4096}))
    for name in ("forward[2.0]", "backward[2.0]", "loss[0]", "forward[0.0]"):
        assert alone_ns(longer[name]) > alone_ns(base[name])
    assert longer["pack[2]"] == base["pack[2]"]


def test_evaluation_pays_for_the_forward_of_the_head_only() -> None:
    model, recipe = ModelSpec.from_config(QWEN_7B), Recipe(micro_batch_size=4, compiled=True)
    train = _body(lower(model, recipe, Plan()))["loss[0]"]
    evaluate = _body(lower_evaluation(model, recipe, Plan()))["loss[0]"]
    assert 0.25 < alone_ns(evaluate) / alone_ns(train) < 0.5


def test_compute_on_the_host_uses_threads_and_dram(schedule: Callable[..., Schedule], host: HardwareProfile) -> None:
    one, two = (_body(schedule(recipe={"compute_threads": n}), host)["forward[2.0]"] for n in (1, 2))
    assert (one.traffic, one.threads, two.threads) == ("compute", 1, 2)
    assert one.dram_bytes == two.dram_bytes > 0
    assert alone_ns(one) > alone_ns(two)
    body = _body(schedule(), host)
    load = body["load[2.0]"]
    assert (load.threads, load.dram_bytes) == (1, 2 * load.amount)


# ---- measured durations --------------------------------------------------------------------------------------------------


def test_a_measured_duration_replaces_the_predicted_one(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "recompute", "1": "keep"})
    numel = s.model.layers[0].numel
    rows = (
        MeasuredOp("forward", "layer", numel, 8, 8, 111), MeasuredOp("backward", "layer", numel, 8, 8, 222),
        MeasuredOp("recompute_backward", "layer", numel, 8, 8, 333), MeasuredOp("loss", "head", s.model.head.numel, 8, 8, 444),
        MeasuredOp("forward", "embedding", s.model.embedding.numel, 8, 8, 555),
        MeasuredOp("backward", "embedding", s.model.embedding.numel, 8, 8, 666),
        *(MeasuredOp("pack", b.kind, b.numel, 1, 1, 777) for b in (s.model.embedding, s.model.layers[0], s.model.head)),
    )  # fmt: skip
    machine = replace(H200, compute=replace(H200.compute, measured=rows))
    body = {name: alone_ns(work) for name, work in _body(s, machine).items()}
    assert (body["forward[1.0]"], body["backward[1.0]"], body["backward[2.1]"]) == (111, 333, 222)
    assert (body["loss[0]"], body["forward[0.1]"], body["backward[0.0]"]) == (444, 555, 666)
    assert body["pack[0]"] == body["pack[2]"] == body["pack[4]"] == 777
    assert works(s, machine).notes == ()


def test_a_gradient_that_is_added_has_a_duration_of_its_own_where_one_was_measured(schedule: Callable[..., Schedule]) -> None:
    s = schedule(recipe={"micro_batches": 3})
    numel = s.model.layers[0].numel
    first = MeasuredOp("recompute_backward", "layer", numel, 8, 8, 333)
    loss = MeasuredOp("loss", "head", s.model.head.numel, 8, 8, 444)

    def durations(*rows: MeasuredOp) -> list[int]:
        body = _body(s, replace(H200, compute=replace(H200.compute, measured=rows)))
        return [alone_ns(body[f"{name}{micro}]"]) for name in ("backward[1.", "loss[") for micro in range(3)]

    assert durations(first, loss) == [333, 333, 333, 444, 444, 444]
    adding = (first._replace(adds=True, duration_ns=350), loss._replace(adds=True, duration_ns=445))
    assert durations(first, loss, *adding) == [333, 350, 350, 444, 445, 445]


def test_between_two_measured_token_counts_time_is_linear_and_outside_the_notes_say_so(
    schedule: Callable[..., Schedule],
) -> None:
    numel = schedule().model.layers[0].numel
    rows = (MeasuredOp("forward", "layer", numel, 16, 8, 100), MeasuredOp("forward", "layer", numel, 32, 8, 300))
    machine = replace(H200, compute=replace(H200.compute, measured=rows))

    def forward(rows_of_8: int) -> tuple[int, list[str]]:
        s = schedule(recipe={"micro_batch_size": rows_of_8})
        notes = [note for note in works(s, machine).notes if ": forward of a layer" in note]
        return alone_ns(_body(s, machine)["forward[1.0]"]), notes

    assert [forward(n) for n in (2, 3, 4)] == [(100, []), (200, []), (300, [])]
    for outside in (1, 5):
        ns, notes = forward(outside)
        assert ns == alone_ns(_body(schedule(recipe={"micro_batch_size": outside}))["forward[1.0]"])
        assert len(notes) == 1 and f"at {8 * outside} tokens in rows of 8 is outside the measured durations" in notes[0]


def test_a_duration_measured_under_other_conditions_is_not_used(schedule: Callable[..., Schedule]) -> None:
    s = schedule()
    numel = s.model.layers[0].numel

    def forward(*rows: MeasuredOp) -> tuple[int, bool]:
        machine = replace(H200, compute=replace(H200.compute, measured=rows))
        said = any(": forward of a layer" in note for note in works(s, machine).notes)
        return alone_ns(_body(s, machine)["forward[1.0]"]), said

    here, elsewhere = (conditions("forward", replace(s.recipe, compiled=c)) for c in (s.recipe.compiled, not s.recipe.compiled))
    everywhere = MeasuredOp("forward", "layer", numel, 8, 8, 111)
    mine, other = (everywhere._replace(conditions=c, duration_ns=ns) for c, ns in ((here, 222), (elsewhere, 333)))
    assert forward(mine, other) == forward(mine, everywhere) == (222, False)
    assert forward(everywhere, other) == (111, False)
    assert forward(other) == (alone_ns(_body(s)["forward[1.0]"]), True)
    # What a loss is computed in tiles of is no matter to a layer, but it is to a loss.
    assert conditions("forward", replace(s.recipe, loss_tile=3)) == here
    assert conditions("loss", replace(s.recipe, loss_tile=3)) != conditions("loss", s.recipe)


def test_a_tied_heads_measurement_is_of_its_vocabulary_too(schedule: Callable[..., Schedule]) -> None:
    def loss(vocab_size: int, measured: int) -> int:
        s = schedule(config={"tie_word_embeddings": True, "vocab_size": vocab_size})
        numel = s.model.head.numel + measured * s.model.hidden_size
        row = MeasuredOp("loss", "head", numel, 8, 8, 444)
        return alone_ns(_body(s, replace(H200, compute=replace(H200.compute, measured=(row,))))["loss[0]"])

    assert loss(103, measured=103) == 444
    assert loss(104, measured=103) != 444


def test_without_a_device_every_update_is_the_cpu_optimizers(
    schedule: Callable[..., Schedule], host: HardwareProfile
) -> None:
    def update(where: str) -> Work:
        body = _body(schedule(placement={"default": where}, chunk_bytes=0), host)
        return next(work for name, work in body.items() if name.startswith("update[1"))

    resident, streamed = update("resident"), update("streamed")
    assert (resident.traffic, resident.rate_per_s, resident.amount) == ("adam", streamed.rate_per_s, streamed.amount)


def test_an_op_without_its_block_is_refused(schedule: Callable[..., Schedule]) -> None:
    s = schedule()
    nameless = replace(s.body, ops=(Op(kind="forward", lane="compute"),))
    with pytest.raises(ValueError, match="forward: a forward names a block"):
        works(replace(s, body=nameless), H200)
