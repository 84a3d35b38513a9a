"""The loss kernels on one GPU: time and memory of forward and backward, and their agreement.

    python -m benchmarks.loss_kernels [--positions N] [--vocab V] [--width C] [--out FOLDER]

Three steps of warm-up, then ten measured one by one. Peak memory is beyond the inputs and the last
step's gradients. Errors are relative to gradients made in chunks in float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, write
from minillm_core.backends.torch.kernels import loss
from minillm_core.ops import LossForm, TanhCap

Kernel = Callable[..., Any]


def measure(step: Callable[[], Any], repeats: int = 10) -> tuple[list[float], int]:
    """(milliseconds of each repetition, peak bytes above what was there before)."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times, torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=65_536)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--commit", help="for a copy of the tree that came without .git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    sizes = parser.parse_args()
    N, V, C = sizes.positions, sizes.vocab, sizes.width
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(N, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(V, C, device=device)).bfloat16().requires_grad_()
    targets = torch.randint(-1, V, (1, N), device=device, dtype=torch.int32)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, N={N} V={V} C={C} bfloat16")

    figures = []
    for form in (LossForm(), LossForm(cap=TanhCap(15.0))):
        exact = exact_gradients(hidden, weight, targets, form)
        for name, kernel, compiled in kernels(form):
            torch._dynamo.reset()
            run = torch.compile(kernel, fullgraph=True) if compiled else kernel

            def step(run: Kernel = run, form: LossForm = form) -> None:
                hidden.grad = weight.grad = None
                (run(hidden, weight, targets, None, form)[0] / N).backward()

            mode = "compiled" if compiled else "eager"
            milliseconds, peak = measure(step)
            pairs = zip((hidden.grad, weight.grad), exact, strict=True)
            errors = [float((g.float() - e).norm() / e.norm()) for g, e in pairs]
            figures.append(
                {
                    "kernel": name,
                    "mode": mode,
                    "form": form.named,
                    "step_milliseconds": milliseconds,
                    "peak_extra_bytes": peak,
                    "gradient_errors": errors,
                }
            )
            print(
                f"{name:14} {mode:8} {form.named!s:8} {statistics.median(milliseconds):7.1f} ms "
                f"{peak / 2**30:6.2f} GiB  gradients off by {errors[0]:.1e}, {errors[1]:.1e}",
                flush=True,
            )
    shape = {"positions": N, "vocab": V, "width": C, "dtype": "bfloat16"}
    print(
        write("loss_kernels", {**shape, "kernels": figures}, commit=sizes.commit, folder=sizes.out)
    )


def kernels(form: LossForm) -> list[tuple[str, Kernel, bool]]:
    """(name, kernel, compiled)."""
    listed = [
        ("dense", loss.dense, True),
        ("chunked", loss.chunked, True),
        ("chunked 16384", partial(loss.chunked, rows=16_384), True),
        ("chunked", loss.chunked, False),
    ]
    has_native = hasattr(torch.nn.functional, "linear_cross_entropy")
    return [*listed, ("torch", loss.native, False)] if form.empty and has_native else listed


def exact_gradients(hidden: Any, weight: Any, targets: Any, form: LossForm) -> list[torch.Tensor]:
    """Both gradients of the mean loss, by chunks in float32."""
    h, w = (x.detach().float().requires_grad_() for x in (hidden, weight))
    (loss.chunked(h, w, targets, None, form)[0] / len(h)).backward()
    return [h.grad, w.grad]


if __name__ == "__main__":
    main()
