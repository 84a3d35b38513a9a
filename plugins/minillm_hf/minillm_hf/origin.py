"""The directory of a model, or the one that it was started from, and what an export takes over from it.

A directory that is exported as it is keeps its files beside the weights byte by byte. A run that started
from one takes over the chat template, the tokens that end a text and the sampling settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from minillm_core import Refusal
from minillm_core.directories import TrainedModel
from minillm_hf.adapter import base_folder
from minillm_hf.hub import CONFIG, OF_TOKENIZER, cached
from minillm_hf.read import ADAPTER_CONFIG, TOKENIZER, read_bytes, read_json, tokenizer_facts

GENERATION_CONFIG = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

SAMPLING: Mapping[str, Callable[[Any], bool]] = {
    "do_sample": lambda value: isinstance(value, bool),
    "temperature": lambda value: type(value) in (int, float) and 0 <= value < 100,
    "top_k": lambda value: type(value) is int and 0 <= value < 1 << 31,
    "top_p": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "min_p": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "typical_p": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "repetition_penalty": lambda value: type(value) in (int, float) and 0 < value < 100,
}
"""Sampling key of generation_config.json -> a validator of its value."""


def with_base(folder: Path) -> tuple[Path, ...]:
    """Return a model directory; for an adapter's, also that of its base, last.

    Raises:
        Refusal: the base is not here.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file() or (folder / CONFIG).exists():
        return (folder,)
    return folder, base_folder(read_json(path), str(path), cached)


def started_from(model: TrainedModel) -> Path | None:
    """Return the directory that a model was started from, there or not; None: it was not."""
    started = model.record.get("initial")
    folder = started.get("directory") if isinstance(started, Mapping) else None
    folder = folder if isinstance(folder, str) else model.plan.config.init
    return None if folder is None else Path(folder)


def as_it_is(model: TrainedModel, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the documents of a directory that is exported as it is: its own, but for config.json.

    Args:
        model: the model.
        config: its config.json, in which the directory's ids of special tokens are set.

    Returns:
        name -> content; None: the model was trained, or has another tokenizer than its directory.

    Raises:
        Refusal: a file cannot be read.
    """
    folder = started_from(model)
    if folder is None or model.record or model.step or model.plan.sourcing.template is not None:
        return None
    folders = with_base(folder)
    own = _first(folders, TOKENIZER)
    if model.tokenizer is not None and not _has_ids_of(model, own):
        return None
    given = read_json(folders[-1] / CONFIG)
    ids = {key: given[key] for key in _IDS if key in given and _is_ids(given[key])}
    paths = [own / name for name in OF_TOKENIZER]
    paths.append(_first(folders, GENERATION_CONFIG) / GENERATION_CONFIG)
    return {CONFIG: {**config, **ids}, **{p.name: read_bytes(p) for p in paths if p.exists()}}


@dataclass(frozen=True)
class TakenOver:
    """What the export of a trained model takes over from the directory that it was started from."""

    template: Any = None  # the chat template: Jinja, or several by their names
    ends: tuple[int, ...] = ()  # ids that end a text
    sampling: Mapping[str, Any] = field(default_factory=dict)


def taken_over(model: TrainedModel, say: Callable[[str], None]) -> TakenOver:
    """Read what an export takes over; a run with a chat template of its own keeps that, and its ends.

    A note names what cannot be taken over.
    """
    if (folder := started_from(model)) is None:
        return TakenOver()
    own = model.plan.sourcing.template is not None
    what = "sampling settings" if own else "chat template, stop tokens and sampling settings"
    try:
        folders = with_base(folder)
        config = read_json(folders[-1] / CONFIG)
        at = _first(folders, GENERATION_CONFIG) / GENERATION_CONFIG
        generation = read_json(at) if at.exists() else {}
        facts = tokenizer_facts(holder := _first(folders, TOKENIZER))
    except Refusal as error:
        say(f"the {what} of {folder} are left out: {error.what}")
        return TakenOver()
    sampling = {key: generation[key] for key, fits in SAMPLING.items() if fits(generation.get(key))}
    if own or model.tokenizer is None:
        return TakenOver(sampling=sampling)
    named = (generation if at.exists() else config).get("eos_token_id")
    vocab = model.plan.config.model.vocab
    ends = tuple(one for one in _listed(named) if type(one) is int and 0 <= one < vocab)
    template = _template(facts["chat_template"], model)
    if (template or ends) and not _has_ids_of(model, holder):
        say(f"the chat template and stop tokens of {folder} are left out: the tokenizer is another")
        return TakenOver(sampling=sampling)
    return TakenOver(template, ends, sampling)


def _template(found: str | None, model: TrainedModel) -> Any:
    """Return a directory's chat template, its own bos and eos token set in it; None: there is none.

    In an export these are the tokens with which the run's texts begin and end.
    """
    if found is None or model.tokenizer is None:
        return None
    given: dict[str, Any] = json.loads(found)
    ours = {
        "bos_token": model.tokenizer.start_token,
        "eos_token": model.tokenizer.end_of_text_token,
    }

    def bound(source: str) -> str:
        tokens = {key: _text(given.get(key)) for key in ours if key in source}
        return (
            "".join(
                f"{{%- set {key} = {json.dumps(token, ensure_ascii=False)} %}}\n"
                for key, token in tokens.items()
                if token not in (None, ours[key])
            )
            + source
        )

    template = given["chat_template"]
    if isinstance(template, str):
        return bound(template)
    named = [one for one in _listed(template) if isinstance(one, dict)]
    return [
        one | {"template": bound(one["template"])}
        for one in named
        if isinstance(one.get("template"), str)
    ] or None


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _has_ids_of(model: TrainedModel, folder: Path) -> bool:
    """Return whether each token of a directory's tokenizer has the same id in the model's."""
    if model.tokenizer is None:
        return False
    try:
        theirs = tokenizers.Tokenizer.from_str(read_bytes(folder / TOKENIZER).decode())
    except Exception:  # tokenizers raises Exception itself
        return False
    ours = tokenizers.Tokenizer.from_str(model.tokenizer.text())
    return theirs.get_vocab().items() <= ours.get_vocab().items()


def _first(folders: Iterable[Path], name: str) -> Path:
    """Return the first folder with a file of that name, or else the last."""
    *_, last = folders = tuple(folders)
    return next((one for one in folders if (one / name).is_file()), last)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_ids(value: Any) -> bool:
    return value is None or all(type(one) is int for one in _listed(value))
