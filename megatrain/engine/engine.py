"""Engine: a model in training. State in, batches in, losses out; order, buffers and overlap come from the schedule.

    engine = Engine(model, recipe, plan, weights)
    for batch in data:
        result = engine.step(batch)       # returns at once; `result.loss` waits for the number
    engine.evaluate(held_out)
    weights = engine.state_dict()
    engine.close()

`step` submits a part and returns: the first step after a flush is the prologue, later ones the body. `flush` runs the updates
that are still pending. Evaluating and reading state flush first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.backend import Backend
from megatrain.engine.clock import Clock
from megatrain.engine.cpu import CpuBackend
from megatrain.engine.executor import Executor, PartRun
from megatrain.engine.kernels import StepContext, UpdateCount
from megatrain.engine.memory import Memory
from megatrain.layers.inputs import DTYPES, make_inputs, n_valid
from megatrain.model import BlockSpec, ModelSpec, ParamSpec
from megatrain.optim.master import join, split
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Schedule, check, lower, lower_evaluation
from megatrain.schedule.layout import input_fields, input_nbytes
from megatrain.trace import Trace

if TYPE_CHECKING:
    from megatrain.engine.cuda import CudaBackend

PIECE_ELEMENTS = 1 << 22
"""Weights are turned into masters in pieces of so many elements: what that takes beside them stays small, wherever they are, and
on the host in its caches; fresh memory for each would take longer than the work."""
STEPS_IN_FLIGHT = 2
"""`step` returns before its step has ended; this many may be unfinished before it waits."""


def _close(executor: Executor, backend: CpuBackend | CudaBackend) -> None:
    executor.close()
    backend.close()


def _schedules(model: ModelSpec, recipe: Recipe, plan: Plan) -> tuple[Schedule, Schedule]:
    """Training and evaluation, proved. ValueError for a plan that fits neither model nor machine."""
    cores = len(os.sched_getaffinity(0))
    if plan.adam_threads > cores:
        raise ValueError(f"plan.adam_threads: must be at most the {cores} cores there are, got {plan.adam_threads}")
    schedules = lower(model, recipe, plan), lower_evaluation(model, recipe, plan)
    for schedule in schedules:
        check(schedule)
    return schedules


class StagedInputs:
    """Host buffers that batches are laid out in, used in turn: one for each step that may be unfinished, and one to fill."""

    def __init__(self, model: ModelSpec, recipe: Recipe, steps: int, *, pinned: bool) -> None:
        self._fields = input_fields(model, recipe)
        nbytes, count = input_nbytes(model, recipe), recipe.micro_batches
        self._buffers = [
            [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)] for _ in range(steps)
        ]
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffers in self._buffers for buffer in buffers)

    def fill(self, micro_batches: list[dict[str, Tensor]]) -> tuple[Tensor, ...]:
        """Each micro-batch's tensors as uint8 [input_nbytes]; they stay until `fill` has been called `steps` times more."""
        buffers = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        for buffer, tensors in zip(buffers, micro_batches, strict=True):
            for f in self._fields:
                value = tensors[f.name].contiguous().view(-1).view(torch.uint8)
                buffer[f.offset_nbytes : f.offset_nbytes + f.nbytes] = value
        return tuple(buffers)


class StepResult:
    """A submitted step. Each figure waits until it is on the host, and no longer.

    `loss`: sum over the step's valid tokens / their number. `norm`: of the gradient the optimizer consumes, before clipping.
    `skipped`: None, or why the step changed nothing. Reading one raises `LaneError` if the run has failed.
    """

    def __init__(self, executor: Executor, run: PartRun, context: StepContext) -> None:
        # Two ops of the run and not the run: results may be kept for long.
        self._executor, self._context = executor, context
        self._report, self._clip = run.named("report"), run.named("clip")

    @property
    def loss(self) -> float:
        self._executor.wait([self._report])
        assert self._context.loss is not None
        return self._context.loss

    @property
    def norm(self) -> float:
        self._executor.wait([self._clip])
        assert self._context.norm is not None
        return self._context.norm

    @property
    def skipped(self) -> str | None:
        self._executor.wait([self._clip])
        return self._context.skipped


