"""Transfers of tensors: host to device and back without waiting, many tensors at once.

Snapshots: on CUDA, tensors are cloned on the device, queued after the steps so far, and copied to the
host on a separate stream. On other devices they are copied at once: the memory is the host's anyway, or
torch may not be called from two threads.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

# torch's operations on lists of tensors (a few kernels for all, not one for each) only have names
# that start with an underscore; its own optimizers use them.
from torch import _foreach_copy_ as foreach_copy_

from minillm_core.backends.base import Snapshot


def batch_to_device(
    batch: Mapping[str, np.ndarray], fields: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Copy the named fields of a NumPy batch to the device, through pinned memory on CUDA."""
    return {n: copied(batch[n], device) for n in fields if n in batch}


def copied(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, through pinned memory on CUDA, without waiting."""
    given = torch.from_numpy(array)
    if device.type != "cuda":
        return given.to(device)
    pinned = torch.empty(array.shape, dtype=given.dtype, pin_memory=True)
    # not by torch, which divides a copy among threads: where cores are shared they wait milliseconds for each other
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


class PendingFigures:
    """A pending copy of figures, float32 (names,), to the host."""

    def __init__(self, names: Sequence[str], packed: Tensor) -> None:
        self.names = tuple(names)
        self.event = None
        if packed.is_cuda:
            self.host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(packed.device))
        else:
            self.host = packed

    def read(self) -> dict[str, float]:
        """Wait for the copy and return the figures by name."""
        if self.event is not None:
            self.event.synchronize()
        return dict(zip(self.names, self.host.tolist(), strict=True))


def non_finite(figures: Tensor) -> Tensor:
    """Return 1 if any of the figures is NaN or infinite, else 0: 0-d float32."""
    return 1.0 - torch.isfinite(figures).all().float()


def overwrite(old: Tensor, new: Tensor, skip: Tensor) -> None:
    """Write ``new`` into ``old``, unless ``skip`` (0-d bool) is set: selected on the device, without waiting."""
    torch.where(skip, old, new.to(old.dtype), out=old)


USABLE = 0.95  # usable fraction of the GPU's memory: the rest is lost to fragmentation


class Snapshotter:
    """The maker of a trainer's snapshots.

    Args:
        device: the tensors' device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak: int | None = None  # peak bytes of training, measured at the first snapshot

    def take(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Take a snapshot; on CUDA it waits only if clones would leave too little memory for the next steps."""
        if self.device.type != "cuda":
            return Snapshot(copy_to_host(tensors).copy)
        size = sum(tensor.nbytes for tensor in tensors.values() if tensor.is_cuda)
        if self._has_room_for(size) and (clones := _clones(tensors)) is not None:
            return Snapshot(self._host_copier(clones))
        return Snapshot(
            copy_to_host(tensors).copy,
            f"training waited while {size / 2**30:.2f} GiB to be saved were copied from the GPU: "
            "it has no room for a second copy of them",
        )

    def _has_room_for(self, size: int) -> bool:
        if self._peak is None:
            self._peak = torch.cuda.max_memory_allocated(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        return self._peak + size < USABLE * (free + torch.cuda.memory_reserved(self.device))

    def _host_copier(self, clones: dict[str, Tensor]) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that copies clones to the host, and frees each as soon as it is copied."""
        stream, made = torch.cuda.Stream(self.device), torch.cuda.Event()
        made.record(torch.cuda.current_stream(self.device))

        def to_host() -> dict[str, np.ndarray]:
            host = {}
            with torch.cuda.stream(stream):
                stream.wait_event(made)
                for name in list(clones):
                    # .cpu() returns once it has copied, so the clone's memory is no longer read
                    host[name] = clones.pop(name).cpu().numpy()
            return host

        return to_host


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Clone tensors on the device, in the current stream; return None if its memory does not suffice."""
    try:
        clones = [torch.empty_like(tensor) for tensor in tensors.values()]
    except torch.OutOfMemoryError:
        return None
    foreach_copy_(clones, list(tensors.values()))
    return dict(zip(tensors, clones, strict=True))


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copy tensors to the host now."""
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
