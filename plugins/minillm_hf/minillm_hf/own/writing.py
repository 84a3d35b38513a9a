"""Generation of modeling files from a plan: its filled slots as straight-line code.

The model's specification is traversed from the embedding to the logits. Layers with identical code share
their classes. An unsupported slot or field is refused by name: a model is written completely or not at
all.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minillm_core import Plan, __version__
from minillm_core.commands import counted
from minillm_core.inspection import DISTRIBUTIONS
from minillm_hf.own.batch_fields import batch_fields
from minillm_hf.own.copying import Copier, Key, part_source
from minillm_hf.own.decoder import decoder
from minillm_hf.own.draft import Draft
from minillm_hf.own.known import KNOWN_ATTRIBUTES, attributes, check_known
from minillm_hf.own.literals import banner
from minillm_hf.own.tidying import WIDTH

TRANSFORMERS, MLX = "modeling_minillm.py", "modeling_mlx.py"


@dataclass(frozen=True)
class Framework:
    """A program that loads a modeling file: its name, the module of parts, the classes that it calls."""

    program: str
    parts: str
    closing: tuple[str, ...]


FRAMEWORKS: Mapping[str, Framework] = {
    TRANSFORMERS: Framework("Transformers", "parts_torch", ("MinillmForCausalLM",)),
    MLX: Framework("mlx-lm", "parts_mlx", ("ModelArgs", "Model")),
}


MODEL = banner("the model")
"""The heading before the model, in each file."""


class Writer:
    """The generator of a modeling file for a plan's model.

    Args:
        plan: the plan.
        framework: the program that loads the file.
        specials: ids of special tokens, by name.
    """

    def __init__(self, plan: Plan, framework: Framework, specials: Mapping[str, int]) -> None:
        self.plan, self.spec, self.framework = plan, plan.spec, framework
        path = Path(__file__).with_name(f"{framework.parts}.py")
        parts = part_source(f"{__package__}.{framework.parts}", path)
        given = {"SIZES", "GEOMETRY", "Decoder", "batch_fields"}
        self.copier = Copier(parts, given, attributes() - KNOWN_ATTRIBUTES)
        self.draft = Draft(plan, self.copier, specials)

    def write(self) -> str:
        """Generate the file's text, before :func:`finished`.

        Raises:
            CannotWriteError: something in the plan cannot be written.
        """
        check_known(self.spec)
        model = decoder(self.draft)
        extra = batch_fields(self.draft)
        for text in (model, extra, *(one.text for one in self.draft.classes)):
            self.copier.note_ops(re.sub(r"@\S+?@", "Named", text))
        for part in ("Geometry", "Module", "Ops"):
            self.copier.take_part(part)
        self.copier.need("replace")
        copied = list(self.copier.uses)
        for part in self.framework.closing:
            self.copier.take_part(part)
        self.copier.finish_ops()
        parts = self.copier.parts.module
        base = self._closure([key for key in copied if key[0] == parts])
        plugins = [key for key in self.copier.uses if key[0] != parts]
        closing = [key for key in self.copier.uses if key[0] == parts and key not in base]
        names = self.copier.names()
        sections = [
            self._head(),
            "\n".join(self._imports()),
            self.copier.written(base),
            banner("parts of techniques") + self.copier.written(plugins) if plugins else "",
            MODEL + self._sizes(),
            extra,
            *(self.draft.class_text(one) for one in self.draft.classes),
            model,
            banner(f"what {self.framework.program} calls") + self.copier.written(closing),
        ]
        text = "\n\n\n".join(filter(None, sections)) + "\n"
        text = text.replace('"""\n\n\nfrom __future__', '"""\n\nfrom __future__')
        text = re.sub(r"@([\w.]+):(\w+)@", lambda found: names[found[1], found[2]], text)
        return text

    def _closure(self, keys: Iterable[Key]) -> set[Key]:
        """Return keys with all of their dependencies."""
        pending, found = list(keys), set[Key]()
        while pending:
            key = pending.pop()
            if key not in found:
                found.add(key)
                pending += self.copier.uses[key].values()
        return found

    def _head(self) -> str:
        """Return the file's docstring: model, licence, and the module docstrings of the techniques."""
        plan = self.plan
        model = plan.config.model
        lines = [
            f"A language model for {self.framework.program}, in one file: written by minillm "
            f"{__version__}, which it does not need.",
            "",
            f"{counted(model.layers, 'layer')}, {model.dim} wide, {counted(model.heads, 'head')} "
            f"({model.kv_heads} of keys and values), {model.vocab:,} tokens; plan {plan.hash[:12]}.",
            "Licence of this file: MIT, as minillm's, from whose modules its parts are copied.",
            "Copyright (c) 2026 The minillm authors. SPDX-License-Identifier: MIT",
        ]
        shaping = {one.owner for one in plan.placements if one.shapes}
        theirs = [one for one in plan.plugins if one.distribution not in DISTRIBUTIONS]
        if named := [one for one in theirs if one.name in shaping]:
            from_where = ", ".join(f"{one.name} ({one.distribution or 'a file'})" for one in named)
            lines.append(
                f"What is copied from {from_where} is its authors', under their licence, which this file "
                "does not know."
            )
        for active in plan.active:
            if active.name not in shaping:
                continue
            words = inspect.getdoc(sys.modules[type(active.plugin).__module__]) or ""
            options = ", ".join(f"{k}={v!r}" for k, v in active.plugin.options().items())
            lines += ["", f"{active.name} {'-' * max(4, 96 - len(active.name))}"]
            lines += textwrap.wrap(f"({options})" * bool(options), WIDTH)
            lines += words.splitlines()
        text = (
            "\n".join(line.rstrip() for line in lines).replace("\\", "\\\\").replace('"""', "'''")
        )
        return f'"""{re.sub(chr(10) + "{3,}", chr(10) * 2, text).rstrip()}\n"""'

    def _imports(self) -> Iterator[str]:
        imports = sorted(
            self.copier.imports.values(), key=lambda one: (one.name is not None, str(one))
        )
        standard = [
            one for one in imports if one.module.partition(".")[0] in sys.stdlib_module_names
        ]
        yield "from __future__ import annotations\n"
        for group in (standard, [one for one in imports if one not in standard]):
            plain = [str(one) for one in group if one.name is None]
            named: dict[str, list[str]] = {}
            for one in group:
                if one.name is not None:
                    named.setdefault(one.module, []).append(str(one).partition(" import ")[2])
            lines = plain + [
                f"from {home} import {', '.join(sorted(of))}" for home, of in sorted(named.items())
            ]
            yield "\n".join(lines) + "\n" * (group is standard)

    def _sizes(self) -> str:
        g = self.spec.geometry
        given = {one.name: getattr(g, one.name) for one in fields(g) if one.name != "layer"}
        sizes = "".join(f"    {name}={value!r},\n" for name, value in given.items())
        checked = "".join(
            f'    "{key}": {value!r},\n' for key, value in sizes_of(self.plan).items()
        )
        return (
            f"GEOMETRY = Geometry(\n{sizes})\n\n"
            f"SIZES = {{  # which config.json has to have\n{checked}}}"
        )


def sizes_of(plan: Plan) -> dict[str, Any]:
    """Return the sizes that config.json and the modeling file must share."""
    model = plan.config.model
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
    }
