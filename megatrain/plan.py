"""Plan: when and where, never what.

Placement, buffers, chunks, recompute or keep, the update policy, threads for Adam. No field of a plan may change a bit of the
result of a deterministic recipe; that is the project's strongest promise and `tests/engine/test_bitwise.py` its test.

Per-block choices are small tables from a block to a value. A key is "default", "embedding", "head", a layer ("3") or a range
of layers ("0-27", both ends included); the most specific key wins: the shortest range, and any range over the default. Two
ranges of one length that overlap must agree, since neither is more specific.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

Placement = Literal["streamed", "device_weights", "streamed_adam", "resident"]
Activations = Literal["recompute", "keep", "offload"]
SLOTS = ("weight_slots", "vocab_slots", "gradient_slots", "host_gradient_slots", "state_slots", "input_slots")
UpdatePolicy = Literal["after", "during_backward", "next_forward"]
UpdateOrder = Literal["first", "last"]
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe is executed.

    `placement` says where a block's state lives: on the host, its weights passing through slots (`streamed`); on the host, with a
    copy of the streamed weights that stays on the device and is refreshed once a step (`device_weights`); on the host, streamed
    through the device for its update, which leaves the CPU to other blocks (`streamed_adam`); on the device (`resident`).
    `activations` says what a decoder layer's backward finds: its input on the device (`recompute`), its input on the host, from
    where it comes back (`offload`), or all that its forward saved (`keep`).
    `update_order`, under `during_backward`, says when the CPU updates a block: when its gradient arrives (`first`), or after all
    that are `first`, in the order in which the next forward needs them (`last`). A CPU that is slower than the backward is behind
    with its updates when that ends, and the next forward waits for the first layers; the gradients of the last ones can wait.
    `weight_slots` (layers) and `vocab_slots` (embedding and head) are the device buffers streamed weights pass through;
    `gradient_slots` the device buffers packed gradients wait in; `host_gradient_slots` the host buffers under `during_backward`
    (under the other policies, and if it is updated `last`, a block has its own); `state_slots` the device buffers that a chunk of
    `streamed_adam` passes through, with all its planes; `input_slots` those that inputs of offloaded layers pass through.
    A chunk is `chunk_bytes` of streamed weights: the grain of transfers and updates, rounded down to whole multiples of 128
    elements but never below 128 (256 bytes in bf16, 512 in fp32); 0 means a whole block. `adam_threads` is the CPU optimizer's
    thread count.
    """

    placement: Mapping[str, Placement] = field(default_factory=lambda: {"default": "streamed"})
    activations: Mapping[str, Activations] = field(default_factory=lambda: {"default": "recompute"})
    update: UpdatePolicy = "next_forward"
    update_order: Mapping[str, UpdateOrder] = field(default_factory=lambda: {"default": "first"})
    weight_slots: int = 2
    vocab_slots: int = 1
    gradient_slots: int = 2
    host_gradient_slots: int = 2
    state_slots: int = 2
    input_slots: int = 2
    chunk_bytes: int = 32 << 20
    adam_threads: int = 1

    def __post_init__(self) -> None:
        for name in (*SLOTS, "adam_threads"):
            # A layer reads its input while it writes the next one's.
            least = 2 if name == "input_slots" else 1
            _require(name, getattr(self, name), is_count(getattr(self, name), least), f"an integer >= {least}")
        _require("chunk_bytes", self.chunk_bytes, is_count(self.chunk_bytes, 0), "an integer >= 0 (0: whole blocks)")
        _require("update", self.update, self.update in get_args(UpdatePolicy), f"one of {get_args(UpdatePolicy)}")
        tables = {"placement": Placement, "activations": Activations, "update_order": UpdateOrder}
        for name, values in ((name, get_args(choices)) for name, choices in tables.items()):
            table = getattr(self, name)
            _require(name, table, isinstance(table, Mapping), f"a table from blocks to {' or '.join(values)}, {{default: ...}}")
            for key, value in table.items():
                _require(f"{name}[{key!r}]", value, value in values, f"one of {values}")
            _refuse_ties(name, table)
        for key in ("embedding", "head"):
            _require("activations", key, key not in self.activations, "by decoder layer; the embedding and the head keep nothing")
        if self.update != "during_backward":
            for key, order in self.update_order.items():
                rule = f"first where update is {self.update}, which has an order of its own"
                _require(f"update_order[{key!r}]", order, order == "first", rule)

    def placement_of(self, kind: str, layer: int | None) -> Placement:
        """The placement of the embedding, the head, or a decoder layer (`layer` counts from 0)."""
        return _look_up(self.placement, kind, layer, "streamed")

    def update_order_of(self, kind: str, layer: int | None) -> UpdateOrder:
        """When, under `during_backward`, the CPU updates a block; `layer` as for `placement_of`."""
        return _look_up(self.update_order, kind, layer, "first")

    def activations_of(self, layer: int) -> Activations:
        """What a decoder layer keeps for its backward, and where. The embedding and head save nothing."""
        return _look_up(self.activations, "layer", layer, "recompute")


def _look_up(table: Mapping[str, _Choice], kind: str, layer: int | None, otherwise: _Choice) -> _Choice:
    if layer is None:
        return table.get(kind, table.get("default", otherwise))
    spans = {key: span for key in table if (span := _parse_key("", key)) and span[0] <= layer <= span[1]}
    if spans:
        return table[min(spans, key=lambda key: spans[key][1] - spans[key][0])]
    return table.get("default", otherwise)


def _refuse_ties(name: str, table: Mapping[str, str]) -> None:
    """ValueError for two keys that claim a layer with the same right and not the same value."""
    spans = [(span, key) for key in table if (span := _parse_key(name, key)) is not None]
    for i, (a, key) in enumerate(spans):
        for b, other in spans[:i]:
            overlap = max(a[0], b[0]), min(a[1], b[1])
            if a[1] - a[0] == b[1] - b[0] and overlap[0] <= overlap[1] and table[key] != table[other]:
                raise ValueError(
                    f"plan.{name}: {other!r} says {table[other]} and {key!r} says {table[key]} of layer {overlap[0]}, and neither"
                    " is more specific; give such layers a key of their own, or make one of the ranges shorter"
                )


def is_count(value: object, least: int) -> bool:
    """Whether `value` is an integer, and no boolean, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _parse_key(name: str, key: str) -> tuple[int, int] | None:
    """The layers a key names, both ends included; None for one that names no layer."""
    if key in ("default", "embedding", "head"):
        return None
    if not isinstance(key, str):
        raise ValueError(f"plan.{name}: the key {key!r} must be text: quote it")
    first, dash, last = key.partition("-")
    if not _is_number(first) or (dash and not _is_number(last)) or (dash and int(last) < int(first)):
        raise ValueError(f"plan.{name}: {key!r} is no block; use default, embedding, head, a layer (3) or a range (0-27)")
    return int(first), int(last) if dash else int(first)


def _is_number(text: str) -> bool:
    # isdigit and isdecimal accept more than 0 to 9 (a superscript, other scripts), and int refuses thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"plan.{name}: must be {rule}, got {value!r}")
