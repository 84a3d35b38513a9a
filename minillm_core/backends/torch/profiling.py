"""Where a step's time goes on torch: marks between its parts, hooks on eager modules, torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from minillm_core.backends.base import Batch
from minillm_core.backends.profiling import Profiler
from minillm_core.backends.torch.marks import Marks
from minillm_core.backends.torch.trainer import TorchTrainer
from minillm_core.errors import BackendError

__all__ = ["TorchProfiler"]

LAYERS = "layers"
"""The model's list of blocks: ``layers.0``, ``layers.1``, ..."""


class TorchProfiler(Profiler):
    """Looks into the steps of one trainer; outside of its methods nothing is marked."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer = trainer
        self.cuda = trainer.device.type == "cuda"
        self.notes = () if self.cuda else ("peak memory is counted on CUDA alone",)

    def check(self, *, layers: bool, trace: bool) -> None:
        """Torch tells both."""

    def parts(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, float]:
        """Seconds of forward, backward and optimizer: by CUDA's events, or by the clock."""
        marks = Marks(self.trainer.device)
        self._busy(micro, values, supervised)
        with self._marked(marks):
            self._step(micro, values, supervised)
        return {name: spent for name, spent in marks.seconds().items() if " " not in name}

    def layers(
        self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int
    ) -> dict[str, tuple[float, float]]:
        """Seconds of each block's passes, and of what is before and behind the blocks.

        A block's backward pass is the time between the gradients of its result and of its input.
        """
        self._refuse_compiled()
        marks = Marks(self.trainer.device)
        blocks = dict(self._blocks())
        self._busy(micro, values, supervised)
        with self._marked(marks), ExitStack() as hooks:
            for name, block in blocks.items():
                for handle in _timed(block, name, marks):
                    hooks.callback(handle.remove)
            self._step(micro, values, supervised)
        found = marks.seconds()
        return {
            name: (found.get(f"forward {name}", 0.0), found.get(f"backward {name}", 0.0))
            for name in ("embedding", *blocks, "head and loss")
        }

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        """Forward, backward and optimizer as ranges, and every module's where it is eager."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        ranges = _Ranges(cuda=self.cuda)
        with profile(activities=kinds, acc_events=True) as recorded, ExitStack() as hooks:
            hooks.enter_context(self._marked(ranges))
            if not self.trainer.binding.compile:  # a hook would break a compiled step's graph
                for name, module in self.trainer.model.named_modules():
                    if name:
                        for handle in ranges.around(module, name):
                            hooks.callback(handle.remove)
            step()
            self.trainer.synchronize()
        recorded.export_chrome_trace(str(path))

    def held_bytes(self) -> int | None:
        """What tensors hold on CUDA."""
        return torch.cuda.memory_allocated(self.trainer.device) if self.cuda else None

    def trim(self) -> None:
        """Give back what is cached."""
        if self.cuda:
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """The peak is from now on."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.trainer.device)

    def peak_bytes(self) -> int | None:
        """The most that tensors held on CUDA."""
        return self.trainer.peak_bytes()

    def _busy(self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int) -> None:
        """Queue a step on CUDA: behind it kernels follow each other, as they do while training.

        From an idle device, what is timed would be Python, which launches them.
        """
        self.trainer.synchronize()
        if self.cuda:
            self.trainer.step(micro, values, supervised)

    def _step(self, micro: Sequence[Batch], values: Mapping[str, float], supervised: int) -> None:
        handle = self.trainer.step(micro, values, supervised)
        assert handle is not None  # or somebody would have cancelled it
        self.trainer.read(handle)

    @contextmanager
    def _marked(self, mark: Callable[[str], None]) -> Iterator[None]:
        before, self.trainer.mark = self.trainer.mark, mark
        try:
            yield
        finally:
            self.trainer.mark = before

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for index, block in enumerate(getattr(self.trainer.model, LAYERS)):
            yield f"{LAYERS}.{index}", block

    def _refuse_compiled(self) -> None:
        if self.trainer.binding.compile:
            raise BackendError(
                "a compiled step has no layers to time", where="bench", fix="train.compile=off"
            )


def _timed(block: nn.Module, name: str, marks: Marks) -> tuple[Any, Any]:
    """Note when a block's passes begin and end; what is recomputed belongs to the backward pass."""

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        if marks.part == "forward":
            marks.note(f"forward {name}")
            previous = _previous(name)
            if given[0].requires_grad:
                given[0].register_hook(lambda grad: marks.note(f"backward {previous}"))

    def after(module: nn.Module, given: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        if marks.part == "forward":
            marks.note("forward head and loss")  # or the next block, which notes it at once
            result[0].register_hook(lambda grad: marks.note(f"backward {name}"))

    return block.register_forward_pre_hook(before), block.register_forward_hook(after)


def _previous(name: str) -> str:
    layers, _, index = name.rpartition(".")
    return f"{layers}.{int(index) - 1}" if int(index) else "embedding"


class _Ranges:
    """Ranges of torch's profiler, and NVTX's on CUDA, one inside the other."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._part: Any = None

    def __call__(self, part: str) -> None:
        """A part of the step begins."""
        if self._part is not None:
            self._close(self._part)
        self._part = self._open(part) if part else None

    def around(self, module: nn.Module, name: str) -> tuple[Any, Any]:
        """A range for every call of a module."""
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
