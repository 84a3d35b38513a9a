"""The implementation of ``minillm plan``: the plan, the origins of its settings, and its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.backends.bind import kernel_preflight
from minillm_core.backends.ranks import forecaster
from minillm_core.checkpoint.directories import export_checked
from minillm_core.cli.console import emit, say
from minillm_core.cli.plan import PlanOutput
from minillm_core.config.folders import cache_folder
from minillm_core.config.load import Loaded
from minillm_core.config.schema import Config
from minillm_core.config.values import show
from minillm_core.data.sources import check_weighted, find
from minillm_core.errors import DataError, Refusal
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.diff import difference, render_diff
from minillm_core.plan.estimate import vocabulary_note
from minillm_core.plan.plan import as_json as to_json
from minillm_core.plan.render import amount, columns, epochs_read, plan_document, render_plan, sized
from minillm_core.plugins.provided import MEASURED, missing_hint, provided
from minillm_core.text import plain
from minillm_core.train.budget import REWINDABLE, Budget
from minillm_core.train.initial import read_initial
from minillm_core.train.memory import fit_memory
from minillm_core.train.request import Prepared, RunRequest, prepare
from minillm_core.train.settings import settings


def answer(asked: RunRequest, shown: PlanOutput, *, as_json: bool) -> None:
    """Show a plan and its cost, also on several GPUs, or the differences between two plugin sets."""
    diff, gpus, card = shown.diff, shown.gpus, shown.card
    for flag, value in {"--gpus": gpus, "--card": card}.items():
        if value is not None and (diff or gpus is None):
            what = "--diff compares plans, which do not depend on GPUs"
            raise Refusal(
                what if diff else "--card names the GPU of --gpus, which is not there",
                where=f"{flag} {value}",
                fix=f"leave {flag} out" if diff else "--gpus 8, say",
            )
    if diff and asked.plugins is not None:
        where = f"--plugins {asked.plugins} --diff {diff[0]} {diff[1]}"
        raise Refusal("--diff names both sets of plugins", where=where, fix="leave --plugins out")
    if diff:
        _show_diff(asked, *diff, json=as_json)
        return
    prepared, plan = _planned(asked)
    divided = _divided(plan, gpus, card) if gpus else None
    notes = vocabulary_note(plan.estimate()), divided.refused if divided else None
    _say_notes([prepared], [plan], *filter(None, notes))
    costs, lines = _costs(prepared, plan)
    if as_json:
        document = plan_document(plan) | {"settings": settings(prepared.loaded), "costs": costs}
        emit(document | ({"mesh": divided.data()} if divided else {}))
        return
    console = Console()
    render_plan(plan, console, prepared.dtype, lines)
    for table in (*(divided.shown() if divided else ()), settings_table(prepared.loaded)):
        console.print()
        console.print(table)


def _divided(plan: Plan, gpus: int, card: str | None) -> Any:
    """Estimate a plan on several NVIDIA GPUs, in the dtype used there."""
    asked = plan.config.backend.replace("auto", "torch")
    if asked != "torch":
        what = f"--gpus {gpus} is of NVIDIA GPUs, which torch trains on together"
        raise Refusal(what, where=f"--backend {asked}", fix="leave --backend out")
    return forecaster(asked)(plan, gpus, card, plan.config.train.dtype.replace("auto", "bfloat16"))


def _show_diff(asked: RunRequest, first: str, second: str, *, json: bool) -> None:
    """Write the differences between the plans with two plugin sets."""
    found = (_planned(replace(asked, plugins=plugins)) for plugins in (first, second))
    each, (one, other) = zip(*found, strict=True)
    _say_notes(each, [one, other])
    if json:
        plans = [plan_document(one), plan_document(other)]
        emit({"plans": plans, "difference": to_json(difference(one, other))})
    else:
        render_diff(one, other, Console(), (first, second))


def _planned(asked: RunRequest) -> tuple[Prepared, Plan]:
    """Plan what a run would train; the steps of a tuning follow from the tokens, if these are known."""
    prepared = fit_memory(prepare(asked, to_run=False))
    plan, budget_known = build_plan(prepared.loaded, prepared.plugins), True
    if plan.sourcing.epochs is not None:
        tokens, exact, *_ = _tokens(plan)
        budget_known = tokens is not None
        choose = provided("minillm.tuning", "epochs") if tokens else None
        if choose and (loaded := choose(prepared, plan, tokens)) is not None:
            more = () if exact else ("tokens are estimated here, and counted before a run",)
            prepared = replace(prepared, loaded=replace(loaded, notes=(*loaded.notes, *more)))
            plan = build_plan(loaded, prepared.plugins)
    plan = export_checked(plan)
    if plan.config.init is not None and prepared.earlier is None:
        read_initial(plan.config.init).check(plan)
    if branch := prepared.loaded.branch:
        branch.check(plan, Budget.of(plan.config.train) if budget_known else None)
    return prepared, plan


def _say_notes(each: Sequence[Prepared], plans: Sequence[Plan], *more: str) -> None:
    """Print every note once, after everything has been checked."""
    pairs = zip(plans, each, strict=True)
    kernels = [kernel_preflight(plan, prepared.detected) for plan, prepared in pairs]
    notes = [prepared.loaded.notes for prepared in each] + [plan.notes for plan in plans] + kernels
    for note in dict.fromkeys(note for part in (*notes, more) for note in part):
        say(f"note: {note}")


def settings_table(loaded: Loaded) -> Table:
    """Return a table of the settings by source, the preset's first; plugins before values.

    Settings at their defaults are left out.
    """
    by_place: dict[str, list[str]] = {}
    values = loaded.config.model_dump() | loaded.config.plugins  # sections, and plugins' options
    names_first = sorted(loaded.origins.items(), key=lambda one: not one[0].startswith("plugins."))
    for key, place in names_first:
        if place != "default":  # no source sets the value: docs/settings.md lists it
            by_place.setdefault(place, []).append(_given(values, key))
    lowest = f"preset {loaded.config.preset}"
    table = columns("settings from", "")
    for place in sorted(by_place, key=lambda place: (not place.startswith(lowest), place)):
        table.add_row(Text(plain(place)), Text("  ".join(map(plain, by_place[place]))))
    return table


def _given(values: Mapping[str, Any], key: str) -> str:
    """Return ``train.lr=0.002``, or only the key if there is no value (a plugin, a cleared setting)."""
    if key.startswith("plugins."):
        return key.removeprefix("plugins.")
    value = reduce(getitem, key.split("."), values)
    return key if value is None else f"{key}={show(value, 400)}"


def _costs(prepared: Prepared, plan: Plan) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Estimate the cost of a plan; files are located, not opened.

    Args:
        prepared: the prepared command line.
        plan: its plan.

    Returns:
        The cost as JSON, with None for unknown values; and pairs (heading, words).
    """
    config, found, speed = plan.config, prepared.detected, None
    if (expect := provided(MEASURED, "speed")) is not None and found is not None:
        dtype = prepared.dtype or config.train.dtype.replace("auto", "float32")
        speed = expect(cache_folder(), plan, found, dtype)
    tokens, exact, data, whole = _tokens(plan)
    steps, seconds = _length(plan, speed)
    epochs = steps * plan.tokens_per_step / tokens if steps and tokens else None
    if epochs is not None:
        data += f", {'' if exact else 'about '}{epochs_read(epochs)}"
    time = "unknown here: minillm bench measures it, and so does a finished run"
    if expect is None:
        time = missing_hint(MEASURED, "unknown: speeds are kept")
    if speed is not None:
        per_second = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.basis}"
        time = f"about {rough_duration(seconds or 0)} of training at {per_second}"
    keep = config.checkpoint.keep + config.checkpoint.best + REWINDABLE * bool(config.train.spike)
    kept = 0 if config.checkpoint.every == 0 else keep
    one = plan.estimate().checkpoint_bytes
    at_most = one * (kept + 1) if kept else 0  # an old one is deleted after the new one is complete
    cached = whole * _id_bytes(config) if whole else None
    disk = "no checkpoints"
    if kept:
        disk = f"{sized(one)} a checkpoint, {kept} kept: {sized(at_most)} at most"
    if cached:
        disk += f"; token cache about {sized(cached)}"
    document = {
        "seconds": seconds,
        "tokens_per_second": speed.tokens_per_second if speed else None,
        "basis": speed.basis if speed else None,
        "steps": steps,
        "train_tokens": tokens,
        "train_tokens_counted": exact,
        "epochs": epochs,
        "checkpoint_bytes": one,
        "checkpoints_kept": kept,
        "disk_bytes": at_most,
        "token_cache_bytes": cached,
    }
    return document, (("time", time), ("data", data), ("disk", disk))


