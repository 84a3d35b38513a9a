"""Generator of the reference in docs/hooks.md, from hook specifications, builders and their types.

python -m tools.hooks_page             # check that the page is up to date
python -m tools.hooks_page --write     # write it

Text between ``<!-- made: NAME -->`` and ``<!-- /made -->`` is generated; the rest of the page is
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import minillm_core as core
import minillm_kit
from minillm_core.nn.init import fan_in
from minillm_core.ops.arrays import ArrayFunctions
from minillm_core.ops.contract import CONTRACTS, Operations
from minillm_core.optim.stage import ANCHORS, GRADIENT
from minillm_core.plugins.builders import ParamInfo
from minillm_core.plugins.builders.base import RESERVED, Anchor, Builder
from minillm_core.plugins.hookspecs import HOOKS, Hooks
from minillm_core.train import events
from minillm_kit import small, stepping
from tools.markdown import called, entry, fields, link, table
from tools.pages import Page, main
from tools.reading import doc_of, members, prose
from tools.repository import ROOT
from tools.slot_usage import usage_tables
from tools.slots import BUILDERS, builder_section

__all__ = ["PAGE"]


def hooks() -> str:
    """Document every hook: its arguments, when it is called, and its purpose."""
    rows = []
    for name, takes in HOOKS.items():
        when, _, what = doc_of(getattr(Hooks, name)).summary.rstrip(".").partition(": ")
        shown = link(f"{name}({', '.join(('self', *takes))})", name)
        rows.append((shown, when.lower(), what))
    return table(("hook", "when", "what it is for"), rows)


def chains() -> str:
    """Document the functions accepted at the anchors of a chain."""
    anchor = "attn.out.gate"
    return "\n\n".join(
        (
            entry(called(anchor, Anchor.__call__), Anchor.__call__),
            entry(called(f"{anchor}.close", Anchor.close), Anchor.close),
        )
    )


def rules() -> str:
    """Document the stages of an update rule and its construction."""
    order = " < ".join(f"`{one}`" for one in ANCHORS)
    text = f"A rule consists of stages, in this order: {order}. The chain `{GRADIENT}` comes before them."
    about = "### `ParamInfo`\n\n" + doc_of(ParamInfo).summary
    rule = core.RowRule
    methods = ("constant", "rate", "refuses", "brought", "next_shared", "in_turn")
    told = ["### `RowRule`", doc_of(rule).summary, *doc_of(rule).body]
    told += [
        entry(called(f"rule.{one}", getattr(rule, one)), getattr(rule, one)) for one in methods
    ]
    return "\n\n".join((text, public("stage"), about, fields(ParamInfo), *told))


def kernels() -> str:
    """Document a kernel candidate, and the request passed to it."""
    parts = []
    for name in ("Candidate", "Request"):
        cls = getattr(core, name)
        doc = doc_of(cls)
        facts = (one for items in doc.sections.values() for one in items)
        listed = "\n".join(f"- for the op `{key}`: {text}" for key, text in facts)
        parts += [f"### `{name}`", doc.summary, fields(cls), listed]
    return "\n\n".join(filter(None, parts))


def plugin() -> str:
    """Document the keywords of a plugin's class statement."""
    doc = doc_of(core.Plugin)
    (keywords,) = (items for key, items in doc.sections.items() if "class statement" in key)
    rows = [(f"`{name}`", text) for name, text in keywords]
    example = f"```python\n{doc.example}\n```"
    return "\n\n".join((*doc.body, example, table(("keyword", "meaning"), rows)))


def public(*names: str) -> str:
    """Document public functions and classes, under their import names."""
    return "\n\n".join(
        entry(called(name, getattr(core, name)), getattr(core, name)) for name in names
    )


def options() -> str:
    """Document option() and Layers."""
    layers, resolve = doc_of(core.Layers), core.Layers.resolve
    example = f"```python\n{layers.example}\n```"
    about = "\n\n".join(("### `Layers`", layers.summary, *layers.body, example))
    return "\n\n".join((public("option"), about, entry(called("layers.resolve", resolve), resolve)))


def modules() -> str:
    """Document the methods of every Module, and the attributes that its class may declare."""
    not_stated = ("ops", "framework", "leaf", "path", "owner", "bound")
    stated = fields(core.Module, *not_stated)
    return "\n\n".join((*doc_of(core.Module).body, "A class may declare:", stated))


def declarations() -> str:
    """Document Param, Linear, Buffer, State, and initial values."""
    rows = [
        ("`zeros`, `ones`", "`Constant(0.0)` and `Constant(1.0)`."),
        *(
            (f"`{called(name, getattr(core, name))}`", doc_of(getattr(core, name)).summary)
            for name in ("Constant", "Normal", "Uniform")
        ),
        ("the default of a `Linear`", doc_of(fan_in).summary),
    ]
    return "\n\n".join(
        (public("Param", "Linear", "Buffer", "State"), table(("initial values", "what"), rows))
    )


def places() -> str:
    """Document ModelShape, Call and Layout."""
    parts = []
    for name in ("ModelShape", "Call", "Layout"):
        cls = getattr(core, name)
        doc = doc_of(cls)
        stated = [fields(cls)] if members(cls) else []
        parts += [f"### `{name}`", doc.summary, *doc.body, *stated]
    return "\n\n".join(parts)


def rotation() -> str:
    """Document rotary tables: Rope, its frequencies, and Rotary."""
    forward, rotary = core.Rope.forward, core.Rotary
    return "\n\n".join(
        (
            public("llama_frequencies", "Rope"),
            entry(called("rope", forward), forward),
            *("### `Rotary`", doc_of(rotary).summary, fields(rotary)),
        )
    )


