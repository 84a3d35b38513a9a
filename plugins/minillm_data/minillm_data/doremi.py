"""DoReMi: mixture weights learnt by two small runs.

Xie et al. 2023 (DoReMi, arXiv:2305.10429). A reference model is trained on all sources in equal
parts. A proxy model of the same size and seed is trained on the same batches by group distributionally
robust optimisation (group DRO): at each step a source's weight grows with its excess loss, the proxy's
loss above the reference's, and the weights scale the proxy's loss. Their mean over the steps is the
mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import ConfigError, build_plan, load
from minillm_core.documents import Progress, find
from minillm_lab.study import Stepper, Study, open_corpus

RATE = 1.0
"""Step size of the weight updates, as in the paper."""

SMOOTHING = 1e-3
"""Smoothing: share of uniform weights mixed into each step's weights, as in the paper."""


def learn_weights(
    paths: Sequence[str | Path],
    steps: int,
    *,
    preset: str = "tiny",
    settings: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Learn the mixture weights of sources with a reference run and a proxy run.

    Args:
        paths: two sources or more; files or folders.
        steps: steps of each of the two runs.
        preset: shape and training of both models.
        settings: other settings of the runs, such as ``{"model.dim": 128}``.
        cache: folder of the token cache; default: minillm's own.
        say: prints a line.
        progress: called with the bytes of text trained on.

    Returns:
        JSON: ``weights``, one per source, with sum 1; ``excess``, the excess loss per source in nats per
        token at the end of the proxy run; ``course``, the weights after every step.

    Raises:
        ConfigError: fewer than two sources, or an invalid setting.
        DataError: a source cannot be read, or is too small for one row.
    """
    if len(paths) < 2:
        raise ConfigError(
            "there is nothing to weigh", where="DoReMi", fix="name two sources or more"
        )
    given = {"data.paths": [f"{path}:1" for path in paths], "train.steps": steps}
    config = load(preset, plugins=["source_weights"], settings={**given, **(settings or {})})
    plan = build_plan(config)
    corpus = open_corpus(config.config, cache=cache, say=say)
    study = Study(corpus, say=say)
    files = find([str(path) for path in paths], lambda line: None)
    text = sum(file.unpacked for file in files)
    a_step = plan.tokens_per_step * text / (corpus.train.tokens + corpus.val.tokens)

    def counted(what: str) -> Iterator[int]:
        for step in range(1, steps + 1):
            if progress is not None:
                progress(what, int((step - 1) * a_step), int(steps * a_step))
            yield step

    with study.stepper(plan) as reference, study.stepper(plan) as proxy:
        for step in counted("training the reference model"):
            micro, _, supervised = reference.arguments()
            handle = reference.trainer.step(micro, plan.values(step / steps), supervised)
            reference.trainer.read(handle)
        weights, course = np.full(len(paths), 1 / len(paths)), []
        recent = np.zeros(len(paths))
        for step in counted("training the proxy model"):
            micro, _, supervised = proxy.arguments()
            excess, counts = _excess(micro, proxy, reference, len(paths))
            weights = updated(weights, excess)
            course.append(weights)
            recent = excess if step == 1 else 0.9 * recent + 0.1 * excess
            # Normalise by token counts: a source's share of the step's mean loss is its weight.
            each = weights * counts.sum() / np.maximum(counts, 1)
            weighed = [{**one, "weights": each[one["source"]].astype(np.float32)} for one in micro]
            handle = proxy.trainer.step(weighed, plan.values(step / steps), supervised)
            proxy.trainer.read(handle)
    return {
        "weights": np.mean(course, axis=0).tolist(),
        "excess": recent.tolist(),
        "course": [one.tolist() for one in course],
    }


def updated(weights: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Update weights by exponentiated gradient ascent, smoothed towards uniform: float64 (k,), sum 1.

    Args:
        weights: float64 (k,), the previous step's weights.
        excess: float64 (k,), excess loss in nats per token, at least 0.
    """
    grown = weights * np.exp(RATE * excess)
    return (1 - SMOOTHING) * grown / grown.sum() + SMOOTHING / len(weights)


def _excess(
    micro: Sequence[Mapping[str, np.ndarray]], proxy: Stepper, reference: Stepper, sources: int
) -> tuple[np.ndarray, np.ndarray]:
    """Average the excess loss, clipped per token at 0, over each source's tokens of a step.

    Returns:
        float64 (sources,), 0 for a source without tokens; and int64 (sources,), tokens per source.
    """
    total, counts = np.zeros(sources), np.zeros(sources, np.int64)
    for batch in micro:
        there = batch["labels"] >= 0
        source = batch["source"][there]
        worse = proxy.trainer.losses(batch)[there] - reference.trainer.losses(batch)[there]
        total += np.bincount(source, np.maximum(worse, 0.0), minlength=sources)
        counts += np.bincount(source, minlength=sources)
    return total / np.maximum(counts, 1), counts