def rough_duration(seconds: float) -> str:
    """Format a duration to two digits: 40 seconds, 3.2 minutes, 2.5 hours, 4 days."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if (count := seconds / size) >= 1.5:
            return f"{count:.2g} {unit}" if count < 99 else f"{count:,.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 1.5 else "a second"


def _length(plan: Plan, speed: Any) -> tuple[int | None, float | None]:
    """Return the steps and the seconds of a run limited by steps or minutes; None if unknown."""
    train = plan.config.train
    clock = None if train.minutes is None else 60 * train.minutes
    if speed is None:
        return train.steps, clock
    a_step = plan.tokens_per_step / speed.tokens_per_second
    steps = train.steps or max(1, int((clock or 0) / a_step))
    return steps, clock or steps * a_step


def _tokens(plan: Plan) -> tuple[int | None, bool, str, int | None]:
    """Return the training tokens, whether an earlier run counted them, a text, and all tokens."""
    config, asked = plan.config, plan.sourcing
    try:
        check_weighted(config.data.paths)
        sources = find(config.data.files, lambda text: None) if asked.files else []
    except DataError as error:
        return None, False, "unknown: " + plain(f"{error.what}: {error.where}", 120), None
    read = [one for one in sources if one.format.read is not None]
    whole = int(sum(one.unpacked for one in read) / bytes_a_token(config.model.vocab))
    ids = sum(one.size for one in sources) - sum(one.size for one in read)
    share = 1.0 - config.data.val if isinstance(config.data.val, float) else 1.0
    counted = provided(MEASURED, "tokens")
    known = counted(cache_folder(), plan) if counted else None
    if known is None and not asked.files:
        return None, False, "unknown until the documents are read from their source", None
    tokens = known or int((whole + ids // _id_bytes(config)) * share)
    about = "about " if known is None else ""
    return tokens, known is not None, f"{about}{amount(tokens)} tokens to train on", whole


def _id_bytes(config: Config) -> int:
    return 2 if config.model.vocab <= 65_536 else 4


def bytes_a_token(vocab: int) -> float:
    """Estimate the bytes per token of a byte-level BPE: 3.2 at 4,096 entries, 4.5 at 50,304."""
    return max(1.0, 0.35 * math.log2(vocab) - 1.0)
