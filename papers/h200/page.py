"""A page for those who have never heard of the project: `python -m papers.h200.page [--rows FILE ...]` writes page.md, page.png.

Every figure is read from the lines in results/ or follows from them. Where a file is missing its section says so. Rows count as
in `papers.h200.table`, which refuses those of another commit; of checks and first steps the last line counts, of rivals the last
of each system, settings and size (`papers.h200.comparison`).

Exit code 0 for a page, whatever it says; 2 with one line for lines that cannot be read, compared or counted, and then page.md
and page.png stay as they are.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.drawing import FAINT, add_axes, add_title, drawing
from megatrain.files import load_hardware, load_job
from megatrain.files.text import write_file
from papers.h200 import table
from papers.h200.first_step import READING_S
from papers.h200.floor import STATE_NBYTES
from papers.h200.gather import Check, Results, Row, Run, gather
from papers.h200.records import CALIBRATED
from papers.h200.rows import HOST_MEMORY, MEASURED, PLANS, RESULTS, ROWS, WARM
from papers.h200.table import judged

NOT_YET = "Not measured yet."
NO_LIMIT_S = 60.0
"""The limit of rows of whose time nothing is promised (`ROWS`)."""
WORST = 3
"""How many of the rows furthest from floor and prediction are named."""
GIB, YES, FILLED = 1 << 30, {True: "yes", False: "no"}, {True: "#332288", False: "white"}
SYSTEMS = {"megatrain": "megatrain", "deepspeed": "DeepSpeed", "plain": "plain PyTorch"}
PHASES = {
    "import_s": "interpreter, libraries, checks, record: what the others leave", "memory_s": "made, touched, pinned",
    "weights_s": "read, turned into masters", "compile_s": "meanwhile", "first_step_s": "the step itself",
}  # fmt: skip
CHECKS = {
    "preflight": "the versions that ran; a copy, and a step on each backend",
    "predictions": "steps as simulated, for the checks that time them",
    "kernels": "AdamW and packing on the GPU have the bits of the CPU's kernels",
    "plain_fp32": "FP32: losses and gradients are those of an ordinary PyTorch loop",
    "near_plain_bf16": "BF16: losses and gradients are near those of an ordinary loop with FP32 masters",
    "seven_b": "seconds a step of 7B with all layers streamed: the median of five without the first two",
    "overlap": "0.5B, every layer streamed, two runs each: copies lie under compute, or compute waits for the optimizer alone",
    "bitwise": "weights after five steps have equal bits under every plan, with NaN in released buffers and random delays too",
    "tracing": "what recording a trace costs, as a share of the step",
    "sanitizer": "compute-sanitizer's memcheck over two steps",
}
OF_TIME = ("predictions", "seven_b", "overlap", "tracing")
"""The checks that are of time; the others are of results."""
SHARES = ("h2d under compute", "update late share of stalls", "median difference", "from", "to", "compute busy")
MAIN = ("step_s", "h2d under compute", "update late share of stalls")
"""Of the runs of a check, the figures that the page shows; all, if a run has none of these."""
AGAIN = """\
[README.md](README.md) says what each command needs and does. Lines are appended, and the last run counts.

    python -m papers.h200.rows calibrate                                   # the machine, for planner and simulator
    python -m papers.h200.rows plan                                        # the rows' plans
    python -m papers.h200.rows measure --commit $(git rev-parse HEAD)      # the rows
    python -m papers.h200.versus search --commit $(git rev-parse HEAD)     # DeepSpeed's fastest settings
    python -m papers.h200.versus compare --commit $(git rev-parse HEAD)    # DeepSpeed and plain PyTorch beside rows
    python -m papers.h200.first_step --commit $(git rev-parse HEAD)        # the first step
    python -m papers.h200.checks --out papers/h200/results                 # the checks
    make h200-table                                                        # the rows, judged, with floors, rates and memory
    python -m papers.h200.page                                             # this page

