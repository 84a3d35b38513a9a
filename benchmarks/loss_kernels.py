"""The loss kernels on one GPU: time and memory of forward and backward passes, and their agreement.

    python -m benchmarks.loss_kernels [--positions N] [--vocab V] [--width C] [--out FOLDER]

Three warm-up steps, then ten measured one by one. Peak memory excludes the inputs and the last
step's gradients. Errors are relative to gradients computed in chunks in float32. As a lower bound, the three
products are also measured by themselves in the same run. If liger-kernel is installed, its
function is also called directly, and then in turns with minillm's plugin ``liger``, step by step;
if Triton is installed, the kernels of minillm's plugins ``triton`` and ``fp8_head`` are measured.
Third-party kernels in CuTe, QuACK's (``pip install quack-kernels``) and Liger's for Hopper, are called
directly if ``nvidia-cutlass-dsl`` is installed, QuACK's also through minillm-cute in a compiled step. The
line of a kernel that cannot run gives the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import measuring, written
from minillm_core.backends.torch import loss
from minillm_core.ops.form import LossForm, SigmoidCap, TanhCap

Kernel = Callable[..., Any]
TURNS = 30


def measure(step: Callable[[], Any], repeats: int = 10) -> tuple[list[float], int]:
    """Return (milliseconds of each repetition, peak bytes above those allocated before)."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = [timed(step) for _ in range(repeats)]
    return times, torch.cuda.max_memory_allocated() - before


def timed(step: Callable[[], Any]) -> float:
    """Measure milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = measuring(__doc__, "loss_kernels")
    parser.add_argument("--positions", type=int, default=65_536)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--width", type=int, default=768)
    sizes = parser.parse_args()
    N, V, C = sizes.positions, sizes.vocab, sizes.width
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(N, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(V, C, device=device)).bfloat16().requires_grad_()
    targets = torch.randint(-1, V, (1, N), device=device, dtype=torch.int32)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, N={N} V={V} C={C} bfloat16")

    alone = products(hidden, weight)
    print(f"the products alone: {sum(alone.values()):.1f} ms", flush=True)
    figures, turns = [], []
    for form in (LossForm(), LossForm(cap=TanhCap(15.0)), LossForm(cap=SigmoidCap(23.0, 5.0, 7.5))):
        exact = exact_gradients(hidden, weight, targets, form)
        steps = {}
        for name, kernel, compiled in kernels(form):
            torch._dynamo.reset()
            run = torch.compile(kernel, fullgraph=True) if compiled else kernel

            def step(run: Kernel = run, form: LossForm = form) -> None:
                hidden.grad = weight.grad = None
                (run(hidden, weight, targets, None, form)[0] / N).backward()

            steps[name] = step
            mode = "compiled" if compiled else "eager"
            try:
                milliseconds, peak = measure(step)
            except Exception as raised:
                if not name.startswith("cute"):
                    raise
                why = f"{type(raised).__name__}: {str(raised)[:300]}"
                figures.append({"kernel": name, "mode": mode, "form": form.named, "failed": why})
                print(f"{name:14} {mode:8} {form.named!s:8} failed: {why}", flush=True)
                continue
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
            if name == "liger":  # compiled again after the reset
                taken = in_turns(step, steps["liger by hand"])
                turns.append({"form": form.named, **taken})
    shape = {"positions": N, "vocab": V, "width": C, "dtype": "bfloat16"}
    document = {
        **shape,
        "product_milliseconds": alone,
        "kernels": figures,
        "liger_and_by_hand": turns,
    }
    print(written(sizes, document))


def in_turns(ours: Callable[[], None], by_hand: Callable[[], None]) -> dict[str, Any]:
    """Measure milliseconds of both, alternating, and the ratio of their medians."""
    pairs = [(timed(ours), timed(by_hand)) for _ in range(TURNS)]
    mine, theirs = (list(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(mine) / statistics.median(theirs)
    print(f"liger through minillm takes {ratio:.3f} x the time of Liger called by hand", flush=True)
    return {"minillm_milliseconds": mine, "by_hand_milliseconds": theirs, "ratio": ratio}


def ligers(form: LossForm) -> list[tuple[str, Kernel, bool]]:
    """Return Liger via the plugin's candidate, eager and compiled, and its function called directly."""
    if find_spec("liger_kernel") is None or isinstance(form.cap, SigmoidCap):
        print("left out: liger-kernel, which is not installed or has no such form")
        return []
    from minillm_liger.kernels.loss import linear_cross_entropy

    listed = [("liger by hand", by_hand, False), ("liger eager", linear_cross_entropy, False)]
    return [*listed, ("liger", linear_cross_entropy, True)]


