import pytest

from sim import bench


def test_the_benchmark_runs_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    # Its exit code depends on what else the machine does, so only what it ran is asserted here.
    assert bench.main() in (0, 1)
    printed = capsys.readouterr().out
    assert "80 layers, 8 chunks a layer" in printed
    assert [word in printed for word in ("lower", "check", "simulate", "total")] == [True] * 4
