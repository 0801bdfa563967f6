"""The ledger: exact where a schedule is exact, near what PyTorch allocates where it estimates, and firm about what fits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megatrain.hardware import H200, HardwareProfile
from megatrain.layers import head as head_module
from megatrain.layers.embedding import embedding_backward
from megatrain.layers.gradients import accumulate
from megatrain.layers.head import head_template
from megatrain.layers.inputs import layer_inputs, make_inputs
from megatrain.layers.template import layer_templates
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Schedule, lower
from megatrain.schedule.layout import input_nbytes
from megatrain.schedule.nouns import COPIES
from sim.ledger import ALIGN, KEPT, PHASES, Ledger, fits, ledger, shortages
from sim.memory import memory_use
from sim.simulate import simulate
from sim.workspaces import saved_nbytes, workspaces
from tests.strategies import cases


def _of(schedule: Schedule, hardware: HardwareProfile = H200) -> Ledger:
    return ledger(schedule.model, schedule.recipe, schedule.plan, hardware)


def _bytes(book: Ledger, what: str) -> int:
    return sum(item.nbytes for item in book.items if item.what == what)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_ledger_is_the_same_with_and_without_the_schedule(case: tuple[ModelSpec, Recipe, Plan]) -> None:
    model, recipe, plan = case
    assert ledger(model, recipe, plan, H200) == ledger(model, recipe, plan, H200, lower(model, recipe, plan))


def test_storages_are_counted_to_the_byte(random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile) -> None:
    for seed in range(40):
        s = random_schedule(random.Random(seed))
        for machine in (H200, host):
            book = _of(s, machine)
            device = [x.nbytes for x in s.storages if x.space == "device" and not x.dynamic]
            around = {"CUDA context", "cuBLAS workspace", "process", "one tensor on its way", "staged inputs"}
            named = sum(i.nbytes for i in book.items if i.what not in around and i.space == "device" and i.phases == PHASES)
            assert named == sum(-(-n // ALIGN) * ALIGN for n in device)
            on_host = [x.nbytes + ALIGN for x in s.storages if x.space == "host"]
            assert sum(i.nbytes for i in book.items if i.what not in around and i.space != "device") == sum(on_host)
            staged = 3 * s.recipe.micro_batches * input_nbytes(s.model, s.recipe)
            assert _bytes(book, "staged inputs") == staged


def test_pinned_is_what_copies_touch(random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile) -> None:
    for seed in range(40):
        s = random_schedule(random.Random(seed))
        ops = (*s.prologue.ops, *s.body.ops, *s.epilogue.ops)
        touched = {s.storages[a.storage] for op in ops if op.kind in COPIES for a in (*op.reads, *op.writes)}
        by_copies = {x.name for x in touched if x.space == "host"}
        by_rule = {x.name for x in s.storages if x.copied}
        # The constants go up only where a resident block's update reads them.
        assert by_rule - by_copies <= {"constants"} and by_copies <= by_rule
        assert all(i.space != "pinned" for i in _of(s, host).items)


def test_kept_activations_peak_as_in_a_simulation(
    random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile
) -> None:
    seen = 0
    for seed in range(40):
        s = random_schedule(random.Random(seed))
        use = memory_use(s, simulate(s, H200, steps=2))["device"]
        dynamic = use.peak_nbytes - use.static_nbytes
        book = _of(s, host)
        # At the op where kept activations and workspace together peak there may be less of the former than there ever is.
        assert _bytes(book, KEPT) <= dynamic
        if book.peak_op.startswith("loss") or not dynamic:
            assert _bytes(book, KEPT) == dynamic
            seen += dynamic > 0
    assert seen > 5


def test_a_step_is_a_maximum_over_time_and_not_a_sum(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "keep"})
    spaces = workspaces(s.model, s.recipe, on_host=False)
    book = _of(s)
    beside = sum(i.nbytes for i in book.items if i.what.startswith("workspace"))
    # The loss keeps its own memory on a GPU; of all others the largest counts.
    assert beside - spaces.loss in spaces and beside < sum(spaces)


@settings(max_examples=40, deadline=None)
@given(case=cases(), layer=st.integers(0, 1))
def test_a_resident_block_moves_bytes_and_more_of_anything_takes_no_less(
    case: tuple[ModelSpec, Recipe, Plan], layer: int
) -> None:
    """What the planner's bisections rely on."""
    model, recipe, plan = case

    def need(**changes: Any) -> tuple[int, int]:
        book = ledger(model, recipe, replace(plan, **changes), H200)
        return book.device_nbytes(), book.host_nbytes()

    streamed, resident = ({**plan.placement, str(layer): where} for where in ("streamed", "resident"))
    (device, host), (device_too, host_too) = need(placement=streamed), need(placement=resident)
    assert device < device_too and host > host_too
    kept, recomputed = ({**plan.activations, str(layer): how} for how in ("keep", "recompute"))
    # The inputs of a kept layer's backward are counted with the op, a recomputed one's with what it saves: bytes apart, in toys.
    assert need(activations=kept)[0] >= need(activations=recomputed)[0] - 1024
    for name in ("weight_slots", "vocab_slots", "gradient_slots", "host_gradient_slots"):
        more = need(**{name: getattr(plan, name) + 1})
        assert more[0] >= need()[0] and more[1] >= need()[1]


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_it_fits_into_what_it_needs_and_not_into_a_byte_less(case: tuple[ModelSpec, Recipe, Plan]) -> None:
    book = ledger(*case, H200)
    device, host = max(map(book.device_nbytes, PHASES)), max(map(book.host_nbytes, PHASES))
    exact = replace(H200, device_memory_bytes=device, host_memory_bytes=host)
    assert fits(book, exact) is None
    for field, space, need in (("device_memory_bytes", "device", device), ("host_memory_bytes", "host", host)):
        found = fits(book, replace(exact, **{field: need - 1}))
        assert found is not None and (found.space, found.need, found.have) == (space, need, need - 1)
        peak = book.device_nbytes(found.phase) if space == "device" else book.host_nbytes(found.phase)
        assert peak == need and f"needs {need:,} bytes" in str(found)
    both = shortages(book, replace(exact, device_memory_bytes=device - 2, host_memory_bytes=host - 1))
    assert [s.space for s in both] == ["device", "host"]


