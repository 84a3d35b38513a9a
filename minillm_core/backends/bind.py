"""Plan + machine -> Binding: dtype, compilation, kernels with reasons; then the framework's backend."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from minillm_core.backends.base import Backend, Binding
from minillm_core.backends.mlx.candidates import CANDIDATES as MLX_CANDIDATES
from minillm_core.backends.offers import check_offers
from minillm_core.backends.requests import requests_of
from minillm_core.backends.torch.candidates import CANDIDATES as TORCH_CANDIDATES
from minillm_core.config.kernels import parse_policy
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Request, choose_all

if TYPE_CHECKING:
    from minillm_core.backends.detect import Detected
    from minillm_core.plan import Plan

__all__ = ["CORE", "bind", "create", "requests_here"]

CORE = {"torch": TORCH_CANDIDATES, "mlx": MLX_CANDIDATES}
"""Backend -> the core's kernels. Neither module imports its framework."""


def bind(detected: Detected, plan: Plan) -> tuple[Binding, tuple[Candidate, ...]]:
    """Decide everything that is outside the plan's hash, without importing a framework.

    Raises:
        BackendError: an op that no kernel serves, a kernel asked for by name that cannot, a plugin
            none of whose kernels can, or determinism where the framework has none.
    """
    config, kind = plan.config, detected.device.partition(":")[0]
    if config.deterministic and detected.backend == "mlx" and kind != "cpu":
        raise BackendError(
            "MLX has no deterministic mode on a GPU: two runs differ in the last bits",
            where="--deterministic",
            fix="--backend torch, --device cpu, or leave --deterministic out",
        )
    asked, candidates = requests_here(detected, plan)
    choices = choose_all(asked, candidates, parse_policy(config.kernels))
    binding = Binding(
        backend=detected.backend,
        device=detected.device,
        device_name=detected.device,
        reason=detected.reason,
        dtype=asked[0].dtype,
        compile=asked[0].compiled,
        checkpointing=config.train.checkpointing,
        deterministic=config.deterministic,
        kernels=choices,
        notes=check_offers(plan.candidates, CORE[detected.backend], asked, choices),
    )
    return binding, candidates


def requests_here(
    detected: Detected, plan: Plan
) -> tuple[tuple[Request, ...], tuple[Candidate, ...]]:
    """What the plan asks of each op on this device, and who offers to serve: plugins, the core."""
    train, slow = plan.config.train, detected.device.partition(":")[0] == "cpu"
    dtype = train.dtype
    if dtype == "auto":
        dtype = "float32" if slow else "bfloat16"
    compiled = train.compile == "on"
    if train.compile == "auto":
        compiled = not (slow and detected.backend == "torch")  # inductor takes a minute to start
    requests = requests_of(
        plan, backend=detected.backend, device=_kind(detected), dtype=dtype, compiled=compiled
    )
    return requests, (*(c for _, c in plan.candidates), *CORE[detected.backend])


def create(detected: Detected, plan: Plan) -> Backend:
    """The framework's backend, bound. Imports the framework.

    Raises:
        BackendError: as :func:`bind`, or the framework does not see the device.
    """
    binding, candidates = bind(detected, plan)
    if detected.backend == "torch":
        from minillm_core.backends.torch.backend import TorchBackend

        return TorchBackend(binding, candidates)
    from minillm_core.backends.mlx.backend import MLXBackend

    return MLXBackend(binding, candidates)


def _kind(detected: Detected) -> str:
    """The kind of device by the kernels' names: MLX's one GPU is Metal's, or CUDA's on Linux."""
    kind = detected.device.partition(":")[0]
    if detected.backend == "mlx" and kind == "gpu":
        return "metal" if sys.platform == "darwin" else "cuda"
    return kind