def tritons() -> list[tuple[str, Kernel, bool]]:
    """Return the kernels of the plugins ``triton`` and ``fp8_head``, eager and compiled."""
    if find_spec("triton") is None:
        print("Triton is not installed: its kernels are left out")
        return []
    from minillm_triton.kernels.loss import fp8_linear_cross_entropy, linear_cross_entropy

    by_name = (("triton", linear_cross_entropy), ("fp8", fp8_linear_cross_entropy))
    return [(name, kernel, mode) for name, kernel in by_name for mode in (False, True)]


def cutes(form: LossForm) -> list[tuple[str, Kernel, bool]]:
    """Return QuACK's and Liger's CuTe kernels for Hopper, called directly; they know the empty form alone."""
    if find_spec("cutlass") is None or not form.empty:
        print("left out: CuTe kernels, which need nvidia-cutlass-dsl and have no such form")
        return []
    listed: list[tuple[str, Kernel, bool]] = []
    if find_spec("quack"):
        from minillm_cute.kernels.loss import linear_cross_entropy

        chunks = (1024, 2048, 4096)
        listed += [(f"cute quack {rows}", partial(by_quack, rows=rows), False) for rows in chunks]
        listed += [("cute minillm", linear_cross_entropy, mode) for mode in (False, True)]
    if find_spec("liger_kernel"):
        listed.append(("cute liger", by_liger_sm90, False))
    return listed


def by_quack(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: None, form: LossForm, *, rows: int
) -> tuple[Tensor]:
    """Compute the loss by QuACK, in chunks of this many positions."""
    from quack.linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        chunked_linear_cross_entropy,
    )

    return (
        chunked_linear_cross_entropy(
            hidden, weight, targets[0].long(), rows, ignore_index=-1, reduction="sum"
        ),
    )


def by_liger_sm90(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: None, form: LossForm
) -> tuple[Tensor]:
    """Compute the loss by Liger's CuTe kernel."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function,
    )

    return (
        LigerFusedLinearCrossEntropySM90Function.apply(
            hidden, weight, targets[0].long(), -1, "sum"
        ),
    )


def products(hidden: Tensor, weight: Tensor) -> dict[str, float]:
    """Measure milliseconds of each of the op's three products, the logits in chunks of 8,192 rows."""
    with torch.no_grad():
        of_hidden, of_weight = (
            torch.empty_like(hidden),
            torch.zeros_like(weight, dtype=torch.float32),
        )
        chunks = [slice(first, first + 8_192) for first in range(0, len(hidden), 8_192)]
        logits = torch.randn(8_192, len(weight), device=hidden.device).bfloat16()

        def forward() -> None:
            for rows in chunks:
                torch.mm(hidden[rows], weight.T, out=logits[: len(hidden[rows])])

        def hidden_gradient() -> None:
            for rows in chunks:
                torch.mm(logits[: len(hidden[rows])], weight, out=of_hidden[rows])

        def weight_gradient() -> None:
            for rows in chunks:
                some = hidden[rows]
                taken = {"out_dtype": torch.float32, "out": of_weight}
                torch.addmm(of_weight, logits[: len(some)].T, some, **taken)

        steps = (forward, hidden_gradient, weight_gradient)
        return {step.__name__: statistics.median(measure(step)[0]) for step in steps}


def by_hand(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: None, form: LossForm
) -> tuple[Tensor]:
    """Compute the loss as in a training loop without minillm; also accumulated in float32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    no_bias = no_class_weights = None
    ignored, z, smoothing, cap = -1, 0.0, 0.0, getattr(form.cap, "cap", None)
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        *(hidden, weight, targets[0].long(), no_bias, no_class_weights),
        *(ignored, z, smoothing, "sum", cap, False, torch.float32),
    )
    return (loss,)


def kernels(form: LossForm) -> list[tuple[str, Kernel, bool]]:
    """Return (name, kernel, compiled)."""
    listed = [
        *ligers(form),
        *tritons(),
        *cutes(form),
        ("dense", loss.dense, True),
        ("chunked", loss.chunked, True),
        ("chunked 16384", partial(loss.chunked, rows=16_384), True),
        ("chunked", loss.chunked, False),
    ]
    has_native = hasattr(torch.nn.functional, "linear_cross_entropy")
    return [*listed, ("torch", loss.native, False)] if form.empty and has_native else listed


def exact_gradients(hidden: Any, weight: Any, targets: Any, form: LossForm) -> list[torch.Tensor]:
    """Compute both gradients of the mean loss, by chunks in float32."""
    h, w = (x.detach().float().requires_grad_() for x in (hidden, weight))
    (loss.chunked(h, w, targets, None, form)[0] / len(h)).backward()
    return [h.grad, w.grad]


if __name__ == "__main__":
    main()
