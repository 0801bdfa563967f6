"""Explain: a plan and why it was chosen, as text a person reads in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from sim.ledger import PHASES

if TYPE_CHECKING:
    from sim.planner import Planned

_GIB = 2**30


def explain(planned: Planned) -> str:
    """Step, what it is compared with, what binds, the plan, memory by phase and item, lanes, stalls, marginal values, notes."""
    model, recipe, machine = planned.model, planned.recipe, planned.hardware
    flops = 6 * model.numel * planned.tokens_per_s
    parts = [
        f"{model.name or 'model'} on {machine.name}: {_seconds(planned.step_ns)} a step of {recipe.tokens_per_step:,} tokens,"
        f" {planned.tokens_per_s:,.0f} tokens/s, {flops / 1e12:,.1f} TFLOPS (simulated)",
        _compared(planned),
        f"Binding: {planned.binding}.",
        _table("Plan", ("field", "value"), [(f.name, _value(getattr(planned.plan, f.name))) for f in fields(planned.plan)]),
        _memory(planned),
        _table("Lanes, of a step", ("lane", "busy"), [(lane, f"{share:.0%}") for lane, share in planned.busy.items()]),
    ]
    if planned.stalls:
        waits = [(str(cause), _seconds(ns)) for cause, ns in planned.stalls.items()]
        parts.append(_table("Compute waits, in a step", ("cause", "time"), waits))
    if planned.marginals:
        more = [(m.text, _change(m.delta_ns), m.how) for m in planned.marginals]
        parts.append(_table("What more would bring", ("more", "a step", "how found"), more))
    parts.append(
        f"Searched: {planned.considered:,} choices considered, {planned.short:,} short of memory, {planned.bounded:,} no better"
        f" by a lower bound, {planned.simulated:,} simulated; {planned.in_full:,} plan{'s' * (planned.in_full != 1)} simulated in"
        " full."
    )
    parts.extend(f"Note: {note}" for note in planned.notes)
    return "\n\n".join(parts) + "\n"


def _compared(planned: Planned) -> str:
    if planned.default_step_ns is not None:
        gain = 1 - planned.step_ns / planned.default_step_ns
        lines = [f"Default plan (all streamed): {_seconds(planned.default_step_ns)}; this one is {gain:.1%} shorter."]
    else:
        lines = [f"Default plan (all streamed): does not fit ({planned.default_lacks})."]
    if planned.runner_up is not None:
        lines.append(f"Runner-up: {_seconds(planned.runner_up.step_ns)}, with {planned.runner_up.differs}.")
    return "\n".join(lines)


def _memory(planned: Planned) -> str:
    book, machine = planned.ledger, planned.hardware
    rows = [
        (str(phase), _gib(book.device_nbytes(phase)), _gib(book.host_nbytes(phase)), _gib(book.nbytes(phase, "pinned")))
        for phase in PHASES
    ]
    rows.append(("there is", _gib(machine.device_memory_bytes), _gib(machine.host_memory_bytes), ""))
    step = [(i.what, i.space, _gib(i.nbytes)) for i in book.items if "step" in i.phases]
    at = f", device at {book.peak_op}" if book.peak_op else ""
    return (
        _table("Memory, GiB", ("phase", "device", "host", "of it pinned"), rows)
        + "\n\n"
        + _table(f"In a step{at}, GiB", ("what", "where", "GiB"), sorted(step, key=lambda row: -float(row[2])))
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, all to the left but numbers' own padding."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *(f"  {line}" for line in [text[0], "  ".join("-" * w for w in widths), *text[1:]])])


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s" if ns >= 10**7 else f"{ns / 1e6:.3f} ms"


def _change(ns: int) -> str:
    return "no change" if abs(ns) < 500 else f"{'-' if ns < 0 else '+'}{_seconds(abs(ns))}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"
