"""The command line from end to end, on a model of three small layers: what each verb prints, writes and returns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import data as data_module
from megatrain.catalog import hardware_profile
from megatrain.cli import demo, show
from megatrain.cli import run as run_verb
from megatrain.engine.engine import MemoryUse
from megatrain.files import load_job, load_record
from megatrain.hardware import H200
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import lower
from megatrain.weights import open_weights
from sim.ledger import ALIGN, CUDA_CONTEXT, PHASES, Item, Ledger, MemorySpace, ledger
from tests.commands import Commands, edit_json, without_progress

VERBS = ("calibrate", "simulate", "plan", "run", "compare", "demo")


pytestmark = pytest.mark.usefixtures("world")
USE = MemoryUse(
    device_reserved=50, device_allocated=40, device_process=60, pinned=30, pageable=20, resident_set=None
)  # fmt: skip


def test_plan_simulate_run_and_compare_follow_from_one_another(megatrain: Commands) -> None:
    planned = megatrain("plan", "--model", "model", "--hardware", "hw.json", "--seq-len", 32, "--batch", 2, "--eager", "--lr",
                        "1e-2", "--out", "found.yaml")  # fmt: skip
    assert planned.code == 0 and planned.err == ""
    assert "Binding: " in planned.out and "written to found.yaml" in planned.out
    job = load_job("found.yaml")
    assert (job.recipe.seq_len, job.recipe.micro_batch_size, job.recipe.compiled, job.recipe.optimizer.lr) == (32, 2, False, 1e-2)
    assert job.plan.adam_threads == 1
    assert Path(job.model).samefile("model")

    predicted = megatrain("simulate", "found.yaml", "--hardware", "hw.json", "--steps", 5, "--out", "predicted.json.gz")
    assert predicted.code == 0 and predicted.err == ""
    assert "tokens/s" in predicted.out and "Largest in a step" in predicted.out
    assert load_record("predicted.json.gz").trace.source == "sim"

    ran = megatrain("run", "found.yaml", "--data", "text", "--steps", 8, "--device", "cpu", "--save", "trained")
    assert ran.code == 0 and ran.err == ""
    measured = load_record("run.json.gz")
    assert measured.trace.source == "cpu" and len(measured.steps) == 8
    assert f"{measured.steps[0].loss:.4f} at the first step, {measured.steps[-1].loss:.4f} at the last" in ran.out
    assert measured.steps[-1].loss < measured.steps[0].loss

    compared = megatrain("compare", "predicted.json.gz", "run.json.gz")
    assert compared.code == 0 and compared.err == ""
    assert "ratio of step times, measured / predicted: " in compared.out
    more = megatrain("compare", *["predicted.json.gz", "run.json.gz"] * 2, "--out", "both", "--json").json
    assert Path(more["throughput"]).is_file()
    written = ["lanes.png", "ops.csv", "report.md", "throughput.png", "trace.perfetto.json.gz"]
    assert sorted(p.name for p in Path("report").iterdir()) == written


def test_run_lays_predicted_and_measured_memory_side_by_side(megatrain: Commands) -> None:
    call = ("run", "plan.yaml", "--data", "random", "--random-weights", "--steps", 3, "--device", "cpu")
    memory = megatrain(*call, "--json").json["memory"]
    assert list(memory) == ["device", "pinned", "pageable", "resident"]
    found = load_job("plan.yaml")
    model = ModelSpec.from_config("model")
    items = ledger(model, found.recipe, found.plan, run_verb.this_machine("cpu")).items
    count = len(lower(model, found.recipe, found.plan).storages)
    for space in ("device", "pinned", "pageable"):
        predicted, measured = memory[space]["predicted"], memory[space]["measured"]
        assert predicted == sum(i.nbytes for i in items if i.space == space and "init" in i.phases and i.what != "process")
        assert abs(measured - predicted) <= ALIGN * count and (measured > 0) == (space != "pinned")

    lines = megatrain(*call).out.splitlines()
    start = lines.index("Memory after warm-up")
    header, *rows, last = lines[start + 1 :]
    assert header.split() == ["predicted", "measured"] and last.startswith("written to")  # and no difference to tell of
    assert [row[: row.index("  ")] for row in rows] == ["device", "host, pageable", "process, resident"]
    assert show.format_bytes_short(memory["device"]["measured"]) in rows[0]


def test_on_a_gpu_every_byte_of_a_steps_ledger_is_compared_but_the_context_and_the_interpreter() -> None:
    book = ledger(ModelSpec.from_config("model"), Recipe(seq_len=32), Plan(), H200)
    (process,) = [i.nbytes for i in book.items if i.what == "process"]
    compared = run_verb.memory_compared(book, USE)
    assert compared["device"] == (book.device_nbytes() - CUDA_CONTEXT, USE.device_reserved)
    assert compared["pinned"] == (book.nbytes("step", "pinned"), USE.pinned)
    assert compared["pageable"] == (book.nbytes("step", "pageable") - process, USE.pageable)
    assert compared["resident"] == (book.host_nbytes(), None)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("predicted", [0, 5 << 30, 100 << 30])
@pytest.mark.parametrize(("space", "least"), [("device", 256 << 20), ("pinned", 64 << 20)])
def test_a_prediction_is_called_wrong_beyond_a_hundredth_or_a_constant(
    space: MemorySpace, least: int, predicted: int, off: int
) -> None:
    small, large = Item(space, "a small thing", predicted // 4, PHASES), Item(space, "a large thing", predicted * 3 // 4, PHASES)
    book = Ledger(items=(small, large) if predicted else (), peak_op="", on_host=False)
    tolerated = max(least, predicted // 100)
    for sign, word in ((-1, "less"), (1, "more")):
        compared = run_verb.memory_compared(book, replace(USE, device_reserved=0, pinned=0))
        measured = predicted + sign * (tolerated + off)
        lines = run_verb.memory_differences(
            book, {**compared, ("pinned" if space == "device" else "device"): (0, 0), space: (predicted, measured)}
        )
        assert len(lines) == (off > 0)
        assert all(line.startswith(f"{space} memory is ") and f" {word} than predicted" in line for line in lines)
        assert all(("a large thing" in line) == (predicted > 0) for line in lines)


def test_saved_weights_are_a_model_to_train_on(megatrain: Commands) -> None:
    assert megatrain("run", "plan.yaml", "--data", "text", "--steps", 2, "--device", "cpu", "--save", "trained").code == 0
    model = ModelSpec.from_config("trained")
    start, trained = open_weights("model", model), open_weights("trained", model)
    assert all(trained[name].dtype == torch.float32 for name in trained)
    assert [name for name in start if torch.equal(start[name], trained[name])] == []
    Path("next.yaml").write_text(Path("plan.yaml").read_text().replace("model: model", "model: trained"))
    again = megatrain("run", "next.yaml", "--data", "text", "--steps", 2, "--device", "cpu", "--json").json
    assert again["first_loss"] == load_record("run.json.gz").steps[0].loss
    from_start = megatrain("run", "plan.yaml", "--data", "text", "--steps", 1, "--device", "cpu", "--json").json
    assert again["first_loss"] < from_start["first_loss"]


def test_json_is_one_object_of_the_fields_that_help_names(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CALIBRATION_S", 1.0)
    monkeypatch.setattr(demo, "TEXT_BYTES", 60_000)
    monkeypatch.setattr(demo, "SIZES", {"layers": 3, "hidden_size": 64, "intermediate_size": 96, "heads": 2, "kv_heads": 2})
    calls = (
        ("calibrate", "--budget", 1, "--device", "cpu", "--out", "measured.json"),
        ("plan", "plan.yaml", "--hardware", "hw.json", "--out", "found.yaml"),
        ("simulate", "plan.yaml", "--hardware", "hw.json", "--out", "predicted.json"),
        ("simulate", "plan.yaml", "--hardware", "hw.json", "--sweep", "sweep", "--depths", "1-2", "--chunks", "0,8KiB"),
        ("run", "plan.yaml", "--data", "random", "--random-weights", "--steps", 3, "--device", "cpu"),
        ("compare", "predicted.json", "run.json.gz", "--out", "found"),
        ("demo", "--steps", 10, "--device", "cpu"),
    )
    monkeypatch.setenv("COLUMNS", "200")
    for verb, *arguments in calls:
        ended = megatrain(verb, *arguments, "--json")
        assert (ended.code, ended.err, ended.out.count("\n")) == (0, "", 1), ended
        assert isinstance(ended.json, dict)
        said = megatrain(verb, "--help").out.partition("JSON fields:")[2].partition("╭")[0]
        words = {word.strip(",.;()") for word in said.split()}
        assert ended.json.keys() <= words, (verb, ended.json.keys() - words)
    assert {p.name for p in Path("sweep").iterdir()} == {"sweep.csv", "sweep.png"}
    assert Path("sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("sweep/sweep.csv").read_text().splitlines()) == 1 + 4
    assert {"hw.json", "plan.yaml", "predicted.json.gz", "measured.json.gz", "report"} <= {p.name for p in Path("demo").iterdir()}


def test_a_number_that_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    show.json_object({"loss": float("nan"), "norm": float("inf"), "steps": 2})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "norm": None, "steps": 2}


@pytest.mark.parametrize(
    ("model", "hardware"), [("dense-120b", "h200-1.5tb"), ("qwen2.5-72b", "h200-1.5tb"), ("qwen2.5-14b", "rtx4090")]
)
def test_the_sizes_this_is_for_can_be_predicted(megatrain: Commands, model: str, hardware: str) -> None:
    ended = megatrain("simulate", "--model", model, "--hardware", hardware, "--batch", 2, "--json")
    assert ended.code == 0, ended
    assert 0 < ended.json["step_ns"] < 200 * 10**9 and 1 < ended.json["tflops"] < 772


@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        ("qwen3-0.6b", "rtx4090"),
        pytest.param("qwen2.5-14b", "rtx4090", marks=pytest.mark.slow),
        pytest.param("qwen2.5-72b", "h200-1.5tb", marks=pytest.mark.slow),
        pytest.param("dense-120b", "h200-1.5tb", marks=pytest.mark.slow),
    ],
)
def test_published_sizes_can_be_planned(megatrain: Commands, model: str, hardware: str) -> None:
    ended = megatrain("plan", "--model", model, "--hardware", hardware, "--out", "found.yaml", "--json")
    assert ended.code == 0, ended
    assert ended.json["default_step_ns"] is None or ended.json["step_ns"] <= ended.json["default_step_ns"]
    assert ended.json["device_bytes"] <= hardware_profile(hardware).device_memory_bytes
    again = megatrain("simulate", "found.yaml", "--hardware", hardware, "--json")
    assert again.json["step_ns"] == ended.json["step_ns"]


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_too_large_says_which_memory_how_many_bytes_and_what_helps(megatrain: Commands, verb: str) -> None:
    out = ["--out", "found.yaml"] if verb == "plan" else []
    text = megatrain.refused(verb, "--model", "qwen2.5-72b", "--hardware", "rtx4090", *out)
    assert "host memory, save" in text
    assert "274,877,906,944" in text  # there are 256 GiB
    assert "GiB more host memory" in text


def test_run_refuses_what_does_not_fit_before_reading_anything(
    megatrain: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_verb, "usable_memory", lambda: 1 << 20)
    text = megatrain.refused("run", "plan.yaml", "--data", "nowhere", "--device", "cpu")
    assert "1,048,576" in text and "memory" in text


def test_predicting_planning_and_comparing_never_import_torch() -> None:
    code = """
