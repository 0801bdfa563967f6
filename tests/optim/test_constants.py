import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from megatrain.optim import constants
from megatrain.optim.constants import clip_factor, learning_rate, step_constants
from megatrain.plan import Plan
from megatrain.recipe import AdamW
from megatrain.schedule import lower
from tests.schedule.fixtures import tiny_model, tiny_recipe


def _rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rate after 1, 2, ..., `steps` calls of scheduler.step()."""
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def _sgd(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def test_importing_constants_does_not_import_torch() -> None:
    code = "import megatrain.optim.constants, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_constant_schedule_is_that_of_transformers(warmup: int) -> None:
    optimizer = AdamW(lr=3e-4, warmup_steps=warmup)
    expected = _rates(get_constant_schedule_with_warmup(_sgd(3e-4), warmup), 20)
    assert [learning_rate(optimizer, step) for step in range(1, 21)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "min_lr"), [(0, 0.0), (5, 0.0), (5, 2e-5)])
def test_cosine_schedule_is_that_of_transformers(warmup: int, min_lr: float) -> None:
    optimizer = AdamW(lr=3e-4, schedule="cosine", warmup_steps=warmup, total_steps=40, min_lr=min_lr)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(_sgd(3e-4), warmup, 40, min_lr=min_lr)
    assert [learning_rate(optimizer, s) for s in range(1, 41)] == pytest.approx(_rates(scheduler, 40), rel=1e-9, abs=1e-18)


def test_cosine_schedule_without_warmup_is_that_of_torch() -> None:
    optimizer = AdamW(lr=3e-4, schedule="cosine", total_steps=40, min_lr=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(_sgd(3e-4), T_max=40, eta_min=1e-5)
    assert [learning_rate(optimizer, s) for s in range(1, 41)] == pytest.approx(_rates(scheduler, 40), rel=1e-9)


def test_cosine_schedule_starts_above_zero_reaches_both_ends_exactly_and_stays_down() -> None:
    optimizer = AdamW(lr=3e-4, schedule="cosine", warmup_steps=4, total_steps=10, min_lr=1e-5)
    assert learning_rate(optimizer, 1) == 3e-4 / 4
    assert learning_rate(optimizer, 4) == 3e-4
    assert learning_rate(optimizer, 10) == learning_rate(optimizer, 1000) == 1e-5


def test_steps_are_counted_from_one() -> None:
    for function in (learning_rate, step_constants):
        with pytest.raises(ValueError, match="step must be >= 1"):
            function(AdamW(), 0)


@given(norm=st.floats(0, 1e30), clip_norm=st.floats(1e-6, 1e6))
def test_the_clipped_norm_is_at_most_the_limit_and_equals_it_if_it_was_above(norm: float, clip_norm: float) -> None:
    factor = clip_factor(norm, clip_norm)
    if norm <= clip_norm:
        assert factor == 1.0
    else:
        assert factor < 1.0 or norm == pytest.approx(clip_norm, rel=1e-15)
        assert norm * factor == pytest.approx(clip_norm, rel=1e-15)


def test_clip_factor_at_the_edges() -> None:
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1e9, None) == 1.0
    for norm in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="norm must be finite"):
            clip_factor(norm, 1.0)


@given(
    step=st.integers(1, 10**6),
    lr=st.floats(1e-8, 1e-1),
    beta1=st.sampled_from([0.0, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.95, 0.999, 1 - 1e-7]),
    factor=st.floats(0, 1),
    skip=st.booleans(),
)
def test_every_constant_is_its_formula_rounded_once(
    step: int, lr: float, beta1: float, beta2: float, factor: float, skip: bool
) -> None:
    block = step_constants(AdamW(lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.1), step, factor=factor, skip=skip)
    assert block.dtype == np.float32
    assert block.shape == (constants.N_CONSTANTS,)
    expected = {
        "SKIP": 1.0 if skip else 0.0,
        "FACTOR": factor,
        "BETA1": beta1,
        "ONE_MINUS_BETA1": 1 - beta1,
        "BETA2": beta2,
        "ONE_MINUS_BETA2": 1 - beta2,
        "INV_SQRT_BC2": 1 / math.sqrt(1 - beta2**step),
        "EPS": 1e-8,
        "STEP_SIZE": lr / (1 - beta1**step),
        "DECAY": 1 - lr * 0.1,
        "LR": lr,
    }
    assert expected.keys() == constants.LAYOUT.keys()
    assert {name: block[index] for name, index in constants.LAYOUT.items()} == {
        name: np.float32(value) for name, value in expected.items()
    }
    assert np.isfinite(block).all()


def test_the_block_is_what_lowering_lays_out() -> None:
    schedule = lower(tiny_model(), tiny_recipe(), Plan(placement={"0": "resident"}))
    sizes = {s.name: s.nbytes for s in schedule.storages}
    assert sizes["constants"] == sizes["constants.device"] == step_constants(AdamW(), 1).nbytes


def test_the_layout_has_no_two_constants_in_one_place() -> None:
    assert len(set(constants.LAYOUT.values())) == len(constants.LAYOUT)
    assert all(0 <= index < constants.N_CONSTANTS for index in constants.LAYOUT.values())


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.5])
def test_a_factor_no_gradient_could_survive_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="factor must be finite"):
        step_constants(AdamW(), 1, factor=factor)
