"""A modeling file being generated: copied definitions, classes, and the construction and calls of nodes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from minillm_core import Module, Plan
from minillm_core.inspection import Node, Setting, Staged
from minillm_hf.own.copying import CORE, CannotWriteError, Copier, identifier
from minillm_hf.own.literals import RESERVED, located, plain, reference, variable


@dataclass(eq=False)
class Class:
    """A generated class: its text with a placeholder for the name, and the layers that use it."""

    kind: str
    text: str
    layers: list[int] = field(default_factory=list)


class Draft:
    """A modeling file of a plan's model while it is generated.

    Args:
        plan: the plan.
        copier: of definitions from the core's parts and from plugins.
        specials: ids of special tokens, by name.
    """

    def __init__(self, plan: Plan, copier: Copier, specials: Mapping[str, int]) -> None:
        self.plan, self.spec, self.copier = plan, plan.spec, copier
        self.specials = specials
        numbers = plan.values(1.0)
        self.values: dict[str, float] = {
            name: int(number) if name in plan.staged else float(number)
            for name, number in numbers.items()
        }
        read = (n for n in plan.spec.streams if f"streams.{n.name}" not in plan.spec.training_alone)
        self.streams = {node.name: node for node in read}
        self.aliases = dict(plan.spec.taps)
        self.products = {leaf: node for leaf, node in plan.spec.linears if node.external}
        self.handed_on = handed_on(plan.spec)
        self.cache = "cache"  # the variable with the KV cache of the layer being generated
        self.declared = {name: owner for name, owner, _ in plan.batch_fields}
        self.classes: list[Class] = []
        self.ropes: list[str] = []
        self.needed: dict[str, None] = {}  # arrays that the decoder computes for its layers
        self.calls: list[str] = []  # of the layers, in the decoder

    # ---- classes

    def class_text(self, one: Class) -> str:
        """Return a class's text with its name and its layers filled in."""
        where = located(one.layers)
        text = one.text.replace("@NAME@", self.class_name(one)).replace("@LAYERS@", where)
        return text.replace("@Layers@", where[0].upper() + where[1:])

    def class_name(self, one: Class) -> str:
        """Return a class's name, numbered where several are of its kind."""
        alike = [other for other in self.classes if other.kind == one.kind]
        return one.kind if len(alike) == 1 else f"{one.kind}{alike.index(one) + 1}"

    def class_of(self, kind: str, text: str, layer: int) -> Class:
        """Return the class with this text, which layers with equal code share; add ``layer`` to it."""
        found = next((o for o in self.classes if (o.kind, o.text) == (kind, text)), None)
        if found is None:
            self.classes.append(found := Class(kind, text))
        found.layers.append(layer)
        return found

    # ---- nodes

    def made(self, node: Node) -> str:
        """Return the code that constructs a node."""
        if not isinstance(node, Node):
            raise CannotWriteError(f"a {type(node).__name__} stands where a part is expected")
        node = written(node)
        cls = node.cls or resolved(node.reference)
        module, _, name = node.reference.partition(":")
        if of_core(module):
            if name not in self.copier.parts.top:
                raise CannotWriteError(f"{node.owner} uses the core's {name}")
            module = self.copier.parts.module
        key = self.copier.take(module, name)
        given = [f"{key}={plain(value, node.owner)!r}" for key, value in node.arguments]
        if "geometry" in inspect.signature(cls.__init__).parameters:
            given.insert(0, "geometry")
        return f"{reference(key)}({', '.join(given)})"

    def call(
        self,
        at: str,
        node: Node,
        own: Mapping[str, str],
        local: Callable[[str], str],
        *,
        name: str,
        shape: str = "x.shape[:2]",
    ) -> str:
        """Return the code that calls a node on its arguments."""
        outline = self.outline(node)
        emits = bool(outline.terms or outline.statistics)
        if keeps := outline.keeps:
            self.copier.take_part("keeping")
            given = ", ".join(
                "None" if r in keeps else own[r] if r in own else local(r) for r in node.reads
            )
            places = tuple(node.reads.index(one) for one in keeps)
            states = tuple(index for index, one in enumerate(keeps) if one in outline.recurrent)
            more = f", states={states!r}" if states else ""
            return f"keeping({at}, cache, {name}, ({given},), kept={places!r}{more})"
        given = ", ".join(own[read] if read in own else local(read) for read in node.reads)
        if looks_back(node.cls or resolved(node.reference)):
            self.copier.take_part("look_back")
            more = ", emits=True" * emits
            return f"look_back({at}, cache, {name}, {given}, shape={shape}{more})"
        return f"{at}({given})" + "[0]" * emits

    def outline(self, node: Node) -> Any:
        """Construct a node alone, to inspect what it emits and keeps."""
        return written(node).make(self.spec.geometry)

    def number(self, setting: Setting) -> str:
        """Return the code of a constant, or of a schedule's final value."""
        number = setting.constant if setting.value is None else self.values[setting.value]
        return repr(number)

    def value(self, name: str) -> str | None:
        """Return the code of a schedule's final value; None: ``name`` is not a schedule."""
        if name not in self.values:
            return None
        number = self.values[name]
        return repr(number) if isinstance(number, int) else f"ops.scalar({number!r})"

    def read(self, name: str) -> str:
        """Return the decoder's code of an input of a part; the decoder then computes it."""
        if (value := self.value(name)) is not None:
            return value
        self.needed[name] = None
        return variable(self.aliases.get(name, name))

    def function(self, function: Any, first: str) -> str:
        """Return the code that calls a plugin's function, with ``first`` as its first argument."""
        owner, named, arguments = function
        key = self.copier.take(*named.split(":"))
        more = "".join(
            f", {name}={self.values[value.value] if isinstance(value, Staged) else plain(value, owner)!r}"
            for name, value in arguments
        )
        return f"{reference(key)}({first}{more})"


