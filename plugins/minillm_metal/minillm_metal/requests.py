"""Requests that the kernels support, and the reasons for others. Does not import MLX."""

from __future__ import annotations

from minillm_core import LossForm, Request

__all__ = [
    "attention",
    "attention_rank",
    "blocks",
    "blocks_rank",
    "gram",
    "gram_rank",
    "loss",
    "loss_rank",
    "norm",
    "norm_rank",
    "required",
    "rope",
    "rope_rank",
]

FEATURES, LARGEST_HEAD = 8, 128
MOST_TARGETS = 8
SPAN = 2**31  # rows and vocabulary are 32-bit numbers in the kernels; offsets are 64-bit
LARGE = 2**31  # bytes of logits from which on the core also uses chunks
LONG = 1_024  # two blocks of queries
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def required(request: Request) -> int:
    """Rank before every other kernel."""
    return -3


def loss(request: Request) -> str | None:
    """Accept every form, and up to eight targets, which a lane keeps in registers."""
    targets = request.facts.get("targets", 1)
    if targets > MOST_TARGETS:
        return f"keeps up to {MOST_TARGETS} targets of a position in registers, not {targets}"
    if request.facts.get("vocab", 0) >= SPAN:
        return "counts the vocabulary in 32 bits"
    return None


def loss_rank(request: Request) -> int:
    """Rank before the core's chunks and its float32 logits; after MLX's own cross-entropy.

    For one plain target and few logits ``mx.fast.cross_entropy`` moves as many bytes as the kernel
    (one write and two reads of the logits, one write of their gradient, and a read by the products).
    """
    facts = request.facts
    large = facts.get("rows", 0) * facts.get("vocab", 0) * ITEMSIZE[request.dtype] > LARGE
    plain = facts.get("form", LossForm()).empty and facts.get("targets", 1) == 1
    return -2 if large or not plain else 1


def attention(request: Request) -> str | None:
    """Accept heads of whole 8 x 8 matrices whose tiles fit threadgroup memory and registers."""
    size = request.facts.get("head_dim", FEATURES)
    if size % FEATURES:
        return f"takes heads of a multiple of {FEATURES} features, not {size}"
    if size > LARGEST_HEAD:
        return f"takes heads of up to {LARGEST_HEAD} features, whose tiles fit 32 KiB, not {size}"
    return None


def attention_rank(request: Request) -> int:
    """Rank first with a window or documents, where MLX holds all scores in the backward pass; else last.

    MLX's plain causal attention is fused forward and backward, and moves as many bytes.
    """
    return -1 if request.facts.get("window") or request.facts.get("documents") else 2


def rope(request: Request) -> str | None:
    """Accept any positions and frequencies."""
    return None


def rope_rank(request: Request) -> int:
    """Rank before the table's composed form, which MLX does not fuse; after ``mx.fast.rope``.

    The latter serves positions 0 .. T-1 in half dtypes, and moves as many bytes.
    """
    return 1 if request.facts.get("positions") is None and request.dtype != "float32" else -1


def norm(request: Request) -> str | None:
    """Accept any width and dtype."""
    return None


def norm_rank(request: Request) -> int:
    """Rank before MLX's own, whose backward pass writes and reads the weight's gradient of every row.

    With CUDA behind it: there MLX runs that second pass beside other kernels, and a step of gpt2-124m takes as long
    either way (docs/experiments.md).
    """
    return 1 if request.device == "cuda" else -1


def blocks(request: Request) -> str | None:
    """Accept masked attention of more queries than one block has."""
    if not (request.facts.get("window") or request.facts.get("documents")):
        return "plainly causal: MLX's own is fused forward and backward"
    if request.facts.get("length", LONG) < LONG:
        return f"serves {LONG} positions or more, whose scores are worth two passes"
    return None


def blocks_rank(request: Request) -> int:
    """Rank after the Metal kernel, before MLX's own, which holds all scores in the backward pass."""
    return 0


def gram(request: Request) -> str | None:
    """Accept any matrices, if an update rule multiplies some."""
    if not request.facts.get("matrices", True):
        return "no rule of the optimizer takes whole matrices, as muon does"
    return None


def gram_rank(request: Request) -> int:
    """Rank before MLX's own product, which computes both triangles."""
    return -1
