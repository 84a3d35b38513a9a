"""Attention with windows and documents on one GPU: time of forward and backward, and its accuracy.

    python -m benchmarks.attention_windows [--shapes 64x1024,8x8192,1x65536] [--heads 6x128,12x64]
                                           [--windows 1792,896,128] [--speed-only] [--out FOLDER]

Compiled, bfloat16; three warm-up steps, then ten measured one by one, each after a cache
flush. One call is one layer, including its block mask; ``mask_milliseconds`` is the mask alone,
which a model's layers share. Documents have 600 tokens on average, exponentially distributed.
Rivals, if they are installed: FlashAttention-4 (``pip install --pre flash-attn-4``), by itself and as
FlexAttention's FLASH backend, and ``torch.nn.attention.varlen``. The packed forms are given the documents'
boundaries, found before the clock starts; minillm-cute, FlashAttention-4 within a compiled step, finds them
itself. What a rival cannot do is its line's reason.

Accuracy: small shapes against the float64 reference, by minillm's contract of the op; a
step that synchronises with the device raises.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.command import measuring, written
from minillm_core.backends.torch.blocks import block_mask, flex
from minillm_core.backends.torch.ops import attention_composed, sdpa
from minillm_core.ops.contract import CONTRACTS
from minillm_kit import reference

Kernel = Callable[..., Tensor]
WINDOWS = "1792,896,128"  # the first two: the last windows of modded-nanogpt's record of 2025-02
DOCUMENT = 600  # tokens, on average


def main() -> None:
    parser = measuring(__doc__, "attention_windows")
    parser.add_argument("--shapes", default="64x1024,8x8192,1x65536", help="rows x tokens")
    parser.add_argument("--heads", default="6x128,12x64", help="heads x features")
    parser.add_argument("--windows", default=WINDOWS, help="keys that a query sees")
    parser.add_argument("--speed-only", action="store_true", help="do not measure the accuracy")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, bfloat16")
    accuracy = [] if asked.speed_only else list(accuracies())
    windows = [int(word) for word in asked.windows.split(",")]
    document: dict[str, Any] = {"dtype": "bfloat16", "accuracy": accuracy, "timings": []}
    for B, T in pairs(asked.shapes):
        for H, D in pairs(asked.heads):
            for figure in timings(B, T, H, D, windows):
                document["timings"].append(figure)
                path = written(asked, document)  # after each: a rival may end the process
    print(path)


def pairs(text: str) -> list[tuple[int, int]]:
    """Parse "64x1024,1x65536" to [(64, 1024), (1, 65536)]."""
    split = (word.split("x") for word in text.split(","))
    return [(int(first), int(second)) for first, second in split]


def accuracies() -> Iterator[dict[str, Any]]:
    """Compare the kernel's output and gradients on small shapes with the reference, compiled and eager."""
    tolerance = CONTRACTS["attention"].tolerance["bfloat16"]
    for T, H, K, D in ((384, 4, 2, 64), (300, 2, 2, 128), (384, 6, 2, 96), (256, 2, 1, 16)):
        for window, with_documents in ((200, True), (128, False), (None, True))[
            : 3 if D == 64 else 1
        ]:
            q, k, v, upstream = arrays(2, T, (H, K, K, H), D)
            documents = documents_of(2, T, mean=100) if with_documents else None
            masked = {"window": window, "documents": documents}
            exact = gradients(attention_composed, [x.double() for x in (q, k, v)], upstream, masked)
            host = [x.detach().double().cpu().numpy() for x in (q, k, v)]
            numpy = masked | {"documents": documents.cpu().numpy() if with_documents else None}
            exact = [torch.from_numpy(reference.attention(*host, **numpy)), *exact[1:]]
            torch._dynamo.reset()
            for mode in ("compiled", "eager") if D == 64 else ("compiled",):
                kernel = torch.compile(flex, fullgraph=True) if mode == "compiled" else flex
                got = gradients(kernel, (q, k, v), upstream, masked)
                errors = [error(g, e) for g, e in zip(got, exact, strict=True)]
                yield {
                    "shape": {"rows": 2, "tokens": T, "heads": H, "kv_heads": K, "head_dim": D},
                    "mode": mode,
                    "window": window,
                    "documents": with_documents,
                    "errors": dict(zip(("y", "q", "k", "v"), errors, strict=True)),
                    "tolerance": tolerance,
                    "kept": max(errors) <= tolerance,
                }
                said = " ".join(f"{e:.1e}" for e in errors)
                print(f"T={T} H={H}/{K} D={D} window={window} {mode:8} y q k v off by {said}")


