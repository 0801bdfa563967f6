"""Lines of comparisons: ratios compare only what can be compared, and what cannot be is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papers.h200 import comparison
from papers.h200.comparison import comparable, last_run, ratios, winner
from tests.lines import line

# ---- ratios --------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_tokens_a_second_over_deepspeeds_at_the_same_tokens() -> None:
    lines = [
        line(step_s=1.0, tokens=16384), line("deepspeed", 3.0, tokens=16384),
        line(step_s=0.5), line(step_s=0.8, gpu_memory_gib=16, settings="3b-16-4096"), line("deepspeed", 2.0),
        line("plain", 0.1), line(step_s=2.0, tokens=32768), line("deepspeed", tokens=32768, error="OutOfMemoryError: no"),
    ]  # fmt: skip
    assert ratios(lines) == [
        {"model": "3B", "gpu_memory_gib": None, "tokens": 4096, "ratio": 4.0},
        {"model": "3B", "gpu_memory_gib": 16, "tokens": 4096, "ratio": 2.5},
        {"model": "3B", "gpu_memory_gib": None, "tokens": 16384, "ratio": 3.0},
    ]
    assert ratios([]) == []


def test_of_two_lines_of_one_run_the_last_counts_and_errors_do_not() -> None:
    lines = [line("deepspeed", 2.0), line(step_s=1.0), line(step_s=0.5), line(error="stopped")]
    assert [found["ratio"] for found in ratios(lines)] == [4.0]


def test_lines_of_the_last_run_count_and_those_of_earlier_ones_may_say_anything() -> None:
    first = [line("deepspeed", 2.0), line(step_s=1.0), line("plain", losses="none"), {"run": ["b"]}, {"of": "an older form"}]
    again = [line("deepspeed", 3.0, run="b", machine={}), line(run="b", machine={}, losses=[9.0] * 3)]
    assert [found["ratio"] for found in ratios([*first[:2], again[0]])] == [], "ours is of an earlier run"
    with pytest.raises(ValueError, match="losses: differ by more than 1% at step 1"):
        ratios([*first, *again])
    again[1]["losses"] = again[0]["losses"]
    assert [found["ratio"] for found in ratios([*first, *again])] == [3.0]
    assert [found["ratio"] for found in ratios([*first[:2], *again, line(step_s=0.5)])] == [4.0], "one that was gone on with"
    assert ratios([*again, line(run="c", error="stopped")]) == []


def test_of_a_run_what_failed_counts_where_it_did_not_run() -> None:
    failed = [line("deepspeed", error="first"), line(error="no"), line("deepspeed", error="last")]
    assert [run.error for _, run in last_run([*failed, line(), line("plain", run="b", error="b")])] == ["b"]
    assert [(run.system, run.error) for _, run in last_run([*failed, line(), line(error="again")])] == [
        ("deepspeed", "last"), ("megatrain", ""),
    ]  # fmt: skip


def test_a_ratio_is_to_the_fastest_line_of_deepspeed_that_ran() -> None:
    slow = line("deepspeed", 3.0, settings="large", checkpointing=True)
    kept, checkpointed = (line("deepspeed", s, checkpointing=c) for s, c in ((1.5, False), (2.0, True)))
    no = line("deepspeed", 0.1, settings="no", error="OutOfMemoryError", out_of_memory="gpu")
    for lines in ([kept, slow, checkpointed, no], [no, checkpointed, slow, kept]):
        assert [found["ratio"] for found in ratios([line(step_s=0.5), *lines])] == [3.0]
    assert [found["ratio"] for found in ratios([line(step_s=0.5), kept, {**kept, "step_s": 1.75}, checkpointed])] == [3.5]
    with pytest.raises(ValueError, match=r" with activations kept: losses: differ by more than 1% at step 1: 13\.0, but 12"):
        ratios([line(step_s=0.5), checkpointed, {**kept, "losses": [13.0, 11.9, 11.8]}])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"losses": [12.0, 12.1, 11.8]}, "losses: differ by more than 1% at step 2: 12.1, but 11.9 in megatrain megatrain 3B"),
        ({"losses": [12.0, 11.9]}, "losses: must be as many at one size, 3 as in megatrain megatrain 3B 4096, got 2$"),
        ({"versions": {"torch": "2.12.0"}}, "versions: must be one in all lines of a run, .*2.11.*, got {'torch': '2.12.0'}$"),
        ({"machine": {"gpu": "H100"}}, "machine: must be one in all lines of a run, .*H200.* as in mega.*, got {'gpu': 'H100'}$"),
    ],
)
def test_lines_that_cannot_be_compared_are_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^deepspeed deepspeed 3B 4096: {says}") as refused:
        ratios([line(), line("deepspeed", 2.0) | changes])
    assert "\n" not in str(refused.value)


def test_losses_are_compared_within_a_percent_and_only_at_one_size() -> None:
    assert comparable([line(), line("plain", tokens=16384, losses=[3.0])])
    assert comparable([line(), line("plain", losses=[12.119, 11.9, 11.8])]), "within 1%"


@pytest.mark.parametrize("field", [*comparison.WHICH, *comparison.SHARED, *comparison.FIGURES])
def test_a_line_without_a_field_is_refused(field: str) -> None:
    broken = {name: value for name, value in line().items() if name != field}
    with pytest.raises(ValueError, match=f"(megatrain|3B|4096|None): {field}: is missing$"):
        ratios([line("deepspeed"), broken])


def test_lines_none_of_which_names_its_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^megatrain megatrain 3B 4096: run: is missing$"):
        ratios([{name: value for name, value in line().items() if name != "run"}])


# ---- a search's winner -------------------------------------------------------------------------------------------------


def test_the_winner_is_the_shortest_step_of_the_installed_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, monkey = tmp_path / "versus-search.jsonl", {"torch": "2.11.0", "deepspeed": "0.19.8"}
    monkeypatch.setattr(comparison, "versions", lambda: monkey)
    with pytest.raises(ValueError, match="run search first"):
        winner(found)
    lines = [line("deepspeed", seconds, settings=name) for name, seconds in (("default", 2.6), ("large", 2.4), ("small", 3.0))]
    found.write_text("\n".join(map(json.dumps, [*lines, line("deepspeed", 0.1, settings="no", error="stopped")])))
    assert winner(found) == "large"
    monkey["deepspeed"] = "0.20.0"
    with pytest.raises(ValueError, match=r"must be a search of DeepSpeed 0\.20\.0, which is installed; it is of 0\.19\.8"):
        winner(found)
    found.write_text(json.dumps(line("deepspeed", versions={"torch": "2.11.0"})))
    with pytest.raises(ValueError, match=r"versus-search\.jsonl: versions: must name DeepSpeed's, got {'torch': '2\.11\.0'}"):
        winner(found)
    found.write_text(json.dumps(line("deepspeed", error="stopped")))
    with pytest.raises(ValueError, match="must hold a setting that ran"):
        winner(found)
