"""``--memory``: choose the rows of a micro-batch that fit, and gradient accumulation to match."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace

from minillm_core.errors import Refusal
from minillm_core.plan import build_plan
from minillm_core.plan.render import sized
from minillm_core.train.request import Prepared

UNITS = {"": 1, "B": 1, **{f"{u}B": 10 ** (3 * i) for i, u in enumerate("KMGT", 1)}}
UNITS |= {f"{u}iB": 2 ** (10 * i) for i, u in enumerate("KMGT", 1)}


def bytes_of(size: str) -> float:
    """Parse a size: ``20GiB``, ``512 MB``, or a number of bytes.

    Raises:
        Refusal: it is not a size.
    """
    read = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if read is None or read[2] not in UNITS:
        raise Refusal(
            f"'{size}' is not a size",
            where=f"--memory {size}",
            fix="--memory 20GiB, 512MiB or 24GB",
        )
    return float(read[1]) * UNITS[read[2]]


def fit_memory(prepared: Prepared) -> Prepared:
    """Set train.rows and train.accumulate to fit ``--memory``, with a note; without it change nothing.

    Among the splits of a step into equal micro-batches, choose the most rows whose memory, as estimated
    by ``minillm plan``, is at most that size.

    Raises:
        Refusal: not even one row fits, the batch shape changes during the run, or the run is resumed.
    """
    asked, loaded = prepared.request and prepared.request.memory, prepared.loaded
    if asked is None:
        return prepared
    train, where, limit = loaded.config.train, f"--memory {asked}", bytes_of(asked)
    if prepared.earlier is not None:
        what, fix = "a resumed run keeps the rows of its batches", "leave --memory out"
        raise Refusal(what, where=where, fix=fix)
    plan = build_plan(loaded.config, prepared.plugins)
    if plan.shaping is not None:
        what = f"the sizes of batches change in this run, by {plan.shaping.choose.owner}"
        raise Refusal(what, where=where, fix="leave out --memory, or the plugin that changes them")
    total = train.rows * train.accumulate
    splits = [rows for rows in range(1, total + 1) if total % rows == 0]

    def needed(rows: int, **more: bool) -> int:
        split = plan.with_train(rows=rows, accumulate=total // rows, **more)
        return split.estimate(prepared.dtype).bytes

    if (least := needed(1)) > limit:
        again = needed(1, checkpointing=True)
        fix = "a smaller train.seq_len or model, or more memory"
        if again <= limit:
            fix = f"train.checkpointing=true (about {sized(again)}), {fix}"
        raise Refusal(
            f"one row takes about {sized(least)}, more than {sized(limit)}", where=where, fix=fix
        )
    fits = bisect_left(splits, True, key=lambda rows: needed(rows) > limit)
    rows = splits[fits - 1]
    chosen = {"rows": rows, "accumulate": total // rows}
    words = " ".join(f"train.{name}={number}" for name, number in chosen.items())
    note = f"{where}: {words}, about {sized(needed(rows))}; {total} rows a step as before"
    config = loaded.config.model_copy(update={"train": train.model_copy(update=chosen)})
    origins = loaded.origins | {f"train.{name}": where for name in chosen}
    notes = (*loaded.notes, note)
    return replace(prepared, loaded=replace(loaded, config=config, origins=origins, notes=notes))