class Reads:
    """The inputs of a generated class besides x, with their variables in its ``forward``."""

    def __init__(self, draft: Draft, kind: str) -> None:
        self.draft, self.kind = draft, kind
        self.locals: dict[str, str] = {}
        self.made: dict[str, str] = {}  # streams that the class computes -> their variables

    @property
    def names(self) -> list[str]:
        """The inputs, in the order of the arguments."""
        return list(self.locals)

    @property
    def parameters(self) -> str:
        """The code of the parameters, to follow others."""
        return "".join(f", {one}" for one in self.locals.values())

    def local(self, name: str) -> str:
        """Return the variable of an input; a schedule's final value is a constant."""
        if (value := self.draft.value(name)) is not None:
            return value.replace("ops.", "self.ops.")
        if name in self.made:
            return self.made[name]
        if name not in self.locals:
            self.locals[name] = self._variable(name)
        return self.locals[name]

    def make(self, name: str) -> str:
        """Return a variable for a stream that the class computes."""
        self.made[name] = made = self._variable(name)
        return made

    def _variable(self, name: str) -> str:
        taken = {*self.locals.values(), *self.made.values(), *RESERVED}
        stem = "earlier" if "." in name else re.sub(r"_\d+$", "", identifier(name))
        stem = {"positions": "positions_of_rows"}.get(stem, stem)
        count, made = 1, stem
        while made in taken:
            count += 1
            made = f"{stem}_{count}"
        return made


def written(node: Node) -> Node:
    """Return the node to generate: of the class that its own names as ``written_as``, if any.

    That class computes the same from the same parameters, without state; it replaces a sublayer whose
    training kernels no modeling file can contain.
    """
    if (plainer := node.plain_form) is None:
        return node
    return replace(node, cls=plainer, reference=f"{plainer.__module__}:{plainer.__qualname__}")


def resolved(named: str) -> type:
    """Return the class of a reference, ``module:name``."""
    module, _, name = named.partition(":")
    return getattr(sys.modules[module], name)


def handed_on(spec: Any) -> list[tuple[str, ...]]:
    """Return, for each layer, the streams computed in it that later parts of the model read."""
    found: list[tuple[str, ...]] = []
    later = {*spec.final.inputs} if spec.final is not None else set()
    later |= {*getattr(spec.final_norm, "inputs", ())}
    for index, block in reversed([*enumerate(spec.blocks)]):
        found.append(tuple(sorted(block.computed & later)))
        later |= {*block.reads()}
        for leaf, node in spec.linears:
            later |= {*node.external} if leaf.startswith(f"layers.{index}.") else set()
    return found[::-1]


@cache
def looks_back(cls: type) -> bool:
    """Return whether a module may read columns before those that it computes (``lookback``)."""
    own = (one for one in cls.__mro__ if issubclass(one, Module) and not of_core(one.__module__))
    return any("lookback" in inspect.getsource(one) for one in own)


def of_core(module: str) -> bool:
    """Return whether a module belongs to the core."""
    return module.partition(".")[0] == CORE