Raw data is in `results/`, one JSON line a run: `rows.jsonl`, `first_step.jsonl`, `checks.jsonl`, `versus.jsonl` and
`versus-search.jsonl`; and `calibrated.json`, the machine's profile. Plans are in `plans/`, DeepSpeed's settings in
`deepspeed/`."""

# ---- what sections share -----------------------------------------------------------------------------------------------


def markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """A Markdown table with a column for each key."""
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines)


def s(seconds: float) -> str:
    """Seconds with four digits."""
    return f"{seconds:#.4g}"


def times(ratio: float) -> str:
    """A ratio with three digits."""
    return f"{ratio:#.3g}".rstrip(".")


def memory(gib: float | None) -> str:
    return "all" if gib is None else f"{gib:g} GiB"


def within(gib: float | None) -> str:
    return "on the whole GPU" if gib is None else f"within {gib:g} GiB of GPU memory"


def commits(named: Iterable[str]) -> str:
    """Where code was when it was measured, for a sentence."""
    known = sorted({name[:9] or "unknown" for name in named})
    return f"commit{'s' if len(known) > 1 else ''} {', '.join(known)}"


def furthest(found: Results) -> list[tuple[float, float, Row]]:
    """The rows that have a prediction: its distance from the measurement, its seconds, the row; the furthest first."""
    known = [(row.entry.predicted_s, row) for row in found.rows if row.entry.predicted_s]
    return sorted(((abs(seconds / row.m.step_s - 1), seconds, row) for seconds, row in known), key=lambda it: -it[0])


def how_far(found: Results) -> Iterator[tuple[bool, int, float, float]]:
    """Of rows whose layers were calibrated (true), and of those whose were not: how many have a prediction, and how far these lie
    from the measurements, in the median and at most. Neither where there are none."""
    for calibrated in (True, False):
        if off := [distance for distance, _, row in furthest(found) if row.entry.calibrated == calibrated]:
            yield calibrated, len(off), statistics.median(off), off[0]


def by_rates(found: Results) -> list[str]:
    """The models whose layers were not calibrated."""
    return list(dict.fromkeys(row.m.model for row in found.rows if not row.entry.calibrated))


def fastest(found: Results, system: str, size: tuple[str, int]) -> Run | None:
    ran = [run for run in found.versus if run.system == system and run.size == size and not run.error]
    return min(ran, key=lambda run: run.step_s, default=None)


def took(run: Run) -> str:
    """A step's seconds, or why there are none."""
    whose = {"gpu": "the GPU's memory ran out", "host": "the host's memory ran out"}
    return whose.get(run.out_of_memory or "", f"failed: {run.error}") if run.error else s(run.step_s)


# ---- sections ----------------------------------------------------------------------------------------------------------


def summary(found: Results) -> str:
    said = [
        "megatrain trains language models that are larger than a GPU's memory, on one GPU. What training keeps of a model, its",
        f"weights in FP32 and two moments of each, {STATE_NBYTES} bytes a parameter, lies in host memory where the GPU has no",
        "room for it. Layers stream through the GPU, gradients stream back; a simulator says beforehand how long a step takes.",
    ]
    limited = [row for row in found.rows if row.m.gpu_memory_gib is not None]
    heads = [max(rows, key=lambda row: (row.numel, row.m.tokens)) for rows in (limited, found.rows) if rows]
    for row in {row.m.row: row for row in heads}.values():
        said.append(f"A model of {row.numel / 1e9:.1f} billion parameters takes a step of {row.m.tokens:,} tokens in")
        said.append(f"**{s(row.m.step_s)} s** {within(row.m.gpu_memory_gib)}.")
    for calibrated, count, middle, most in how_far(found):
        whose = "" if calibrated else f" of {', '.join(by_rates(found))}, no layer of which was timed before"
        said.append(f"Over {count} rows{whose}, predictions lie **{middle:.1%}** from the measured time of a step in the median,")
        said.append(f"{most:.1%} at most.")
    if found.ratios:
        models = ", ".join(dict.fromkeys(ratio["model"] for ratio in found.ratios))
        where: dict[float | None, list[float]] = {}
        for ratio in found.ratios:
            where.setdefault(ratio["gpu_memory_gib"], []).append(ratio["ratio"])
        ranges = [
            f"**{times(min(of))} to {times(max(of))}** {within(gib)}" + ", with less or nothing to offload" * (gib is None)
            for gib, of in sorted(where.items(), key=lambda it: it[0] or math.inf)
        ]
        said.append(f"Its tokens a second over those of DeepSpeed ZeRO-3 with offload, at {models}: {'; '.join(ranges)}.")
    else:
        said.append("Beside DeepSpeed ZeRO-3 with offload it is not measured yet.")
    kept = sum(judged(row.entry)[0] for row in found.rows)
    ran = [row.m.row for row in found.rows] + [it.row for it in found.failures]
    said.append(f"{kept} of {len(ran)} measured rows keep all that was promised of them beforehand.")
    if missing := [f"`{name}`" for name in ROWS if name not in ran]:
        said.append(f"Not measured yet: {', '.join(missing)}.")
    return " ".join(said)


