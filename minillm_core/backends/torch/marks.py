"""Moments between the parts of a step: by CUDA's events on the trainer's own device, or by the clock."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Marks"]


class Marks:
    """Moments with a name each; what lasts from one to the next has the name of the first."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._at: list[tuple[str, Any]] = []
        self.part = ""

    def __call__(self, part: str) -> None:
        """A part of the step begins; the last one is "", when all is queued."""
        self.part = part
        # before the blocks is the embedding; behind them, and so first backward, the head
        place = {"forward": " embedding", "backward": " head and loss"}.get(part, "")
        self.note(part + place)

    def note(self, name: str) -> None:
        """Something begins."""
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self._device))
        self._at.append((name, moment))

    def seconds(self) -> dict[str, float]:
        """By name, those of several micro-batches added up; waits on CUDA."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self._at, self._at[1:], strict=False):
            lasted = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            for known_as in {name, name.partition(" ")[0]}:
                found[known_as] = found.get(known_as, 0.0) + lasted
        return {name: found[name] for name in found if name}
