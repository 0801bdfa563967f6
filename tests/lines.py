"""Lines of `papers.h200.versus` in tests."""

from __future__ import annotations

from typing import Any


def line(system: str = "megatrain", step_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "system": system, "settings": system, "checkpointing": None, "model": "3B", "gpu_memory_gib": None,
        "tokens": 4096, "step_s": step_s, "losses": [12.0, 11.9, 11.8], "run": "a",
        "versions": {"torch": "2.11.0", "deepspeed": "0.19.8"}, "machine": {"gpu": "H200"}, **changes,
    }  # fmt: skip