def method(found: Results) -> str:
    machine, recipe, others = load_hardware(CALIBRATED), ROWS["7b-all-16384"].recipe, ", ".join(by_rates(found))
    rates = f" It has none of {others}: those times follow from rates of products and memory (*by rates*)." * bool(others)
    return f"""\
**The machine** is one NVIDIA H200 with {machine.device_memory_bytes / GIB:.1f} GiB of memory, {machine.cores} cores and \
{machine.host_memory_bytes / GIB:.1f} GiB of host memory that can be used, {HOST_MEMORY / GIB:g} of them by plans.

**The work** is to train Qwen2.5's shapes, each with an output matrix of its own ("14B-62" is 14B's with 62 layers), from random
weights on distinct random tokens in sequences of {recipe.seq_len:,}: BF16, AdamW on exact FP32 masters and moments, gradients
clipped exactly to a norm of {recipe.clip_norm:.1f} unless the table says no. Nothing can be learnt of such tokens; a step takes
as long as with others. A row's *recipe* says what is computed, its *plan* where and when. A deterministic recipe gives the
same bits under every plan and in every run; the others may use faster kernels that do not.

**24 GiB** in a row's name is what its plan may take. Nothing else keeps the process from taking more of the GPU's
memory; what it took was measured, and the row fails if that is more.

**A measured time** is the median of the steady steps: after {WARM} steps {MEASURED} are recorded, and {MEASURED - 1} times lie
between their ends. The spread is the fastest and the slowest. GPU memory is what another process sees: the largest use during
the run, less what was used before the process made its context. Host memory is the largest resident size. Each row verifies
that every block's weights have changed, that what ran has the digest of its schedule, that no memory was allocated after the
warm-up (*segments flat*), and that memory is as the simulator's *ledger* says.

**A predicted time** is a simulation of the same plan's schedule with a profile of the machine, `results/calibrated.json`. The
profile holds times of single layers of these shapes, at these rows' batch sizes, and rates of copies and of the optimizer, alone
and beside each other. `rows calibrate` made it on such a machine at another time than the rows; nothing is fitted to what
the rows took.{rates}"""


def speed(found: Results) -> str:
    if not found.rows:
        return NOT_YET
    return (
        f"Measured at {commits(row.m.commit for row in found.rows)}, which have the present lowering, engine and kernels. "
        "*At most* is the limit that was set before; of the deepest models only three steps are promised. The *floor* is what "
        "the row's plan needs at least at rates that were measured just after it: the longest of the times that compute, link, "
        "CPU optimizer, host memory, or the chain of backward and updates that clipping makes need alone. Those rates move by a "
        "few percent with the GPU's clock, and so does the floor. TFLOPS count 6 x parameters x tokens, neither recomputation "
        "nor attention. A row passes that keeps its limits of time and memory and all that it verifies.\n\n"
    ) + markdown(map(_speed, found.rows))


