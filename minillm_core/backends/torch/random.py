"""torch's own generators: nothing of the core draws from them, a plugin's native module may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

__all__ = ["Generators", "seed"]

Access = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


def seed(number: int) -> None:
    """Seed the generators of every device by a run's seed."""
    torch.manual_seed(number % 2**64)


class Generators:
    """The generators that modules on a device draw from: the CPU's, and its own.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._access: dict[str, Access] = {"torch.cpu": (torch.get_rng_state, torch.set_rng_state)}
        if device.type != "cpu":
            module = torch.get_device_module(device)
            which = (device,) if device.type == "cuda" else ()  # elsewhere there is one alone
            self._access[f"torch.{device.type}"] = (
                lambda: module.get_rng_state(*which),
                lambda state: module.set_rng_state(state, *which),
            )

    def states(self) -> dict[str, Tensor]:
        """``torch.cpu``, ``torch.cuda`` -> uint8, on the host; waits for nothing."""
        return {name: get() for name, (get, _) in self._access.items()}

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """The inverse; generators that have no state there go on as they are."""
        for name, (_, put) in self._access.items():
            if name in states:
                put(states[name])

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """:meth:`restore` from ``random.<name>`` on the host.

        Raises:
            ValueError: a state is none of this generator's.
        """
        states = {}
        for name, now in self.states().items():
            if (array := saved.get(f"random.{name}")) is not None:
                if array.shape != tuple(now.shape) or array.dtype != np.uint8:
                    raise ValueError(
                        f"random.{name}: {array.dtype} {array.shape}, not uint8 {tuple(now.shape)}"
                    )
                states[name] = torch.from_numpy(array.copy())
        self.restore(states)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is drawn inside, training draws what it would have drawn."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)
