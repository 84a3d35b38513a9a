"""A run trained for two steps on a few chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm

SMALL = {
    "model.layers": 1,
    "model.dim": 32,
    "model.heads": 2,
    "model.vocab": 300,
    "train.seq_len": 64,
    "train.rows": 4,
    "train.steps": 2,
    "eval.samples": 0,
    "data.val": 0.2,
}

Train = Callable[..., Path]
Planned = Callable[..., minillm.Plan]


@pytest.fixture
def planned() -> Planned:
    """Build a small plan of a run on chats, with settings such as ``data__val=0.1``."""

    def planned(data: Path, **more: Any) -> minillm.Plan:
        options = {key.replace("__", "."): value for key, value in more.items()}
        plugins = options.pop("plugins", "sft")
        loaded = minillm.load("tiny", plugins=plugins, data=data, settings={**SMALL, **options})
        return minillm.build_plan(loaded)

    return planned


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train a run on chats and return its folder, once per set of settings."""
    folder, made = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def train(plugins: str | None = "sft", **more: Any) -> Path:
        key = json.dumps([plugins, more], sort_keys=True)
        if key not in made:
            data, out = folder / f"data-{len(made)}.jsonl", folder / f"run-{len(made)}"
            turns = [
                {"role": "user", "content": "What is {} plus one, and why?"},
                {"role": "assistant", "content": "It is more, my friend."},
            ]
            record = {"messages": turns} if plugins else {"text": "A text, and no chat."}
            data.write_text("".join(json.dumps({**record, "id": n}) + "\n" for n in range(60)))
            settings = {**SMALL, **{key.replace("__", "."): one for key, one in more.items()}}
            loaded = minillm.load("tiny", plugins=plugins, data=data, settings=settings)
            minillm.Run(minillm.build_plan(loaded), out=out, cache=folder / "cache").train()
            made[key] = out
        return made[key]

    return train


@pytest.fixture(scope="session")
def other_boundary(
    trained: Train, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], dict[str, str]]:
    """Return settings of ``trained`` for documents that begin with ``</s>``."""
    path = tmp_path_factory.mktemp("other") / "tokenizer.json"

    def settings() -> dict[str, str]:
        text = (trained() / "tokenizer.json").read_text()
        path.write_text(text.replace("<|endoftext|>", "</s>"))
        return {"data__tokenizer": str(path), "data__end_of_text": "</s>"}

    return settings
