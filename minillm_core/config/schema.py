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
    kv_heads: int = Field(ge=1, description="key and value heads; a divisor of heads")
    hidden: int = Field(ge=1, description="hidden width of the MLP")
    vocab: int = Field(ge=2, le=2**31 - 1, description="vocabulary size: rows of the embedding")
    tied: bool = Field(description="tied embeddings: the head is the embedding")
    rope_base: float = Field(10_000.0, gt=1, description="base of the rotary frequencies")
    head_dim: int | None = Field(None, ge=2, description="width of a head; none: dim / heads")
    norm_eps: float = Field(1e-5, gt=0, lt=1, description="RMSNorm's epsilon, inside the root")

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

    until: float = Field(gt=0, le=1, description="end of the stage, as a fraction of train.steps")
    rows: int | None = Field(None, ge=1, description="train.rows in this stage")
    accumulate: int | None = Field(None, ge=1, description="train.accumulate in this stage")
    seq_len: int | None = Field(None, ge=1, description="train.seq_len in this stage")


class TrainConfig(Section):
    """The optimisation."""

    steps: int | None = Field(None, ge=1, description="number of optimizer steps; or set minutes")
    minutes: float | None = Field(
        None, gt=0, le=1e7, description="minutes of training, instead of steps; schedules follow"
    )
    rows: int = Field(ge=1, description="rows of one micro-batch on one device")
    accumulate: int = Field(1, ge=1, description="gradient accumulation: micro-batches per step")
    seq_len: int = Field(ge=1, description="tokens in a row")
    stages: tuple[Stage, ...] = Field(
        (),
        description="stages with other rows, accumulate and seq_len, each until a fraction of the "
        "steps: [{until=0.25, rows=32, seq_len=256}]; after the last one those of train apply",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="compute dtype (mixed precision: master weights stay float32); auto: float32 "
        "on a CPU, bfloat16 on a GPU",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compilation of the step; auto: off for torch on a CPU, on elsewhere"
    )
    checkpointing: bool | Literal["selective"] = Field(
        False,
        description="activation checkpointing: recompute each block; selective: only the results of "
        "norms and activations, in torch's compiled step",
    )
    lr: float = Field(ge=0, description="peak learning rate of AdamW")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="lr after warm-up: cosine to 0.1 lr; wsd: constant, then linear to 0"
    )
    warmup: float = Field(0.05, ge=0, le=1, description="warm-up, as a fraction of the steps")
    cooldown: float = Field(
        0.2, gt=0, le=1, description="fraction of the steps over which wsd decays to 0"
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay rates of AdamW's moments")
    epsilon: float = Field(
        1e-8,
        gt=0,
        description="AdamW's epsilon, added to the root of the second moment: rows of large "
        "embeddings, whose gradients are small, learn sooner with 1e-12",
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, times lr")
    clip: float = Field(1.0, ge=0, description="maximum global gradient norm; 0: no clipping")
    spike: float = Field(
        0.0,
        ge=0,
        description="nats above the median of the last 64 losses at which to rewind; 0: off",
    )
    rewind: int = Field(100, ge=1, description="fewest steps to rewind; 3 more checkpoints stay")
    skip: int = Field(200, ge=0, description="steps whose batches are skipped after a rewind")

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
        description="files or folders; none: the running Python's standard library. PATH:WEIGHT, "
        "for all or none: a mixture whose rows keep these proportions throughout the run",
    )
    val: float | str = Field(0.05, description="held-out text: a path, or a fraction of the data")
    tokenizer: str | None = Field(None, description="a tokenizer.json; none: one is trained")
    end_of_text: str | None = Field(
        None,
        description="special token of data.tokenizer that begins documents; none: <|endoftext|>",
    )
    seed: int = Field(0, ge=0, description="seed of the data order, independent of the run's seed")
    block: int = Field(
        0,
        ge=0,
        description="tokens that are shuffled together; training starts once the first block is "
        "tokenised, while the rest is tokenised in parallel; 0: all",
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
        description="steps between evaluations, from step 0 on; none: a sixth of the run; 0: only "
        "at the end",
    )
    tokens: int = Field(
        65_536, ge=1, description="number of predictions in the final evaluation; fewer are faster"
    )
    share: float = Field(
        1.0, gt=0, le=1, description="fraction of eval.tokens in evaluations before the final one"
    )
    samples: int | None = Field(
        None,
        ge=0,
        description="number of samples after each evaluation, at least two at the end; none: only "
        "at the end; 0: never",
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
        description="maximum minutes of training between two checkpoints, in addition to every; 0: "
        "not by the clock, nor with train.spike, whose rewinds must not depend on the clock",
    )
    keep: int = Field(3, ge=1, description="number of newest valid checkpoints to keep")
    best: bool = Field(
        False, description="also keep the one with the lowest held-out loss (--best reads it)"
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="action when a checkpoint cannot be written, such as on a full disk"
    )


class LogConfig(Section):
    """metrics.jsonl and the console."""

    every: int = Field(1, ge=1, description="steps between step events")


class MeshConfig(Section):
    """What several processes divide among them; no plan depends on it."""

    shard: Literal["auto", "off", "updates", "weights"] = Field(
        default="auto",
        description="updates: each process updates its own part of the parameters, and keeps "
        "optimizer state for that part only; weights: also only its part of the weights, gathering "
        "a layer's while it computes it; off: each updates all; auto: updates, where several "
        "processes train on torch, or weights, where updates alone does not fit a GPU's memory",
    )
    unit: int = Field(default=1, ge=1, description="layers that mesh.shard=weights gathers at once")
    data: int = Field(
        default=0,
        ge=0,
        description="data parallelism: N parts of each step, trained by a process each, or by those that "
        "share its rows; 0: as many as the processes allow; another number of processes is refused",
    )
    context: int = Field(
        default=0,
        ge=0,
        description="context parallelism: N processes share each row, each computing some columns; N "
        "divides their number, and 2 N train.seq_len; 0: 1, or more where memory or few rows ask for it",
    )
    tensor: int = Field(
        default=0,
        ge=0,
        description="tensor parallelism: N processes share each layer, each computing some heads and "
        "hidden units; N divides their number, model.heads and model.hidden; 0: as for mesh.context",
    )
    context_exchange: Literal["auto", "keys", "heads"] = Field(
        default="auto",
        description="communication of context parallelism in each attention; keys: all-gather of "
        "keys and values; heads: all-to-all of heads for columns (Ulysses), where N divides heads "
        "and kv_heads; auto: whichever sends fewer bytes",
    )
    pipeline: int = Field(
        default=0,
        ge=0,
        description="pipeline parallelism: N processes share the layers, each computing consecutive "
        "ones per micro-batch (train.accumulate); N divides their number; 0: as for mesh.context",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b",
        description="schedule of a pipeline stage; 1f1b: one forward, one backward, as many "
        "micro-batches in flight as stages; gpipe: all forward, then all backward",
    )


class Config(Section):
    """Every setting of a run, without the origins."""

    preset: str = Field(description="model shape with training settings; a recipe has plugins too")
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
        None, description="initial weights: a run, a model directory, or a model of the hub"
    )
    seed: int = Field(0, ge=0, description="seed of weights and all randomness but the data order")
    backend: Literal["auto", "torch", "mlx"] = Field(
        "auto", description="framework that trains the model"
    )
    device: str = Field("auto", description="device: cpu, cuda, cuda:1, mps, gpu")
    deterministic: bool = Field(False, description="results repeatable bit for bit on the same GPU")
    kernels: str = Field(
        "auto",
        description="kernels; auto: for each op the first that supports the run; strict: the "
        "preferred one, or an error; reference: the plain one; op=name,...: this one for that op "
        "(op=reference: its plain one), also after a policy: strict,attention=sdpa",
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
