"""Tests of the base class: class statement as manifest, methods as hooks, refused mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError, field_validator

from minillm_core.errors import PluginError
from minillm_core.plugins.hookspecs import HOOKS
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin

names = st.from_regex(r"[a-z][a-z_]{2,20}", fullmatch=True)


def make(**members: Any) -> type[Plugin]:
    """Build a plugin class with these members."""
    return type("Made", (Plugin,), {"__module__": __name__, **members}, api=1)


class Example(Plugin, api=1, backends=("torch",), identity_at_init=True, export="qwen3"):
    """An example.

    More of it.
    """

    width: int = option(12, ge=1, help="features")

    def build_attention(self, attn):
        return self._helper(attn)

    def on_batch(self, batch):  # omits phase, which is allowed
        return batch

    def _helper(self, attn):
        return attn

    @property
    def half(self) -> int:
        return self.width // 2

    @staticmethod
    def free(anything):
        return anything

    @classmethod
    def wide(cls):
        return cls(width=100)

    @field_validator("width")
    @classmethod
    def even(cls, width: int) -> int:
        if width % 2:
            raise ValueError("an even number")
        return width


def test_the_class_is_the_manifest() -> None:
    assert Example.manifest.backends == ("torch",)
    assert Example.manifest.identity_at_init
    assert Example.manifest.export == "qwen3"
    assert Example.summary() == "An example."
    assert Example.hooks == ("build_attention", "on_batch")


def test_a_plugin_is_frozen_and_json() -> None:
    plugin = Example(width=4)
    assert plugin.options() == {"width": 4}
    assert (plugin.half, Example.free(3), Example.wide().width) == (2, 3, 100)
    with pytest.raises(ValidationError, match="frozen"):
        plugin.width = 5
    with pytest.raises(ValidationError, match="even number"):
        Example(width=5)


def test_hooks_are_inherited_and_the_manifest_is_restated() -> None:
    class Child(Example, api=1):
        def build_model(self, model): ...

    assert set(Child.hooks) == {"build_attention", "build_model", "on_batch"}
    assert Child.manifest.export is None
    assert Child.summary() == ""


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, "states no hook API"),
        ({"api": 2}, "hook API 2.*: install a newer minillm"),
        ({"api": 1, "apis": 2}, "'apis'"),
    ],
)
def test_a_wrong_statement_is_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        type("Made", (Plugin,), {"__module__": __name__}, **keywords)


@given(st.sampled_from(sorted(HOOKS)), st.data())
def test_a_misspelt_hook_is_refused_with_its_name(hook: str, data: st.DataObject) -> None:
    drop = data.draw(st.integers(1, len(hook) - 1))
    misspelt = hook[:drop] + hook[drop + 1 :]
    assume(misspelt not in HOOKS)
    with pytest.raises(PluginError, match=f"Made.{misspelt} is not a hook") as refused:
        make(**{misspelt: lambda self: None})
    assert f"did you mean {hook}?" in str(refused.value.fix)
    assert "test_plugin.py:" in str(refused.value.where)


@given(names)
def test_every_public_method_is_a_hook_or_refused(name: str) -> None:
    assume(name not in HOOKS)
    with pytest.raises(PluginError, match="is not a hook") as refused:
        make(**{name: lambda self: None})
    assert f"_{name}" in str(refused.value.fix)
    assert make(**{f"_{name}": lambda self: None}).hooks == ()


@given(st.sampled_from(sorted(HOOKS)), names)
def test_a_wrong_argument_is_refused(hook: str, argument: str) -> None:
    assume(argument not in (*HOOKS[hook], "self"))
    scope: dict[str, Any] = {}
    exec(f"def hook(self, a_{argument}): ...", scope)
    with pytest.raises(PluginError, match=f"argument 'a_{argument}'") as refused:
        make(**{hook: scope["hook"]})
    assert refused.value.fix == f"def {hook}(self, {', '.join(HOOKS[hook])})"


def generator(self, attn):
    yield attn


async def coroutine(self, attn): ...


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda self, *attn: None, r"takes \*attn"),
        (lambda self, **attn: None, r"takes \*attn"),
        (lambda self, attn=None: None, "without a default"),
        (lambda self, attn, /: None, "by name"),
        (lambda: None, "does not take self"),
        (generator, "would never run"),
        (coroutine, "would never run"),
        (staticmethod(lambda attn: None), "not a plain method"),
        (classmethod(lambda cls, attn: None), "not a plain method"),
        (property(lambda self: None), "not a plain method"),
    ],
)
def test_a_hook_is_a_plain_method(method: Any, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        make(build_attention=method)


@pytest.mark.parametrize("name", ["options", "manifest", "copy", "build_model"])
def test_an_option_hides_nothing(name: str) -> None:
    with pytest.raises(PluginError, match=f"option '{name}' of Made would hide"):
        make(__annotations__={name: int}, **{name: 3})