def array_functions() -> str:
    """Document the array functions; those that need no explanation are only named."""
    told, known = [], []
    for name, target in vars(ArrayFunctions).items():
        if not name.startswith("_") and callable(target):
            doc, shown = doc_of(target), f"`{called(name, target)}`"
            if doc.summary:
                told.append((shown, " ".join((doc.summary, *doc.body))))
            else:
                known.append(shown)
    return f"{', '.join(known)}.\n\n{table(('function', 'what it does'), told)}"


def contracts() -> str:
    """Document the ops that have selectable kernels."""
    parts = []
    for name, contract in CONTRACTS.items():
        names = ", ".join(f"`{one}`" for one in contract.differentiable)
        gradients = f"*Gradients* of {names}" if names else "*No gradient*"
        bounds = ", ".join(f"{bound:g} in {dtype}" for dtype, bound in contract.tolerance.items())
        paragraphs = contract.doc.split("\n\n")
        parts += [
            f"### `{called(f'ops.{name}', getattr(Operations, name))}`",
            *(prose(one) for one in paragraphs),
            f"{gradients}. *Tolerance*: {bounds}.",
        ]
    return "\n\n".join(parts)


def packers() -> str:
    """Document a packer's inputs and outputs, and its pieces."""
    doc = doc_of(core.Packer)
    knows = [(f"`packer.{name}`", text) for name, text in doc.sections["Attributes"]]
    row, part = core.Packer.row, core.Piece.part
    piece = ["### `Piece`", doc_of(core.Piece).summary, fields(core.Piece)]
    return "\n\n".join(
        (
            *("### `Packer`", doc.summary, *doc.body, table(("attribute", "meaning"), knows)),
            entry(called("packer.row", row), row),
            *(*piece, entry(called("piece.part", part), part)),
        )
    )


def schedules() -> str:
    """Document values that change during the run."""
    names = ("piecewise", "cosine", "scheduled", "plateaus", "stages")
    targets = {name: getattr(core, name) for name in names}
    rows = [(f"`{called(name, one)}`", doc_of(one).summary) for name, one in targets.items()]
    return table(("schedule", "value"), rows)


def verdicts() -> str:
    """Document Verdict, and the model facts passed to a plugin for a verdict."""
    about = "### `Verdict`\n\n" + doc_of(core.Verdict).summary
    model = "### `Predictor`\n\n" + doc_of(core.Predictor).summary
    methods = [getattr(core.Predictor, name) for name in ("losses", "scores", "logits")]
    asked = [entry(called(f"model.{one.__name__}", one), one) for one in methods]
    return "\n\n".join((about, fields(core.Verdict), model, *asked))


def event_table() -> str:
    """Tabulate every event, its name in metrics.jsonl, and its fields."""
    rows = []
    for name, cls in vars(events).items():
        if isinstance(cls, type) and issubclass(cls, events.Event) and cls is not events.Event:
            stated = [one for one in members(cls) if one.name != "event"]
            told = (f"`{one.name}`{f' ({one.about})' * bool(one.about)}" for one in stated)
            rows.append((f"`{name}`", f"`{cls.event}`", doc_of(cls).summary, ", ".join(told)))
    told = table(("event", "in metrics.jsonl", "when", "fields"), rows)
    speed = doc_of(events.Throughput).summary
    return "\n\n".join((told, f"### `Throughput`\n\n{speed}", fields(events.Throughput)))


def tests() -> str:
    """Document the test helpers for plugin authors."""
    parts = [
        entry(called(name, getattr(minillm_kit, name)), getattr(minillm_kit, name))
        for name in ("conformance", "run_module", "one_step", "numpy_ops")
    ]
    sizes = ", ".join(f"`{name}={value}`" for name, value in vars(minillm_kit.GEOMETRY).items())
    about = f"### `GEOMETRY`\n\nThe sizes that `run_module` passes as `geometry`: {sizes}."
    step = "### `Step`\n\n" + doc_of(minillm_kit.Step).summary
    more = [
        entry(called(f"{name}.{one}", getattr(module, one)), getattr(module, one))
        for name, module, ones in (
            ("small", small, ("plan", "model", "batch", "node")),
            ("stepping", stepping, ("plan", "drawn", "stepped")),
        )
        for one in ones
    ]
    return "\n\n".join(
        (*parts[:2], about, parts[2], step, fields(minillm_kit.Step), parts[3], *more)
    )


def reserved() -> str:
    """List the reserved names, which no field, stream or tap may have."""
    return ", ".join(f"`{name}`" for name in sorted(RESERVED)) + "."


def note() -> str:
    """Document the methods common to all builders: attn.note(text) and so on."""
    return entry(called("builder.note", Builder.note), Builder.note)


def refusal() -> str:
    """Document PlanError, with the arguments common to all errors."""
    return entry(called("PlanError", core.PlanError), core.MinillmError)


SECTIONS: Mapping[str, Callable[[], str]] = {
    "hooks": hooks,
    "chains": chains,
    "reserved": reserved,
    "note": note,
    **{hook: partial(builder_section, hook) for hook in BUILDERS},
    "frozen": partial(public, "FrozenModel"),
    "rules": rules,
    "kernels": kernels,
    "packers": packers,
    "random": partial(public, "random_stream"),
    "verdicts": verdicts,
    "events": event_table,
    "plugin": plugin,
    "option": options,
    "modules": modules,
    "declarations": declarations,
    "places": places,
    "rotation": rotation,
    "arrays": array_functions,
    "ops": contracts,
    "schedules": schedules,
    "refusal": refusal,
    "tests": tests,
    "said": lambda: usage_tables(PAGE.text()),
}
"""Section of the page -> the function that generates it."""


PAGE = Page(ROOT / "docs" / "hooks.md", SECTIONS)

if __name__ == "__main__":
    main(__doc__, PAGE)
