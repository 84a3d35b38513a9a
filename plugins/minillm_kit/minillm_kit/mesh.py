"""Distributed training: two ranks over gloo train as one process, or a parallelism axis refuses the plugin.

    python -B -m minillm_kit.mesh SPEC JSON     trains on 1 and on 2 ranks, and prints the results as JSON

An axis is a row of :data:`AXES`: a way to divide a step or its updates. Both ranks are forked from a
process that has imported torch and computed nothing (fresh.py), and connect through minillm-mesh, as
under a launcher.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm_core import Plan, Refusal
from minillm_core.commands import pip_line, plain
from minillm_core.inspection import (
    ALONE,
    Detected,
    Ranks,
    entry_points,
    join,
    part_of,
)
from minillm_kit import fresh
from minillm_kit.check import Failed, NotApplicable, place
from minillm_kit.numbers import on_host
from minillm_kit.probe import prepared
from minillm_kit.subject import Batch, Subject, first_row, supervised, traced_trainer

Arrays = Mapping[str, np.ndarray]

RANKS, STEPS, PATIENCE = 2, 2, 180
"""Processes; steps, of which the second has optimizer state; timeout in seconds."""

LOSS, CHANGE, ROUNDING = 1e-6, 1e-3, 3e-7
"""Tolerances against one process: of a loss, relative; of a change of a parameter or State, relative to its norm,
since orthogonalisation amplifies rounding; and of its value."""

AGAIN, NUDGES = 10, 8
"""Or this multiple of the deviation of one process from itself with the rows in reverse order and weights off by
their last bit, the largest of this many trials: AdamW makes a full step from a gradient that is only
rounding."""


RAISED = "\n--- raised ---\n"
"""Encloses the error of a rank, as a report shows it."""


@dataclass(frozen=True)
class Axis:
    """A parallelism axis: one way of dividing a run."""

    name: str
    divides: str  # for people
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the small model, as Subject.plan takes them


AXES = (
    Axis(
        "data",
        "whole micro-batches",
        {"train_accumulate": 2, "mesh_shard": "off"},
    ),
    Axis("shard", "updates", {"train_accumulate": 2, "mesh_shard": "updates"}),
    Axis("weights", "weights and updates", {"train_accumulate": 2, "mesh_shard": "weights"}),
    Axis("rows", "rows of micro-batches", {"train_rows": 4, "mesh_shard": "off"}),
    Axis(
        "context",
        "columns of rows",
        {"train_seq_len": 12, "mesh_context": 2, "mesh_shard": "off"},
    ),
    Axis(
        "tensor",
        "heads and hidden units",
        {"model_kv_heads": 4, "mesh_tensor": 2, "mesh_shard": "off"},
    ),
    Axis(
        "pipeline",
        "layers",
        {"train_accumulate": 2, "mesh_pipeline": 2, "mesh_shard": "off"},
    ),
)
"""The axes, in the order of trial."""


def mesh(subject: Subject) -> str:
    """Check that one process and two, divided along each axis, have the same losses, updates and State."""
    if "torch" not in subject.backends:
        raise NotApplicable("processes of torch alone are tried, over gloo: MLX's ring may hang")
    if not any(one.name == "torch" for one in entry_points(group="minillm.ranks")):
        raise NotApplicable(f"minillm-mesh is not installed: {pip_line('minillm-mesh')}")
    if sys.platform != "linux":
        raise NotApplicable("its processes are forked, which is safe on Linux alone")
    found = _asked(subject)
    reasons = {one.get("refused") for one in found.values()}
    if len(reasons) == 1 and None not in reasons:
        raise NotApplicable(f"refused along {', '.join(found)}: {reasons.pop()}")
    return "torch, " + "; ".join(f"{axis}: {_judged(axis, one)}" for axis, one in found.items())


def _asked(subject: Subject) -> dict[str, dict[str, Any]]:
    """Run both ranks; return rank 0's findings by axis.

    Raises:
        Failed: a rank ended with an error, or did not end.
    """
    try:
        ended = fresh.run(
            "minillm_kit.mesh",
            subject.spec,
            subject.described,
            environment=dict(os.environ),
            seconds=PATIENCE,
            imported=prepared(*subject.backends),
        )
    except TimeoutError:
        cause = "a rank waits for another: a hook or a node computes otherwise in each process"
        raise Failed(f"not done after {PATIENCE} seconds", cause=cause) from None
    if ended.code:
        # the first error: the other process may raise because it lost this one
        raised = ended.stderr.split(RAISED)[1:2]
        last = plain((ended.stderr.strip().splitlines() or ["no output"])[-1])
        cause = "it raises in one of two processes, which has a part of the rows, columns, heads or layers"
        raise Failed(*raised or [f"exit {ended.code}: {last}"], cause=cause)
    return json.loads(ended.stdout.splitlines()[-1])


def _judged(axis: str, found: Mapping[str, Any]) -> str:
    """Return a summary line for an axis.

    Raises:
        Failed: two ranks do not train as one process.
    """
    if "refused" in found:
        return f"refused, {found['refused']}"
    cause = (
        "it computes a mean over its own rows, draws from a generator of the process, or keeps what it "
        "has seen: return sums and counts, take random_stream(), and keep what is learnt in a State"
    )
    if axis == "context":
        cause = f"it reads earlier columns and declares no lookback; or {cause}"
    for step, (one, other) in enumerate(zip(*found["losses"], strict=True), 1):
        if not abs(one - other) <= LOSS * abs(one):
            raise Failed(
                f"{axis}: step {step} has the loss {other:.8f}, on one process {one:.8f}",
                cause=cause,
            )
    if not found["same"]:
        raise Failed(f"{axis}: the ranks end with other weights or State", cause=cause)
    name, apart, bound = found["worst"]
    if not apart <= bound:
        raise Failed(
            f"{axis}: {name} is {apart:.1e} from one process's (bound {bound:.0e})", cause=cause
        )
    return "equal to the bit" if found["bits"] else f"{apart / bound:.0e} of the bound"


def steps_of(subject: Subject, plan: Plan) -> list[list[Batch]]:
    """Build the micro-batches of each step, with very different numbers of labels per rank."""
    count = plan.config.train.accumulate
    each = subject.batches(plan, STEPS * count)
    for number, batch in enumerate(each):
        rows, columns = np.indices(batch["labels"].shape)
        few = (rows >= 2) | (number % count > 0)
        hidden = few & (columns % 3 > 0)
        batch["labels"] = np.where(hidden, np.int32(-1), batch["labels"])
    return [each[step * count : (step + 1) * count] for step in range(STEPS)]


def train(
    subject: Subject,
    plan: Plan,
    steps: Sequence[Sequence[Batch]],
    ranks: Ranks,
    *,
    nudged: int | None = None,
) -> tuple[list[float], Arrays, Arrays]:
    """Train some steps together with other ranks; return losses, and the arrays before and after.

    ``nudged``: the seed with which initial weights are perturbed by their last bit.
    """
    run = subject.trainer(plan, "torch", stirred=True)
    if nudged is not None:
        rng, held = np.random.default_rng(nudged), run.arrays()
        for name in sorted(name for name in held if name.startswith("model.")):
            aside = rng.choice([-np.inf, np.inf], held[name].shape).astype(np.float32)
            held[name] = np.nextafter(held[name], aside)
        run.load(held)
    if ranks.size > 1 and plan.config.mesh.shard != "off":
        # in the order of a session: shard the new trainer, then load the weights
        held, ranks.shard = run.arrays(), plan.config.mesh.shard
        run = traced_trainer(plan, "torch", ranks)
        run.resume(held)
    else:
        run.join(ranks)
    start, losses, total = run.arrays(), [], plan.config.train.steps or 1
    for index, micro in enumerate(steps, 1):
        part = [ranks.columns(one, plan) for one in part_of(micro, *ranks.data_parallel)]
        result = run.read(run.step(part, plan.values(index / total), supervised(micro)))
        losses.append(result.loss)
    return losses, start, run.arrays() | {"logits": run.next_logits(first_row(steps[0][0]))}


def compared(start: Arrays, one: Arrays, other: Arrays) -> dict[str, tuple[float, float]]:
    """Map parameters and State to (difference, bound)."""
    found = {}
    for name in (name for name in one if name.startswith(("model.", "state."))):
        before, after, apart = (on_host(arrays[name]) for arrays in (start, one, other))
        error, change = float(np.linalg.norm(after - apart)), float(np.linalg.norm(after - before))
        found[name] = error, CHANGE * change + ROUNDING * float(np.linalg.norm(after))
    return found


def worst(found: Mapping[str, tuple[float, float]]) -> tuple[str, float, float]:
    """Return the entry with the largest difference relative to its bound."""
    share = {
        name: error / bound if bound else float(error > 0) for name, (error, bound) in found.items()
    }
    name = max(share, key=share.__getitem__)
    return (name, *found[name])


def turned(steps: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """Return the same steps with rows and micro-batches in reverse order."""
    return [
        [{name: array[::-1].copy() for name, array in batch.items()} for batch in micro[::-1]]
        for micro in steps
    ]


def tried(subject: Subject, axis: Axis, ranks: Ranks) -> dict[str, Any]:
    """Train on these ranks, and on rank 0 alone; return the differences, or the refusal."""
    try:
        plan = subject.planned(**axis.settings)
        mesh = plan.config.mesh
        ranks.divide(plan)
        steps = steps_of(subject, plan)
        losses, _, arrays = train(subject, plan, steps, ranks)
    except Refusal as refusal:
        return {"refused": plain(refusal.what)}
    digest, shared = hashlib.sha256(), mesh.shard != "off"
    held = sorted(name for name in arrays if not name.startswith("random."))
    for name in ["logits"] if shared else held:  # only rank 0 gathers the sharded updates
        digest.update(arrays[name].tobytes())
    same = len({*ranks.all_gather([int(digest.hexdigest()[:12], 16)])}) == 1
    if not ranks.is_main:
        return {}
    alone, start, expected = train(subject, plan, steps, ALONE)
    found = compared(start, expected, arrays)
    name, error, bound = worst(found)
    for seed in range(NUDGES):
        if error <= bound:
            break
        # a gradient may be only rounding, which does not give a full step in every trial
        _, _, again = train(subject, plan, turned(steps), ALONE, nudged=seed)
        own = compared(start, expected, again)
        found = {
            key: (apart, max(most, AGAIN * own[key][0])) for key, (apart, most) in found.items()
        }
        name, error, bound = worst(found)
    return {
        "losses": [alone, losses],
        "same": same,
        "worst": [name, error, bound],
        "bits": all(error == 0.0 for error, _ in found.values()),
    }


def main(arguments: list[str]) -> None:
    """Train on two ranks, one of them forked here."""
    spec, given = arguments
    subject = Subject(spec, **json.loads(given))
    with socket.create_server(("localhost", 0)) as held:
        port = held.getsockname()[1]
    met = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    child = os.fork()
    rank = 0 if child else 1
    os.environ.update(met, RANK=str(rank), LOCAL_RANK=str(rank))
    code, along = 0, ""  # the axis that is being tried
    try:
        with redirect_stdout(sys.stderr):  # keeps a hook's prints out of the answer
            ranks = join(Detected("torch", "cpu", ""))
            found = {}
            for axis in AXES:
                along = axis.name
                found[along] = tried(subject, axis, ranks)
            along = ""
        if child:
            sys.stdout.write(json.dumps(found))
        ranks.close()
    except BaseException as error:
        traceback.print_exc()
        if along:
            raised = f"{type(error).__name__} along {along}: {place(error, subject)}"
            sys.stderr.write(f"{RAISED}{raised}{RAISED}")
        code = 1
        if child:  # it may wait for this one, whose connections are still there
            os.kill(child, signal.SIGKILL)
    if not child:
        sys.stderr.flush()
        os._exit(code)
    _, ended = os.waitpid(child, 0)
    sys.exit(code or os.waitstatus_to_exitcode(ended))


if __name__ == "__main__":
    main(sys.argv[1:])
