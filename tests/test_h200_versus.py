"""Our engine beside others: all train the same model, ratios compare only what can be compared, refusals are one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from papers.h200 import versus
from papers.h200.checks import RandomWeights, batches, qwen
from papers.h200.versus import comparable, deepspeed_config, main, parameter_groups, plain, ratios, winner

SETTINGS = sorted(path.stem for path in versus.SETTINGS.glob("*.json"))


def line(system: str = "megatrain", step_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "system": system, "settings": system, "model": "3B", "gpu_memory_gib": None, "tokens": 4096, "step_s": step_s,
        "losses": [12.0, 11.9, 11.8], "run": "a", "versions": {"torch": "2.11.0", "deepspeed": "0.19.8"},
        "machine": {"gpu": "H200"}, **changes,
    }  # fmt: skip


# ---- ratios --------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_tokens_a_second_over_deepspeeds_at_the_same_tokens() -> None:
    lines = [
        line(step_s=0.5), line(step_s=0.8, gpu_memory_gib=16, settings="3b-16-4096"), line("deepspeed", 2.0),
        line("plain", 0.1), line(step_s=1.0, tokens=16384), line("deepspeed", 3.0, tokens=16384),
        line(step_s=2.0, tokens=32768), line("deepspeed", tokens=32768, error="OutOfMemoryError: no"),
    ]  # fmt: skip
    assert ratios(lines) == [
        {"model": "3B", "gpu_memory_gib": None, "tokens": 4096, "ratio": 4.0},
        {"model": "3B", "gpu_memory_gib": 16, "tokens": 4096, "ratio": 2.5},
        {"model": "3B", "gpu_memory_gib": None, "tokens": 16384, "ratio": 3.0},
    ]
    assert ratios([]) == []


def test_of_two_lines_of_one_run_the_last_counts_and_errors_do_not() -> None:
    lines = [line("deepspeed", 2.0), line(step_s=1.0), line(step_s=0.5), line(error="stopped", run="b")]
    assert [found["ratio"] for found in ratios(lines)] == [4.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"losses": [12.0, 12.1, 11.8]}, r"losses: differ by more than 1% at step 2: 11.9 \(megatrain .*\), 12.1 \(deepspeed"),
        ({"losses": [float("nan")]}, "losses: must be finite numbers, at least one"),
        ({"losses": []}, "losses: must be finite numbers, at least one"),
        ({"run": "b"}, "run: must be one in all lines, got 'a' .* and 'b'"),
        ({"versions": {"torch": "2.12.0", "deepspeed": "0.19.8"}}, "versions: must be one in all lines"),
        ({"machine": {"gpu": "H100"}}, "machine: must be one in all lines"),
        ({"step_s": 0.0}, "step_s: must be a finite number > 0, got 0.0"),
        ({"step_s": "1"}, "step_s: must be a finite number > 0, got '1'"),
    ],
)
def test_lines_that_cannot_be_compared_are_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        ratios([line(), line("deepspeed", 2.0) | changes])
    assert "\n" not in str(refused.value)


def test_only_steps_that_both_have_are_compared_and_only_at_one_size() -> None:
    assert comparable([line(), line("deepspeed", losses=[12.1])])
    assert comparable([line(), line("plain", tokens=16384, losses=[3.0])])
    assert comparable([line(), line("plain", losses=[12.119, 11.9])]), "within 1%"


@pytest.mark.parametrize("field", versus.FIELDS)
def test_a_line_without_a_field_is_refused(field: str) -> None:
    broken = {name: value for name, value in line().items() if name != field}
    with pytest.raises(ValueError, match=f"{field}: is missing"):
        ratios([line("deepspeed"), broken])


# ---- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_offload_everything_and_leave_the_conditions_to_the_recipe(settings: str) -> None:
    recipe = Recipe(micro_batch_size=16, optimizer=AdamW(lr=3e-5, beta2=0.97))
    config = deepspeed_config(settings, recipe)
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"]["params"] == {"lr": 3e-5, "betas": [0.9, 0.97], "eps": 1e-8, "weight_decay": 0.1}
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradient_clipping": 2.0}, "must hold bf16 and zero_optimization"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "FP32 masters"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "offload_param: must be wholly on the cpu"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer: must be wholly on the cpu",
        ),
    ],
)
def test_settings_that_change_the_conditions_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.loads((versus.SETTINGS / "default.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps(good | changes))
    monkeypatch.setattr(versus, "SETTINGS", tmp_path)
    with pytest.raises(ValueError, match=says):
        deepspeed_config("bad", Recipe())


def test_the_winner_is_the_shortest_step_of_the_installed_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, monkey = tmp_path / "versus-search.jsonl", {"torch": "2.11.0", "deepspeed": "0.19.8"}
    monkeypatch.setattr(versus, "versions", lambda: monkey)
    with pytest.raises(ValueError, match="run search first"):
        winner(found)
    lines = [line("deepspeed", seconds, settings=name) for name, seconds in (("default", 2.6), ("large", 2.4), ("small", 3.0))]
    found.write_text("\n".join(map(json.dumps, [*lines, line("deepspeed", 0.1, settings="no", error="stopped")])))
    assert winner(found) == "large"
    monkey["deepspeed"] = "0.20.0"
    with pytest.raises(ValueError, match=r"must be a search of DeepSpeed 0\.20\.0, which is installed; it is of 0\.19\.8"):
        winner(found)
    found.write_text(json.dumps(line("deepspeed", error="stopped")))
    with pytest.raises(ValueError, match="must hold a setting that ran"):
        winner(found)


# ---- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.1, None])
def test_plain_pytorch_and_our_engine_have_the_same_losses(clip_norm: float | None) -> None:
    """On one batch again and again with large steps, so that a missed update would be seen."""
    model = qwen("7B", "cpu")
    recipe = Recipe(micro_batch_size=2, seq_len=16, clip_norm=clip_norm, optimizer=AdamW(lr=5e-3))
    data = batches(model, recipe, 1) * 5
    step = plain(model, recipe, "cpu")
    theirs = [float(step(batch["input_ids"])) for batch in data]
    with Engine(model, recipe, Plan(chunk_bytes=0), RandomWeights(model, "cpu")) as engine:
        losses = [engine.step(batch).loss for batch in data]
    assert losses == pytest.approx(theirs, rel=0.01)
    assert all(b < 0.98 * a for a, b in pairwise(theirs)), "every update counts"


def test_matrices_decay_and_nothing_else_does() -> None:
    model = qwen("7B", "cpu")
    made = RandomWeights(model, "cpu")
    decayed, free = parameter_groups(model, [(name, made[name]) for name in made], 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {w.dim() for w in decayed["params"]} == {2}
    assert {w.dim() for w in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(made)


def test_a_rehearsal_runs_ours_and_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--device", "cpu", "--out", str(tmp_path), "--rows", "7b-all-4096", "--systems", "megatrain", "plain"]
    assert main([*arguments, "--commit", "c0ffee0", "--run", "here"]) == 0
    lines = versus.read_lines(tmp_path / "versus.jsonl")
    assert [found["system"] for found in lines] == ["megatrain", "plain"]
    assert [json.loads(said) for said in capsys.readouterr().out.splitlines()] == lines
    for found in lines:
        assert len(found["losses"]) == 10
        assert len(found["steps_s"]) >= 5
        assert found["spread"][0] <= found["step_s"] <= found["spread"][1]
        assert (found["commit"], found["run"]) == ("c0ffee0", "here")
    assert comparable(lines) == lines
    assert ratios(lines) == [], "nothing to compare with"
    assert json.loads((tmp_path / "rows.jsonl").read_text())["row"] == "7b-all-4096"


def test_a_run_that_fails_or_takes_too_long_is_a_line_with_an_error(tmp_path: Path) -> None:
    call = versus.Call(out=tmp_path, device="cpu", commit="", timeout_s=120.0, common={})
    assert versus.other(call, "deepspeed", "no-such-settings", "7B", 4096)["error"].startswith("ended with 1: ")
    python = [sys.executable, "-c"]
    with pytest.raises(RuntimeError, match="ended with 1: ValueError: too large"):
        versus.in_its_own_process(call, "fails", [*python, "input(); raise ValueError('too large')"], dict(os.environ))
    brief = dataclasses.replace(call, timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"took longer than 0\.5 s"):
        versus.in_its_own_process(brief, "hangs", [*python, "import time; time.sleep(60)"], dict(os.environ))


@pytest.mark.parametrize("arguments", [["search"], ["compare", "--rows", "7b-all-4096"]], ids=lambda a: a[0])
def test_without_deepspeed_there_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*arguments, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("DeepSpeed is not installed: pip install 'megatrain[deepspeed]'")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_row_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--rows", "8b-all-1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("rows: must be of 7b-all-4096")
