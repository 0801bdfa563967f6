"""Our engine beside others: all train the same model, what runs and what does not, refusals are one line."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain.engine.engine import Engine
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from papers.h200 import comparison, page, rivals, table, versus
from papers.h200.comparison import comparable, ratios, read_lines
from papers.h200.models import qwen
from papers.h200.process import in_its_own_process, ran_out
from papers.h200.rivals import conditions, deepspeed_config, library_model, parameter_groups, plain, read_settings
from papers.h200.versus import main
from papers.h200.workload import RandomWeights, batches
from tests.lines import line

SETTINGS = sorted(path.stem for path in rivals.SETTINGS.glob("*.json"))


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
        ({"gradient_clipping": 2.0}, "must hold bf16 and zero_optimization, and may hold checkpointing, got bf16, grad"),
        ({"checkpointing": 1}, "checkpointing: must be true or false, got 1"),
        ({"checkpointing": None}, "checkpointing: must be true or false, got null"),
        ({"checkpointing": "no"}, "checkpointing: must be true or false, got 'no'"),
        ({"zero_optimization": [3]}, "stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}, "offload_optimizer: must be wholly on the cpu, got 'c"),
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
    good = json.loads((rivals.SETTINGS / "default.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps(good | changes))
    monkeypatch.setattr(rivals, "SETTINGS", tmp_path)
    with pytest.raises(ValueError, match=says) as refused:
        deepspeed_config("bad", Recipe())
    assert str(refused.value).startswith("bad.json: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]", "1"])
def test_settings_that_are_no_table_are_refused_in_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text(text)
    monkeypatch.setattr(rivals, "SETTINGS", tmp_path)
    with pytest.raises(ValueError, match=r"^bad\.json: [^\n]*$"):
        read_settings("bad")


def test_settings_checkpoint_unless_they_say_that_they_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in SETTINGS if not read_settings(name).checkpointing] == ["no-checkpointing"]
    assert deepspeed_config("no-checkpointing", Recipe()) == deepspeed_config("default", Recipe()), "else as the default"
    good = json.loads((rivals.SETTINGS / "default.json").read_text())
    (tmp_path / "said.json").write_text(json.dumps(good | {"checkpointing": True}))
    monkeypatch.setattr(rivals, "SETTINGS", tmp_path)
    assert read_settings("said").checkpointing
    assert "checkpointing" not in deepspeed_config("said", Recipe()), "DeepSpeed has no such field"


# ---- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip_norm", "checkpointing"), [(0.1, False), (None, True)])
def test_plain_pytorch_and_our_engine_have_the_same_losses(clip_norm: float | None, checkpointing: bool) -> None:
    """On one batch again and again with large steps, so that a missed update would be seen."""
    model = qwen("7B", "cpu")
    recipe = Recipe(micro_batch_size=2, seq_len=16, clip_norm=clip_norm, optimizer=AdamW(lr=5e-3))
    data = batches(model, recipe, 1) * 5
    step = plain(model, recipe, "cpu", checkpointing)
    theirs = [float(step(batch["input_ids"])) for batch in data]
    with Engine(model, recipe, Plan(chunk_bytes=0), RandomWeights(model, "cpu")) as engine:
        losses = [engine.step(batch).loss for batch in data]
    assert losses == pytest.approx(theirs, rel=0.005)
    assert all(b < 0.99 * a for a, b in pairwise(theirs)), "every update changes the loss by more than that"


def test_matrices_decay_and_nothing_else_does() -> None:
    model = qwen("7B", "cpu")
    made = RandomWeights(model, "cpu")
    decayed, free = parameter_groups(model, [(name, made[name]) for name in made], 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {w.dim() for w in decayed["params"]} == {2}
    assert {w.dim() for w in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(made)


def saved_by_forward(module: Any, recipe: Recipe) -> int:
    """Bytes that a forward keeps for its backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(recipe.micro_batch_size, recipe.seq_len, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(input_ids=ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_forward_is_tried_with_all_activations_and_few_weights(checkpointing: bool) -> None:
    model, recipe = conditions("3B", 4096, "cpu")
    whole, tried = library_model(model, checkpointing), rivals.without_weights(model, "cpu", checkpointing)
    assert saved_by_forward(tried, recipe) == saved_by_forward(whole, recipe) > 0
    assert sum(p.numel() for p in tried.parameters()) == model.layers[0].numel + model.head.numel


def test_checkpointing_keeps_less() -> None:
    model, recipe = conditions("3B", 4096, "cpu")
    kept, checkpointed = (saved_by_forward(library_model(model, c), recipe) for c in (False, True))
    assert checkpointed < kept


def test_what_lasts_is_tried_with_it_on_the_gpu_alone() -> None:
    model, recipe = conditions("3B", 4096, "cpu")
    vast: Any = SimpleNamespace(config_json=model.config_json, blocks=[SimpleNamespace(numel=1 << 50)])
    rivals.try_forward("deepspeed", vast, recipe, "cpu", False)
    with pytest.raises(RuntimeError) as problem:
        rivals.try_forward("plain", vast, recipe, "cpu", False)
    assert ran_out(problem.value) == "host"


@pytest.mark.parametrize("system", ["plain", "deepspeed"])
def test_what_cannot_fit_is_not_built(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*conditions: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(rivals, "try_forward", no)
    for builder in ("plain", "offloaded"):
        monkeypatch.setattr(rivals, builder, lambda *conditions: pytest.fail("was built"))
    with pytest.raises(torch.OutOfMemoryError):
        rivals.measured(system, "default", "3B", 4096, "cpu", False, lambda: pytest.fail("was measured"))


def test_a_rehearsal_runs_ours_and_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--device", "cpu", "--out", str(tmp_path), "--rows", "7b-all-4096", "--systems", "megatrain", "plain"]
    assert main([*arguments, "--commit", "c0ffee0", "--run", "here"]) == 0
    lines = read_lines(tmp_path / "versus.jsonl")
    assert [(found["system"], found["checkpointing"]) for found in lines] == [("megatrain", None), ("plain", False)]
    assert [json.loads(said) for said in capsys.readouterr().out.splitlines()] == lines
    for found in lines:
        assert len(found["losses"]) == 10
        assert len(found["steps_s"]) >= 5
        assert found["spread"][0] <= found["step_s"] <= found["spread"][1]
        assert (found["commit"], found["run"]) == ("c0ffee0", "here")
    assert [(run.system, list(run.losses)) for run in comparable(lines)] == [(it["system"], it["losses"]) for it in lines]
    assert ratios(lines) == [], "nothing to compare with"
    assert json.loads((tmp_path / "rows.jsonl").read_text())["row"] == "7b-all-4096"
    assert {path.name for path in tmp_path.glob("7b-all-4096.*")} == {"7b-all-4096.measured.json.gz", "7b-all-4096.stalls.txt"}


CODE = "import os, signal, torch; from papers.h200.process import answer\ndef work(answers):\n    {}\nanswer(work)"


@pytest.mark.parametrize(
    ("work", "error", "out_of_memory"),
    [
        ("raise torch.OutOfMemoryError('too\\nlarge')", "ended with 1: OutOfMemoryError: too large", "gpu"),
        ("torch.empty(1 << 60)", "ended with 1: RuntimeError: ", "host"),
        ("print('noise'); raise ValueError('out of memory')", "ended with 1: ValueError: out of memory", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed", "host"),
        ("os._exit(3)", "ended with 3: nothing said", None),
    ],
    ids=["gpu", "host", "neither", "killed", "silent"],
)
def test_a_run_that_fails_says_by_a_field_whether_memory_ran_out(
    work: str, error: str, out_of_memory: str | None, tmp_path: Path
) -> None:
    found = in_its_own_process(
        [sys.executable, "-c", CODE.format(work)], os.environ, title="fails", log=tmp_path / "log", device="cpu", timeout_s=300.0
    )
    assert set(found) == {"error", "out_of_memory"}
    assert found["error"].startswith(error)
    assert found["out_of_memory"] == out_of_memory


def test_a_run_that_takes_too_long_or_cannot_begin_is_a_line_with_an_error(tmp_path: Path) -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = in_its_own_process(hangs, os.environ, title="hangs", log=tmp_path / "log", device="cpu", timeout_s=0.5)
    assert found == {"error": "took longer than 0.5 s", "out_of_memory": None}
    call = versus.Call(out=tmp_path, lines=tmp_path / "lines", device="cpu", commit="", timeout_s=300.0, common={})
    made = versus.rival(call, "deepspeed", "no-such-settings", "7B", 4096, True)
    assert made["error"].startswith("ended with 1: ")
    assert (made["out_of_memory"], made["checkpointing"]) == (None, True)
    assert read_lines(tmp_path / "lines") == [made]


def test_memory_that_ran_out_is_told_by_what_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")) == "gpu"
    assert ran_out(MemoryError()) == "host"
    assert ran_out(ValueError("out of memory")) is None
    wrapped = RuntimeError("12:forward[6]: failed")
    wrapped.__cause__ = torch.OutOfMemoryError("no")
    assert ran_out(wrapped) == "gpu"
    for free, whose in ((1 << 34, "host"), (1 << 20, "gpu")):  # pinned memory fails with the words of the GPU's
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 37))
        assert ran_out(torch.AcceleratorError("CUDA error: out of memory")) == whose
    assert ran_out(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")) is None


# ---- what is run, and what is not ----------------------------------------------------------------------------------------


Answers = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[dict[str, Any]]]:
    """Replaces what runs by what it would answer; gives the list of what is asked for, which grows."""

    def replace(answers: Answers) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []

        def run(command: list[str], environment: Any, **how: Any) -> dict[str, Any]:
            seen.append(json.loads(command[-1]))
            return answers(seen[-1])

        monkeypatch.setattr(versus, "in_its_own_process", run)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(versus, "build_kernels", lambda device: None)
        return seen

    return replace


RAN = {"step_s": 1.0, "losses": [12.0]}


def search_won_by(settings: str, path: Path) -> list[str]:
    """Arguments that name a search with one line."""
    path.write_text(json.dumps(line("deepspeed", settings=settings, versions=comparison.versions())) + "\n")
    return ["--search", str(path), "--device", "cpu", "--out", str(path.parent)]


@pytest.mark.parametrize(
    ("memory", "tries"),
    [("gpu", [False, True]), ("host", [False]), (None, [False])],
)
def test_only_where_the_gpus_memory_ran_out_a_rival_runs_again_with_checkpointing(
    memory: str | None, tries: list[bool], tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    seen = asked(lambda it: RAN if it["checkpointing"] else {"error": "failed", "out_of_memory": memory})
    arguments = search_won_by("no-checkpointing", tmp_path / "search.jsonl")
    code = main(["compare", *arguments, "--rows", "3b-all-4096", "3b-16-4096", "--systems", "deepspeed", "plain"])
    wanted = [(system, c) for system in ("deepspeed", "plain") for c in tries]
    assert [(it["system"], it["checkpointing"]) for it in seen] == wanted, "once a size"
    lines = read_lines(tmp_path / "versus.jsonl")
    assert [(found["system"], found["checkpointing"]) for found in lines] == wanted, "both lines stay"
    assert [found.get("out_of_memory", "ran") for found in lines] == [memory if not c else "ran" for _, c in wanted]
    assert code == (0 if memory == "gpu" else 1)


def test_a_rival_that_fits_with_activations_kept_runs_once(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    seen = asked(lambda it: RAN)
    arguments = ["compare", *search_won_by("no-checkpointing", tmp_path / "search.jsonl"), "--rows", "3b-all-4096"]
    assert main([*arguments, "--systems", "deepspeed", "plain"]) == 0
    assert [it["checkpointing"] for it in seen] == [False, False]


def test_settings_that_checkpoint_run_once_whatever_happens(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    seen = asked(lambda it: {"error": "failed", "out_of_memory": "gpu"})
    arguments = search_won_by("default", tmp_path / "search.jsonl")
    assert main(["compare", *arguments, "--rows", "3b-all-4096", "--systems", "deepspeed"]) == 1
    assert [(it["settings"], it["checkpointing"]) for it in seen] == [("default", True)]


def test_settings_that_are_named_run_in_place_of_the_winner(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    seen = asked(lambda it: RAN)
    arguments = [*search_won_by("default", tmp_path / "search.jsonl"), "--settings", "no-checkpointing", "large-buckets"]
    assert main(["compare", *arguments, "--rows", "3b-all-4096", "--systems", "deepspeed"]) == 0
    wanted = [("no-checkpointing", False), ("large-buckets", True)]
    assert [(it["settings"], it["checkpointing"]) for it in seen] == wanted
    del seen[:]
    assert main(["search", *arguments]) == 0
    assert [(it["settings"], it["checkpointing"]) for it in seen] == wanted
    del seen[:]
    assert main(["search", *arguments[:-3]]) == 0
    assert [it["settings"] for it in seen] == SETTINGS, "all by default"


def test_a_search_tries_settings_that_do_not_fit_once(tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]) -> None:
    seen = asked(lambda it: {"error": "failed", "out_of_memory": "gpu"})
    assert main(["search", "--settings", "no-checkpointing", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert len(seen) == 1


def test_a_run_goes_on_where_it_was_left(tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]) -> None:
    answers: dict[str, dict[str, Any]] = {
        "default": RAN, "large-buckets": {"error": "took longer than 420 s", "out_of_memory": None},
        "no-checkpointing": {"error": "OutOfMemoryError", "out_of_memory": "gpu"},
    }  # fmt: skip
    seen = asked(lambda it: answers[it["settings"]])
    arguments = ["search", "--device", "cpu", "--out", str(tmp_path), "--settings", *answers]
    assert main([*arguments, "--run", "a", "--commit", "c0ffee0"]) == 1
    answers["large-buckets"] = RAN
    for call, ran in (
        (["--run", "a", "--commit", "c0ffee0"], ["large-buckets"]),
        (["--run", "a", "--commit", "c0ffee0"], []),
        (["--run", "a", "--commit", "decade0"], list(answers)),
        (["--run", "b", "--commit", "c0ffee0"], list(answers)),
        (["--commit", "c0ffee0"], list(answers)),
    ):
        del seen[:]
        assert main([*arguments, *call]) == 1, "what did not fit still counts as failed"
        assert [it["settings"] for it in seen] == ran, call


def test_what_did_not_fit_in_an_earlier_call_goes_on_with_checkpointing(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    first: Answers = lambda it: {"error": "failed", "out_of_memory": None if it["checkpointing"] else "gpu"}  # noqa: E731
    arguments = ["compare", "--device", "cpu", "--out", str(tmp_path), "--run", "a"]
    arguments += ["--rows", "3b-all-4096", "--systems", "plain"]
    asked(first)
    assert main(arguments) == 1
    seen = asked(lambda it: RAN)
    assert main(arguments) == 0
    assert [it["checkpointing"] for it in seen] == [True]


def test_a_run_goes_on_only_where_its_lines_could_be_compared(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(lambda it: RAN)
    (tmp_path / "versus.jsonl").write_text(json.dumps(line(run="a", versions=comparison.versions(), machine={"gpu_uuid": 1})))
    arguments = ["compare", "--device", "cpu", "--out", str(tmp_path), "--systems", "plain"]
    assert main([*arguments, "--run", "a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("--run a: machine: must be {'gpu_uuid': 1}, as in ")
    assert said.count("\n") == 1
    assert seen == []
    assert main([*arguments, "--run", "b", "--rows", "3b-all-4096"]) == 0, "lines of another run do not matter"


def test_a_comparison_that_is_repeated_takes_the_place_of_the_one_before(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]]
) -> None:
    arguments = ["compare", *search_won_by("default", tmp_path / "search.jsonl"), "--rows", "3b-all-4096"]
    for step_s in (1.0, 2.0):
        asked(lambda it, step_s=step_s: RAN | {"step_s": step_s})  # type: ignore[misc]
        assert main([*arguments, "--systems", "deepspeed", "plain"]) == 0
    lines = read_lines(tmp_path / "versus.jsonl")
    assert len(lines) == 4
    assert [(run.system, run.step_s) for run in comparable(lines)] == [("deepspeed", 2.0), ("plain", 2.0)]


@pytest.mark.parametrize("timeout", ["nan", "-5", "0", "inf", "1e999"])
def test_a_time_limit_must_be_one(
    timeout: str, tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(lambda it: RAN)
    arguments = [*search_won_by("default", tmp_path / "search.jsonl"), "--timeout", timeout]
    for what in ("search", "compare"):
        assert main([what, *arguments]) == 2
        assert capsys.readouterr().err == f"--timeout: must be a finite number > 0, got {float(timeout):g}\n"
    assert not seen and [it.name for it in tmp_path.iterdir()] == ["search.jsonl"]


def test_a_search_whose_settings_are_refused_runs_nothing(
    tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "bad.json").write_text("{}")
    monkeypatch.setattr(rivals, "SETTINGS", tmp_path)
    monkeypatch.setattr(versus, "SETTINGS", tmp_path)
    seen = asked(lambda it: RAN)
    assert main(["search", "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("bad.json: must hold bf16 and zero_optimization")
    assert seen == []
    assert not (tmp_path / "out").exists()


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


# ---- bad lines ---------------------------------------------------------------------------------------------------------


NAN, VAST = float("nan"), 10**400
NO_TEXT: list[Any] = [None, 1, True, [], ["x"], {}, {"x": 1}, NAN, "two\nlines", "\ud800"]
BAD: dict[str, list[Any]] = {
    "system": [*NO_TEXT, "", "tensorflow"], **dict.fromkeys(("settings", "model", "run", "commit"), NO_TEXT),
    "checkpointing": [0, "no", [], {}, NAN],
    "gpu_memory_gib": ["16", True, [16], {}, 0, -1, NAN, math.inf, VAST],
    "tokens": [None, "4096", True, 0, -1, 4096.0, 0.5, NAN, math.inf, VAST, [4096], {}],
    "versions": [None, "0.19.8", [], ["0.19.8"], {"deepspeed": 1}, {"deepspeed": []}, {"deepspeed": "a\nb"}, NAN],
    "machine": [None, "H200", [], NAN],
    "step_s": [None, "1", True, 0, -1.0, NAN, math.inf, -math.inf, VAST, [1.0], {}],
    "spread": ["x", 1.0, [], [1.0], [1.0, 1.0, 1.0], ["1", "1"], [None, 1.0], [NAN, NAN], [2.0, 1.0], [0, 2], [1, math.inf], {}],
    "losses": [None, "x", 12.0, {}, [], ["12"], [None], [[12.0]], [{}], [True], [NAN], [math.inf], [VAST], [-1.0], [0.0]],
    "gpu_peak_gib": ["x", True, -1, NAN, math.inf, VAST, [], {}],
    "out_of_memory": [1, True, [], {}], "error": [1, True, ["x"], {"x": 1}, NAN],
}  # fmt: skip
"""Values that a field must not have, by the field."""
ALSO_FAILED = {field: values for field, values in BAD.items() if field not in ("step_s", "spread", "losses", "error")}
"""Those that a line of a run that failed must not have either."""


def of_page(path: Path) -> int:
    return page.main(["--results", str(path.parent), "--out", str(path.parent)])


def of_table(path: Path) -> int:
    (path.parent / "failed.jsonl").write_text(json.dumps({"row": "7b-all-4096", "error": "stopped"}))
    return table.main(["--rows", str(path.parent / "failed.jsonl")])


def of_compare(path: Path) -> int:
    return main(["compare", "--search", str(path), "--device", "cpu", "--out", str(path.parent / "out"), "--rows", "3b-all-4096"])


@pytest.mark.parametrize("command", [of_page, of_table, of_compare])
@pytest.mark.parametrize(
    ("field", "failed"), [*((field, False) for field in BAD), *((field, True) for field in ALSO_FAILED)], ids=str
)
def test_a_bad_value_is_refused_in_one_line_that_names_line_and_field(
    field: str, failed: bool, command: Callable[[Path], int], tmp_path: Path, asked: Callable[[Answers], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen, path = asked(lambda it: RAN), tmp_path / "versus.jsonl"
    monkeypatch.setattr(table, "VERSUS_FILE", path)
    for bad in BAD[field]:
        lines = [line("deepspeed", 2.0), line("deepspeed", 2.0) | ({"error": "stopped"} if failed else {}) | {field: bad}]
        path.write_text("".join(json.dumps(it) + "\n" for it in lines))
        assert command(path) == 2, bad
        out, err = capsys.readouterr()
        assert f"{path}:2: {field}" in err and err.count("\n") == 1 and not out, (bad, err)
    assert not seen and {it.name for it in tmp_path.iterdir()} <= {"versus.jsonl", "failed.jsonl"}
