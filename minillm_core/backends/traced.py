"""A backend whose compiled step is one graph or an error, on a CPU within seconds."""

from __future__ import annotations

from minillm_core.backends.base import Backend
from minillm_core.backends.bind import bind, create
from minillm_core.backends.detect import Detected
from minillm_core.plan import Plan

__all__ = ["create_traced"]


def create_traced(detected: Detected, plan: Plan) -> Backend:
    """As :func:`~minillm_core.backends.bind.create`; torch traces, and generates no code.

    Raises:
        BackendError: as ``create``.
    """
    if detected.backend != "torch":
        return create(detected, plan)
    from minillm_core.backends.torch.backend import TorchBackend
    from minillm_core.backends.torch.traced import traced

    return TorchBackend(*bind(detected, plan), compiler=traced())
