"""Machines by name: the measured one, and others from data sheets and other people's measurements.

An unmeasured profile is built by one rule from few figures, so that its weak points are the same everywhere and can be named:

* matrix products: the best BF16 rate others reached in one GEMM, less 5% for what a step sustains (the measured H200 lies 2%
  below the best published for it); FP32 without TF32 at 0.75 of the data sheet. Dense, with FP32 accumulation.
* attention: a share of the BF16 rate, of deterministic flash attention forward and backward at 1,024 tokens. On the H200 it is
  0.21, measured; GPUs with slower matrix units lose less to the rest of the kernel: 0.4 (A100) and 0.5 (others), assumed.
* GPU memory: 0.85 of the data sheet, as measured on the H200 and on a GH200 (STREAM, 3.4 of 4.0 TB/s).
* links: the published rate of large pinned copies; a copy takes 3 us more than its bytes, and 10 us at least, which gives the
  H200's measured rows from 64 KiB on within 25%.
* CPU Adam: 12 GB/s a thread (16 on Grace) up to 0.9 of what DRAM sustains; on the H200 a thread of 8 reached 12.5. DRAM sustains
  0.8 of the data sheet unless a STREAM figure is published.
* the rest (launch and op costs) as in the H200's profile. Traffic that shares DRAM has no measured table but where stated, so
  simulations name the rule they fall back to.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.hardware import H200, Compute, HardwareProfile, Link, SharingRow

_GB = 10**9
_TFLOPS = 10**12
_NS_PER_S = 10**9
_START_UP_NS = 3_000
_SHORTEST_COPY_NS = 10_000


def _link(gb_per_s: float) -> Link:
    """A link on which large copies reach `gb_per_s` and small ones start up as they do on the measured one."""
    peak = round(gb_per_s * _GB)
    sizes = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
    times_ns = [max(_SHORTEST_COPY_NS, _START_UP_NS + n * _NS_PER_S // peak) for n in sizes]
    rows = [(n, n * _NS_PER_S // ns) for n, ns in zip(sizes, times_ns, strict=True)]
    return Link(latency_ns=_SHORTEST_COPY_NS, rates=(*rows, (64 << 20, peak)))


def _unmeasured(
    name: str, *, sources: str, device_gib: int, host_gib: int, cores: int, h2d_gb_per_s: float, d2h_gb_per_s: float,
    bf16_tflops: float, fp32_tflops: float, attention_share: float, memory_gb_per_s: int, dram_gb_per_s: int,
    thread_gb_per_s: int = 12, sharing: tuple[SharingRow, ...] = (),
) -> HardwareProfile:  # fmt: skip
    """A profile by the rules of this module. `bf16_tflops` is the best published, `fp32_tflops` and `memory_gb_per_s` the data
    sheet's, `dram_gb_per_s` what the host's memory sustains, the links' rates those of large copies."""
    bf16 = round(bf16_tflops * 0.95 * _TFLOPS)
    threads = [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72) if n <= cores]
    most = dram_gb_per_s * _GB * 9 // 10
    return HardwareProfile(
        name=name,
        provenance=f"not measured: data sheets and published rates. {sources}. Sustained BF16 FLOP/s assumed at 0.95 of that"
        f" GEMM, FP32 at 0.75 and GPU memory at 0.85 of the data sheet, attention at {attention_share} of BF16, CPU Adam at"
        f" {thread_gb_per_s} GB/s a thread up to 0.9 of DRAM; start-up of copies 3 us (10 us at least); launches and ops as the"
        " h200's",
        device_memory_bytes=device_gib << 30,
        host_memory_bytes=host_gib << 30,
        cores=cores,
        h2d=_link(h2d_gb_per_s),
        d2h=_link(d2h_gb_per_s),
        compute=Compute(
            flops_per_s={"bf16": bf16, "fp32": round(fp32_tflops * 0.75 * _TFLOPS)},
            attention_flops_per_s=round(bf16 * attention_share),
            memory_bytes_per_s=memory_gb_per_s * _GB * 85 // 100,
            launch_ns=H200.compute.launch_ns,
        ),
        adam_rates=tuple((n, min(n * thread_gb_per_s * _GB, most)) for n in threads),
        dram_bytes_per_s=dram_gb_per_s * _GB,
        host_op_ns=H200.host_op_ns,
        sharing=sharing,
    )


_H200_LARGE_HOST = replace(
    H200,
    name="h200-1.5tb",
    provenance="not measured as a whole: the h200 profile's GPU and link with 1.5 TB (1,536 GiB) of host memory and 32 cores."
    " CPU Adam at 32 threads as measured on the two-GPU H200 machine (32 cores, 256 GiB). Assumed: DRAM in all grows with the"
    f" cores as Adam does, 180 to 228 GB/s; up to 16 threads everything is as in the h200's. {H200.provenance}",
    host_memory_bytes=1536 << 30,
    cores=32,
    adam_rates=(*H200.adam_rates, (32, 150 * _GB)),
    dram_bytes_per_s=228 * _GB,
)

