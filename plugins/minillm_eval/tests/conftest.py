"""Fixtures: a small run, and local tasks, without network access."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import minillm_core as minillm

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "seven",
    "old",
    "men",
    "sing",
    "of",
    "love",
    "and",
    "war",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of a few steps; return its folder."""
    folder = tmp_path_factory.mktemp("run")
    text = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 12)) for n in range(200)]
    data = folder / "text.jsonl"
    data.write_text("".join(json.dumps({"text": one}) + "\n" for one in text))
    settings = {
        "model.layers": 2,
        "model.dim": 32,
        "model.heads": 2,
        "model.vocab": 320,
        "train.seq_len": 48,
        "train.rows": 8,
        "train.steps": 30,
        "eval.samples": 0,
    }
    loaded = minillm.load("tiny", plugins=[], data=data, settings=settings)
    minillm.Run(minillm.build_plan(loaded), out=folder / "out", cache=folder / "cache").train()
    return folder / "out"


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {
            "question": " ".join(WORDS[n % 7 : n % 7 + 3 + n % 4]),
            "choices": [f"{WORDS[(n + k) % len(WORDS)]}{' and war' * (k % 2)}" for k in range(4)],
            "answer": n % 4,
            "text": " ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 4 + 9 * n)),
        }
        for n in range(24)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    )
    kinds = {
        "toy_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\nfewshot_split: test\n"
        + metric("acc")
        + metric("acc_norm"),
        "toy_word": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: ' {{choices[0]}}'\n" + metric("acc"),
        "toy_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        + metric("word_perplexity", "weighted_perplexity", higher=False),
        "toy_answer": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs:\n  until: ['.', ' and']\n"
        "  max_gen_toks: 6\n" + metric("exact_match"),
    }
    for name, body in kinds.items():
        listed = "metric_list:\n" + "".join(
            line
            for line in body.splitlines(True)
            if line.startswith(("  - ", "    agg", "    hig"))
        )
        rest = "".join(
            line
            for line in body.splitlines(True)
            if not line.startswith(("  - ", "    agg", "    hig"))
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{rest}{listed}")
    return folder


def metric(name: str, aggregation: str = "mean", *, higher: bool = True) -> str:
    return (
        f"  - metric: {name}\n    aggregation: {aggregation}\n"
        f"    higher_is_better: {str(higher).lower()}\n"
    )
