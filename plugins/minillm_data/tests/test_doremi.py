"""DoReMi: the weights grow with excess loss, and a source that can still be learnt gets more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core import ConfigError, MinillmError
from minillm_data.doremi import SMOOTHING, learn_weights, updated
from minillm_data.mix import mix
from minillm_data.source_weights import SourceWeights

SMALL = {
    **{"model.dim": 32, "model.layers": 1, "model.heads": 2, "model.kv_heads": 2},
    **{"model.hidden": 32, "model.vocab": 300, "train.rows": 4, "train.accumulate": 2},
    **{"train.seq_len": 32, "train.lr": 0.02, "backend": "torch", "device": "cpu"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write two sources: noise, which cannot be learnt, and sentences, which are learnt slowly."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    noise = ["".join(chr(c) for c in rng.integers(97, 123, 200)) for _ in range(60)]
    words = [f"w{n:02d}" for n in range(40)]
    follows = rng.permutation(40)

    def sentence() -> str:
        at, said = int(rng.integers(40)), []
        for _ in range(50):
            said.append(words[at])
            at = int(follows[at])
        return " ".join(said)

    made = {"noise": noise, "order": [sentence() for _ in range(60)]}
    for name, texts in made.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return [str(folder / "noise.jsonl"), str(folder / "order.jsonl")]


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 5)), min_size=1, max_size=6))
def test_an_update_is_exponential_in_the_excess_and_smoothed(
    pairs: list[tuple[float, float]],
) -> None:
    before = np.array([weight for weight, _ in pairs])
    before /= before.sum()
    excess = np.array([one for _, one in pairs])
    after = updated(before, excess)
    grown = before * np.exp(excess)
    expected = (1 - SMOOTHING) * grown / grown.sum() + SMOOTHING / len(pairs)
    np.testing.assert_allclose(after, expected, rtol=1e-12)
    assert after.sum() == pytest.approx(1)
    assert after.min() >= SMOOTHING / len(pairs) * (1 - 1e-9)


@pytest.mark.slow
def test_what_can_be_learnt_gets_the_weight_and_the_same_call_gives_the_same(
    sources: list[str], tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []

    def learn() -> dict[str, Any]:
        return learn_weights(
            sources,
            30,
            settings=SMALL,
            cache=tmp_path / "cache",
            progress=lambda what, done, total: told.append((what, done, total)),
        )

    found = learn()
    assert sum(found["weights"]) == pytest.approx(1)
    assert found["weights"][1] > found["weights"][0]
    assert len(found["course"]) == 30
    np.testing.assert_allclose(np.mean(found["course"], axis=0), found["weights"])
    assert {what for what, _, _ in told} == {
        "reading",
        "training the reference model",
        "training the proxy model",
    } - {"reading"}
    assert learn() == found


def test_mix_takes_the_weights_that_were_learnt(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def learnt(paths: list[str], **given: Any) -> dict[str, Any]:
        asked.append({"paths": paths, "steps": given["steps"], "preset": given["preset"]})
        return {"weights": [0.25, 0.75], "excess": [0.0, 0.5], "course": [[0.25, 0.75]]}

    monkeypatch.setattr("minillm_data.doremi.learn_weights", learnt)
    report = mix(sources, tmp_path / "mixed", doremi=7)
    assert asked == [{"paths": sources, "steps": 7, "preset": "tiny"}]
    assert [one["share"] for one in report["sources"]] == [0.25, 0.75]
    assert report["learnt"]["excess"] == [0.0, 0.5]
    assert report["doremi"] == {"steps": 7, "preset": "tiny"}
    page = (tmp_path / "mixed" / "report.htm").read_text()
    assert "DoReMi, two runs of 7 steps, preset tiny" in page


@pytest.mark.parametrize(
    ("paths", "given", "message"),
    [
        (["a", "b"], {"doremi": 0}, "runs of 0 steps"),
        (["a:1", "b:2"], {"doremi": 5}, "--doremi with weights has no effect"),
        (["a", "b"], {"doremi": 5, "temperature": 2.0}, "--doremi with --temperature"),
        (["a", "b"], {"doremi": 5, "like": ["c"], "size": 9}, "--doremi with --like"),
        (["a"], {"doremi": 5}, "--doremi with one source"),
        (["a", "b"], {"preset": "tiny"}, "--preset without --doremi has no effect"),
    ],
)
def test_options_without_effect_are_refused(
    paths: list[str], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        mix(paths, tmp_path / "out", **given)


def test_one_source_has_nothing_to_be_weighed_against(sources: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing to weigh"):
        learn_weights(sources[:1], 3)


# the plugin


def run_of(sources: list[str], tmp_path: Path, **options: Any) -> minillm.Run:
    given = {"data.paths": [f"{path}:1" for path in sources], "train.steps": 2, **SMALL, **options}
    loaded = minillm.load("tiny", plugins=["source_weights"], settings=given)
    return minillm.Run(minillm.build_plan(loaded), cache=tmp_path / "cache")


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.5e308, 0.5e308)])
def test_each_source_weighs_what_it_is_given_with_a_mean_of_one(
    weights: tuple[float, ...],
) -> None:
    plugin = SourceWeights(weights=weights)
    batch = {"ids": np.zeros((2, 3), np.int32), "source": np.array([[0] * 3, [1] * 3], np.int32)}
    found = plugin.on_batch(dict(batch), "train")["weights"]
    np.testing.assert_array_equal(found, [[1.5] * 3, [0.5] * 3])
    again = plugin.on_batch({**batch, "weights": found}, "train")["weights"]
    np.testing.assert_array_equal(again, [[2.25] * 3, [0.25] * 3])
    assert "weights" not in plugin.on_batch(dict(batch), "eval")


def test_equal_weights_train_as_none_do(sources: list[str], tmp_path: Path) -> None:
    losses = []
    for weights in ((), (2.0, 2.0)):
        run = run_of(sources, tmp_path, **{"source_weights.weights": list(weights)})
        losses.append([one.loss for one in run.steps() if isinstance(one, minillm.Stepped)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("weights", "mixed", "said"),
    [
        ([1.0], True, "weights: 1, sources of --data: 2"),
        ([1.0, 2.0, 9.0], True, "weights: 3, sources of --data: 2"),
        ([1.0, 2.0], False, "weights: 2, sources of --data: 0"),
        ([1.0, -0.5], True, "the weight -0.5 is below 0"),
        ([0.0, 0.0], True, "all weights are 0"),
    ],
)
def test_weights_that_do_not_fit_the_sources_are_refused(
    sources: list[str], tmp_path: Path, weights: list[float], mixed: bool, said: str
) -> None:
    options: dict[str, Any] = {"source_weights.weights": weights}
    if not mixed:
        options["data.paths"] = sources
    with pytest.raises(MinillmError, match=said):
        run_of(sources, tmp_path, **options)


def test_the_command_says_what_it_needs(program: Callable[..., Any], tmp_path: Path) -> None:
    code, _, stderr = program("data", "mix", "a", "b", "--to", str(tmp_path / "o"), "--preset", "x")
    assert code == 2
    assert "--preset without --doremi" in stderr