class _Masters(Mapping[str, Tensor]):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places = {p.name: (block, p) for block, p in engine._params()}

    def __getitem__(self, name: str) -> Tensor:
        return self._engine._master(*self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Moments(NamedTuple):
    """Adam's first and second moment of one parameter, FP32, of its shape."""

    m: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that an engine takes of the machine's memory.

    On the device: `device_reserved` and `device_allocated` are the allocator's peaks, with its cached blocks and without; what
    the process had there before the engine is in them. On the cpu backend both are the arena. `device_process` is what is taken
    of the whole GPU now, allocator, contexts and *other processes* included: the driver tells no process its own share. 0
    without a GPU.

    On the host: `pinned` are the storages registered with the driver and, with a GPU, staged inputs; `pageable` are all other
    host storages. Both are sums of exact sizes (for staged inputs PyTorch may pin up to twice as much). `resident_set` is what
    the whole process has in memory now, mapped files included; None where there is no /proc.
    """

    device_reserved: int
    device_allocated: int
    device_process: int
    pinned: int
    pageable: int
    resident_set: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Seconds of an engine's start: for memory (made, touched, pinned), then for loading the weights; layers compiled for
    `compile_s` while that went on and, if it is longer, after it."""

    memory_s: float
    weights_s: float
    compile_s: float


@contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[Callable[[], float]]:
    """`work` on a thread of its own; it has ended when the block has, and what it raised is raised then, unless the block raised
    something itself. Gives a function that says how long it took.

    The interpreter's turns are short meanwhile: a thread that computes in Python keeps its turn to the end, and one that calls
    many short operations would wait for its own after each, 5 ms as a rule."""
    took, errors = 0.0, []

    def timed() -> None:
        nonlocal took
        began = time.perf_counter()
        try:
            work()
        except BaseException as error:  # for the thread that waits
            errors.append(error)
        took = time.perf_counter() - began

    thread = threading.Thread(target=timed, name="megatrain compile", daemon=True)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield lambda: took
    finally:
        thread.join()
        sys.setswitchinterval(usual)
    if errors:
        raise errors[0]


def resident_set(root: Path = Path("/")) -> int | None:
    """VmRSS of this process in bytes; `root` is where /proc is looked for."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)


class Engine:
    """`weights` maps every Hugging Face parameter name of the model to a tensor (any float type); they become FP32 masters.

    `device` is where the schedule's device storages are: "cpu" (an arena in host memory) or "cuda". With `tracing` off a run is
    neither timed nor recorded. One thread at a time may use an engine; two engines may run at once. `wrap` puts a backend of the
    caller's around the real one (to delay, to poison, to fail: tests of the engine itself). `on_start` is called with the share
    of the weights that is loaded, 0 before there is memory for them. Layers compile meanwhile; `start_times` says how long each
    took.

    Raises ValueError for a missing, surplus, misshapen or non-finite weight and for a plan that fits neither model nor machine.
    """

    def __init__(
        self,
        model: ModelSpec,
        recipe: Recipe,
        plan: Plan,
        weights: Mapping[str, Tensor],
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        tracing: bool = True,
        clock: Clock | None = None,
        wrap: Callable[[Any], Backend] = lambda backend: backend,
        on_start: Callable[[float], None] = lambda loaded: None,
    ) -> None:
        self._device, self._tracing, self._clock, self._wrap = device, tracing, clock, wrap
        self._counts = UpdateCount()
        self._warm = self._stepped = False  # whether a step has run since the last flush, or at all
        began = time.perf_counter()
        schedules = _schedules(model, recipe, plan)
        on_start(0.0)
        backend = self._backend(schedules, {})
        self._staged = StagedInputs(model, recipe, STEPS_IN_FLIGHT + 1, pinned=device == "cuda")
        there = time.perf_counter()
        with _meanwhile(backend.rehearse if recipe.compiled else lambda: None) as compiling:
            self._load(weights, on_start)
            loaded = time.perf_counter()
        backend.after_load()
        self.start_times = StartTimes(memory_s=there - began, weights_s=loaded - there, compile_s=compiling())
        self._start(backend)

    # ---- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Submit one step. `batch`: `input_ids` [micro_batches x micro_batch_size, seq_len] and what the recipe's mask asks for
        (`megatrain.layers.inputs`). ValueError if its shape is not the recipe's; LaneError if the run has failed."""
        part = self.schedule.body if self._warm else self.schedule.prologue
        if len(self._steps) >= STEPS_IN_FLIGHT:
            self._executor.wait([self._steps[0].named("clip")])
            del self._steps[0]
        context = self._context(batch)  # after the wait: it fills the buffers of a step that has ended
        run = self._executor.submit(part, context, from_cold=not self._warm)
        self._warm = self._stepped = True
        if self._device == "cuda" and self._rehearsals[part.name] < 2:
            # It may compile, and be captured as graphs: then nobody, the caller included, may synchronise the device.
            self._rehearsals[part.name] += 1
            self._executor.wait(run.issued)
        self._steps.append(run)
        return StepResult(self._executor, run, context)

    def flush(self) -> None:
        """Run pending updates and wait until nothing is in flight. The step after a flush is a prologue again."""
        if self._warm:
            self._executor.submit(self.schedule.epilogue)
            self._warm = False
        self._executor.drain()
        self._steps.clear()

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of `batch` (shaped as for `step`) under the present weights; changes nothing but flushes first."""
        self.flush()
        context = self._context(batch)
        self._executor.submit(self.evaluation.prologue, context, from_cold=True, record=False)
        self._executor.drain()
        assert context.loss is not None
        return context.loss

    def trace(self) -> Trace:
        """What ran in training since the start or the last `restart_trace`, up to `TRACED_PARTS` parts (flushes first); digests
        are recomputed from what the lanes did."""
        self.flush()
        return self._executor.trace()

    def restart_trace(self) -> None:
        """Start recording anew, from the next step on. Flushes first: a trace begins with a prologue."""
        self.flush()
        self._executor.restart_trace()

    def replan(self, plan: Plan) -> None:
        """Go on under another plan, as if it had been the plan from the start: no bit of the state changes. Flushes first.

        What stays on the host stays where it is; what was on the device passes through the host. The trace begins anew, and
        `gradients` asks for a step. ValueError for a plan that fits neither model nor machine, RuntimeError or MemoryError where
        the device has no room; the engine then goes on under the plan it had.
        """
        schedules = _schedules(self.schedule.model, self.schedule.recipe, plan)
        self.flush()
        before = (self.schedule, self.evaluation)
        spaces = {storage.name: storage.space for storage in self.schedule.storages}
        names = [f"{what}[{block.index}]" for block in self.schedule.model.blocks for what in ("weights", "lo", "m", "v")]
        state = {
            name: self.memory.named(name) if spaces[name] == "host" else self.memory.named(name).cpu().clone()
            for name in names
            if name in self.memory
        }
        self._finalizer()
        del self.memory, self._executor, self._unwrapped  # their device memory is needed now
        try:
            backend = self._backend(schedules, state)
        except (RuntimeError, MemoryError):
            self._start(self._backend(before, state))
            raise
        self._start(backend)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def masters(self) -> Mapping[str, Tensor]:
        """FP32 masters by name, each copied when it is asked for: to write them takes no more memory than the largest does. A
        tied weight appears once, under the embedding's name. Flushes first; training meanwhile changes what is given later."""
        self.flush()
        return _Masters(self)

    def state_dict(self) -> dict[str, Tensor]:
        """`masters`, all of them copied now. Flushes first."""
        return dict(self.masters())

    def streamed_weights(self) -> dict[str, Tensor]:
        """The weights as they go to the device (BF16 or FP32), by name (copies). Flushes first."""
        self.flush()
        dtype = DTYPES[self.schedule.recipe.precision]
        return {p.name: self._plane("weights", block, p, dtype).clone() for block, p in self._params()}

    def moments(self) -> dict[str, Moments]:
        """Adam's moments by name (copies). Flushes first."""
        self.flush()
        return {
            p.name: Moments(*(self._plane(what, block, p, torch.float32).clone() for what in ("m", "v")))
            for block, p in self._params()
        }

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients as the optimizer got them, before the clip factor: rounded to the link's type, widened to
        FP32, by name (copies). Flushes first. ValueError under `during_backward`, where they only pass through."""
        if self.schedule.plan.update == "during_backward":
            raise ValueError("gradients: under plan.update during_backward no gradient outlives its update")
        self.flush()
        if not self._stepped:
            raise ValueError("gradients: no step has run")
        dtype = DTYPES[self.schedule.recipe.gradient_dtype]
        return {
            p.name: self._plane("grad", block, p, dtype).to(torch.float32, copy=True) for block, p in self._params()
        }

    @property
    def applied_updates(self) -> int:
        """Steps that changed the weights; skipped ones do not count. Flushes first."""
        self.flush()
        return self._counts.applied

    def memory_use(self, *, reset: bool = False) -> MemoryUse:
        """What is taken now, and at most since the engine was made or last replanned. Waits for nothing and changes nothing; with
        `reset` the allocator's peaks begin anew. They are kept by process: two engines at once see each other's."""
        backend = self._unwrapped
        reserved, allocated, process = backend.device_use(reset=reset)
        storages = [self.memory.named(s.name) for s in self.schedule.storages if s.space == "host" and not s.dynamic]
        pinned, host = backend.pinned_nbytes, sum(view.numel() for view in storages)
        staged = self._staged.nbytes
        staged_pinned = staged if self._device == "cuda" else 0
        return MemoryUse(
            device_reserved=reserved, device_allocated=allocated, device_process=process, pinned=pinned + staged_pinned,
            pageable=host - pinned + staged - staged_pinned, resident_set=resident_set(),
        )  # fmt: skip

    def close(self) -> None:
        """Stop the lanes. What was not flushed is lost."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _backend(self, schedules: tuple[Schedule, Schedule], state: Mapping[str, Tensor]) -> CpuBackend | CudaBackend:
        """A backend for the schedules, its memory holding `state`: bytes on the host by storage name."""
        self.schedule, self.evaluation = schedules
        backend: CpuBackend | CudaBackend
        if self._device == "cuda":
            from megatrain.engine.cuda import CudaBackend

            backend = CudaBackend(self.schedule, self._counts, self._clock, state)
        else:
            backend = CpuBackend(self.schedule, self._counts, self._clock, state)
        self.memory: Memory = backend.memory
        for name, value in state.items():
            place = self.memory.named(name)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        return backend

    def _start(self, backend: CpuBackend | CudaBackend) -> None:
        self._unwrapped = backend
        self._executor = Executor(self._wrap(backend), tracing=self._tracing)
        # Lanes must not outlive the engine, nor run on while the interpreter goes down.
        self._finalizer = weakref.finalize(self, _close, self._executor, backend)
        self._steps: list[PartRun] = []
        self._warm = self._stepped = False
        self._rehearsals: Counter[str] = Counter()

    def _context(self, batch: Mapping[str, Tensor]) -> StepContext:
        model, recipe = self.schedule.model, self.schedule.recipe
        return StepContext(batch=self._staged.fill(make_inputs(model, recipe, batch)), n_valid=n_valid(batch))

    def _params(self) -> list[tuple[BlockSpec, ParamSpec]]:
        return [(block, p) for block in self.schedule.model.blocks for p in block.params]

    def _plane(self, what: str, block: BlockSpec, p: ParamSpec, dtype: torch.dtype) -> Tensor:
        """One parameter in one of its block's storages, a view of its shape."""
        return self.memory.named(f"{what}[{block.index}]").view(dtype)[p.offset : p.end].view(p.shape).cpu()

    def _master(self, block: BlockSpec, p: ParamSpec) -> Tensor:
        if self.schedule.recipe.precision == "fp32":
            return self._plane("weights", block, p, torch.float32).clone()
        return join(*(self._plane(what, block, p, dtype) for what, dtype in (("weights", torch.bfloat16), ("lo", torch.int16))))

    def _load(self, weights: Mapping[str, Tensor], on_start: Callable[[float], None]) -> None:
        done, known = 0, {p.name for _, p in self._params()}
        embedding = self.schedule.model.embedding.params[0].name
        for name in weights:
            if self.schedule.model.tied and name == "lm_head.weight" and embedding in weights:
                # It has no storage of its own; files may carry it all the same, as the same values.
                if not torch.equal(weights[name], weights[embedding]):
                    raise ValueError(f"weights: {name!r} must equal {embedding!r}, to which it is tied")
            elif name not in known:
                raise ValueError(f"weights: {name!r} is no parameter of {self.schedule.model.name!r}")
        for block in self.schedule.model.blocks:
            for what in ("weights", "lo", "m", "v"):
                if f"{what}[{block.index}]" in self.memory:
                    self.memory.named(f"{what}[{block.index}]").zero_()
        for block, p in self._params():
            if p.name not in weights:
                raise ValueError(f"weights: {p.name!r} is missing")
            value = weights[p.name].detach()
            if tuple(value.shape) != p.shape:
                raise ValueError(f"weights: {p.name!r} must have shape {list(p.shape)}, got {list(value.shape)}")
            target = self.memory.named(f"weights[{block.index}]")
            at = p.offset
            for piece in torch.split(value.reshape(-1), PIECE_ELEMENTS):
                place, at = slice(at, at + piece.numel()), at + piece.numel()
                # Both are NaN where any is. To ask every value would take longer than to copy it.
                if not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(piece)):
                    raise ValueError(f"weights: {p.name!r} is not finite")
                if self.schedule.recipe.precision == "fp32":
                    target.view(torch.float32)[place].copy_(piece)
                elif piece.dtype == torch.bfloat16:  # is its own hi, and the remainders are 0 already
                    target.view(torch.bfloat16)[place].copy_(piece)
                else:
                    hi, lo = split(piece.to(torch.float32), name=p.name)
                    target.view(torch.bfloat16)[place].copy_(hi)
                    self.memory.named(f"lo[{block.index}]").view(torch.int16)[place].copy_(lo)
            done += p.numel
            on_start(done / self.schedule.model.numel)
