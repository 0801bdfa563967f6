"""The checks of `papers/h200`: what fails and what does not, what a rehearsal writes, and what the figures they judge mean."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.derive import derive
from megatrain.files import load_record
from megatrain.hardware import H200
from megatrain.plan import Plan
from megatrain.schedule import lower
from papers.h200 import checks
from papers.h200.checks import main
from papers.h200.measurement import cpu_busy_after_clip, missed_by_run
from papers.h200.models import QWEN25, qwen
from papers.h200.workload import RandomWeights, batches
from sim.simulate import simulate
from tests.engine.small import small_model, small_recipe

ROOT = Path(__file__).parent.parent


def run(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The command's exit code and the lines that it wrote."""
    code = main(["--out", str(out), *arguments])
    return code, [json.loads(line) for line in (out / "checks.jsonl").read_text().splitlines()]


def replace(monkeypatch: pytest.MonkeyPatch, **of: Any) -> None:
    """Checks that return or raise what is given, with a preflight that passes unless it is given too."""

    def check(outcome: Any) -> checks.Check:
        def give(device: str, folder: Path) -> dict[str, Any]:
            if isinstance(outcome, Exception):
                raise outcome
            return dict(outcome)

        return give

    monkeypatch.setattr(checks, "preflight", check(of.pop("preflight", {})))
    monkeypatch.setattr(checks, "CHECKS", {name: check(outcome) for name, outcome in of.items()})


# ---- the command ---------------------------------------------------------------------------------------------------------


def test_a_check_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(monkeypatch, first=ValueError("no such thing"), second={"x": 1})
    code, lines = run(tmp_path, "--device", "cpu")
    assert code == 1
    assert [(line["check"], line["passed"]) for line in lines] == [("preflight", True), ("first", False), ("second", True)]
    assert lines[1]["error"] == "ValueError: no such thing"
    assert lines[2]["result"] == {"x": 1}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    code, lines = run(tmp_path, "--device", "cpu", "second")
    assert (code, [line["check"] for line in lines[3:]]) == (0, ["preflight", "second"]), "lines are added to those before"


def test_nothing_runs_after_a_preflight_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, preflight=RuntimeError("no device"), first={})
    code, lines = run(tmp_path)
    assert (code, [line["check"] for line in lines]) == (1, ["preflight"])


@pytest.mark.parametrize("result", [{"missed": ["too slow"]}, {"a": {"missed": []}, "b": {"missed": ["too slow"]}}])
def test_a_promise_that_is_missed_fails_on_a_gpu_and_not_in_a_rehearsal(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, first=result)
    code, lines = run(tmp_path / "gpu", "--device", "cuda")
    assert (code, lines[1]["passed"], lines[1]["missed"]) == (1, False, ["too slow"])
    code, lines = run(tmp_path / "cpu", "--device", "cpu")
    assert (code, lines[1]["passed"], lines[1]["missed"]) == (0, True, [])


def test_an_unknown_check_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "kernels", "kernel"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "must be of preflight, predictions, kernels," in said.err and said.err.endswith("got kernel\n")
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_runs_what_the_gpu_would(tmp_path: Path) -> None:
    """The quick checks of each kind, but for what needs a GPU, in the order of priority and not of the command."""
    code, lines = run(tmp_path, "--device", "cpu", "seven_b", "plain_fp32", "kernels", "host_costs")
    assert (code, [line["check"] for line in lines]) == (0, ["preflight", "plain_fp32", "seven_b", "host_costs"])
    assert all(line.keys() == {"check", "passed", "missed", "result", "seconds"} for line in lines)
    measured = lines[2]["result"]
    assert measured.keys() == {"during_backward", "next_forward"}
    for policy, figures in measured.items():
        assert figures["digests equal"] and len(figures["losses"]) == 9 and all(map(math.isfinite, figures["losses"]))
        kept = load_record(tmp_path / f"7b-{policy}.measured.json.gz")
        assert kept.job.plan.update == policy and kept.model_name == "Qwen2.5-7B"
        assert "Stalls by lane and cause" in (tmp_path / f"7b-{policy}.stalls.txt").read_text()


