"""The model card of an exported directory: model, training data, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from minillm_core.commands import counted, plain
from minillm_core.directories import TrainedModel


def card(
    name: str,
    model: TrainedModel,
    parameters: int,
    dtype: str,
    *,
    layout: str | None = None,
    begun: bool = True,
) -> str:
    """Return the text of README.md.

    Local paths are left out: a card is published with its model.

    Args:
        name: of the directory.
        model: the trained model.
        parameters: their number.
        dtype: of the written tensors.
        layout: of the directory, if it is not the plan's.
        begun: the tokenizer prepends the token that begins documents.
    """
    layout = layout or model.plan.export.layout
    made = "trained with" if model.step else "written by"
    lines = (
        *("---", "library_name: transformers", "pipeline_tag: text-generation"),
        *("tags:", "- minillm", "---", "", f"# {plain(name)}", ""),
        f"A language model, {made} minillm: {parameters:,} parameters in {dtype}.",
        *("", *_facts(model, layout), ""),
        *(*_use(name, layout, tokenizer=model.tokenizer is not None, begun=begun), ""),
    )
    return "\n".join(lines)


def _facts(model: TrainedModel, layout: str | None) -> Iterator[str]:
    """Yield the rows of the card's table."""
    plan, record, shape = model.plan, model.record, model.plan.config.model
    yield "| | |"
    yield "| --- | --- |"
    if layout == "own":
        yield "| layout | its own: modeling_minillm.py computes it in Transformers, modeling_mlx.py in mlx-lm |"
    else:
        yield f"| layout | {layout} |"
    yield (
        f"| model | {counted(shape.layers, 'layer')}, {shape.dim} wide, {counted(shape.heads, 'head')} "
        f"({shape.kv_heads} of keys and values), {shape.vocab:,} tokens |"
    )
    if model.step:
        steps = counted(model.step, "step")
        yield f"| training | {steps} of {plan.tokens_per_step:,} tokens |"
    if isinstance(data := record.get("data"), Mapping) and data.get("description"):
        yield f"| data | {plain(str(data['description']).partition(' from ')[0])} |"
    if isinstance(initial := record.get("initial"), Mapping) and initial.get("digest"):
        if initial.get("published"):
            yield f"| model of the hub | {plain(str(initial['published']))} |"
        yield f"| started from | weights with the sha256 {plain(str(initial['digest']))} |"
    if plan.plugins:
        named = (f"{one.name}{_options(one.options)}" for one in plan.plugins)
        yield f"| plugins | {plain(', '.join(named), 2000)} |"
    yield f"| plan | {plan.hash} |"


def _options(options: Mapping[str, Any]) -> str:
    given = (f"{key}={json.dumps(value, default=str)}" for key, value in options.items())
    return f" ({', '.join(given)})" if options else ""


def _use(name: str, layout: str | None, *, tokenizer: bool, begun: bool) -> Iterator[str]:
    if not tokenizer:
        yield "The model was trained on token ids; their tokenizer is not in this directory."
        yield ""
    elif begun:
        yield "A text begins with the token that begins documents; the tokenizer puts it there."
        yield ""
    trust = ", trust_remote_code=True" if layout == "own" else ""
    if trust:
        yield "The code of the model is in this directory: read it, or know whose it is, before it runs."
        yield ""
    yield "```python"
    yield f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if tokenizer else ''}"
    yield ""
    yield f"model = AutoModelForCausalLM.from_pretrained({json.dumps(name)}{trust})"
    if tokenizer:
        yield f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)}{trust})"
    yield "```"
