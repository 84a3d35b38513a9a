"""Every plugin's module is made once under its plugin's name: what raises there is the plugin's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.decoder import DecoderSpec, layer_geometry
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.node import Node
from minillm_core.plugins.manager import Manager

__all__ = ["nodes_of", "rehearse"]


def rehearse(spec: DecoderSpec, manager: Manager) -> None:
    """Construct each node as the model will, and compute claimed rotary frequencies.

    Raises:
        PluginCodeError: a plugin's own code raised.
    """
    plugins = {plugin.name: plugin for plugin in manager.plugins}
    for node, geometry in nodes_of(spec):
        name = node.reference.rpartition(":")[2]
        with plugins[node.owner].contain(f"{name}.__init__, {node.slot}"):
            node.make(geometry)
    for block in spec.blocks:
        if isinstance(block.attention, AttentionSpec):
            rope = block.attention.rope
            unscaled = replace(rope, scaling=None)  # scaling is not to blame for these
            for claim, part in ((rope.frequencies, unscaled), (rope.scaling, rope)):
                if claim is not None:
                    with plugins[claim[0]].contain("attn.rope"):
                        for number in part.numbers:
                            part.radians(spec.geometry.head_dim, number)


def nodes_of(spec: DecoderSpec) -> Iterator[tuple[Node, Geometry]]:
    """Each node, and the geometry that it is given."""
    geometry = spec.geometry
    for index, block in enumerate(spec.blocks):
        for node in block.nodes():
            yield node, layer_geometry(geometry, index)
    nodes = [*spec.embed, *spec.streams, *(node for _, node in spec.linears), spec.final_norm]
    nodes += [coefficient for _, _, coefficient in (spec.final.terms if spec.final else ())]
    nodes += [term.node for term in spec.loss.terms]
    for node in nodes:
        if isinstance(node, Node):
            yield node, geometry
