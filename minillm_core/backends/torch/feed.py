"""Host to device and back without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["Later", "batch_to", "numbers_to"]


def batch_to(
    batch: Mapping[str, np.ndarray], fields: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Those fields of a NumPy batch on the device, through pinned memory on CUDA."""
    return {n: _to(torch.from_numpy(batch[n]), device) for n in fields if n in batch}


def numbers_to(numbers: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Each as 0-d float32 on the device, in one copy."""
    packed = _to(torch.tensor(list(numbers.values()), dtype=torch.float32), device)
    return dict(zip(numbers, packed.unbind(0), strict=True))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Later:
    """Figures, float32 (names,), on their way to the host."""

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
        """Wait for them."""
        if self.event is not None:
            self.event.synchronize()
        return dict(zip(self.names, self.host.tolist(), strict=True))
