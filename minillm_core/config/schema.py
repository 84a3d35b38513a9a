"""The settings of a run and their meaning, for validation, help and docs.

Defaults that depend on the model's size are in ``presets/*.toml``; every preset must set the fields
without a default.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A table of settings: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    """The plain decoder's shape."""

    layers: int = Field(ge=1, le=1024, description="number of blocks")
    dim: int = Field(ge=8, description="width of the residual stream")
    heads: int = Field(ge=1, description="query heads")
    kv_heads: int = Field(ge=1, description="key and value heads; heads is a multiple of it")
    hidden: int = Field(ge=1, description="width inside the MLP")
    vocab: int = Field(ge=2, le=2**31 - 1, description="rows of the embedding")
    tied: bool = Field(description="the head is the embedding")
    rope_base: float = Field(10_000.0, gt=1, description="base of the rotary frequencies")
    head_dim: int | None = Field(None, ge=2, description="width of a head; none: dim / heads")
    norm_eps: float = Field(1e-5, gt=0, lt=1, description="what RMSNorm adds to the mean square")

    @property
    def head_width(self) -> int:
        """The width of a head: ``head_dim``, or dim / heads."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim


class Shape(NamedTuple):
    """The sizes of a step's batch."""

    rows: int  # rows of a micro-batch
    accumulate: int  # micro-batches of a step (gradient accumulation)
    seq_len: int

    @property
    def tokens(self) -> int:
        """The tokens of the whole step, on one device."""
        return self.rows * self.accumulate * self.seq_len


class Stage(Section):
    """An early part of a run whose batches have other sizes."""

    until: float = Field(gt=0, le=1, description="share of train.steps that is over at its end")
    rows: int | None = Field(None, ge=1, description="in the place of train.rows")
    accumulate: int | None = Field(None, ge=1, description="in the place of train.accumulate")
    seq_len: int | None = Field(None, ge=1, description="in the place of train.seq_len")


