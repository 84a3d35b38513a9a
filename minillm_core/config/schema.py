"""What a run can be told, and what each setting means. One place: help, validation and docs read it from here.

Defaults that depend on the model's size are not here but in ``presets/*.toml``; a field without a
default is one that every preset must state.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "TrainConfig",
]


class Section(BaseModel):
    """A table of settings: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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


class TrainConfig(Section):
    """The optimisation."""

    steps: int | None = Field(None, ge=1, description="optimizer steps; or give minutes")
    minutes: float | None = Field(
        None, gt=0, description="stop by the clock; the schedule follows it"
    )
    rows: int = Field(ge=1, description="rows of one micro-batch on one device")
    accumulate: int = Field(1, ge=1, description="micro-batches in a step")
    seq_len: int = Field(ge=1, description="tokens in a row")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute dtype; auto: float32 on a CPU, bfloat16 on a GPU"
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
        0.0, ge=0, description="nats over the median of the last 64 losses that rewind; 0: never"
    )
    rewind: int = Field(100, ge=1, description="steps to go back at least at a spike")
    skip: int = Field(200, ge=0, description="steps' batches to pass over after a rewind")


class DataConfig(Section):
    """The text."""

    paths: tuple[str, ...] = Field(
        (), description="files or folders; none: the running Python's standard library"
    )
    val: float | str = Field(0.05, description="a path, or the fraction that is held out")
    tokenizer: str | None = Field(None, description="a tokenizer.json; none: one is trained")
    seed: int = Field(0, ge=0, description="fixes the data order, apart from the run's seed")


class EvalConfig(Section):
    """Validation."""

    every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    tokens: int = Field(
        65_536, ge=1, description="predictions in one evaluation; on a CPU fewer are sooner done"
    )


class CheckpointConfig(Section):
    """Checkpoints."""

    every: int = Field(1000, ge=0, description="steps between checkpoints; 0: none at all")
    keep: int = Field(3, ge=1, description="how many verified ones to keep")
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="when one cannot be written, such as on a full disk"
    )


class LogConfig(Section):
    """metrics.jsonl and the console."""

    every: int = Field(1, ge=1, description="steps between step events")


class Config(Section):
    """Everything that a run was told, origins apart."""

    preset: str = Field(description="a shape with its training, and plugins in a recipe")
    model: ModelConfig
    train: TrainConfig
    data: DataConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    plugins: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="plugin name -> its options as given, not yet typed"
    )
    init: str | None = Field(None, description="a model directory to start from")
    seed: int = Field(0, ge=0, description="initial weights and all other randomness but the data")
    backend: Literal["auto", "torch", "mlx"] = Field(
        "auto", description="the framework that trains"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, mps, gpu")
    deterministic: bool = Field(False, description="the same bits again on the same GPU")
    kernels: str = Field(
        "auto",
        description="auto: for each op the first kernel that serves; strict: the preferred one, or "
        "no run; reference: the plain one; op=name,...: this one for that op, op=reference its plain "
        "one, also after a word: strict,attention=sdpa",
    )
