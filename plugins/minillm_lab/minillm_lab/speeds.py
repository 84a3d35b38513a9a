"""Throughput measured on this machine, cached for the time estimates of ``minillm plan``.

``speeds.json`` holds the newest measurements of finished runs and of ``minillm bench``, one for each
model and machine, and the number of training tokens of earlier runs' data. It is a cache: if it
cannot be read or written, times are unknown and nothing fails.
"""

from __future__ import annotations

import json
import math
import os
import platform
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from minillm_core import BackendError, DataError, Plan
from minillm_core.documents import digest, find
from minillm_core.inspection import launched
from minillm_core.studies import Binding, Detected, hardware, replace_file
from minillm_lab.card import BadCard, card_sources, read_cards

FILE = "speeds.json"
MOST = 64
"""Maximum number of measurements, and of corpora, in the file."""
FEWEST = 5
"""Minimum steps of a stored measurement."""
_MOST_BYTES = 1 << 20
_FAR = 30.0
"""Largest ratio of FLOPs per token, either way, between a measured model and a model it is used for."""

Positive = Annotated[FiniteFloat, Field(gt=0)]
Ratio = Callable[[str, str], float | None]


@dataclass(frozen=True)
class Measured:
    """One measurement."""

    machine: str  # host, backend, device, dtype
    hardware: str  # as named in technique cards
    run: str  # digest of everything that affects a step's time
    model: str  # the same digest without plugins
    plugins: tuple[str, ...]
    flops_per_token: Positive
    tokens_per_second: Positive
    by: str  # "run", "bench"
    date: str  # ISO, UTC


_MEASURED = TypeAdapter(Measured)


@dataclass(frozen=True)
class Expected:
    """The expected throughput of a plan on this machine."""

    tokens_per_second: float
    basis: str  # a description of the source


def remember(
    cache: Path,
    plan: Plan,
    bound: Binding,
    tokens: int,
    tokens_per_second: float,
    *,
    steps: int,
    by: Literal["run", "bench"] = "run",
) -> None:
    """Store the throughput of a run and the size of its data; runs of too few steps are skipped.

    Of a run of several processes only the size of its data is stored: its speed is not that of one.

    Args:
        cache: the folder; if it cannot be written, nothing is stored.
        plan: of the run.
        bound: the plan's binding to this machine.
        tokens: of the training corpus.
        tokens_per_second: the throughput without the first step.
        steps: number of measured steps.
        by: the source, "run" or "bench".
    """
    if steps < FEWEST or not tokens_per_second > 0:
        return
    new = Measured(
        machine=_machine(bound.backend, bound.device, bound.dtype),
        hardware=_hardware(bound),
        run=_run(plan),
        model=_model(plan),
        plugins=tuple(plugin.name for plugin in plan.plugins),
        flops_per_token=plan.estimate().flops_per_token,
        tokens_per_second=tokens_per_second,
        by=by,
        date=datetime.now(UTC).date().isoformat(),
    )
    kept = _speeds(cache)
    if _alone():
        kept = [one for one in kept if (one.machine, one.run) != (new.machine, new.run)] + [new]
    counts = _tokens(cache)
    if (key := _corpus(plan)) is not None:
        counts.pop(key, None)
        counts[key] = tokens
    document = {
        "speeds": [asdict(one) for one in kept[-MOST:]],
        "tokens": dict(list(counts.items())[-MOST:]),
    }
    try:
        cache.mkdir(parents=True, exist_ok=True)
        replace_file(cache / FILE, json.dumps(document, indent=1).encode() + b"\n")
    except OSError:
        return  # the token cache is in the same folder, and reports that it cannot be written


def expected(
    cache: Path, plan: Plan, backend: str, device: str, dtype: str, ratio: Ratio
) -> Expected | None:
    """Estimate the throughput of a plan on this machine; None: no similar model was measured.

    Uses, in this order: the same model and plugins; the same model, times each differing plugin's speed
    ratio from its card on this hardware; the FLOP/s of the model with the nearest FLOPs per token.

    Args:
        cache: the folder.
        plan: the plan to train.
        backend: as in a binding.
        device: likewise.
        dtype: likewise.
        ratio: (plugin, hardware) -> tokens per second with the plugin over those without; None: unknown.
    """
    machine = _machine(backend, device, dtype)
    here = [one for one in _speeds(cache) if one.machine == machine]
    run, model = _run(plan), _model(plan)
    for one in reversed(here):
        if one.run == run:
            return Expected(one.tokens_per_second, f"as in a {one.by} of {one.date} here")
    names = {plugin.name for plugin in plan.plugins}
    for one in reversed(here):
        if one.model == model and (times := _times(one, names, ratio)) is not None:
            basis = f"as in a {one.by} of {one.date} here with other options of its plugins"
            if others := ", ".join(sorted(names ^ set(one.plugins))):
                basis = f"by a {one.by} of {one.date} here and the cards of {others}"
            return Expected(one.tokens_per_second * times, basis)
    flops = max(plan.estimate().flops_per_token, 1)
    near = [one for one in here if 1 / _FAR < flops / one.flops_per_token < _FAR]
    if not near:
        return None
    one = min(reversed(near), key=lambda one: abs(math.log(one.flops_per_token / flops)))
    speed = one.tokens_per_second * one.flops_per_token / flops
    return Expected(speed, f"from the FLOP/s of another model in a {one.by} of {one.date} here")