class TrainConfig(Section):
    """The optimisation."""

    steps: int | None = Field(None, ge=1, description="optimizer steps; or give minutes")
    minutes: float | None = Field(
        None, gt=0, description="stop by the clock; the schedule follows it"
    )
    rows: int = Field(ge=1, description="rows of one micro-batch on one device")
    accumulate: int = Field(1, ge=1, description="gradient accumulation: micro-batches in a step")
    seq_len: int = Field(ge=1, description="tokens in a row")
    stages: tuple[Stage, ...] = Field(
        (),
        description="rows, accumulate and seq_len up to a share of the steps, one stage after the "
        "other: [{until=0.25, rows=32, seq_len=256}]; after the last one those of train hold",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="compute dtype (mixed precision: masters stay float32); auto: float32 on a CPU, "
        "bfloat16 on a GPU",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="auto: off for torch on a CPU, on elsewhere"
    )
    checkpointing: bool = Field(False, description="recompute each block in the backward pass")
    lr: float = Field(ge=0, description="peak learning rate of AdamW")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="after the warm-up: cosine to 0.1, or stable and then linear to 0"
    )
    warmup: float = Field(0.05, ge=0, le=1, description="fraction of the steps")
    cooldown: float = Field(
        0.2, gt=0, le=1, description="share of the steps over which wsd decays to 0"
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates")
    epsilon: float = Field(
        1e-8,
        gt=0,
        description="AdamW's, beside the root of the second moment: rows of large embeddings, whose "
        "gradients are small, learn sooner with 1e-12",
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled, times the learning rate")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 for none")
    spike: float = Field(
        0.0,
        ge=0,
        description="rewind when the loss exceeds the median of the last 64 by this many nats; 0: off",
    )
    rewind: int = Field(100, ge=1, description="steps to go back at least at a spike")
    skip: int = Field(200, ge=0, description="steps' batches to pass over after a rewind")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The sizes of a batch in each stage, and after the last one."""
        parts, names = (*self.stages, self), Shape._fields
        return tuple(Shape(*(getattr(o, n) or getattr(self, n) for n in names)) for o in parts)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def weighted_path(text: str) -> tuple[str, float | None]:
    """Parse ``PATH`` or ``PATH:WEIGHT``: the text after the last colon is a weight if it is a number.

    A path that ends in a colon and a number needs a weight: ``a:1:0.5`` is the file ``a:1``.
    """
    path, colon, last = text.rpartition(":")
    return (path, float(last)) if colon and _NUMBER.fullmatch(last) else (text, None)


class DataConfig(Section):
    """The text."""

    paths: tuple[str, ...] = Field(
        (),
        description="files or folders; none: the running Python's standard library. PATH:WEIGHT, all "
        "or none: a mixture, whose rows keep these proportions over any stretch",
    )
    val: float | str = Field(0.05, description="a path, or the fraction that is held out")
    tokenizer: str | None = Field(None, description="a tokenizer.json; none: one is trained")
    end_of_text: str | None = Field(
        None,
        description="special token of data.tokenizer that begins documents; none: <|endoftext|>",
    )
    seed: int = Field(0, ge=0, description="fixes the data order, apart from the run's seed")
    block: int = Field(
        0,
        ge=0,
        description="tokens of text that are shuffled together, and after which training begins, while "
        "the rest is tokenised beside it; 0: all",
    )

    @property
    def files(self) -> tuple[str, ...]:
        """The paths without their weights."""
        return tuple(weighted_path(one)[0] for one in self.paths)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the paths; empty if unset: the documents of all paths are then shuffled together."""
        found = (weighted_path(one)[1] for one in self.paths)
        return tuple(one for one in found if one is not None)


class EvalConfig(Section):
    """Evaluation on held-out text, and samples."""

    every: int | None = Field(
        None,
        ge=0,
        description="steps between evaluations, from step 0 on; none: at every sixth of the run; "
        "0: only at the end",
    )
    tokens: int = Field(
        65_536, ge=1, description="predictions in the evaluation at the end; fewer are faster"
    )
    share: float = Field(
        1.0, gt=0, le=1, description="share of these that the evaluations before it make"
    )
    samples: int | None = Field(
        None,
        ge=0,
        description="samples after each evaluation, two at the end at least; none: at the end "
        "alone; 0: never",
    )
    prompts: tuple[str, ...] = Field(
        (), description="prompts of the samples; none: the beginnings of two held-out documents"
    )


class CheckpointConfig(Section):
    """Checkpoints."""

    every: int | None = Field(
        None,
        ge=0,
        description="steps between checkpoints; none: a twentieth of the run; 0: no checkpoints",
    )
    minutes: float = Field(
        5.0,
        ge=0,
        description="most minutes of training between two checkpoints, beside every; 0: not by the "
        "clock, nor with train.spike, whose rewinds must not depend on it",
    )
    keep: int = Field(3, ge=1, description="how many of the newest that verify to keep")
    best: bool = Field(
        False, description="keep the one with the lowest held-out loss as well (--best reads it)"
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="when one cannot be written, such as on a full disk"
    )


class LogConfig(Section):
    """metrics.jsonl and the console."""

    every: int = Field(1, ge=1, description="steps between step events")


class MeshConfig(Section):
    """What several processes divide among them; no plan depends on it."""

    shard: Literal["auto", "off", "updates", "weights"] = Field(
        default="auto",
        description="updates: each process updates its own part of the parameters, and keeps the "
        "optimizer's state of that part alone; weights: it keeps its part of the weights alone, too, and "
        "has a layer's whole ones while it computes it; off: each updates all; auto: updates, where "
        "several processes train on torch, or weights, where updates alone do not fit a GPU's memory",
    )
    context: int = Field(
        default=1,
        ge=1,
        description="context parallel: N processes share each row, and every one computes some of its "
        "columns; N divides the number of processes, and 2 N train.seq_len",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="tensor parallel: N processes share each layer, and every one computes some of its heads "
        "and hidden units; N divides the number of processes, model.heads and model.hidden",
    )
    context_exchange: Literal["auto", "keys", "heads"] = Field(
        default="auto",
        description="what processes that share rows send in each attention; keys: all gather keys and "
        "values; heads: heads for columns, all-to-all (Ulysses), where N divides heads and kv_heads; "
        "auto: what sends fewer bytes",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        description="pipeline parallel: N processes share the layers, and each computes a run of them, "
        "micro-batch by micro-batch (train.accumulate); N divides the number of processes",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b",
        description="in which order a pipeline stage computes; 1f1b: one forward, one backward, as many "
        "micro-batches in flight as stages; gpipe: all forward, then all backward",
    )


class Config(Section):
    """Every setting of a run, without the origins."""

    preset: str = Field(description="a shape with its training, and plugins in a recipe")
    model: ModelConfig
    train: TrainConfig
    data: DataConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    mesh: MeshConfig = MeshConfig.model_validate({})
    plugins: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="plugin name -> its options as given, not yet typed"
    )
    init: str | None = Field(
        None, description="a run or a model directory to start from, or a model of the hub"
    )
    seed: int = Field(0, ge=0, description="initial weights and all other randomness but the data")
    backend: Literal["auto", "torch", "mlx"] = Field(
        "auto", description="the framework that trains"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, mps, gpu")
    deterministic: bool = Field(False, description="bit-for-bit repeatable on the same GPU")
    kernels: str = Field(
        "auto",
        description="auto: for each op the first kernel that serves; strict: the preferred one, or "
        "no run; reference: the plain one; op=name,...: this one for that op, op=reference its plain "
        "one, also after a word: strict,attention=sdpa",
    )


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
"""The tables of settings by name."""

TOP: tuple[str, ...] = tuple(
    name for name in Config.model_fields if name not in SECTIONS and name != "plugins"
)
"""Settings outside any table, such as preset and seed."""

FIELDS: dict[str, FieldInfo] = {name: Config.model_fields[name] for name in TOP} | {
    f"{table}.{name}": field
    for table, section in SECTIONS.items()
    for name, field in section.model_fields.items()
}
"""Every key of the config, without those of plugins, with its type, bounds and description."""
