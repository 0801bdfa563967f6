"""The cuda backend: lanes as streams, deps as events.

One thread enqueues the ops of all three streams, in the order of the part, and runs ahead of the device; the cpu lane works on
its own thread. A mark of a stream is an event. What follows a mark of another stream makes its stream wait for the event; what
follows one on the cpu lane waits on the host for that event, and for nothing else. The executor asks for neither before the event
was recorded. A stream that follows the cpu lane waits for a count in pinned memory, which that lane raises after each op: so the
host is never waited for on the way to the device.

Why one thread: threads that enqueue take turns at the interpreter, and with a thread a lane each turn was longer than a copy.

After warm-up nothing here allocates, frees or synchronises: the arena holds every slot, staged inputs and copied planes are
registered with the driver at their exact size, events come from a pool, and temporaries from PyTorch's cached blocks of the
compute stream.
"""

from __future__ import annotations

import gc
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# cuBLAS reads this when its first handle is made. A workspace of a fixed size belongs to the bits of a product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# PyTorch reads this when the first growing segment is made. Nothing here shares device memory with another process; told so, it
# does not first ask the driver for a kind of sharing that most machines refuse, which a memory checker would report.
os.environ.setdefault("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")

import torch
from torch import Tensor

from megatrain.engine import driver, triton_kernels
from megatrain.engine.backend import Ran
from megatrain.engine.clock import Clock, RealClock
from megatrain.engine.driver import Flag
from megatrain.engine.kernels import Kernel, Kernels, StepContext, UpdateCount
from megatrain.engine.memory import Memory
from megatrain.model import BlockSpec
from megatrain.optim.kernel import Run
from megatrain.recipe import Recipe
from megatrain.schedule.nouns import Lane, Op, Schedule
from megatrain.trace import Source


class CudaBase(NamedTuple):
    """An event on an idle stream, and the clock's time just before and after it was enqueued."""

    event: torch.cuda.Event
    before_ns: int
    after_ns: int


class CudaBackend:
    """Runs the ops of `schedule` on the current CUDA device. RuntimeError where there is none."""

    source: Source = "cuda"

    def __init__(
        self, schedule: Schedule, counts: UpdateCount, clock: Clock | None = None, adopted: Mapping[str, Tensor] | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("the cuda backend needs a CUDA device")
        configure(schedule.recipe)
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()  # for `device_use`
        self.schedule, self.clock = schedule, clock or RealClock()
        self.memory = Memory(schedule.storages, "cuda", adopted)
        self._pinned = [self.memory.named(name) for name in [s.name for s in schedule.storages if s.copied]]
        for view in self._pinned:
            # At its exact size, and touched before by all threads: faulting pages in is the slow part of pinning.
            error = int(torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0))
            if error:
                raise MemoryError(f"pinning {view.numel()} bytes of host memory failed: CUDA error {error}")
        self.lanes = CudaLanes(self.clock)
        self.kernels = Kernels(schedule=schedule, memory=self.memory, device=CudaOps(schedule, self.lanes.streams), counts=counts)
        torch.cuda.synchronize()  # the arena was filled on the default stream

    def rehearse(self) -> None:
        """On the calling thread, while others may load state."""
        with torch.cuda.stream(self.lanes.streams["compute"]):
            self.kernels.rehearse()
            torch.cuda.current_stream().synchronize()

    def after_load(self) -> None:
        """Once state is loaded: what that took is given back, since nothing will ask for memory of its sizes."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Wait for the device and give pinned memory back to the driver."""
        self.lanes.abandon()
        torch.cuda.synchronize()
        self.kernels.forget()
        for view in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(view.data_ptr())
        self._pinned = []

    @property
    def pinned_nbytes(self) -> int:
        """Host memory registered with the driver."""
        return sum(view.numel() for view in self._pinned)

    def device_use(self, *, reset: bool) -> tuple[int, int, int]:
        """Bytes: the allocator's peaks since the backend was made or `reset`, reserved and allocated, and what is taken of the
        whole device now, by whomever."""
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return reserved, allocated, total - free

    def run(self, op: Op, step: Any) -> Ran:
        return self.kernels.run(op, step)

    def joins(self, op: Op) -> bool:
        return self.kernels.joins(op)

    def run_series(self, ops: Sequence[Op], step: Any, count: int) -> list[tuple[int, Ran, int]]:
        series, ran = self.kernels.series(ops)
        called = self.clock.now_ns()
        spans = series(self.lanes.ended_address, count)
        return [(called + start, what, called + end) for what, (start, end) in zip(ran, spans, strict=False)]


