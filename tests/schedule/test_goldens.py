"""The text form of a few small schedules, word for word. A change here is a change of what every step does.

To accept one: `REGENERATE=1 pytest tests/schedule/test_goldens.py`, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.schedule import Schedule
from tests.schedule.fixtures import build, tiny_model, tiny_recipe

GOLDENS = Path(__file__).parent / "goldens"


def _streamed() -> Schedule:
    """Everything streamed, exact clipping under the next forward, one slot, layers in two chunks."""
    return build(recipe=tiny_recipe(micro_batches=1), update="next_forward", weight_slots=1, gradient_slots=1)


def _tied_during_backward() -> Schedule:
    """A tied model with its embedding and one layer resident, updated during backward, whole blocks for chunks."""
    return build(
        tiny_model(tied=True), tiny_recipe(clip_norm=None), update="during_backward", chunk_bytes=0,
        placement={"default": "streamed", "embedding": "resident", "1": "resident"},
    )  # fmt: skip


def _kept_after() -> Schedule:
    """FP32, activations of the second layer kept, serial updates, a slot a layer."""
    return build(
        recipe=tiny_recipe(precision="fp32", gradient_dtype="fp32"), update="after", chunk_bytes=4096,
        activations={"default": "recompute", "1": "keep"},
    )  # fmt: skip


def _passing_offload() -> Schedule:
    """The embedding and a layer updated in passing, one on the CPU, one resident; the first layer's input waits on the host."""
    return build(
        tiny_model(layers=3), tiny_recipe(micro_batches=1), update="next_forward", weight_slots=1, gradient_slots=1,
        placement={"default": "streamed", "embedding": "streamed_adam", "0": "streamed_adam", "2": "resident"},
        activations={"default": "offload"}, state_slots=1,
    )  # fmt: skip


SCHEDULES = {
    "streamed": _streamed, "tied_during_backward": _tied_during_backward, "kept_after": _kept_after,
    "passing_offload": _passing_offload,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_form(name: str) -> None:
    schedule = SCHEDULES[name]()
    digests = schedule.digests()
    parts = (schedule.prologue, schedule.body, schedule.epilogue)
    text = "\n".join(f"{part.name} {digests[part.name]}\n{schedule.format(part)}" for part in parts)
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("REGENERATE"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_the_text_form_names_ops_storages_and_tags() -> None:
    """One line read by hand: `index:name lane <- deps | reads -> writes`."""
    schedule = _streamed()
    lines = schedule.format(schedule.prologue).splitlines()
    line = next(x for x in lines if ":load[2.1]" in x)
    assert line == (
        f"{lines.index(line)}:load[2.1] h2d <- . | weights[2](1536:3072)=weights[2]@-1 "
        "-> slot.layer.0(1536:3072)=weights[2]@-1"
    )