import sys
from dataclasses import replace
from megatrain.cli import main, show
from megatrain.files import load_record, save_record
show.SAID_EVERY_S = float("inf")
for line in open("calls").read().splitlines():
    sys.argv = ["megatrain", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, line
    if "--out predicted.json" in line:  # a run of the same, without what runs it
        found = load_record("predicted.json")
        save_record("run.json", replace(found, trace=replace(found.trace, source="cpu")))
print("loaded", sorted({"torch", "transformers"} & set(sys.modules)))
"""
    Path("calls").write_text(
        "simulate plan.yaml --hardware hw.json --out predicted.json\nplan plan.yaml --hardware hw.json --out found.yaml\n"
        "simulate plan.yaml --hardware hw.json --sweep sweep --depths 1 --chunks 0\ncompare predicted.json run.json\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1:] == ["loaded []"], ended
    assert ended.stderr == ""


def test_help_names_defaults_and_groups_options(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        first = megatrain("--help")
        assert first.code == 0 and all(verb in first.out for verb in VERBS)
        for verb in VERBS:
            ended = megatrain(verb, "--help")
            assert ended.code == 0 and "Examples:" in ended.out and "--json" in ended.out
            assert max(map(len, ended.out.splitlines())) <= columns
            if verb in ("calibrate", "simulate", "plan"):
                recipe = ended.out.partition("Recipe (")[2].partition("╰")[0]
                assert "--seq-len" in recipe and "1024" in recipe
    assert megatrain().code == 2
    assert megatrain("--version").out.startswith("megatrain 0.")


@pytest.mark.parametrize("columns", [80, 140])
def test_tables_are_aligned_and_unbroken(
    megatrain: Commands, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = megatrain("simulate", "plan.yaml", "--hardware", "hw.json").out.splitlines()
    start = lines.index("Lanes, a step")
    header, *rows = lines[start + 1 : lines.index("", start)]
    assert [row.split()[0] for row in rows] == ["h2d", "compute", "d2h", "cpu"]
    assert {len(row) for row in rows} == {len(header)}  # the last column stands at the right
    assert all(line == line.rstrip() for line in lines)


def test_without_a_terminal_what_takes_long_says_so_on_standard_error_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show.SAID_EVERY_S >= 5
    monkeypatch.setattr(show, "SAID_EVERY_S", 1e6)  # of the clock below; the thread that waits has none but the real one
    now = 1000.0
    monkeypatch.setattr(show, "monotonic", lambda: now)
    with show.progress("plan") as bar:
        for now in (1000.0, 1000 + 0.9 * show.SAID_EVERY_S, 1001 + show.SAID_EVERY_S, 1002 + show.SAID_EVERY_S):
            bar(None, f"descending (at {now:.0f})")
        now += show.SAID_EVERY_S
        bar(0.5, "half [of it] " + "long " * 40)
    out, err = capsys.readouterr()
    after = show.SAID_EVERY_S
    assert out == ""
    assert err.splitlines() == [
        f"plan: {1 + after:.0f} s: descending (at {1001 + after:.0f})",
        f"plan: 50%, {2 + 2 * after:.0f} s: half [of it] {'long ' * 40}",
    ]


def test_what_takes_long_within_one_step_says_so_too(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step goes on only once a line has said that it is under way."""
    said, lines, batch, printed = threading.Event(), [], data_module.Data.batch, show.err.print

    def noted(line: str, **how: Any) -> None:
        lines.append(line)
        if re.fullmatch(r"train: 0%, \d+ s: first step", line):
            said.set()
        printed(line, **how)

    def slow(*arguments: Any) -> Any:
        assert said.wait(300)
        return batch(*arguments)

    monkeypatch.setattr(show, "SAID_EVERY_S", 0.05)
    monkeypatch.setattr(show.err, "print", noted)
    monkeypatch.setattr(data_module.Data, "batch", slow)
    ended = megatrain("run", "plan.yaml", "--data", "text", "--device", "cpu", "--steps", 1, "--json")
    assert ended.code == 0 and ended.json["steps"] == 1
    assert ended.err.splitlines() == lines
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megatrain progress")]


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_no_line_of_progress_comes_after_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception | None
) -> None:
    monkeypatch.setattr(show, "SAID_EVERY_S", 0.0)
    with contextlib.suppress(ValueError), show.progress("plan") as bar:
        bar(None, "within")
        if error is not None:
            raise error
    capsys.readouterr()
    bar(None, "after")
    assert capsys.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megatrain progress")]