# ---- judging -------------------------------------------------------------------------------------------------------------


def test_every_run_must_execute_its_schedule_and_leave_the_allocator_alone() -> None:
    what = "segments and bytes reserved before, after"
    good = {"digests equal": True, what: [[3, 8], [3, 8]]}
    assert missed_by_run(good, {"fast": True}) == []
    assert missed_by_run(good, {"fast": False}) == ["fast"]
    assert missed_by_run(good | {"digests equal": False}, {}) == ["digests equal"]
    for after in ([4, 8], [3, 9]):
        assert missed_by_run(good | {what: [[3, 8], after]}, {"fast": True}) == ["segments flat"]


def test_the_cpu_lane_is_busy_after_a_clip_for_as_long_as_its_ops_last() -> None:
    """When each op of the lane but the clip takes half of its time and ends when it did, the share is half as large."""
    schedule = lower(small_model(), small_recipe(), Plan(update="next_forward"))
    facts = derive(schedule, simulate(schedule, H200))
    share = cpu_busy_after_clip(facts)
    assert 0 < share <= 1
    events = list(facts.run.events)
    for i in facts.run.lanes["cpu"]:
        if facts.run.placed[i].op.kind != "clip":
            events[i] = events[i]._replace(start_ns=(events[i].start_ns + events[i].end_ns) // 2)
    shorter = dataclasses.replace(facts, run=dataclasses.replace(facts.run, events=tuple(events)))
    assert cpu_busy_after_clip(shorter) == pytest.approx(share / 2, rel=0.01)


def test_a_cpu_that_updates_nothing_is_not_busy_after_a_clip() -> None:
    schedule = lower(small_model(), small_recipe(), Plan(placement={"default": "resident"}))
    assert cpu_busy_after_clip(derive(schedule, simulate(schedule, H200))) == 0


# ---- what runs are given -------------------------------------------------------------------------------------------------


def test_models_have_as_many_parameters_as_published() -> None:
    numel = {name: sum(block.numel for block in qwen(name, "cuda").blocks) for name in QWEN25}
    published = {"0.5B": 0.49e9, "3B": 3.09e9, "7B": 7.61e9, "14B": 14.7e9}
    tied = {"0.5B": 896 * 151936, "3B": 2048 * 151936}  # whose output matrix is the embedding's there, and its own here
    assert numel == pytest.approx({name: n + tied.get(name, 0) for name, n in published.items()}, rel=0.01)
    deep, usual = qwen("14B-60", "cuda"), qwen("14B", "cuda")
    assert (deep.n_layers, usual.n_layers) == (60, 48)
    assert deep.layers[59].params[0].shape == usual.layers[0].params[0].shape
    assert not usual.tied


def test_weights_and_batches_are_the_same_at_every_call() -> None:
    model, recipe = qwen("7B", "cpu"), small_recipe(micro_batches=2, micro_batch_size=3)
    one, other = RandomWeights(model, "cpu"), RandomWeights(model, "cpu")
    params = {p.name: p.shape for block in model.blocks for p in block.params}
    assert list(one) == list(params)
    for name in reversed(params):  # whatever was asked for before
        other[name]
        assert one[name].shape == params[name] and torch.equal(one[name], other[name])
        assert "norm" in name or one[name].numel() < 100 or float(one[name].float().std()) == pytest.approx(0.02, rel=0.2)
    first, second = batches(model, recipe, 2)
    assert first["input_ids"].shape == (6, recipe.seq_len)
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(batches(model, recipe, 1)[0]["input_ids"], first["input_ids"])


@pytest.mark.parametrize("module", ["models", "records", "table"])
def test_what_reads_figures_needs_no_pytorch(module: str) -> None:
    code = f"import sys, papers.h200.{module}; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


def test_no_two_random_matrices_are_equal() -> None:
    made = {name: weight.clone() for name, weight in RandomWeights(qwen("7B", "cpu"), "cpu").items() if "norm" not in name}
    for (a, one), (b, other) in itertools.combinations(made.items(), 2):
        assert one.shape != other.shape or not torch.equal(one, other), (a, b)
