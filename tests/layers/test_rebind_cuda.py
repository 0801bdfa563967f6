"""A layer's weights may move between its forward and its backward, and no bit changes.

The promise streaming stands on: the forward reads slot A, slot A is filled with NaN, another slot B is loaded by a
copy, the backward reads slot B; output, dx and every weight gradient are bitwise those of weights that never moved,
kept or recomputed, with copies running on other streams all the while. On a GPU the layer has the shape of Qwen2.5-7B's
at batch 4 x 1,024 in BF16; without one the same code runs on a small layer. Run it as a script for the table alone:

    python tests/layers/test_rebind_cuda.py [cuda|cpu]
"""

from __future__ import annotations

import os

# cuBLAS reads this when its first handle is made; without it deterministic algorithms refuse to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.layers.inputs import LayerInputs, rotary_tables
from megatrain.layers.template import LayerTemplate, layer_templates
from megatrain.model import BlockSpec, ModelSpec

QWEN_7B_LAYER = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 1,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
}
SMALL_LAYER = QWEN_7B_LAYER | {
    "vocab_size": 131,
    "hidden_size": 56,
    "intermediate_size": 104,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}


@dataclass(kw_only=True)
class Row:
    """How often each result had the reference's bits, out of `repeats`."""

    case: str
    repeats: int = 0
    y: int = 0
    dx: int = 0
    grads: int = 0
    ms: list[float] = field(default_factory=list)

    def count(self, got: tuple[Tensor, ...], reference: tuple[Tensor, ...], started: float) -> None:
        self.ms.append((time.perf_counter() - started) * 1e3)
        equal = [torch.equal(a, b) for a, b in zip(got, reference, strict=True)]
        self.repeats += 1
        self.y += equal[0]
        self.dx += equal[1]
        self.grads += all(equal[2:])

    @property
    def exact(self) -> bool:
        return self.repeats == self.y == self.dx == self.grads and self.repeats > 0