def timings(B: int, T: int, H: int, D: int, windows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Time every kernel at one shape; return the reason for one that cannot run."""
    q, k, v, upstream = arrays(B, T, (H, H, H, H), D)
    documents = documents_of(B, T)
    windows = [window for window in windows if window < T]
    short = windows[0] if windows else None
    masks = [*((window, None) for window in windows), (None, documents), (short, documents)]
    kinds = [Timed("sdpa", sdpa), Timed("flex, every block", every_block)]
    kinds += [Timed("flex", flex, *mask) for mask in masks]
    if B * T * T <= 2**28:  # sdpa's masks are B T T elements
        kinds += [Timed("sdpa", sdpa, short), Timed("sdpa", sdpa, short, documents)]
    kinds += [one for mask in ((None, None), *masks) for one in rivals(*mask)]
    exact: dict[tuple[int | None, bool], list[Tensor]] = {}
    for kind in kinds:
        torch._dynamo.reset()
        begun = time.perf_counter()
        run = kind.kernel
        if kind.compiled:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        mask = {"window": kind.window, "documents": kind.documents}
        step = partial(gradients, run, (q, k, v), upstream, mask)
        key = (kind.window, kind.documents is not None)
        figure: dict[str, Any] = {
            "kernel": kind.name,
            "shape": {"rows": B, "tokens": T, "heads": H, "head_dim": D},
            "window": kind.window,
            "documents": kind.documents is not None,
        }
        label = (
            f"{B:3} x {T:6}, {H:2} x {D:3}  {kind.name:18} window {kind.window!s:5} "
            f"{'documents' if kind.documents is not None else '':9}"
        )
        try:
            got = step()
            figure["first_seconds"] = time.perf_counter() - begun
            if kind.ours:
                exact.setdefault(key, got)
            elif key in exact:  # the same precision on both sides: what is left is rounding
                figure["from_ours"] = [error(*pair) for pair in zip(got, exact[key], strict=True)]
            figure["step_milliseconds"], figure["peak_extra_bytes"] = measure(
                step, strict=kind.ours
            )
        except torch.OutOfMemoryError:
            yield figure | {"failed": "out of memory"}
            continue
        except Exception as raised:
            if kind.ours:
                raise
            why = f"{type(raised).__name__}: {str(raised)[:300]}"
            print(f"{label} failed: {why}", flush=True)
            yield figure | {"failed": why}
            continue
        if kind.name == "flex":
            listed = torch.compile(partial(listing, T, kind.window), fullgraph=True, dynamic=False)
            figure["mask_milliseconds"], _ = measure(partial(listed, kind.documents, q.device))
        yield figure
        print(
            f"{label} {statistics.median(figure['step_milliseconds']):8.3f} ms, mask "
            f"{statistics.median(figure.get('mask_milliseconds', [0.0])):6.3f} ms, "
            f"{figure['peak_extra_bytes'] / 2**20:8.0f} MiB, {figure['first_seconds']:5.1f} s to begin, "
            f"{max(figure.get('from_ours', [0.0])):.1e} from ours",
            flush=True,
        )


@dataclass(frozen=True)
class Timed:
    """A kernel with its mask."""

    name: str
    kernel: Kernel
    window: int | None = None
    documents: Tensor | None = None  # int32 (B, T)
    compiled: bool = True
    ours: bool = True  # must run, without synchronising


def rivals(window: int | None, documents: Tensor | None) -> Iterator[Timed]:
    """Yield the installed third-party kernels, for one mask."""
    their = partial(Timed, window=window, documents=documents, ours=False)
    bounds = None if documents is None else boundaries(documents)
    if find_spec("torch.nn.attention.varlen") and bounds is not None:
        yield their("torch varlen", partial(varlen, bounds=bounds), compiled=False)
    if find_spec("flash_attn") and find_spec("flash_attn.cute"):
        from minillm_cute.kernels.attention import attention

        yield their("fa4", partial(fa4, bounds=bounds), compiled=False)
        held = None if documents is None else documents.cpu()
        yield their("minillm-cute", attention, documents=held)  # read on the host
        if window is not None or documents is not None:
            yield their("flex, FLASH", flex_flash)


def boundaries(documents: Tensor) -> tuple[Tensor, int]:
    """Return where documents begin and end in the joined rows, int32 (n + 1,), and the longest one's length.

    A document ends with its row.
    """
    B, T = documents.shape
    new = torch.ones(B, T, dtype=torch.bool, device=documents.device)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = new.flatten().nonzero().flatten().int()
    bounds = torch.cat([begins, begins.new_tensor([B * T])])
    return bounds, int(bounds.diff().max())


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    documents: Tensor,
    bounds: tuple[Tensor, int],
) -> Tensor:
    """Call torch's packed attention, q, k and v (B, T, H, D)."""
    from torch.nn.attention.varlen import varlen_attn

    at, longest = bounds
    seen = (-1 if window is None else window - 1, 0)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    y: Any = varlen_attn(*packed, at, at, longest, longest, window_size=seen)
    return y.view_as(q)


def fa4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    documents: Tensor | None,
    bounds: tuple[Tensor, int] | None,
) -> Tensor:
    """Call FlashAttention-4, packed if there are documents; q, k and v (B, T, H, D)."""
    from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    seen = {"causal": True} | ({} if window is None else {"window_size": (window - 1, 0)})
    if bounds is None:
        y = flash_attn_func(q, k, v, **seen)
    else:
        at, longest = bounds
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        packed = (x.flatten(0, 1) for x in (q, k, v))
        y = flash_attn_varlen_func(*packed, cu_seqlens_q=at, cu_seqlens_k=at, **lengths, **seen)
    y = y[0] if isinstance(y, tuple) else y
    return y.view_as(q)