def _speed(row: Row) -> dict[str, str]:
    m, entry = row.m, row.entry
    by = "" if entry.calibrated else ", by rates"
    return {
        "row": f"`{m.row}`", "model": m.model, "tokens a step": f"{m.tokens:,}",
        "recipe": ", ".join(["no clipping"] * (not m.clipping) + ["deterministic"] * m.deterministic),
        "measured [s] (spread)": f"{s(m.step_s)} ({s(m.spread[0])} to {s(m.spread[1])})",
        "at most [s]": s(m.limit_s) if m.limit_s < NO_LIMIT_S else "",
        "predicted [s]": f"{s(entry.predicted_s)} ({entry.predicted_s / m.step_s - 1:+.1%}{by})" if entry.predicted_s else "",
        "floor [s]": s(entry.floor.seconds) if entry.floor else entry.why_no_floor,
        "step / floor": f"{row.over_floor:.3f}" if entry.floor else "", "TFLOPS (6N)": f"{m.tflops_6n:g}",
        "GPU peak [GiB]": f"{m.gpu_peak_gib:.2f}" + (f" of {m.gpu_memory_gib:g}" if m.gpu_memory_gib is not None else ""),
        "host peak [GiB]": f"{m.host_peak_gib:.2f}", "passed": YES[judged(entry)[0]],
    }  # fmt: skip


def larger(found: Results) -> str:
    gpu, state = load_hardware(CALIBRATED).device_memory_bytes, {row.m.row: row.numel * STATE_NBYTES for row in found.rows}
    rows = [row for row in found.rows if state[row.m.row] > gpu]
    if not rows:
        return NOT_YET
    most = max(state.values())
    return (
        f"The state of these rows, {STATE_NBYTES} bytes a parameter, is larger than the GPU's {gpu / GIB:.1f} GiB, and where "
        f"*state / host* is above 1 also than the {HOST_MEMORY / GIB:g} GiB of host memory that plans may use. The largest has "
        f"{most / GIB:.1f} GiB, of {(gpu + HOST_MEMORY) / GIB:.1f} GiB in both together, which also hold weights, gradients and "
        "activations.\n\n"
    ) + markdown(
        {
            "row": f"`{row.m.row}`", "parameters": f"{row.numel / 1e9:.2f}e9", "state [GiB]": f"{state[row.m.row] / GIB:.1f}",
            "state / GPU": f"{state[row.m.row] / gpu:.2f}", "state / host": f"{state[row.m.row] / HOST_MEMORY:.2f}",
            "tokens a step": f"{row.m.tokens:,}", "measured [s]": s(row.m.step_s), "GPU peak [GiB]": f"{row.m.gpu_peak_gib:.2f}",
            "host peak [GiB]": f"{row.m.host_peak_gib:.2f}",
        }
        for row in rows
    )  # fmt: skip


def rivals(found: Results) -> str:
    parts = [NOT_YET]
    if found.versus:
        models = [run.model for run in found.versus]
        runs = sorted(found.versus, key=lambda run: (models.index(run.model), run.tokens))
        parts = [
            "All train the same model from the same weights on the same tokens, with the same batch of a step, clipping and "
            f"AdamW, one after the other on one machine, at {commits(run.commit for run in runs)}. DeepSpeed keeps "
            "parameters and optimizer in host memory, plain PyTorch all on the GPU. Their GPU memory is not limited, ours is "
            "where the table says so. "
            f"Their time is the median of {MEASURED} steps from the batch on the host to the update's end.",
            "What differs: both rivals run the library's model as it is, neither compiled nor with the loss in tiles; ours are "
            "compiled layers. They take a step's sequences as one micro-batch and recompute where activations do not fit; ours "
            "may divide them (`plans/`), as it does at 32,768 tokens, which is to its advantage there. DeepSpeed's `zero.Init` "
            "rounds the model's rotary frequencies to BF16, which the "
            f"others keep in FP32. {_losses_apart(found)}",
            "\n".join(f"- {_verdict(found, run)}" for run in runs if run.system == "megatrain"),
            markdown(_rival(found, run) for run in runs),
        ]
    search = sorted(found.search, key=lambda run: (bool(run.error), run.step_s))
    if not search:
        return "\n\n".join([*parts, "The search of DeepSpeed's settings is not measured yet."])
    tried = dict.fromkeys(f"`{run.settings}`" for run in found.versus if run.system == "deepspeed")
    besides = [name for name in tried if name != f"`{search[0].settings}`"]
    there = len(list((table.HERE / "deepspeed").glob("*.json")))
    also = f"Above, {', '.join(besides)} ran as well. " * bool(besides)
    parts.append(
        f"DeepSpeed's `{search[0].settings}` is the fastest of a search at {search[0].model} and {search[0].tokens:,} tokens, at "
        f"{commits(run.commit for run in search)}, among {len({run.settings for run in search})} of {there} settings. {also}"
        "Ratios are over DeepSpeed's fastest line of a size. [Settings](deepspeed/README.md) says what each is."
    )
    keys = ({"settings": run.settings, "checkpointing": YES[bool(run.checkpointing)], "seconds": took(run)} for run in search)
    return "\n\n".join([*parts, markdown(keys)])