def expected_here(cache: Path, plan: Plan, detected: Detected, dtype: str) -> Expected | None:
    """Estimate the throughput of a plan on a machine, by :func:`expected` and the plugins' cards."""
    files = {one.name: one.origin.file for one in plan.active}

    def ratio(plugin: str, hardware: str) -> float | None:
        """Look up a plugin's speed ratio on some hardware, in a card measured there."""
        if plugin not in files:
            return None
        try:
            cards = read_cards(plugin, card_sources(files[plugin]))
        except BadCard:
            return None
        made = [card.cost.speed for card in cards if card.hardware == hardware]
        return next((speed.effect for speed in made if speed is not None), None)

    return expected(cache, plan, detected.backend, detected.device, dtype, ratio)


def known_tokens(cache: Path, plan: Plan) -> int | None:
    """Look up the number of training tokens of an earlier run on the same files; reads only file metadata."""
    key = _corpus(plan)
    return None if key is None else _tokens(cache).get(key)


def _times(one: Measured, names: set[str], ratio: Ratio) -> float | None:
    """Multiply the speed ratios of the plugins that are in only one of the two sets."""
    times = 1.0
    for name in names ^ set(one.plugins):
        known = ratio(name, one.hardware)
        if known is None:
            return None
        times *= known if name in names else 1 / known
    return times


def _hardware(bound: Binding) -> str:
    """Describe the hardware as cards written on this machine do."""
    about = hardware(bound.device_name)
    cores = f", {about['cores']} cores" if about["device"] == about["machine"] else ""
    return f"{bound.device_name}{cores}, {bound.backend} in {bound.dtype}"


def _alone() -> bool:
    """Return whether this process trains alone, as far as its launcher's environment says so."""
    try:
        return launched()[1] == 1
    except BackendError:
        return False


def _machine(backend: str, device: str, dtype: str) -> str:
    kind = "cuda:0" if device == "cuda" else device
    return f"{platform.node()}, {os.cpu_count()} cores: {backend} on {kind} in {dtype}"


def _model(plan: Plan) -> str:
    train = plan.config.train
    sizes = [size for one in plan.course for size in (one.rows, one.seq_len)]
    shape = [*sizes, train.checkpointing, train.compile]
    return _digest([plan.config.model.model_dump(mode="json"), shape, plan.config.kernels])


def _run(plan: Plan) -> str:
    return _digest([_model(plan), {plugin.name: plugin.options for plugin in plan.plugins}])


def _corpus(plan: Plan) -> str | None:
    """Build a key of the data files from names, sizes and dates; None if a file is missing."""
    data, asked, vocab = plan.config.data, plan.sourcing, plan.config.model.vocab
    try:
        sources = find(data.files, lambda text: None) if asked.files else []
    except DataError:
        return None
    files = [(str(one.path.resolve()), one.size, one.modified) for one in sources]
    return _digest([files, data.weights, data.val, data.tokenizer, vocab, *asked.key])


def _digest(value: object) -> str:
    return digest(json.dumps(value, sort_keys=True, default=str))


def _speeds(cache: Path) -> list[Measured]:
    found, listed = [], _document(cache).get("speeds")
    for one in listed if isinstance(listed, list) else ():
        with suppress(ValidationError):
            found.append(_MEASURED.validate_python(one))
    return found


def _tokens(cache: Path) -> dict[str, int]:
    found = _document(cache).get("tokens")
    items = found.items() if isinstance(found, dict) else ()
    return {key: count for key, count in items if isinstance(count, int) and count > 0}


def _document(cache: Path) -> Mapping[str, Any]:
    """Read the file; return an empty document if the format is not ours."""
    path = cache / FILE
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            return {}
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
