"""The core's kernels on each framework, in order of preference. Imports no framework, so that plans can use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packaging.version import Version

from minillm_core.install import installed_version
from minillm_core.ops.form import LossForm
from minillm_core.ops.select import Candidate, Request

FIRST_WITH_LINEAR_CROSS_ENTROPY = Version("2.13")
LEAST_HEAD = 16  # the smallest head size that FlexAttention supports
LARGE = 2**31  # bytes of logits in the compute dtype above which chunks are worth their launches
SUMMED = 2**14  # how many logits mx.fast.cross_entropy adds on a CPU within float32's tolerance
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def _torch_loss(request: Request) -> str | None:
    """Return why F.linear_cross_entropy cannot serve: it needs eager mode, one target, the empty form."""
    if (installed := installed_version("torch")) is None:
        return "torch is not installed"
    if Version(installed) < FIRST_WITH_LINEAR_CROSS_ENTROPY:
        return f"torch {installed} has no F.linear_cross_entropy; 2.13 has"
    if request.compiled:
        return "does not trace under torch.compile(fullgraph=True)"
    if reason := _one_plain_target(request):
        return reason
    if request.facts.get("weights") == "position":
        return "does not take a weight per position"
    return None


def _one_plain_target(request: Request) -> str | None:
    form: LossForm = request.facts.get("form", LossForm())
    targets = request.facts.get("targets", 1)
    if targets != 1:
        return f"takes one target, not {targets}"
    if not form.empty:
        return f"does not know the form's {', '.join(form.named)}"
    return None


def _blocks(request: Request) -> str | None:
    """Return why FlexAttention cannot serve: it needs a window or documents, by which it skips blocks."""
    head_dim = request.facts.get("head_dim", LEAST_HEAD)
    if not _masked(request):
        return "the mask is only causal: it has no blocks to skip beyond those that sdpa skips"
    if head_dim < LEAST_HEAD:
        return f"takes heads of {LEAST_HEAD} features or more, not {head_dim}"
    return None


def _masked(request: Request) -> bool:
    return bool(request.facts.get("window") or request.facts.get("documents"))


def _if_masked(request: Request) -> int:
    """Rank FlexAttention first with a window or documents, else last."""
    return -1 if _masked(request) else 1


def _fused_loss(request: Request) -> str | None:
    """Return why mx.fast.cross_entropy cannot serve: it needs one target, the empty form."""
    if request.device == "cpu" and request.dtype != "float32":
        return f"sums in {request.dtype} on a CPU"
    vocab = request.facts.get("vocab", 0)
    if request.device == "cpu" and vocab > SUMMED:
        return f"sums {vocab:,} logits one by one on a CPU, outside float32's tolerance"
    return _one_plain_target(request)


def _if_large(request: Request) -> int:
    """Rank the chunked loss first if the logits are large, last if they would fit a few chunks."""
    rows, vocab = (request.facts.get(fact, 0) for fact in ("rows", "vocab"))
    return -1 if rows * vocab * ITEMSIZE[request.dtype] > LARGE else 1


def _fast_rope(request: Request) -> str | None:
    """Return why mx.fast.rope cannot serve: positions are 0 .. T-1, angles float32 products."""
    if (positions := request.facts.get("positions")) is not None:
        return f"counts positions from 0, but here each {positions} has its own"
    if request.dtype == "float32":
        return "its angles are outside float32's tolerance"
    return None


def _offered_by(backend: str) -> Callable[..., Candidate]:
    at = f"minillm_core.backends.{backend}."
    return lambda op, name, function, **more: Candidate(op, name, (backend,), at + function, **more)


def _usual(offer: Callable[..., Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that both frameworks have under the same names."""
    return (
        offer("linear", "matmul", "ops:linear", plain=True),
        offer("embedding", "gather", "ops:embedding", plain=True),
        offer("rms_norm", "fused", "ops:rms_norm_fused"),
        offer("rms_norm", "composed", "ops:rms_norm_composed", plain=True),
        offer("rotate", "table", "ops:rotate", plain=True),
        offer("attention", "sdpa", "ops:sdpa"),
        offer("attention", "composed", "ops:attention_composed", plain=True),
        offer("swiglu", "composed", "ops:swiglu", plain=True),
        offer("logits", "matmul", "ops:logits", plain=True),
        offer("gram", "matmul", "ops:gram", plain=True),
        offer("token_losses", "chunked", "loss:token_losses", plain=True),
    )


_torch, _mlx = _offered_by("torch"), _offered_by("mlx")

TORCH: tuple[Candidate, ...] = (
    *_usual(_torch),
    _torch("attention", "flex", "blocks:flex", devices=("cuda",), accepts=_blocks, rank=_if_masked),
    _torch("linear_cross_entropy", "chunked", "loss:chunked"),
    _torch("linear_cross_entropy", "dense", "loss:dense", plain=True),
    _torch("linear_cross_entropy", "torch", "loss:native", accepts=_torch_loss),
)

_GPUS = ("metal", "cuda")  # on a CPU mx.fast.rope is composed of array operations too
MLX: tuple[Candidate, ...] = (
    _mlx("rotate", "fast", "ops:rotate_fast", devices=_GPUS, accepts=_fast_rope),
    *_usual(_mlx),
    _mlx("linear_cross_entropy", "chunked", "loss:chunked", rank=_if_large),
    _mlx("linear_cross_entropy", "fused", "loss:fused", accepts=_fused_loss),
    _mlx("linear_cross_entropy", "dense", "loss:dense", plain=True),
)

CORE: Mapping[str, tuple[Candidate, ...]] = {"torch": TORCH, "mlx": MLX}