def _losses_apart(found: Results) -> str:
    """How far from plain PyTorch's losses at the same size and step those of the others lie at most."""
    apart: dict[str, float] = {}
    for run in found.versus:
        plain = fastest(found, "plain", run.size)
        if plain is not None and run.system != "plain" and not run.error:
            far = max(abs(x / y - 1) for x, y in zip(run.losses, plain.losses, strict=True))
            apart[run.system] = max(far, apart.get(run.system, 0.0))
    said = " and ".join(f"{far:.2%} ({SYSTEMS[system]})" for system, far in apart.items())
    return f"A step's loss lies within {said} of plain PyTorch's." if said else ""


def _checkpointing(run: Run) -> str:
    """Whether layers run forward twice; our plans say it layer by layer."""
    if run.checkpointing is not None:
        return YES[run.checkpointing]
    if run.settings not in ROWS:
        return "by layer"
    plan, layers = load_job(PLANS / f"{run.settings}.yaml").plan, range(len(table.model_of_row(run.model).layers))
    kept = sum(plan.activations_of(layer) == "keep" for layer in layers)
    return "no" if kept == len(layers) else f"{len(layers) - kept} of {len(layers)} layers"


def _rival(found: Results, run: Run) -> dict[str, str]:
    ours = [it for it in found.versus if (it.system, it.size) == ("megatrain", run.size) and not it.error]
    over = ", ".join(f"{times(run.step_s / it.step_s)} {within(it.gpu_memory_gib)}" for it in ours)
    spread = f" ({s(run.spread[0])} to {s(run.spread[1])})" if run.spread and not run.error else ""
    return {
        "model": run.model, "tokens": f"{run.tokens:,}", "system": SYSTEMS.get(run.system, run.system),
        "settings": run.settings, "GPU memory": memory(run.gpu_memory_gib),
        "checkpointing": _checkpointing(run), "seconds (spread)": took(run) + spread,
        "tokens/s": "" if run.error else f"{run.tokens / run.step_s:,.0f}",
        "GPU peak [GiB]": "" if run.gpu_peak_gib is None else f"{run.gpu_peak_gib:.2f}",
        "ours over it": "" if run.error or run.system == "megatrain" else over,
    }  # fmt: skip


def _verdict(found: Results, ours: Run) -> str:
    """Who wins at a row of ours."""
    said = [f"megatrain {took(ours)}"] if ours.error else []
    for system in () if ours.error else ("deepspeed", "plain"):
        name, it = SYSTEMS[system], fastest(found, system, ours.size)
        failed = [run for run in found.versus if (run.system, run.size) == (system, ours.size)]
        if it is None:
            said.append(f"{name}: {took(failed[-1]) if failed else 'not measured yet'}")
        elif it.step_s < ours.step_s:
            said.append(f"**{name} is {times(ours.step_s / it.step_s)} times as fast as megatrain**")
        else:
            said.append(f"megatrain is {times(it.step_s / ours.step_s)} times as fast as {name}")
    return f"{ours.model}, {ours.tokens:,} tokens, ours {within(ours.gpu_memory_gib)}: {'; '.join(said)}."


