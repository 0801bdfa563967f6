"""A layer template: the library's layer as functions of weights that may move and are held by nobody."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

import megatrain.layers.last_product as last_product
import megatrain.layers.template as template_module
from megatrain.layers.hf import CLASSES, hf_config
from megatrain.layers.inputs import LayerInputs, rotary_tables
from megatrain.layers.saved import WeightView
from megatrain.layers.template import LayerTemplate, layer_structure, layer_templates
from megatrain.model import BlockSpec, ModelSpec
from tests.layers.small import ARCHITECTURES, filled_slot, library_model, slot_views, small_config

DTYPES = (torch.float32, torch.bfloat16)
T = 13


@pytest.fixture(autouse=True)
def own_templates() -> Iterator[None]:
    """What a test compiles with another backend must not be found by the next."""
    yield
    template_module._build.cache_clear()


def make(
    architecture: str, dtype: torch.dtype, **changes: object
) -> tuple[ModelSpec, BlockSpec, Tensor, Tensor, Tensor, LayerInputs]:
    model = ModelSpec.from_config(small_config(architecture, **changes))
    block = model.layers[1]
    weights = dict(library_model(model).named_parameters())
    torch.manual_seed(1)
    x, dy = (torch.randn(2, T, model.hidden_size).to(dtype) for _ in range(2))
    cos, sin = rotary_tables(model, torch.arange(T)[None], dtype)
    return model, block, filled_slot(block, weights, dtype), x, dy, LayerInputs(cos=cos, sin=sin, mask=None)


def plain(model: ModelSpec, block: BlockSpec, slot: Tensor, x: Tensor, dy: Tensor, inputs: LayerInputs) -> list[Tensor]:
    """y, dx and gradients by the library's layer with ordinary parameters and ordinary autograd."""
    config = hf_config(json.loads(model.config_json))
    layer = CLASSES[model.architecture].layer(config, 1).to(x.dtype).eval()
    with torch.no_grad():
        for parameter, view in zip(layer.state_dict().values(), slot_views(slot, block, x.dtype), strict=True):
            parameter.copy_(view)
    leaf = x.clone().requires_grad_()
    y = layer(leaf, attention_mask=inputs.mask, position_embeddings=(inputs.cos, inputs.sin))
    parameters = [dict(layer.named_parameters())[name] for name in layer.state_dict()]
    return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)]


def moved(
    template: LayerTemplate, block: BlockSpec, slot: Tensor, x: Tensor, dy: Tensor, inputs: LayerInputs
) -> list[Tensor]:
    """The same with the slot filled with NaN after the forward and the weights in another slot for the backward."""
    other = torch.cat([torch.zeros(512, dtype=torch.uint8), slot])[512:]
    y, saved = template.forward(slot_views(slot, block, x.dtype), x, inputs)
    slot.view(x.dtype).fill_(float("nan"))
    dx, grads = template.backward(slot_views(other, block, x.dtype), saved, dy)
    return [y, dx, *grads]


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (a - b).abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moved_weights_give_the_bits_of_plain_autograd(architecture: str, dtype: torch.dtype) -> None:
    model, block, slot, x, dy, inputs = make(architecture, dtype)
    expected = plain(model, block, slot, x, dy, inputs)
    assert_same_bits(moved(layer_templates(model)[1], block, slot, x, dy, inputs), expected)


def test_biases_and_norms_move_too() -> None:
    model, block, slot, x, dy, inputs = make("llama", torch.bfloat16, attention_bias=True, mlp_bias=True)
    assert sum(p.name.endswith("bias") for p in block.params) == 7
    expected = plain(model, block, slot, x, dy, inputs)
    assert_same_bits(moved(layer_templates(model)[1], block, slot, x, dy, inputs), expected)