_PROFILES = (
    H200,
    _H200_LARGE_HOST,
    _unmeasured(
        "gh200",
        sources="GH200 with 96 GB of HBM3 and 480 GB of LPDDR5X, 72 cores (NVIDIA's data sheet: 4.0 TB/s, FP32 67 TFLOPS)."
        " NVLink-C2C 375 / 297 GB/s up / down and host STREAM 486 GB/s: Schieffer et al., arXiv 2407.07850 (others: 346 up)."
        " Best BF16 GEMM published: 829 TFLOPS, 0.84 of the dense peak of 989",
        device_gib=94, host_gib=480, cores=72, h2d_gb_per_s=375, d2h_gb_per_s=297, bf16_tflops=829, fp32_tflops=67,
        attention_share=0.21, memory_gb_per_s=4_000, dram_gb_per_s=486, thread_gb_per_s=16,
    ),
    _unmeasured(
        "a100-pcie",
        sources="A100 PCIe 80 GB (NVIDIA's data sheet: 1.935 TB/s, FP32 19.5 TFLOPS) in the host of MegaTrain's table, arXiv"
        " 2604.05091: 600 GB, 140.8 GB/s of DRAM, of which 0.8 assumed sustained; 24 cores assumed. PCIe 4.0 x16 25.5 / 25.5"
        " GB/s pinned, published; both at once: down as alone, up 15 (published: 11 to 19). Best BF16 GEMM published: 253"
        " TFLOPS, 0.81 of the dense peak of 312",
        device_gib=79, host_gib=558, cores=24, h2d_gb_per_s=25.5, d2h_gb_per_s=25.5, bf16_tflops=253, fp32_tflops=19.5,
        attention_share=0.4, memory_gb_per_s=1_935, dram_gb_per_s=112,
        sharing=(SharingRow(h2d_bytes_per_s=15 * _GB, d2h_bytes_per_s=25_500_000_000),),
    ),
    _unmeasured(
        "a6000",
        sources="RTX A6000 48 GB (NVIDIA's data sheet: 768 GB/s, FP32 38.7 TFLOPS) in the host of MegaTrain's table, arXiv"
        " 2604.05091: 251 GB, 204.8 GB/s of DRAM (8 channels of DDR4-3200), of which 0.8 assumed sustained; 32 cores assumed."
        " PCIe 4.0 x16 at 25.5 / 25.5 GB/s as published for an A100. Best BF16 GEMM published: 123 TFLOPS, 0.79 of the dense"
        " peak of 154.8",
        device_gib=47, host_gib=251, cores=32, h2d_gb_per_s=25.5, d2h_gb_per_s=25.5, bf16_tflops=123, fp32_tflops=38.7,
        attention_share=0.5, memory_gb_per_s=768, dram_gb_per_s=163,
    ),
    _unmeasured(
        "rtx3090",
        sources="RTX 3090 24 GB (NVIDIA's data sheet: 936 GB/s, FP32 35.6 TFLOPS) in the host of MegaTrain's table, arXiv"
        " 2604.05091: 251 GB, 204.8 GB/s of DRAM, of which 0.8 assumed sustained, PCIe 3.0 x16 (16 GB/s a direction, of which"
        " 12.5 assumed for pinned copies; the card itself has 4.0); 32 cores assumed. Best BF16 GEMM published: 76 TFLOPS,"
        " above the data sheet's dense 71 with FP32 accumulation (at its nominal clock); the 142 printed in that table is the"
        " rate with FP16 accumulation",
        device_gib=23, host_gib=251, cores=32, h2d_gb_per_s=12.5, d2h_gb_per_s=12.5, bf16_tflops=76, fp32_tflops=35.6,
        attention_share=0.5, memory_gb_per_s=936, dram_gb_per_s=163,
    ),
    _unmeasured(
        "rtx4090",
        sources="RTX 4090 24 GB (NVIDIA's data sheet: 1,008 GB/s, FP32 82.6 TFLOPS) in an assumed workstation: 256 GiB in 8"
        " channels of DDR4-3200 (204.8 GB/s, of which 0.8 assumed sustained), 32 cores. PCIe 4.0 x16 at 25.5 / 25.5 GB/s as"
        " published for an A100. Best BF16 GEMM published: 161 to 173 TFLOPS; 161 taken, 0.97 of the dense peak of 165 with"
        " FP32 accumulation",
        device_gib=23, host_gib=256, cores=32, h2d_gb_per_s=25.5, d2h_gb_per_s=25.5, bf16_tflops=161, fp32_tflops=82.6,
        attention_share=0.5, memory_gb_per_s=1_008, dram_gb_per_s=163,
    ),
    _unmeasured(
        "rtx5090",
        sources="RTX 5090 32 GB (NVIDIA's data sheet: 1,792 GB/s, FP32 104.8 TFLOPS) in an assumed workstation: 256 GiB in 8"
        " channels of DDR5-5200 (332.8 GB/s, of which 0.8 assumed sustained), 32 cores. PCIe 5.0 x16 35.5 / 56 GB/s up / down,"
        " 25 each with both running, published (of one machine; up is far below what the link allows). BF16: torch.matmul at"
        " 224 TFLOPS published (main-horse.github.io/posts/5090-mm-perf), above the data sheet's dense 209.5; 209.5 taken as"
        " the best",
        device_gib=31, host_gib=256, cores=32, h2d_gb_per_s=35.5, d2h_gb_per_s=56, bf16_tflops=209.5, fp32_tflops=104.8,
        attention_share=0.5, memory_gb_per_s=1_792, dram_gb_per_s=266,
        sharing=(SharingRow(h2d_bytes_per_s=25 * _GB, d2h_bytes_per_s=25 * _GB),),
    ),
)  # fmt: skip

MACHINES: dict[str, HardwareProfile] = {profile.name: profile for profile in _PROFILES}
