import itertools
from dataclasses import replace

import pytest

from megatrain.hardware import H200, HardwareProfile, SharingRow
from sim.cost import Traffic, Work, adam_bytes_per_s
from sim.sharing import Sharing

GB = 10**9


def _work(traffic: Traffic, threads: int = 0, hardware: HardwareProfile = H200) -> Work:
    rate = {
        "h2d": hardware.h2d.peak_bytes_per_s, "d2h": hardware.d2h.peak_bytes_per_s,
        "adam": adam_bytes_per_s(hardware, threads), "compute": GB,
    }[traffic]  # fmt: skip
    return Work(0, 10**6, rate, traffic, threads, 10**6)


def test_each_row_of_the_table_comes_back() -> None:
    sharing = Sharing(H200)
    assert sharing([_work("h2d"), _work("d2h")]) == (50_800_000_000, 50_800_000_000)
    assert sharing([_work("adam", 16), _work("h2d")]) == (112 * GB, 49 * GB)
    assert sharing([_work("d2h"), _work("adam", 8), _work("h2d")]) == (42 * GB, 75 * GB, 42 * GB)
    assert sharing.notes == []


def test_rates_are_linear_in_the_threads_between_rows() -> None:
    sharing = Sharing(H200)
    assert sharing([_work("h2d"), _work("adam", 12)]) == (51 * GB, 104 * GB)
    # Below the first row, towards the same combination without Adam: 50.8 GB/s each way, and one way alone.
    assert sharing([_work("h2d"), _work("d2h"), _work("adam", 4)]) == (46_400_000_000, 46_400_000_000, 37_500_000_000)
    assert sharing([_work("h2d"), _work("adam", 4)]) == ((55_400_000_000 + 53 * GB) // 2, 48 * GB)
    assert sharing.notes == []


def test_what_runs_alone_has_its_full_rate_and_nothing_is_faster_than_alone() -> None:
    fast = SharingRow(h2d_bytes_per_s=10**12, d2h_bytes_per_s=1)
    machine = replace(H200, sharing=(fast,))
    for traffic, threads in (("h2d", 0), ("d2h", 0), ("adam", 3), ("compute", 64)):
        work = _work(traffic, threads)  # type: ignore[arg-type]
        assert Sharing(machine)([work]) == (work.rate_per_s,)
    assert Sharing(machine)([_work("h2d"), _work("d2h")]) == (H200.h2d.peak_bytes_per_s, 1)


def test_a_missing_combination_shares_the_dram_in_proportion_and_is_named_once() -> None:
    machine = replace(H200, sharing=(), dram_bytes_per_s=100 * GB)
    sharing = Sharing(machine)
    running = [_work("h2d"), _work("adam", 16)]
    rates = sharing(running)
    assert sum(rates) == pytest.approx(100 * GB, rel=1e-9)
    assert rates[0] / rates[1] == pytest.approx(55.4 / 118, rel=1e-9)
    sharing(list(reversed(running)))
    sharing(running)
    assert sharing.notes == ["h200: no measured rates for adam(16 threads) + h2d; DRAM's 100.0 GB/s shared in proportion"]
    # Where the DRAM is wide enough for all, nobody is slowed.
    assert Sharing(replace(machine, dram_bytes_per_s=999 * GB))(running) == tuple(w.rate_per_s for w in running)


def test_more_threads_than_the_table_has_are_a_missing_combination() -> None:
    machine = replace(H200, sharing=tuple(r for r in H200.sharing if r.adam_threads < 16))
    sharing = Sharing(machine)
    sharing([_work("h2d"), _work("adam", 16)])
    assert len(sharing.notes) == 1


def test_cores_are_shared_in_proportion_by_those_that_use_them() -> None:
    # 16 + 16 threads on 16 cores: both at half speed; the copy, which uses none, is not slowed by it.
    works = [
        Work(0, 10**6, GB, "compute", 16, 0), Work(0, 10**6, 2 * GB, "compute", 16, 0),
        Work(0, 10**6, 5 * GB, "h2d", 0, 10**6),
    ]  # fmt: skip
    assert Sharing(H200)(works) == (GB // 2, GB, 5 * GB)


def test_two_works_of_one_traffic_split_its_rate() -> None:
    assert Sharing(H200)([_work("h2d"), _work("h2d")]) == (27_700_000_000, 27_700_000_000)
    assert Sharing(H200)([_work("adam", 8), _work("adam", 8)]) == (59 * GB, 59 * GB)


def test_more_company_never_makes_anyone_faster_on_the_measured_machine() -> None:
    sharing = Sharing(H200)
    everyone = [_work("h2d"), _work("d2h"), _work("adam", 16)]
    for size in (1, 2):
        for some in itertools.combinations(everyone, size):
            for extra in everyone:
                if extra not in some:
                    with_extra = dict(zip([*some, extra], sharing([*some, extra]), strict=True))
                    assert all(with_extra[w] <= r for w, r in zip(some, sharing(some), strict=True))