def test_without_a_gpu_device_and_host_are_one_memory(schedule: Callable[..., Schedule], host: HardwareProfile) -> None:
    book = _of(schedule(), host)
    need = max(book.nbytes(p, "device") + book.nbytes(p, "pageable") for p in PHASES)
    assert fits(book, replace(host, host_memory_bytes=need)) is None
    short = fits(book, replace(host, host_memory_bytes=need - 1))
    assert short is not None and short.space == "host" and short.need == need


def test_loading_and_saving_take_one_tensor_more_than_the_state(schedule: Callable[..., Schedule]) -> None:
    s = schedule()
    book = _of(s)
    tensor = 8 * max(p.numel for block in s.model.blocks for p in block.params)
    staged = _bytes(book, "staged inputs")
    assert book.host_nbytes("load") == book.host_nbytes("step") + tensor - staged
    assert book.host_nbytes("save") == book.host_nbytes("step") + tensor
    assert book.device_nbytes("load") <= book.device_nbytes("step")


# ---- estimates against what PyTorch allocates --------------------------------------------------------------------------


def _allocated(run: Callable[[], object], folder: Path) -> tuple[int, int]:
    """(most bytes alive at once, bytes alive at the end) of what `run` allocates, by PyTorch's memory profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    del kept
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak, live


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"precision": "fp32", "micro_batch_size": 2}, {"attention": "eager"},
        {"attention_mask": "segments", "loss_tile": 999}, {"seq_len": 24, "micro_batches": 3},
    ],
)  # fmt: skip
def test_workspaces_are_what_the_cpu_backend_allocates(
    changes: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    recipe = Recipe(**{"micro_batch_size": 4, "seq_len": 128, "loss_tile": 128, **changes})
    # As the backend's: with more, oneDNN's scratch grows, and tests before this one may have set any number.
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(recipe.compute_threads)
    architecture = "qwen3" if recipe.precision == "fp32" else "qwen2"
    model = ModelSpec.from_config({
        "model_type": architecture, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 9001,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    })  # fmt: skip
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.precision]
    template, head = layer_templates(model, attention=recipe.attention)[0], head_template(model)
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in template.shapes]
    sums = [torch.zeros(shape) for shape in template.shapes]
    matrix, norm = torch.randn(model.vocab_size, 256).mul_(0.02).to(dtype), torch.ones(256, dtype=dtype)
    head_sums = [torch.zeros(256), torch.zeros(model.vocab_size, 256)]
    x = torch.randn(recipe.micro_batch_size, recipe.seq_len, 256).to(dtype)
    out = torch.empty_like(x)
    batch = {"input_ids": torch.randint(0, model.vocab_size, (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len))}
    if recipe.attention_mask == "segments":
        batch["segments"] = torch.ones_like(batch["input_ids"])
    tensors = make_inputs(model, recipe, batch)[0]
    inputs = layer_inputs(tensors)

    def forward() -> object:
        y, saved = template.forward(weights, x, inputs)
        out.copy_(y)
        return saved

    def backward() -> None:
        saved = template.saved_by(weights, x, inputs)
        dx, grads = template.backward(weights, saved, x)
        accumulate(sums, grads, recipe.micro_batches == 1)
        out.copy_(dx)

    def loss() -> None:
        _, dx = head.loss_forward_backward((norm, matrix), x, tensors["targets"], 100, recipe.loss_tile, head_sums, True)
        out.copy_(dx)

    # What oneDNN takes for a product: its scratch, of fixed size, and on processors without products in BF16 the result in FP32.
    factors = torch.randn(max(x.numel() // 256, 256), 256).to(dtype), torch.randn(256, 1024).to(dtype)
    scratch = (256 << 10) + _allocated(lambda: factors[0] @ factors[1], tmp_path)[0] - (factors[0] @ factors[1]).nbytes
    expected = workspaces(model, recipe, on_host=True)
    saved_bytes = saved_nbytes(model, recipe, on_host=True)
    forward_peak, saved_live = _allocated(forward, tmp_path)
    for what, got, estimate in (
        ("saved", saved_live, saved_bytes),
        ("forward", forward_peak, expected.forward),
        ("kept forward", forward_peak, expected.kept_forward + saved_bytes),
        ("backward", _allocated(backward, tmp_path)[0], expected.backward),
        ("loss", _allocated(loss, tmp_path)[0], expected.loss),
        (
            "embedding backward",
            _allocated(lambda: embedding_backward(tensors["ids"], x, head_sums[1], first=True), tmp_path)[0],
            expected.embedding_backward,
        ),
    ):
        assert 0.95 * got - scratch <= estimate <= 1.1 * got, f"{what}: {estimate} expected, {got} allocated"


class _Logits:
    """A tile's logits that nobody computes, and a product of them that takes memory and no time."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self._there = torch.empty(rows, vocabulary, dtype=torch.bfloat16)

    def __matmul__(self, matrix: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(self._there), matrix.shape[1], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "tile", "tokens"),
    [(256, 4096, 128, 512), (256, 1024, 128, 512), (512, 16384, 256, 1024), (256, 4096, 512, 512)],
)
def test_the_loss_on_a_gpu_takes_what_is_estimated(
    hidden: int, vocabulary: int, tile: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on the CPU: what the GPU's kernels compute is left out, the memory they work on is there."""
    rows = torch.zeros(tokens)
    monkeypatch.setattr(head_module, "_loss_gradient", lambda h, m, t, n: (rows[: len(h)].clone(), _Logits(len(h), len(m))))
    monkeypatch.setattr(head_module, "_add_product", lambda acc, a, b, first: None)
    model = ModelSpec.from_config({
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocabulary, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    })  # fmt: skip
    recipe = Recipe(micro_batch_size=1, seq_len=tokens, loss_tile=tile, precision="bf16")
    weights = (torch.ones(hidden).bfloat16(), torch.zeros(vocabulary, hidden).bfloat16())
    x, targets = torch.randn(1, tokens, hidden).bfloat16(), torch.zeros(1, tokens, dtype=torch.int64)
    sums = [torch.zeros(hidden), torch.zeros(vocabulary, hidden)]

    def loss() -> object:
        return head_template(model).loss_forward_backward(weights, x, targets, tokens, tile, sums, True)

    got, estimate = _allocated(loss, tmp_path)[0], workspaces(model, recipe, on_host=False).loss
    assert abs(got - estimate) <= 0.001 * got, f"{estimate} expected, {got} allocated"