def start(found: Results) -> str:
    it = found.first_step
    if it is None:
        return NOT_YET
    return (
        f"From the command's start to the end of the first step of `{it.row}`, compilers' caches empty and no file cached, at "
        f"{commits([it.commit])}: **{it.total_s:g} s**; {it.limit_s:g} s were allowed. The disk alone takes {it.read_s:g} s for "
        f"{it.files_gb:g} GB at {it.disk_gb_per_s:g} GB/s; what of that lies above {READING_S:g} s would not count"
        f"{f', so {it.counted_s:g} s do' if it.counted_s < it.total_s else ''}. Reading begins while memory is made, and layers "
        "compile while weights load, so the phases add up to more than the whole.\n\n"
    ) + markdown(
        {"phase": name.removesuffix("_s").replace("_", " "), "seconds": f"{it.phases[name]:g}", "what": PHASES.get(name, "")}
        for name in dict.fromkeys((*PHASES, *it.phases))
        if name in it.phases
    )


def checks(found: Results) -> str:
    if not found.checks:
        return NOT_YET
    parts = ["A plan says where and when things are computed; it must not change a bit of the result."]
    for of_time, what in ((False, "Results:"), (True, "Time:")):
        lines = [
            {
                "check": f"`{it.check}`", "what it shows": CHECKS.get(it.check, ""), "passed": YES[it.passed] + _before(it),
                "figures": "; ".join(filter(None, [*_figures(it.result), *(f"missed: {what}" for what in it.missed), it.error])),
            }
            for it in found.checks
            if (it.check in OF_TIME) == of_time
        ]  # fmt: skip
        parts += [what, markdown(lines)] * bool(lines)
    return "\n\n".join(parts)


def _before(it: Check) -> str:
    return f" ({it.failed_before} earlier run{'s' * (it.failed_before > 1)} did not)" if it.failed_before else ""


def _figures(result: Mapping[str, Any]) -> Iterator[str]:
    """Numbers and texts by name, how many a list holds, of a check's runs the main figures."""
    for name, value in result.items():
        if isinstance(value, dict):
            main = {figure: value[figure] for figure in MAIN if figure in value}
            yield f"{name} ({', '.join(_figures(main or value))})"
        elif name == "says" and value:
            yield str(value[-1]).strip("= ")
        elif isinstance(value, list):
            if name != "missed":
                yield f"{name}: {len(value)}"
        else:
            said = f"{value:.1%}" if name in SHARES else f"{value:.6g}" if isinstance(value, float) else f"{value}"
            yield f"step: {s(value)} s" if name == "step_s" else f"{name}: {said}"


def losses(found: Results) -> str:
    """Worst first in each category; no category without anything in it."""
    said = [f"`{row.row}` failed: {row.error}" for row in found.failures]
    failed = [(row, why) for row in found.rows for passed, why in [judged(row.entry)] if not passed]
    for row, why in sorted(failed, key=lambda it: -it[0].m.step_s / it[0].m.limit_s):
        said.append(f"`{row.m.row}` does not keep what was promised: {why}.")
    said += [f"The check `{it.check}` failed: {it.error or '; '.join(it.missed)}." for it in found.checks if not it.passed]
    said += [
        f"The check `{it.check}` passed only after {it.failed_before} that did not; [README.md](README.md) says why."
        for it in found.checks
        if it.passed and it.failed_before
    ]
    if (first := found.first_step) and not first.passed:
        said.append(f"Of the time to the first step {first.counted_s:g} s count, more than {first.limit_s:g} s.")
    slower = [
        (ours.step_s / it.step_s, ours, it)
        for ours in found.versus
        for system in ("deepspeed", "plain")
        if ours.system == "megatrain" and (it := fastest(found, system, ours.size)) and it.step_s < ours.step_s
    ]
    for ratio, ours, rival in sorted(slower, key=lambda it: -it[0]):
        size = f"{ours.model} with {ours.tokens:,} tokens"
        said.append(f"At {size}, {SYSTEMS[rival.system]} is {times(ratio)} times as fast as ours {within(ours.gpu_memory_gib)}.")
    for row in sorted(found.rows, key=lambda row: -row.over_floor)[:WORST]:
        if row.over_floor > 1:
            said.append(f"`{row.m.row}` takes {row.over_floor:.3f} times its floor{': ' * bool(row.waits)}{row.waits}.")
    for distance, predicted_s, row in furthest(found)[:WORST]:
        by = "" if row.entry.calibrated else " by rates"
        said.append(f"`{row.m.row}` takes {s(row.m.step_s)} s where {s(predicted_s)} s were predicted{by}, {distance:.1%} off.")
    return "\n".join(f"- {' '.join(text.split())}" for text in said) or "Nowhere, in what is measured."


