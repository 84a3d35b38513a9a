"""The MLP on one GPU: time, memory and accuracy of the forms that plugins give it.

    python -m benchmarks.mlp_kernels [--mlp relu2|swiglu] [--positions N] [--width C] [--hidden F] [--out FOLDER]

Forward and backward passes of one layer, compiled: of the ReLU squared MLP ``relu2`` (minillm-modded),
``fused_relu2`` (minillm-cute), and ``fp8_mlp`` (minillm-triton) with gradients in bfloat16 and in fp8; of
SwiGLU the core's and ``fused_swiglu`` (minillm-cute). Three warm-up steps, then ten measured one by one, and
one by kernel: a busy host launches them more slowly than they run. Errors, of the output and the gradients of
x and of each matrix, are relative to float64, on the first 4,096 positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.command import measuring, written
from benchmarks.loss_kernels import Kernel, measure
from benchmarks.profiling import profiled

COMPARED = 4096  # positions whose errors are measured


def relu2(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute relu(x up^T)^2 down^T (N, C), as the plugin's module does."""
    return (x @ up.T).relu().square() @ down.T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute (silu(x gate^T) * x up^T) down^T (N, C), as the core's module does."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def by_quack(mlp: str) -> Iterator[tuple[str, Kernel]]:
    """Yield minillm-cute's form of an MLP, if QuACK is installed."""
    if find_spec("quack"):
        from minillm_cute.kernels import mlp as kernels

        yield f"fused_{mlp}", getattr(kernels, f"{mlp}_mlp")
    else:
        print(f"left out: fused_{mlp}, since quack-kernels is not installed")


def of_swiglu() -> Iterator[tuple[str, Kernel]]:
    """Yield each form's name and function (x (N, C), gate and up (F, C), down (C, F)) -> (N, C)."""
    yield "swiglu", swiglu
    yield from by_quack("swiglu")


def of_relu2() -> Iterator[tuple[str, Kernel]]:
    """Yield each form's name and function (x (N, C), up (F, C), down (C, F)) -> (N, C)."""
    yield "relu2", relu2
    yield from by_quack("relu2")
    from minillm_triton.kernels import mlp

    def fp8(x: Tensor, up: Tensor, down: Tensor, *, narrow: bool) -> Tensor:
        expected = (torch.full((), most, device=x.device) for most in (6.0, 30.0))
        return mlp.relu2_mlp(x, up, down, *expected, narrow=narrow)[0]

    yield "fp8_mlp", partial(fp8, narrow=False)
    yield "fp8_mlp backward=fp8", partial(fp8, narrow=True)


FORMS = {"relu2": (relu2, of_relu2, 1, 3072), "swiglu": (swiglu, of_swiglu, 2, 2048)}
"""MLP -> its definition, its forms, its matrices in front of the activation, its hidden width for 768."""


def results(kernel: Kernel, arrays: list[Tensor], by: Tensor) -> list[Tensor]:
    """Compute output and gradients."""
    y = kernel(*arrays)
    return [y, *torch.autograd.grad(y, arrays, by)]


def main() -> None:
    """Measure every form, write the result file, and print a table."""
    parser = measuring(__doc__, "mlp_kernels")
    parser.add_argument("--mlp", choices=tuple(FORMS), default="relu2")
    parser.add_argument("--positions", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--hidden", type=int, help="3,072 for relu2, 2,048 for swiglu")
    given = parser.parse_args()
    plain, forms, before, usual = FORMS[given.mlp]
    N, C, F = given.positions, given.width, given.hidden or usual
    torch.manual_seed(0)
    scaled = (((N, C), 1.0), *[((F, C), C**-0.5)] * before, ((C, F), F**-0.5))
    arrays = [
        (by * torch.randn(shape, device="cuda")).bfloat16().requires_grad_() for shape, by in scaled
    ]
    by = (1e-6 * torch.randn(N, C, device="cuda")).bfloat16()
    few = [arrays[0][:COMPARED].detach().requires_grad_(), *arrays[1:]]
    exact = results(plain, [one.detach().double().requires_grad_() for one in few], by[:COMPARED])
    figures = []
    for name, kernel in forms():
        torch._dynamo.reset()
        run = torch.compile(kernel, fullgraph=True)
        off = [
            float((one.double() - other).norm() / other.norm())
            for one, other in zip(results(run, few, by[:COMPARED]), exact, strict=True)
        ]
        torch._dynamo.reset()  # static shapes again
        step = partial(results, run, arrays, by)
        milliseconds, peak = measure(step)
        profile = profiled(step, gpu=True)
        figures.append(
            {
                "form": name,
                "step_milliseconds": milliseconds,
                "peak_extra_bytes": peak,
                "errors": off,
                "profile": profile,
            }
        )
        print(
            f"{name:22} {statistics.median(milliseconds):6.3f} ms, {1e3 * profile['busy_seconds']:6.3f} in "
            f"kernels {peak / 2**30:5.2f} GiB  "
            f"off by {', '.join(f'{one:.1e}' for one in off)}",
            flush=True,
        )
    shape = {"mlp": given.mlp, "positions": N, "width": C, "hidden": F, "dtype": "bfloat16"}
    print(written(given, {**shape, "forms": figures}))


if __name__ == "__main__":
    main()