class CudaLanes:
    """Streams that a thread enqueues on, and the cpu lane on its own."""

    threads: tuple[tuple[Lane, ...], ...] = (("h2d", "compute", "d2h"), ("cpu",))

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Copies first: where the device must choose, a short copy lets long computation start.
        self.streams: dict[Lane, torch.cuda.Stream] = {
            "h2d": torch.cuda.Stream(priority=-1), "d2h": torch.cuda.Stream(priority=-1), "compute": torch.cuda.Stream(),
        }  # fmt: skip
        self._handles = {lane: stream.cuda_stream for lane, stream in self.streams.items()}
        self._idle = torch.cuda.Stream(priority=-1)
        self._ended = Flag()
        self.ended_address = self._ended.address
        """Where the count of ended ops of the cpu lane lies."""
        self._free: dict[bool, list[torch.cuda.Event]] = {True: [], False: []}

    def enter(self, lanes: tuple[Lane, ...]) -> None:
        # The driver takes its context from the thread, and a thread has none before its first call of the runtime. Memory of
        # growing segments belongs to no context by itself: a copy to it would then be refused.
        torch.cuda.Event().record(self._idle)
        if "compute" in lanes:
            torch.cuda.set_stream(self.streams["compute"])  # copies name their stream

    def mark(self, lane: Lane, *, timed: bool) -> int | torch.cuda.Event:
        if lane not in self.streams:
            return self._clock.now_ns()
        free = self._free[timed]
        event = free.pop() if free else torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(self.streams[lane])
        return event

    def recycle(self, marks: Iterable[int | torch.cuda.Event], *, timed: bool) -> None:
        self._free[timed] += [mark for mark in marks if not isinstance(mark, int)]

    def follow(self, lane: Lane, mark: int | torch.cuda.Event) -> None:
        if isinstance(mark, int):
            return
        if lane in self.streams:
            self.streams[lane].wait_event(mark)
        else:
            mark.synchronize()

    def follow_count(self, lane: Lane, other: Lane, count: int) -> bool:
        return lane in self.streams and other not in self.streams and self._ended.follow(self._handles[lane], count)

    def ended(self, lane: Lane, count: int) -> None:
        if lane not in self.streams:
            self._ended.set(count)

    def abandon(self) -> None:
        self._ended.abandon()

    def settle(self, mark: int | torch.cuda.Event) -> None:
        if not isinstance(mark, int):
            mark.synchronize()

    def base(self) -> CudaBase:
        # The thread may lose its turn between reading the clock and recording: of a few tries the closest pair counts.
        tries = []
        for _ in range(4):
            event = torch.cuda.Event(enable_timing=True)
            before = self._clock.now_ns()
            event.record(self._idle)
            tries.append(CudaBase(event, before, self._clock.now_ns()))
        return min(tries, key=lambda base: base.after_ns - base.before_ns)

    def timeline(self, bases: Sequence[CudaBase]) -> CudaTimeline:
        return CudaTimeline([*bases, self.base()])


class CudaTimeline:
    """The device's clock laid on the host's.

    Events count milliseconds in FP32 from each other, so each is read from its part's base, whose own place is the sum of the
    distances between bases. Each base is a point where both clocks are known, to the time it took to record it; between them the
    clocks are taken to drift evenly, so that no two events of the device change places.
    """

    def __init__(self, bases: Sequence[CudaBase]) -> None:
        self._bases = bases
        bases[-1].event.synchronize()
        self._device = [0]
        for a, b in itertools.pairwise(bases):
            self._device.append(self._device[-1] + elapsed_ns(a.event, b.event))
        self._host = [base.before_ns for base in bases]
        gap = max(base.after_ns - base.before_ns for base in bases)
        drift = max(
            abs((h1 - h0) - (d1 - d0))
            for (h0, h1), (d0, d1) in zip(itertools.pairwise(self._host), itertools.pairwise(self._device), strict=True)
        )
        # Half a microsecond is an event's own grain, one its rounding in FP32 at seconds from its base.
        self.resolution_ns = 4000 + gap + drift
        self.notes = [f"device and host clocks: recorded within {gap} ns, apart by up to {drift} ns from part to part"]

    def ns(self, part: int, mark: int | torch.cuda.Event) -> int:
        if isinstance(mark, int):
            return mark
        at = self._device[part] + elapsed_ns(self._bases[part].event, mark)
        i = min(max(bisect_right(self._device, at) - 1, 0), len(self._device) - 2)
        (d0, d1), (h0, h1) = self._device[i : i + 2], self._host[i : i + 2]
        return h0 + (at - d0) * (h1 - h0) // (d1 - d0)


def elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(float(start.elapsed_time(end)) * 1e6)


class CudaOps:
    """Device operations: copies on their lane's stream, kernels on the current one."""

    def __init__(self, schedule: Schedule, streams: Mapping[Lane, torch.cuda.Stream]) -> None:
        self._streams = {lane: stream.cuda_stream for lane, stream in streams.items()}
        self._pool = GraphPool()
        # Blocks of one structure have the same tiles.
        tables: dict[tuple[tuple[int, int], ...], Tensor] = {}
        self._tiles: dict[int, Tensor] = {}
        for block in schedule.model.blocks:
            key = tuple((p.offset, p.end) for p in block.params)
            if key not in tables:
                tables[key] = triton_kernels.tiles_of(key).cuda()
            self._tiles[block.index] = tables[key]

    def pack(self, block: BlockSpec, sums: Tensor, grads: Tensor, partials: Tensor) -> None:
        triton_kernels.pack(self._tiles[block.index], sums, grads, partials)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        driver.copy(target.data_ptr(), source.data_ptr(), source.numel(), self._streams[lane])

    def repeated(self, kernel: Kernel) -> Kernel:
        return Graphed(kernel, self._pool)

    def prepare_adamw(
        self, master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, runs: Sequence[Run]
    ) -> Callable[[], None]:
        def cut(run: Run) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, bool]:
            part = slice(run.first, run.end)
            return tuple(plane[part] for plane in master), m[part], v[part], grad[part], run.decayed

        parts = [cut(run) for run in runs]

        def update() -> None:
            for planes, m, v, grad, decayed in parts:
                triton_kernels.adamw(planes, m, v, grad, constants, decayed=decayed)

        return update


class GraphPool:
    """The memory that all graphs of a run take their temporaries from.

    They run one after the other on one stream, in the order of their capture, so what one has given back the next may take: the
    pool is as large as the most that lives at once. Kept activations live in it from a forward to its backward.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._used = False

    def first_use(self) -> None:
        """Before the first capture: what ops took for themselves until now will not be asked for again."""
        if not self._used:
            self._used = True
            torch.cuda.empty_cache()


class Graphed:
    """A kernel as a CUDA graph: the work it launches, launched at once.

    To launch a layer's kernels one by one from Python takes longer than a GPU needs to run them, where a layer is small. The
    first run goes the ordinary way (it compiles and loads what it needs), the second is captured. A graph launches the same
    kernels with the same operands, so it gives the same bits.
    """

    def __init__(self, kernel: Kernel, pool: GraphPool) -> None:
        self._kernel, self._pool = kernel, pool
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: StepContext) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif not self._has_run:
            self._has_run = True
            self._kernel(step)
        else:
            self._pool.first_use()
            self._graph = captured(lambda: self._kernel(step), self._pool.handle)
            self._graph.replay()


def captured(launch: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What `launch` launches on the current stream, as a graph. Other threads may use the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # it might find a graph of an engine long closed, and to destroy one ends this thread's capture
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def configure(recipe: Recipe) -> None:
    """Set what PyTorch keeps per process: full FP32 products, and for a deterministic recipe only repeatable kernels.

    The backward of cuDNN's attention is not repeatable, flash attention's is when asked.
    """
    # Segments that grow, so that what one part of a step frees serves the next whatever its sizes: with segments of fixed sizes
    # a run at the limit of memory held a sixth more than it ever used.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(recipe.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not recipe.deterministic)
    torch.backends.cuda.enable_mem_efficient_sdp(not recipe.deterministic)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
