"""Tensors as they are now, brought to the host by whichever thread asks for them.

On CUDA they are cloned on the device, in the queue behind the steps so far, and copied on a stream
of their own. Elsewhere memory is the host's anyway, or torch may not be called from two threads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from minillm_core.backends.base import Snapshot
from minillm_core.backends.torch import foreach

__all__ = ["Snapshots"]

USABLE = 0.95  # of the GPU's memory: the rest is lost between blocks


class Snapshots:
    """Takes a trainer's snapshots.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak: int | None = None  # bytes of training alone: until the first snapshot

    def take(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Does not wait on CUDA, unless clones would leave too little memory for the next steps."""
        if self.device.type != "cuda":
            return Snapshot(_brought(tensors).copy)
        clones = _clones(tensors) if self._has_room_for(tensors) else None
        if clones is not None:
            return Snapshot(_Copies(clones, self.device).bring)
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
        return Snapshot(
            _brought(tensors).copy,
            f"training waited while {size:.2f} GiB to be saved were copied from the GPU: "
            "it has no room for a second copy of them",
        )

    def _has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        if self._peak is None:
            self._peak = torch.cuda.max_memory_allocated(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        ours = free + torch.cuda.memory_reserved(self.device)
        return self._peak + sum(tensor.nbytes for tensor in tensors.values()) < USABLE * ours


class _Copies:
    """Clones on a CUDA device, each freed as soon as it is on the host."""

    def __init__(self, clones: dict[str, Tensor], device: torch.device) -> None:
        self._clones, self._stream = clones, torch.cuda.Stream(device)
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(device))

    def bring(self) -> dict[str, np.ndarray]:
        """To the host."""
        host = {}
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._made)
            for name in list(self._clones):
                # .cpu() returns once it has copied, so the clone's memory is no longer read
                host[name] = self._clones.pop(name).cpu().numpy()
        return host


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """On the device, in the current stream; None where its memory does not suffice."""
    try:
        clones = [torch.empty_like(tensor) for tensor in tensors.values()]
    except torch.OutOfMemoryError:
        return None
    foreach.copy_(clones, list(tensors.values()))
    return dict(zip(tensors, clones, strict=True))


def _brought(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copied to the host now."""
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