def test_a_masked_layer_with_eager_attention_moves_too() -> None:
    model, block, slot, x, dy, inputs = make("qwen2", torch.float32)
    mask = torch.zeros(2, 1, T, T).masked_fill_(
        ~torch.ones(T, T, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    causal = plain(model, block, slot, x, dy, inputs)
    got = moved(
        layer_templates(model, attention="eager")[1],
        block,
        slot,
        x,
        dy,
        LayerInputs(cos=inputs.cos, sin=inputs.sin, mask=mask),
    )
    for a, b in zip(got, causal, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def references(slot: Tensor) -> int:
    """How many owners the slot's memory has, in Python and in C++ (saved variables, graph nodes)."""
    return int(torch._C._storage_Use_Count(slot.untyped_storage()._cdata))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kept_forward_owns_no_part_of_the_slot(architecture: str, dtype: torch.dtype) -> None:
    model, block, slot, x, dy, inputs = make(architecture, dtype)
    template = layer_templates(model)[1]
    before = references(slot)
    y, saved = template.forward(slot_views(slot, block, dtype), x, inputs)
    assert references(slot) == before
    template.backward(slot_views(slot, block, dtype), saved, dy)
    assert saved.rebinding.weights is None
    assert references(slot) == before
    assert y.grad_fn is None


def test_no_reachable_tensor_lies_in_the_slot_of_a_kept_forward() -> None:
    model, block, slot, x, _, inputs = make("qwen3", torch.bfloat16)
    kept = layer_templates(model)[1].forward(slot_views(slot, block, torch.bfloat16), x, inputs)
    low, high = slot.data_ptr(), slot.data_ptr() + slot.nbytes
    objects = gc.get_objects()
    inside = [o for o in objects if type(o) is Tensor and o.numel() and o is not slot and low <= o.data_ptr() < high]
    assert inside == []
    packed = [o for o in objects if type(o) is WeightView]
    assert {view.index for view in packed} == set(range(len(block.params))), (
        "not every weight was packed: the test sees too little"
    )
    del kept


def test_a_slot_may_be_freed_between_forward_and_backward() -> None:
    model, block, slot, x, dy, inputs = make("mistral", torch.float32)
    expected = plain(model, block, slot, x, dy, inputs)
    other = slot.clone()
    template = layer_templates(model)[1]
    y, saved = template.forward(slot_views(slot, block, torch.float32), x, inputs)
    slot.untyped_storage().resize_(0)
    dx, grads = template.backward(slot_views(other, block, torch.float32), saved, dy)
    assert_same_bits([y, dx, *grads], expected)


def test_a_failed_backward_lets_go_of_the_weights() -> None:
    model, block, slot, x, dy, inputs = make("llama", torch.float32)
    template, weights = layer_templates(model)[1], slot_views(slot, block, torch.float32)
    _, saved = template.forward(weights, x, inputs)
    with pytest.raises(RuntimeError):
        template.backward(weights, saved, dy[:1])
    assert saved.rebinding.weights is None


def test_several_layers_kept_at_once_each_get_their_own_weights() -> None:
    """Kept handles of one template interleave; the rebinding belongs to the handle, not to the template."""
    model, block, slot, x, dy, inputs = make("llama", torch.float32)
    template = layer_templates(model)[1]
    slots = [slot.clone(), (slot.view(torch.float32) * 0.5).view(torch.uint8)]
    expected = [plain(model, block, s, x, dy, inputs) for s in slots]
    kept = [template.forward(slot_views(s, block, torch.float32), x, inputs) for s in slots]
    for i in (0, 1):
        y, saved = kept[i]
        dx, grads = template.backward(slot_views(slots[i], block, torch.float32), saved, dy)
        assert_same_bits([y, dx, *grads], expected[i])


def test_layers_share_a_template_exactly_when_their_structure_is_equal() -> None:
    base = ModelSpec.from_config(small_config("qwen2"))
    same = ModelSpec.from_config(
        small_config("qwen2", vocab_size=999, num_hidden_layers=5, rope_theta=5e5, tie_word_embeddings=True)
    )
    templates = layer_templates(base)
    assert templates[0] is templates[2]
    assert layer_structure(base, 0) == layer_structure(same, 4)
    for change in ({"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}, {"num_key_value_heads": 3}, {"head_dim": 12}):
        assert layer_structure(ModelSpec.from_config(small_config("qwen2", **change)), 0) != layer_structure(base, 0)
    assert templates[0] is layer_templates(same)[4]


def test_wrong_weights_and_layers_are_refused() -> None:
    model, block, slot, x, _, inputs = make("llama", torch.float32)
    template, weights = layer_templates(model)[1], slot_views(slot, block, torch.float32)
    with pytest.raises(ValueError, match="9 expected, got 8"):
        template.forward(weights[:-1], x, inputs)
    with pytest.raises(ValueError, match=r"q_proj.weight: \(60, 42\) expected"):
        template.forward([weights[0].t(), *weights[1:]], x, inputs)
    with pytest.raises(ValueError, match=r"layer: must be in 0..2"):
        layer_structure(model, 3)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", torch.float32), pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_a_compiled_layer_keeps_no_weight_either(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aot_eager` saves through the same seam as the default backend, without its code generation."""
    model, block, slot, x, dy, inputs = make("qwen3", dtype)
    template_module._build.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    template = layer_templates(model, compiled=True)[1]
    weights = slot_views(slot.clone(), block, dtype)
    y, saved = template.forward(weights, x, inputs)
    dx, grads = template.backward(weights, saved, dy)
    expected = [y, dx, *grads]
    for _ in range(2):
        assert_same_bits(moved(template, block, slot.clone(), x, dy, inputs), expected)
    before = references(slot)
    y, saved = template.forward(slot_views(slot, block, dtype), x, inputs)
    assert references(slot) == before
    for got, reference in zip(expected, plain(model, block, slot, x, dy, inputs), strict=True):
        # Fused kernels round less often than eager BF16 code does.
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        assert float((got - reference).norm()) <= tolerance * float(reference.norm())


@pytest.mark.parametrize("backend", ["eager code", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_for_what_it_saves_computes_no_output_and_saves_the_same_bits(
    architecture: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in place of what is not computed would reach every gradient that depends on it."""
    model, block, slot, x, dy, inputs = make(architecture, dtype, **({"mlp_bias": True} if architecture == "llama" else {}))
    if backend != "eager code":
        template_module._build.cache_clear()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    template, weights = layer_templates(model, compiled=backend != "eager code")[1], slot_views(slot, block, dtype)
    _, saved = template.forward(weights, x, inputs)
    expected = template.backward(weights, saved, dy)
    left_out = []

    def nothing(x: Tensor, weight: Tensor) -> Tensor:
        left_out.append(tuple(x.shape))
        return x.new_full((*x.shape[:-1], weight.shape[0]), float("nan"))

    monkeypatch.setattr(last_product, "_uncomputed", nothing)
    dx, grads = template.backward(weights, template.saved_by(weights, x, inputs), dy)
    assert left_out == [(2, T, model.intermediate_size)]
    assert_same_bits([dx, *grads], [expected[0], *expected[1]])
    y, _ = template.forward(weights, x, inputs)
    assert bool(y.isfinite().all())


def test_a_change_of_shape_beyond_the_recompile_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block, slot, x, _, _ = make("llama", torch.float32)
    template_module._build.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    template, weights = layer_templates(model, compiled=True)[1], slot_views(slot, block, torch.float32)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        for length in range(3, 8):
            cos, sin = rotary_tables(model, torch.arange(length)[None], torch.float32)
            template.forward(weights, x[:, :length], LayerInputs(cos=cos, sin=sin, mask=None))