def views(slot: Tensor, block: BlockSpec, dtype: torch.dtype) -> list[Tensor]:
    """The block's parameters as views into a byte buffer."""
    elements = slot.view(dtype)
    return [elements[p.offset : p.end].view(p.shape) for p in block.params]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """What a deterministic recipe sets: deterministic kernels, flash attention, no TF32, no reduced-precision sums."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


class Copies:
    """Traffic beside the computation: both directions at once, on two streams of their own. Nothing on a CPU."""

    def __init__(self, host: Tensor, nbytes: int, device: torch.device) -> None:
        self.host = host
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.down = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.other = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))

    def start(self, times: int = 2) -> None:
        if not self.cuda:
            return
        for _ in range(times):
            with torch.cuda.stream(self.streams[0]):
                self.other.copy_(self.host, non_blocking=True)
            with torch.cuda.stream(self.streams[1]):
                self.down.copy_(self.other, non_blocking=True)


def rebind(
    config: dict[str, object], device: torch.device, compiled: bool, batch: int, seq_len: int, repeats: int
) -> list[Row]:
    """Run the cases; every row says how often the bits were those of the resident reference."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    model = ModelSpec.from_config(config, name="layer")
    block = model.layers[0]
    template: LayerTemplate = layer_templates(model, attention="sdpa", compiled=compiled)[0]
    nbytes = block.span * dtype.itemsize
    cuda = device.type == "cuda"

    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda)
    for spec, weight in zip(block.params, views(host, block, dtype), strict=True):
        weight.copy_(torch.randn(spec.shape) * 0.02 + (1.0 if spec.name.endswith("layernorm.weight") else 0.0))
    resident, slot_a, slot_b = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(3))
    resident.copy_(host)

    x = torch.randn(batch, seq_len, model.hidden_size, device=device, dtype=dtype)
    dy = torch.randn(batch, seq_len, model.hidden_size, device=device, dtype=dtype)
    cos, sin = rotary_tables(model, torch.arange(seq_len)[None], dtype)
    inputs = LayerInputs(cos=cos.to(device), sin=sin.to(device), mask=None)
    copies = Copies(host, nbytes, device)
    load_stream = torch.cuda.Stream(device) if cuda else None

    def load(slot: Tensor) -> None:
        """Host to slot, on a stream of its own, ordered after and before the computation by events."""
        if load_stream is None:
            slot.copy_(host)
            return
        load_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(load_stream):
            slot.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(load_stream)

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    def unmoved() -> tuple[Tensor, ...]:
        weights = views(resident, block, dtype)
        y, saved = template.forward(weights, x, inputs)
        dx, grads = template.backward(weights, saved, dy)
        return (y, dx, *grads)

    def moved(keep: bool) -> tuple[Tensor, ...]:
        load(slot_a)
        y, saved = template.forward(views(slot_a, block, dtype), x, inputs)
        slot_a.view(dtype).fill_(float("nan"))
        load(slot_b)
        weights = views(slot_b, block, dtype)
        if not keep:
            y, saved = template.forward(weights, x, inputs)
        dx, grads = template.backward(weights, saved, dy)
        slot_b.view(dtype).fill_(float("nan"))
        return (y, dx, *grads)

    mode = "compiled" if compiled else "eager"
    started = time.perf_counter()
    reference = unmoved()
    synchronize()
    print(
        f"{mode}: first forward and backward (with compilation) took {time.perf_counter() - started:.1f} s", flush=True
    )
    assert all(bool(t.isfinite().all()) for t in reference), "the reference itself is not finite"

    rows = []
    for case, run in (
        ("resident again", unmoved),
        ("moved, kept", lambda: moved(keep=True)),
        ("moved, recomputed", lambda: moved(keep=False)),
    ):
        row = Row(case=f"{mode}: {case}")
        for _ in range(repeats):
            copies.start()
            started = time.perf_counter()
            got = run()
            copies.start()
            synchronize()
            row.count(got, reference, started)
        rows.append(row)

    # The backward does read the weights it is given: a slot of NaN must show.
    _, saved = template.forward(views(resident, block, dtype), x, inputs)
    slot_a.view(dtype).fill_(float("nan"))
    dx, _ = template.backward(views(slot_a, block, dtype), saved, dy)
    assert not bool(dx.isfinite().any()), "the backward did not read the slot it was given"
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'case':<30} {'repeats':>7} {'y':>4} {'dx':>4} {'grads':>6} {'median ms':>10}"]
    for row in rows:
        ms = sorted(row.ms)[len(row.ms) // 2]
        lines.append(f"{row.case:<30} {row.repeats:>7} {row.y:>4} {row.dx:>4} {row.grads:>6} {ms:>10.2f}")
    return "\n".join(lines)


def run_all(device: torch.device, modes: tuple[bool, ...]) -> list[Row]:
    small = device.type != "cuda"
    config, batch, seq_len = (SMALL_LAYER, 2, 24) if small else (QWEN_7B_LAYER, 4, 1024)
    with deterministic():
        return [
            row
            for compiled in modes
            for row in rebind(config, device, compiled, batch=batch, seq_len=seq_len, repeats=10)
        ]


@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        pytest.param("cpu", False, id="cpu-eager"),
        pytest.param("cpu", True, id="cpu-compiled", marks=pytest.mark.slow),
        pytest.param("cuda", False, id="cuda-eager", marks=pytest.mark.cuda),
        pytest.param("cuda", True, id="cuda-compiled", marks=pytest.mark.cuda),
    ],
)
def test_moving_the_weights_between_forward_and_backward_changes_no_bit(
    device: str, compiled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rows = run_all(torch.device(device), (compiled,))
    if device == "cuda":
        with capsys.disabled():
            print("\n" + table(rows))
    assert all(row.exact for row in rows), table(rows)


def main() -> int:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else default)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    rows = run_all(device, (False, True))
    print(table(rows))
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
