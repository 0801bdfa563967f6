"""The page of `papers/h200`: its figures are those of the lines, what is missing is said to be, bad lines change no file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.files import Job
from megatrain.files.fields import plain
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from papers.h200 import page, table
from papers.h200.models import qwen
from papers.h200.page import NOT_YET, main

RATES = {
    "h2d_bytes_per_s": 55e9, "d2h_bytes_per_s": 54e9, "adam_bytes_per_s": 190e9, "dram_bytes_per_s": 190e9,
    "gpu_adam_bytes_per_s": 4.1e12, "layer_forward_s": 0.011, "layer_again_s": 0.008, "layer_backward_s": 0.023, "loss_s": 0.1,
}  # fmt: skip
SHARED = {"run": "a", "versions": {"torch": "2.11.0"}, "machine": {"gpu": "H200"}, "commit": "c0ffee0123", "losses": [12.0, 11.9]}
SECTIONS = [
    "What was measured, and how", "Speed and memory", "Larger than the GPU, and than the host",
    "Beside DeepSpeed ZeRO-3 with offload, and plain PyTorch", "Time to the first step", "Checks", "Where we lose",
    "How to repeat it",
]  # fmt: skip


def row(name: str = "7b-24-16384", **changes: Any) -> dict[str, Any]:
    """A line of a row that passes."""
    clipping, tokens = changes.get("clipping", True), changes.get("tokens", 16384)
    recipe = Recipe(micro_batch_size=tokens // 1024, seq_len=1024, clip_norm=1.0 if clipping else None, compiled=True)
    return {
        "row": name, "model": "7B", "gpu_memory_gib": 24, "tokens": tokens, "clipping": clipping,
        "deterministic": recipe.deterministic, "step_s": 2.2022, "spread": [2.1977, 2.2557], "tflops_6n": 340.5,
        "gpu_peak_gib": 22.187, "host_peak_gib": 95.121, "commit": "3b9b557801cbfa20", "limit_s": 2.6, "rates": RATES,
        "job": plain(Job(model="7B", recipe=recipe, plan=Plan(chunk_bytes=0, adam_threads=14))),
        "utilisation": {"compute": 0.75}, "compute stalls, s": {"weights late": 0.2, "update late": 0.6}, **changes,
    }  # fmt: skip


def rival(system: str = "megatrain", step_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "system": system, "settings": system, "checkpointing": None, "model": "3B", "gpu_memory_gib": None, "tokens": 4096,
        "step_s": step_s, "gpu_peak_gib": 61.25, **SHARED, **changes,
    }  # fmt: skip


def did_not_fit(system: str, memory: str, **changes: Any) -> dict[str, Any]:
    line = rival(system, error="ended with 1", out_of_memory=memory, **changes)
    return {name: value for name, value in line.items() if name not in ("step_s", "gpu_peak_gib", "losses")}


FIRST_STEP = {
    "row": "7b-24-16384", "commit": "decade0", "total_s": 131.5, "counted_s": 97.5, "limit_s": 120.0, "passed": True,
    "phases": {"memory_s": 21.5, "weights_s": 64.5, "compile_s": 31.5, "first_step_s": 5.5, "import_s": 40.5},
    "files_gb": 15.23, "disk_gb_per_s": 0.24, "read_s": 63.5,
}  # fmt: skip


RUN = {"step_s": 0.125, "ready_s": 77, "h2d under compute": 0.75}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results without any; rows of every commit count."""
    monkeypatch.setattr(table, "difference", lambda *asked: "")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def write(path: Path, *lines: Mapping[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ran(results: Path, *arguments: str) -> int:
    return main(["--results", str(results), "--out", str(results.parent), *arguments])


def page_of(results: Path) -> dict[str, str]:
    """The sections of the page by title; what comes before the first is its summary."""
    assert ran(results) == 0
    first, *others = (results.parent / "page.md").read_text().split("\n## ")
    return {"summary": first} | {part.partition("\n\n")[0]: part.partition("\n\n")[2].strip() for part in others}


def cells(section: str, name: str) -> dict[str, str]:
    """The line of a section's tables that has a cell `name`, by column."""
    header: Sequence[str] = []
    for text in section.splitlines():
        found = [cell.strip() for cell in text.strip("|").split(" | ")] if text.startswith("|") else []
        if found and not header:
            header = found
        elif name in found:
            return dict(zip(header, found, strict=True))
        header = header if found else []
    raise AssertionError(f"no {name} in {section}")


def predicted(results: Path, name: str) -> float:
    made = table.entries(table.read_rows([results / "rows.jsonl"]), results, results, table.model_of_row)
    (found,) = (it.predicted_s for it in made if isinstance(it, table.Entry) and it.measured.row == name)
    assert found is not None
    return found


# ---- what is there -----------------------------------------------------------------------------------------------------


def test_without_results_each_section_says_so(results: Path) -> None:
    found = page_of(results)
    assert list(found) == ["summary", *SECTIONS]
    for title in SECTIONS[1:6]:
        assert found[title].startswith(NOT_YET), title
    assert "The search of DeepSpeed's settings is not measured yet." in found[SECTIONS[3]]
    assert "Beside DeepSpeed ZeRO-3 with offload it is not measured yet." in found["summary"]
    assert "page.png" not in found["summary"] and not (results.parent / "page.png").exists()


def test_the_page_has_a_rows_figures(results: Path) -> None:
    write(results / "rows.jsonl", row())
    found = page_of(results)
    says, seconds = cells(found["Speed and memory"], "`7b-24-16384`"), predicted(results, "7b-24-16384")
    assert says["predicted [s]"] == f"{seconds:#.4g} ({seconds / 2.2022 - 1:+.1%})"
    assert float(says["step / floor"]) == pytest.approx(2.2022 / float(says["floor [s]"]), abs=2e-3)
    del says["predicted [s]"], says["step / floor"], says["floor [s]"]
    assert says == {
        "row": "`7b-24-16384`", "model": "7B", "tokens a step": "16,384", "recipe": "deterministic",
        "measured [s] (spread)": "2.202 (2.198 to 2.256)", "at most [s]": "2.600", "TFLOPS (6N)": "340.5",
        "GPU peak [GiB]": "22.19 of 24", "host peak [GiB]": "95.12", "passed": "yes",
    }  # fmt: skip
    assert "at commit 3b9b55780, which" in found["Speed and memory"]
    assert "7.6 billion parameters takes a step of 16,384 tokens in **2.202 s** within 24 GiB of GPU memory." in found["summary"]
    assert "1 of 1 measured rows keep all that was promised" in found["summary"]
    missing = found["summary"].partition("Not measured yet: ")[2]
    assert "`7b-all-4096`" in missing and "`7b-24-16384`" not in missing
    assert (results.parent / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_takes_the_largest_models_and_all_predictions(results: Path) -> None:
    quick = row("7b-24-4096", tokens=4096, step_s=0.9, spread=[0.9, 0.9])
    large = row("14bx62-all-1024", model="14B-62", tokens=1024, gpu_memory_gib=None, step_s=2.1, spread=[2.0, 2.2])
    write(results / "rows.jsonl", quick, row(), large)
    said = page_of(results)["summary"]
    assert said.count("billion parameters") == 2 and "16,384 tokens in **2.202 s** within 24 GiB" in said
    assert "18.6 billion parameters takes a step of 1,024 tokens in **2.100 s** on the whole GPU." in said
    off = sorted(abs(predicted(results, it["row"]) / it["step_s"] - 1) for it in (quick, row(), large))
    assert f"Over 3 rows, predictions lie **{off[1]:.1%}** from" in said and f"{off[2]:.1%} at most" in said


def test_predictions_of_layers_that_were_not_calibrated_are_told_apart(results: Path) -> None:
    write(results / "rows.jsonl", row(), row("3b-24-16384", model="3B"))
    found = page_of(results)
    known, unknown = (abs(predicted(results, name) / 2.2022 - 1) for name in ("7b-24-16384", "3b-24-16384"))
    assert f"Over 1 rows, predictions lie **{known:.1%}** from" in found["summary"]
    assert f"Over 1 rows of 3B, no layer of which was timed before, predictions lie **{unknown:.1%}** from" in found["summary"]
    assert "It has none of 3B: " in found[SECTIONS[0]]
    says = {name: cells(found["Speed and memory"], f"`{name}`")["predicted [s]"] for name in ("7b-24-16384", "3b-24-16384")}
    assert says["3b-24-16384"].endswith("%, by rates)") and says["7b-24-16384"].endswith("%)")


def test_models_larger_than_the_gpu_have_their_state_beside_both_memories(results: Path) -> None:
    large = row("14bx62-all-1024", model="14B-62", tokens=1024, gpu_memory_gib=None)
    write(results / "rows.jsonl", row(), large)
    section = page_of(results)["Larger than the GPU, and than the host"]
    gib = 12 * qwen("14B-62", "cuda").numel / 2**30
    says = cells(section, "`14bx62-all-1024`")
    assert (says["state [GiB]"], says["state / host"]) == (f"{gib:.1f}", f"{gib / 120:.2f}")
    assert "`7b-24-16384`" not in section


def test_rivals_stand_beside_ours_row_by_row(results: Path) -> None:
    write(
        results / "versus.jsonl", did_not_fit("plain", "gpu", model="14B", run="before"), rival(step_s=0.1, run="before"),
        did_not_fit("megatrain", "gpu"), rival(step_s=0.5), rival(step_s=0.8, gpu_memory_gib=16),
        did_not_fit("deepspeed", "gpu", settings="no-checkpointing", checkpointing=False),
        rival("deepspeed", 2.0, settings="default", checkpointing=True, losses=[12.1, 11.9]),
        rival("plain", 0.4, checkpointing=False),
        rival(model="7B", step_s=3.0), did_not_fit("deepspeed", "host", model="7B"), did_not_fit("plain", "gpu", model="7B"),
    )  # fmt: skip
    write(
        results / "versus-search.jsonl", rival("deepspeed", 3.125, settings="default", checkpointing=True, tokens=16384),
        rival("deepspeed", 2.875, settings="unpinned", checkpointing=True, tokens=16384),
    )  # fmt: skip
    found = page_of(results)
    section = found[SECTIONS[3]]
    for wins in (
        "3B, 4,096 tokens, ours on the whole GPU: megatrain is 4.00 times as fast as DeepSpeed; **plain PyTorch is 1.25 times",
        "ours within 16 GiB of GPU memory: megatrain is 2.50 times as fast as DeepSpeed; **plain PyTorch is 2.00 times",
        "7B, 4,096 tokens, ours on the whole GPU: DeepSpeed: the host's memory ran out; plain PyTorch: the GPU's memory ran",
    ):
        assert wins in section
    assert cells(section, "default") == {
        "model": "3B", "tokens": "4,096", "system": "DeepSpeed", "settings": "default", "GPU memory": "all",
        "checkpointing": "yes", "seconds (spread)": "2.000", "tokens/s": "2,048", "GPU peak [GiB]": "61.25",
        "ours over it": "4.00 on the whole GPU, 2.50 within 16 GiB of GPU memory",
    }  # fmt: skip
    assert cells(section, "no-checkpointing")["seconds (spread)"] == "the GPU's memory ran out"
    assert "14B" not in section, "of an earlier run"
    assert cells(section, "16 GiB")["tokens/s"] == "5,120"
    assert "loss lies within 0.00% (megatrain) and 0.83% (DeepSpeed) of plain PyTorch's." in section
    assert section.count("| megatrain |") == 3, "what ran later did not fail"
    searched = section[section.index("the fastest of a search at 3B and 16,384 tokens, at commit c0ffee012, among 2 of ") :]
    assert searched.index("2.875") < searched.index("3.125")
    assert "at 3B: **2.50 to 2.50** within 16 GiB of GPU memory; **4.00 to 4.00** on the whole GPU, with" in found["summary"]
    lost = found["Where we lose"].splitlines()
    assert lost == [
        "- At 3B with 4,096 tokens, plain PyTorch is 2.00 times as fast as ours within 16 GiB of GPU memory.",
        "- At 3B with 4,096 tokens, plain PyTorch is 1.25 times as fast as ours on the whole GPU.",
    ]


def test_of_first_steps_and_checks_the_last_counts(results: Path) -> None:
    write(results / "first_step.jsonl", FIRST_STEP | {"total_s": 999.0}, FIRST_STEP)
    write(
        results / "checks.jsonl", {"check": "bitwise", "passed": False, "error": "no", "seconds": 1.0},
        {"check": "near_plain_bf16", "passed": True, "missed": [], "result": {"least cosine": 0.99995254}},
        {"check": "bitwise", "passed": True, "missed": [], "result": {"plans equal": ["a", "b", "c"]}},
        {"check": "sanitizer", "passed": True, "missed": [], "result": {"says": ["=== X", "==== ERROR SUMMARY: 0 errors"]}},
        {"check": "overlap", "passed": False, "missed": ["h2d >= 0.8"], "result": {"run": RUN}},
    )  # fmt: skip
    found = page_of(results)
    for figure in ("131.5", "97.5", "120", "21.5", "64.5", "31.5", "5.5", "40.5", "15.23", "0.24", "63.5", "decade0"):
        assert re.search(rf"\b{figure}\b", found["Time to the first step"]), figure
    assert "999" not in found["Time to the first step"]
    figures = {name: cells(found["Checks"], f"`{name}`") for name in ("bitwise", "near_plain_bf16", "sanitizer", "overlap")}
    assert [it["passed"] for it in figures.values()] == ["yes (1 earlier run did not)", "yes", "yes", "no"]
    assert [it["figures"] for it in figures.values()] == [
        "plans equal: 3", "least cosine: 0.999953", "ERROR SUMMARY: 0 errors",
        "run (step: 0.1250 s, h2d under compute: 75.0%); missed: h2d >= 0.8",
    ]  # fmt: skip
    assert found["Where we lose"].splitlines() == [
        "- The check `overlap` failed: h2d >= 0.8.",
        "- The check `bitwise` passed only after 1 that did not; [README.md](README.md) says why.",
    ]


def test_where_we_lose_begins_with_the_worst(results: Path) -> None:
    lines = [
        row("late", step_s=2.7, spread=[2.7, 2.7]), row("later", step_s=5.2, spread=[5.2, 5.2]), row("kept"),
        {"row": "none", "error": "RuntimeError:\nout of memory"},
    ]  # fmt: skip
    write(results / "rows.jsonl", *lines)
    found = page_of(results)
    lost = found["Where we lose"].splitlines()
    assert lost[0] == "- `none` failed: RuntimeError: out of memory"
    assert [text.split("`")[1] for text in lost[1:3]] == ["later", "late"] and "5.2 s > limit 2.6 s" in lost[1]
    above = [text for text in lost if "its floor" in text]
    assert [text.split("`")[1] for text in above] == ["later", "late", "kept"]
    assert above[0].endswith("compute waits 25% of the time, 75% of it for `update late` (weights wait for the optimizer).")
    apart = {it["row"]: abs(predicted(results, it["row"]) / it["step_s"] - 1) for it in lines[:3]}
    off = [text.split("`")[1] for text in lost if "were predicted" in text]
    assert off == sorted(apart, key=lambda name: -apart[name])
    assert "1 of 4 measured rows keep all that was promised" in found["summary"]


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("rows.jsonl", [row(step_s=-1.0)], r"rows\.jsonl:1: row 7b-24-16384: step_s: must be a finite"),
        ("rows.jsonl", [row(), row("b", **{"compute stalls, s": [1]})], r"rows\.jsonl:2: row b: compute stalls, s: must be a"),
        ("rows.jsonl", [row(model="8B")], r"rows\.jsonl:1: row 7b-24-16384: model: must be one of"),
        ("versus.jsonl", [rival(), rival("plain", losses=[13.0, 11.9])], r"jsonl:2: losses: differ by .*, but 12\.0 in .*:1$"),
        ("versus.jsonl", [rival(), rival("plain", losses=[12.0])], r"jsonl:2: losses: must be as many at one size, 2 as in .*:1"),
        ("versus.jsonl", [rival(tokens="many")], r"versus\.jsonl:1: tokens: must be an integer, got 'many'"),
        ("versus.jsonl", [rival(losses="x")], r"versus\.jsonl:1: losses: must be a list, got 'x'"),
        ("versus.jsonl", [rival(spread=[0.5, "x"])], r"versus\.jsonl:1: spread\[1\]: must be a number, got 'x'"),
        ("versus.jsonl", [rival(spread=[1.5, 2.5])], r"versus\.jsonl:1: spread: must enclose step_s 1\.0, got \[1\.5, 2\.5\]"),
        ("versus.jsonl", [did_not_fit("plain", "gpu", settings=["x"])], r"versus\.jsonl:1: settings: must be a text, got \['x"),
        ("versus-search.jsonl", [rival(), rival("plain", machine={})], r"versus-search\.jsonl:2: machine: must be one in all"),
        ("first_step.jsonl", [FIRST_STEP, {"row": "7b-24-16384"}], r"first_step\.jsonl:2: commit: is missing"),
        ("checks.jsonl", [{"check": "bitwise", "passed": "yes"}], r"checks\.jsonl:1: passed: must be true or false, got 'yes'"),
    ],
)
def test_bad_lines_are_refused_in_one_line_and_change_nothing(
    name: str, lines: list[dict[str, Any]], says: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in ("page.md", "page.png"):
        (results.parent / made).write_text("as it was")
    write(results / name, *lines)
    assert ran(results) == 2
    out, err = capsys.readouterr()
    assert re.search(says, err) and err.count("\n") == 1 and not out
    assert all((results.parent / made).read_text() == "as it was" for made in ("page.md", "page.png"))
    assert sorted(path.name for path in results.parent.iterdir()) == ["page.md", "page.png", "results"]


def test_rows_of_another_commit_are_refused_as_by_the_table(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "difference", lambda repository, commit, paths: f"{commit} was measured, and x changed since")
    write(results / "rows.jsonl", row())
    assert ran(results) == 2
    assert "row 7b-24-16384: commit: 3b9b557801cbfa20 was measured, and x changed since\n" in capsys.readouterr().err
    assert not (results.parent / "page.md").exists()


def test_rows_that_are_named_must_be_there(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(results / "other.jsonl", row("other", gpu_memory_gib=None))
    assert ran(results, "--rows", str(results / "other.jsonl")) == 0
    assert "`other`" in (results.parent / "page.md").read_text()
    assert ran(results, "--rows", str(results / "none.jsonl")) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err


def test_a_cell_stays_one_cell() -> None:
    assert page.markdown([{"a": "x | y\nz", "b": "1"}]).splitlines() == ["| a | b |", "| --- | --- |", "| x \\| y z | 1 |"]