def flex_flash(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, documents: Tensor | None
) -> Tensor:
    """Call FlexAttention with minillm's block mask and FlashAttention-4's kernel."""
    mask = block_mask(q.shape[1], window, documents, q.device)
    options: Any = {"BACKEND": "FLASH"}
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(*heads, block_mask=mask, kernel_options=options).transpose(1, 2)


def every_block(q: Tensor, k: Tensor, v: Tensor, *, window: None, documents: None) -> Tensor:
    """Call FlexAttention for plain causal attention, for which minillm uses sdpa."""
    mask = block_mask(q.shape[1], window, documents, q.device)
    y = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    return y.transpose(1, 2)


def listing(T: int, window: int | None, documents: Tensor | None, device: Any) -> list[Tensor]:
    """Count the kinds of blocks of a block mask."""
    mask = block_mask(T, window, documents, device)
    return [x for x in mask.as_tuple() if isinstance(x, Tensor)]


def arrays(B: int, T: int, heads: tuple[int, ...], D: int) -> list[Tensor]:
    """Create (B, T, n, D) in bfloat16 for each number of heads, with gradients."""
    made = (torch.randn(B, T, n, D, device="cuda", dtype=torch.bfloat16) for n in heads)
    *qkv, upstream = (x.requires_grad_() for x in made)
    return [*qkv, upstream.detach()]


def documents_of(B: int, T: int, mean: int = DOCUMENT) -> Tensor:
    """Divide rows into documents, numbered over all rows: int32 (B, T)."""
    ends = np.random.default_rng(0).random(B * T) < 1 / mean
    return torch.from_numpy(np.cumsum(ends).astype(np.int32).reshape(B, T)).cuda()


def gradients(kernel: Kernel, qkv: Any, upstream: Tensor, masked: dict[str, Any]) -> list[Tensor]:
    """Compute y and the gradients of q, k and v."""
    y = kernel(*qkv, **masked)
    return [y, *torch.autograd.grad(y, qkv, upstream.to(y.dtype))]


def error(got: Tensor, exact: Tensor) -> float:
    """Compute the error as defined by the op's tolerance."""
    got, exact = got.double().cpu(), exact.double().cpu()
    return float((got - exact).norm() / max(exact.norm(), exact.numel() ** 0.5))


def measure(
    step: Callable[[], Any], repeats: int = 10, *, strict: bool = True
) -> tuple[list[float], int]:
    """Return (milliseconds of each repetition, peak bytes above those allocated before).

    A strict one raises where the step synchronises with the device.
    """
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):  # about a millisecond, while the step is enqueued
            flush.zero_()
        start.record()
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        step()
        torch.cuda.set_sync_debug_mode("default")
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times, torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