def test_sequences_beyond_the_models_positions_are_allowed_and_said(megatrain: Commands) -> None:
    edit_json("model/config.json", max_position_embeddings=31)
    verbs = (
        ("simulate", "plan.yaml", "--hardware", "hw.json"),
        ("simulate", "plan.yaml", "--hardware", "hw.json", "--sweep", "sweep", "--depths", "1", "--chunks", "0"),
        ("plan", "plan.yaml", "--hardware", "hw.json", "--out", "found.yaml"),
        ("run", "plan.yaml", "--data", "text", "--device", "cpu", "--steps", 1),
    )
    for verb in verbs:
        ended = megatrain(*verb, "--json")
        assert ended.code == 0 and ended.json
        assert re.fullmatch(r"note: sequences of 32 tokens \(seq_len\) go beyond the 31 positions of .*\n", ended.err), ended
    edit_json("model/config.json", max_position_embeddings=32)
    assert [megatrain(*verb, "--json").err for verb in verbs] == [""] * len(verbs)


def test_planning_that_takes_long_says_so(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "SAID_EVERY_S", 0.0)
    ended = megatrain("plan", "plan.yaml", "--hardware", "hw.json", "--out", "found.yaml", "--json")
    assert ended.code == 0 and ended.json["out"] == "found.yaml"
    found = [re.fullmatch(r"plan: \d+ s: .+ \((\d+) simulated\)|plan: \d+ s", line) for line in ended.err.splitlines()]
    counts = [int(line[1]) for line in found if line is not None and line[1] is not None]
    assert counts and None not in found and counts == sorted(counts)


def test_names_with_brackets_are_no_markup(megatrain: Commands) -> None:
    Path("model").rename("[bold]m[1]")
    shown = megatrain("simulate", "--model", "[bold]m[1]", "--hardware", "hw.json", "--seq-len", 32, "--out", "[red]a.json")
    assert shown.code == 0
    assert "[bold]m[1] on one-core" in shown.out and "[red]a.json" in shown.out


def test_a_terminal_that_knows_ascii_only_gets_help_all_the_same() -> None:
    command = [sys.executable, "-m", "megatrain", "plan", "--help"]
    shown = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert shown.returncode == 0 and b"--gpu-memory" in shown.stdout and shown.stderr == b""


def test_python_m_is_the_same_program() -> None:
    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "megatrain", *arguments], capture_output=True, text=True, check=False)

    done = ended("simulate", "plan.yaml", "--hardware", "hw.json", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["model"] == "model" and without_progress(done.stderr) == ""
    wrong = ended("run", "plan.yaml", "--data", "nowhere", "--device", "cpu")
    said = without_progress(wrong.stderr)
    assert (wrong.returncode, wrong.stdout, said.count("\n")) == (2, "", 1) and "nowhere" in said
