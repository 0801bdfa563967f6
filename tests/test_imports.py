"""The direction of imports, beyond what the import contracts can say: what a fresh interpreter really loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOUNS = ("model", "recipe", "plan", "hardware", "trace", "schedule", "derive", "files", "catalog")
MAY_NAME_CUDA = {Path("megatrain/engine/cuda.py"), Path("megatrain/calibrate/cuda.py")}


@pytest.mark.parametrize(
    "statement",
    [
        *(f"import megatrain.{noun}" for noun in NOUNS),
        "import sim, sim.simulate, sim.longest_path, sim.memory, sim.bench, sim.planner",
        "import megatrain.cli, megatrain.cli.predict, megatrain.cli.report",
    ],
)
def test_nouns_and_simulator_load_neither_torch_nor_transformers(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


def test_only_the_cuda_backend_and_calibration_name_torch_cuda() -> None:
    sources = [path for package in ("megatrain", "sim", "analysis") for path in (ROOT / package).rglob("*.py")]
    naming = {path.relative_to(ROOT) for path in sources if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert naming <= MAY_NAME_CUDA