# ---- the page ----------------------------------------------------------------------------------------------------------


def page(found: Results) -> str:
    """The whole page in Markdown. It shows page.png where a row has a prediction."""
    sections = {
        "What was measured, and how": method(found), "Speed and memory": speed(found),
        "Larger than the GPU, and than the host": larger(found),
        "Beside DeepSpeed ZeRO-3 with offload, and plain PyTorch": rivals(found), "Time to the first step": start(found),
        "Checks": checks(found), "Where we lose": losses(found), "How to repeat it": AGAIN,
    }  # fmt: skip
    made = "*Written by `python -m papers.h200.page` from the files in `results/`.*"
    shown = ["![By row, how far the predicted step lies from the measured one](page.png)"] * bool(furthest(found))
    titled = [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n\n".join(["# megatrain on one H200", made, summary(found), *shown, *titled]) + "\n"


def picture(found: Results) -> bytes:
    """A PNG: by row, how far the predicted step lies from the measured one, the fastest and the slowest."""
    rows = [(row, row.entry.predicted_s) for row in found.rows if row.entry.predicted_s]
    with drawing(10, 1.75 + 0.3 * len(rows)) as figure:
        ax = add_axes(figure, left=2.6, right=1.7, bottom=0.75, top=0.9)
        for y, (row, predicted_s) in enumerate(rows):
            m = row.m
            low, middle, high = (100 * (predicted_s / measured_s - 1) for measured_s in (m.spread[0], m.step_s, m.spread[1]))
            ax.plot([low, high], [y, y], color="#88ccee", linewidth=5, solid_capstyle="butt")
            ax.plot(middle, y, marker="o", markersize=7, color="#332288", markerfacecolor=FILLED[row.entry.calibrated])
            said = f"{s(predicted_s)} s, {s(m.step_s)} s"
            ax.text(1.03, y, said, transform=ax.get_yaxis_transform(), va="center", fontsize=9.5)
        ax.text(1.03, -0.9, "predicted, measured", transform=ax.get_yaxis_transform(), va="center", fontsize=9.5, color=FAINT)
        ax.axvline(0, color=FAINT, linewidth=1.2)
        ax.set_yticks(range(len(rows)), [row.m.row for row, _ in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.grid(True, axis="x")
        ax.set_xlabel("prediction's error [%]; negative: steps took longer\npoint: median step; bar: fastest to slowest step")
        apart = [
            f"{count} rows{'' if calibrated else ' of layers not timed before (hollow)'}: median {middle:.1%}, at most {most:.1%}"
            for calibrated, count, middle, most in how_far(found)
        ]
        add_title(ax, "Step time, predicted and measured", "; ".join(apart), gap=8)
        png = io.BytesIO()
        figure.savefig(png, format="png")
        return png.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What was measured, as a page and a picture for those who do not know it.")
    parser.add_argument("--rows", type=Path, nargs="+", action="extend", metavar="FILE", help="default: rows.jsonl in --results")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where lines are; results/ by default")
    parser.add_argument("--out", type=Path, default=table.HERE, metavar="DIR", help="where the page goes; here by default")
    options = parser.parse_args(arguments)
    rows = options.results / "rows.jsonl"
    try:
        if not options.out.is_dir():
            raise ValueError(f"--out: must be a folder, got {options.out}")
        found = gather(options.rows or ([rows] if rows.exists() else []), options.results)
        text = page(found)
        if furthest(found):
            write_file(options.out / "page.png", picture(found))
        write_file(options.out / "page.md", text.encode())
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
