"""Runs with a frozen reference model: bit-exact resume, reading without it, and refusal of another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import DataError, FrozenModel, Refusal, Run, Stepped, build_plan, load

SMALL: dict[str, Any] = {
    **{"model.layers": 1, "model.dim": 32, "model.heads": 2, "model.kv_heads": 1},
    **{"model.hidden": 32, "model.vocab": 300, "train.rows": 4, "train.seq_len": 16},
    **{"train.steps": 6, "train.compile": "off", "train.dtype": "float32", "device": "cpu"},
    **{"eval.tokens": 200, "eval.samples": 0, "eval.every": 0, "checkpoint.every": 100},
}
TEXT = "\n".join(
    f"The quick brown fox number {n} jumps over the lazy dog {n * n}." for n in range(300)
)

Train = Callable[..., Run]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the text, the cache, and the run of a reference model."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    run(folder, "reference", backend="torch", seed=7).train()
    return folder


def run(place: Path, name: str, plugins: str | None = None, **changed: Any) -> Run:
    """Bind a new run of the text, whose options are ``rho1__model``."""
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    data = changed.pop("data", place / "text.txt")
    config = load("tiny", plugins=plugins, settings={**SMALL, **changed}, data=data)
    return Run(build_plan(config), out=place / name, cache=place / "cache")


def arrays(place: Path, name: str) -> dict[str, np.ndarray]:
    return FrozenModel(place / name).arrays()


@pytest.mark.broad(2)
@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", ["distill", "rho1", "jest"])
def test_a_resumed_run_is_the_uninterrupted_one(place: Path, name: str, backend: str) -> None:
    given = {"backend": backend, f"{name}.model": str(place / "reference")}
    whole, broken = (f"{name}-{backend}-{part}" for part in ("whole", "broken"))
    run(place, whole, name, **given).train()
    with run(place, broken, name, **given) as first:
        steps = first.steps()
        while not (isinstance(event := next(steps), Stepped) and event.step == 3):
            pass
        first.save()
    Run.open(place / broken, cache=place / "cache").train()
    expected = arrays(place, whole)
    for key, array in arrays(place, broken).items():
        assert np.array_equal(array, expected[key]), key
    assert not any("reference" in key or "teacher" in key for key in expected)
    plain = arrays(place, "reference")
    assert any(not np.array_equal(plain[key], array) for key, array in expected.items())


def test_a_run_knows_its_reference_by_its_weights(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "reference", tmp_path / "one")
    with run(place, "known", "rho1", rho1__model=str(tmp_path / "one")) as begun:
        plan_hash = begun.plan.hash
        steps = begun.steps()
        while not isinstance(next(steps), Stepped):
            pass
        begun.save()
    record = json.loads((place / "known" / "run.json").read_text())
    (held,) = record["references"].values()
    assert held == {"path": str(tmp_path / "one"), **FrozenModel(tmp_path / "one").identity}
    (tmp_path / "one").rename(tmp_path / "two")  # the trained model is read without it
    with Run.open(place / "known", cache=place / "cache") as read:
        assert read.plan.hash == plan_hash
        assert read.generate("The", max_tokens=3).startswith("The")
        assert read.evaluate(place / "text.txt", max_tokens=50).tokens == 50
    with pytest.raises(Refusal, match="holds no run"):
        Run.open(place / "known", cache=place / "cache").train()
    elsewhere = {"rho1.model": str(tmp_path / "two")}
    other = {"rho1.model": str(tmp_path / "other")}
    shutil.copytree(place / "known", tmp_path / "other")
    with pytest.raises(Refusal, match="not the model that the run began with") as refused:
        Run.open(place / "known", settings=other, cache=place / "cache").train()
    assert refused.value.exit_code == 2
    Run.open(place / "known", settings=elsewhere, cache=place / "cache").train()
    assert Run.open(place / "known").step == 6


def test_a_reference_of_other_ids_is_refused(place: Path) -> None:
    given = {"rho1__model": str(place / "reference")}
    with pytest.raises(DataError, match=r"has 300 ids, but model\.vocab is 290"):
        run(place, "ids", "rho1", **given, **{"model.vocab": 290})
    (place / "other.txt").write_text(TEXT.upper())
    with pytest.raises(DataError, match="tokenizer of the reference is not the run's"):
        run(place, "words", "rho1", **given, data=place / "other.txt")
    assert not (place / "ids").exists()


def test_a_reference_whose_batches_a_plugin_made_is_refused(place: Path) -> None:
    run(place, "hashed", "bigram_hash", backend="torch", train__steps=1).train()
    with pytest.raises(Refusal, match="on_batch of plugin 'bigram_hash'"):
        run(place, "beside", "rho1", rho1__model=str(place / "hashed"))


def test_a_reference_that_is_not_there_is_refused_before_the_start(
    program: Any, place: Path
) -> None:
    words = ("--preset", "tiny", "--data", str(place / "text.txt"), "--plugins", "jest")
    gone = str(place / "gone")
    code, _, err = program("train", *words, f"jest.model={gone}", "--out", str(place / "none"))
    assert code == 2
    assert f"{gone} holds no run" in err
    assert not (place / "none").exists()
    there = f"jest.model={place / 'reference'}"
    code, out, err = program("plan", *words, there, "model.vocab=300")
    assert code == 0, err
    assert out.count("reference 'jest_reference'") == 2  # its FLOPs, and its bytes


def test_losses_are_those_of_an_evaluation_and_of_the_logits(place: Path) -> None:
    with Run.open(place / "reference", cache=place / "cache") as trained:
        assert trained.tokenizer is not None
        ids = [trained.tokenizer.end_of_text, *trained.tokenizer.encode([TEXT])[0][:200].tolist()]
        rows = [ids[first : first + 17] for first in range(0, 160, 16)]
        losses = trained.losses([*rows, ids[:5]])
        assert [len(one) for one in losses] == [16] * 10 + [4]
        logits = trained.logits(ids[:16])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -log_p[np.arange(16), ids[1:17]]
        np.testing.assert_allclose(losses[0], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(losses[-1], losses[0][:4], rtol=1e-5, atol=1e-5)
        (place / "few.txt").write_text(TEXT)
        found = trained.evaluate(place / "few.txt", max_tokens=160)
        assert found.val_loss == pytest.approx(np.concatenate(losses[:10]).mean(), rel=1e-5)
        for wrong in ([1], list(range(18)), [1, 300], [-1, 2]):
            with pytest.raises(DataError, match="a row of"):
                trained.losses([wrong])
