import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from megatrain.hardware import H200, MOST, HardwareProfile, Link, MeasuredOp, SharingRow


def test_the_measured_machine_says_where_its_numbers_come_from() -> None:
    assert "measured" in H200.provenance
    assert H200.h2d.peak_bytes_per_s == 55_400_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": " "}, r"hardware\.name: must be a text, got ' '"),
        ({"provenance": ""}, r"hardware\.provenance: must be a text"),
        ({"cores": 0}, r"hardware\.cores: must be > 0, got 0"),
        ({"dram_bytes_per_s": -1}, r"hardware\.dram_bytes_per_s: must be > 0, got -1"),
        ({"device_memory_bytes": 0}, r"hardware\.device_memory_bytes: must be > 0"),
        ({"host_op_ns": -1}, r"hardware\.host_op_ns: must be >= 0"),
        ({"adam_rates": ()}, r"hardware\.adam_rates: must be at least one row"),
        ({"adam_rates": ((4, 10), (1, 20))}, r"hardware\.adam_rates: must be sorted .* got \(\(4, 10\), \(1, 20\)\)"),
        ({"adam_rates": ((4, 10), (4, 20))}, r"hardware\.adam_rates: must be sorted .* each value once"),
        ({"adam_rates": ((32, 10),)}, r"hardware\.adam_rates: must be of at most 16 threads"),
        ({"sharing": (*H200.sharing, H200.sharing[0])}, r"hardware\.sharing: must be at most one row a combination"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused_with_the_field_the_rule_and_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(H200, **change)


def test_a_link_has_its_top_rate_in_the_last_row() -> None:
    with pytest.raises(ValueError, match=r"hardware\.link\.rates: must be fastest in the last row"):
        Link(latency_ns=1, rates=((10, 20), (20, 10)))
    with pytest.raises(ValueError, match=r"hardware\.link\.latency_ns: must be >= 0, got -1"):
        Link(latency_ns=-1, rates=((10, 20),))


@pytest.mark.parametrize(
    "row",
    [
        {"h2d_bytes_per_s": 1},
        {"h2d_bytes_per_s": 1, "adam_bytes_per_s": 1},
        {"h2d_bytes_per_s": 1, "d2h_bytes_per_s": 1, "adam_threads": 3},
        {"h2d_bytes_per_s": 1, "d2h_bytes_per_s": -1},
    ],
)
def test_a_sharing_row_is_of_two_traffics_or_more_and_gives_threads_iff_adam_ran(row: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"hardware\.sharing"):
        SharingRow(**row)


def test_compute_needs_both_precisions_and_one_duration_a_combination() -> None:
    with pytest.raises(ValueError, match=r"hardware\.compute\.flops_per_s\['fp32'\]: must be > 0, got 0"):
        replace(H200.compute, flops_per_s={"bf16": 1})
    row = MeasuredOp("forward", "layer", 10, 8, 8, 5)
    with pytest.raises(ValueError, match="at most one row a combination"):
        replace(H200.compute, measured=(row, row._replace(duration_ns=6)))
    with pytest.raises(ValueError, match="a duration > 0"):
        replace(H200.compute, measured=(row._replace(duration_ns=0),))
    with pytest.raises(ValueError, match="must be one that adds only of backward, recompute_backward, loss"):
        replace(H200.compute, measured=(row._replace(adds=True),))
    assert replace(H200.compute, measured=(row._replace(kind="loss"), row._replace(kind="loss", adds=True))).measured[1].adds


def test_a_measured_op_may_be_as_large_as_the_most_and_no_larger() -> None:
    counts = {name: MOST[name] for name in ("numel", "tokens", "seq_len")}
    row = MeasuredOp("forward", "layer", **counts, duration_ns=MOST["ns"])
    assert replace(H200.compute, measured=(row,)).measured == (row,)
    for name in (*counts, "duration_ns"):
        with pytest.raises(ValueError, match=rf"hardware\.compute\.measured\[0\]\.{name}: must be at most .*, got "):
            replace(H200.compute, measured=(row._replace(**{name: getattr(row, name) + 1}),))


def test_profiles_are_values() -> None:
    assert replace(H200) == H200
    assert isinstance(H200, HardwareProfile)
    with pytest.raises(AttributeError):
        H200.cores = 1  # type: ignore[misc]


@pytest.mark.parametrize("module", ["megatrain.hardware", "sim.simulate", "sim.memory", "sim.longest_path", "sim.bench"])
def test_importing_the_simulator_loads_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
