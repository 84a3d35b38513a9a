"""A step's time on torch: timestamps between its parts, hooks on eager modules, torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from minillm_core import BackendError, MinillmError
from minillm_core.inspection import memory
from minillm_core.studies import Batch, Trainer

LAYERS = "layers"
"""The model's list of blocks: ``layers.0``, ``layers.1``, ..."""


class TorchProfiler:
    """A profiler of one trainer's steps; it costs nothing outside its methods."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.device = torch.device(trainer.binding.device)
        self.cuda = self.device.type == "cuda"
        self.notes = (
            ()
            if self.cuda
            else ("the peak is the whole process's: torch counts arrays on CUDA alone",)
        )

    @staticmethod
    def check(*, layers: bool, trace: bool) -> None:
        """Accept both: torch supports layer timings and traces."""

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Time forward, backward and optimizer by CUDA events, or by the CPU's clock."""
        moments = Moments(self.device)
        self._busy(micro, values, supervised)
        with self._timed(moments):
            self._step(micro, values, supervised)
        return {name: spent for name, spent in moments.seconds().items() if " " not in name}

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Time each block's passes, and the parts before and after the blocks.

        A block's backward time is the time between the gradients of its output and of its input.
        """
        self._refuse_compiled()
        moments = Moments(self.device)
        blocks = dict(self._blocks())
        self._busy(micro, values, supervised)
        with self._timed(moments), ExitStack() as hooks:
            for name, block in blocks.items():
                for handle in _hooks(block, name, moments):
                    hooks.callback(handle.remove)
            self._step(micro, values, supervised)
        found = moments.seconds()
        return {
            name: (found.get(f"forward {name}", 0.0), found.get(f"backward {name}", 0.0))
            for name in ("embedding", *blocks, "head and loss")
        }

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Write a trace with ranges for forward, backward and optimizer, and for modules of an eager trainer.

        Raises:
            MinillmError: the file cannot be written, which torch's profiler only logs.
        """
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        ranges = _Ranges(cuda=self.cuda)
        with profile(activities=kinds, acc_events=True) as recorded, ExitStack() as hooks:
            hooks.enter_context(self._timed(ranges))
            if not self.trainer.binding.compile:  # a hook would break a compiled step's graph
                for name, module in self.trainer.model.named_modules():
                    if name:
                        for handle in ranges.around(module, name):
                            hooks.callback(handle.remove)
            step()
            self.trainer.synchronize()
        try:
            with TemporaryDirectory(dir=path.parent) as folder:
                written = Path(folder) / path.name
                recorded.export_chrome_trace(str(written))
                written.replace(path)
        except OSError as error:
            raise MinillmError(
                f"the trace could not be written: {error.strerror or error}",
                where=str(path),
                fix="make room there, or --trace with a file in another folder",
            ) from None

    def memory_bytes(self) -> int:
        """Return the GPU's bytes; on a CPU the container's or the machine's."""
        if self.cuda:
            return torch.cuda.get_device_properties(self.device).total_memory
        if self.device.type == "mps":
            return torch.mps.recommended_max_memory()
        return memory()

    def held_bytes(self) -> int | None:
        """Return the bytes currently allocated by tensors on CUDA."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else None

    def trim(self) -> None:
        """Free cached memory."""
        if self.cuda:
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Reset the peak memory statistics."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the peak bytes allocated by tensors on CUDA; on a CPU, the process's peak."""
        return self.trainer.peak_bytes()

    def _busy(self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int) -> None:
        """Enqueue a step on CUDA, so that the kernels of the timed step follow without gaps, as in training.

        On an idle device the timing would measure Python's kernel launches.
        """
        self.trainer.synchronize()
        if self.cuda:
            self.trainer.step(micro, values, supervised)

    def _step(self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int) -> None:
        handle = self.trainer.step(micro, values, supervised)
        assert handle is not None  # otherwise already cancelled
        self.trainer.read(handle)

    @contextmanager
    def _timed(self, timer: Callable[[str], None]) -> Iterator[None]:
        before, self.trainer.step_timer = self.trainer.step_timer, timer
        try:
            yield
        finally:
            self.trainer.step_timer = before

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for index, block in enumerate(getattr(self.trainer.model, LAYERS)):
            yield f"{LAYERS}.{index}", block

    def _refuse_compiled(self) -> None:
        if self.trainer.binding.compile:
            raise BackendError(
                "a compiled step has no layers to time", where="bench", fix="train.compile=off"
            )


class Moments:
    """Named timestamps; the interval between two has the name of the first."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._at: list[tuple[str, Any]] = []
        self.part = ""

    def __call__(self, part: str) -> None:
        """Record the start of a part of the step; "" when everything is enqueued."""
        self.part = part
        # the embedding precedes the blocks; the head follows them, and so is first in the backward pass
        place = {"forward": " embedding", "backward": " head and loss"}.get(part, "")
        self.note(part + place)

    def note(self, name: str) -> None:
        """Record the start of an interval."""
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self._device))
        self._at.append((name, moment))

    def seconds(self) -> dict[str, float]:
        """Sum the seconds by name over all micro-batches; synchronises CUDA."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self._at, self._at[1:], strict=False):
            lasted = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            for known_as in {name, name.partition(" ")[0]}:
                found[known_as] = found.get(known_as, 0.0) + lasted
        return {name: found[name] for name in found if name}


def _hooks(block: nn.Module, name: str, moments: Moments) -> tuple[Any, Any]:
    """Record the start and end of a block's passes; recomputation counts as backward pass."""

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        if moments.part == "forward":
            moments.note(f"forward {name}")
            previous = _previous(name)
            if given[0].requires_grad:
                given[0].register_hook(lambda grad: moments.note(f"backward {previous}"))

    def after(module: nn.Module, given: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        if moments.part == "forward":
            moments.note("forward head and loss")  # or the next block, which notes it at once
            result[0].register_hook(lambda grad: moments.note(f"backward {name}"))

    return block.register_forward_pre_hook(before), block.register_forward_hook(after)


def _previous(name: str) -> str:
    layers, _, index = name.rpartition(".")
    return f"{layers}.{int(index) - 1}" if int(index) else "embedding"


class _Ranges:
    """Nested ranges of torch's profiler, and of NVTX on CUDA."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._part: Any = None

    def __call__(self, part: str) -> None:
        """Close the current part's range and open the next one."""
        if self._part is not None:
            self._close(self._part)
        self._part = self._open(part) if part else None

    def around(self, module: nn.Module, name: str) -> tuple[Any, Any]:
        """Return hooks that record each call of a module as a range."""
        opened: list[Any] = []
        return (
            module.register_forward_pre_hook(lambda *_: opened.append(self._open(name))),
            module.register_forward_hook(
                lambda *_: self._close(opened.pop()) if opened else None, always_call=True
            ),
        )

    def _open(self, name: str) -> Any:
        if self._cuda:
            torch.cuda.nvtx.range_push(name)
        entered = record_function(name)
        entered.__enter__()
        return entered

    def _close(self, entered: Any) -> None:
        entered.__exit__(None, None, None)
        if self._cuda:
            torch.cuda.nvtx.range_pop()
