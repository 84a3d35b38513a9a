"""Decoding: logits from the KV cache equal those of the whole pass, however the sequence is cut."""

from __future__ import annotations

import numpy as np

from minillm_kit.check import Failed
from minillm_kit.oracle import Oracle
from minillm_kit.subject import Batch, Subject, first_row, rows

CUTS = ((1,) * 11, (6, 1, 1, 3), (2, 5, 4))
"""Sizes of the pieces, with equal total length."""

LEVEL = 2e-5

EXACT = 1e-12
"""Tolerance of features in float64."""

ROUNDING = 8 * 2.0**-24
"""Tolerance of one column's loss in float32, where sums may be in another order."""


def decodes(subject: Subject) -> str:
    """Check that decoding in pieces gives the logits of one pass over the whole sequence."""
    plan, found = subject.plan(), []
    row = first_row(subject.batches(plan, 1, phase="decode")[0])
    for backend in subject.backends:
        run, worst = subject.trainer(plan, backend, stirred=True), 0.0
        ends = sorted({int(end) for cut in CUTS for end in np.cumsum(cut)})
        whole = {end: run.next_logits(_columns(row, 0, end)) for end in ends}
        for cut in CUTS:
            decoding, at = run.decoding(), 0
            for size in cut:
                logits = decoding.feed(_columns(row, at, at + size))
                at += size
                apart = float(np.abs(logits - whole[at]).max())
                worst = max(worst, apart)
                if not apart <= LEVEL:
                    raise Failed(
                        f"{backend}: fed {cut}, the logits after column {at} are {apart:.1e} from "
                        f"those of the whole (bound {LEVEL:.0e})",
                        cause="a node looks at earlier columns and declares no lookback, or at "
                        "later ones",
                    )
        found.append(f"{backend} {worst:.0e}")
    return "logits apart by " + ", ".join(found)


def causal(subject: Subject) -> str:
    """Check that a later token changes no earlier logit."""
    plan, found = subject.plan(), []
    (batch,) = rows(plan.config, 1)
    half = batch["ids"].shape[1] // 2
    labels = np.full_like(batch["labels"], -1)
    labels[:, :half] = batch["ids"][:, 1 : half + 1]
    changed = batch["ids"].copy()
    changed[:, half:] = (changed[:, half:] + 1) % plan.config.model.vocab
    both = [
        subject.hooked(plan, {**batch, "ids": ids, "labels": labels}, phase="eval")
        for ids in (batch["ids"], changed)
    ]
    if subject.on_numpy:
        oracle = Oracle(subject, plan)
        one, other = (oracle.hidden(batch)[:, :half] for batch in both)
        apart = np.abs(one - other).max((0, 2)) / np.abs(one).max()
        found.append(_unmoved("numpy, features", apart, EXACT, half))
    for backend in subject.backends:
        run = subject.trainer(plan, backend, stirred=True)
        one, other = (
            np.array([run.evaluate([_alone(batch, at)])[0] for at in range(half)]) for batch in both
        )
        apart = np.abs(one - other) / np.maximum(np.abs(one), 1.0)
        found.append(_unmoved(f"{backend}, loss", apart, ROUNDING, half))
    return ", ".join(found)


def _alone(batch: Batch, column: int) -> Batch:
    """Return the batch with the labels of a single column."""
    labels = np.full_like(batch["labels"], -1)
    labels[:, column] = batch["labels"][:, column]
    return {**batch, "labels": labels}


def _unmoved(what: str, apart: np.ndarray, bound: float, half: int) -> str:
    """Return the largest difference in an earlier column.

    Raises:
        Failed: it exceeds rounding.
    """
    worst = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
    if not apart[worst] <= bound:
        raise Failed(
            f"{what}: other tokens from column {half} on change column {worst} by "
            f"{apart[worst]:.1e} (bound {bound:.0e})",
            cause="a node sees later columns: a shift the wrong way, a mean over all columns",
        )
    return f"{what} {apart[worst]:.0e}"


def _columns(row: Batch, start: int, end: int) -> Batch:
    return {name: array[:, start:end] for name, array in row.items()}
