"""Matrix products in fp8 (Micikevicius et al., arXiv:2209.05433), each matrix with one scale, a power of two."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from minillm_core import BackendError

__all__ = [
    "E4M3",
    "E5M2",
    "check_device",
    "largest",
    "multiplied",
    "power_of_two",
    "scale_of",
    "to_e4m3",
    "to_e5m2",
    "transposed",
]

MULTIPLE = 16  # of the sides of an fp8 product
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def check_device(x: Tensor, where: str, fix: str) -> None:
    """Check that a GPU supports fp8 products.

    Raises:
        BackendError: it does not.
    """
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise BackendError(
            f"{torch.cuda.get_device_name(x.device)} cannot multiply 8-bit numbers",
            where=where,
            fix=f"{fix}: Ada, Hopper and later GPUs can",
        )


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value in one pass, without the copy that abs() makes."""
    return torch.linalg.vector_norm(x, float("inf"))


def power_of_two(most: Tensor) -> Tensor:
    """Return the smallest power of two >= ``most``, float32: division by it does not round."""
    return torch.exp2(torch.ceil(torch.log2(most.float().clamp(min=2.0**-100))))


def scale_of(x: Tensor) -> Tensor:
    """Return the power of two by which an array fits into e4m3, from its largest value: float32 ()."""
    return power_of_two(largest(x) / torch.finfo(E4M3).max)


def to_e4m3(x: Tensor, by: Tensor) -> Tensor:
    """Divide by a power of two, and round to e4m3; values beyond its range are clipped."""
    return _rounded(x, by, E4M3)


def to_e5m2(x: Tensor, by: Tensor) -> Tensor:
    """Divide by a power of two, and round to e5m2; values beyond its range are clipped."""
    return _rounded(x, by, E5M2)


def _rounded(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (x * (1.0 / by).to(x.dtype)).clamp(-most, most).to(dtype)


def transposed(x: Tensor) -> Tensor:
    """Copy an 8-bit matrix (n, m) to (m, n'), n' the next multiple of 16, with 0 in the columns from n on."""
    (n, m), short = x.shape, -x.shape[0] % MULTIPLE
    if not x.is_cuda:
        return torch.nn.functional.pad(x.view(torch.uint8).T, (0, short)).view(x.dtype)
    from minillm_triton.kernels.transpose import transpose  # imports Triton

    out = x.new_empty((m, n + short))
    transpose(x.view(torch.uint8), out.view(torch.uint8))
    return out


def multiplied(
    a: Tensor,  # (n, k), row-major
    b: Tensor,  # (k, m), column-major
    by_a: Tensor,
    by_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Multiply 8-bit matrices and both scales; ``fast`` accumulates with fewer bits.

    A CPU accumulates in float32: PyTorch 2.11 has no such product there.
    """
    if not a.is_cuda:
        return ((a.float() @ b.float()) * (by_a * by_b)).to(dtype)
    whole = ScalingType.TensorWise
    return scaled_mm(a, b, by_a, whole, by_b, whole, output_dtype=dtype, use_fast_accum=fast)
