"""Tests that exceptions from plugin code outside hooks are attributed to the plugin."""

from __future__ import annotations

import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_core.config.selection import FileSpec
from minillm_core.errors import OutOfMemory, PluginCodeError
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.plugins.manager import LoadedPlugin, load

SOURCE = '''
from minillm_core import Plugin

class Trick(Plugin, api=1):
    """A trick."""

    def build_model(self, model):
        raise_it(ValueError("no"))

def raise_it(error):
    raise error
'''


@pytest.fixture
def trick(tmp_path: Path) -> LoadedPlugin:
    """Create a single-file plugin."""
    (tmp_path / "trick.py").write_text(SOURCE)
    (loaded,) = load([FileSpec(f"{tmp_path}/trick.py", "Trick")])
    return loaded


def raise_it(plugin: LoadedPlugin, error: BaseException) -> None:
    """Make the plugin's own code raise."""
    import sys

    sys.modules[type(plugin.plugin).__module__].raise_it(error)


@pytest.mark.parametrize("error", [IndexError("out"), SystemExit(0)])
def test_the_frame_names_the_plugin(trick: LoadedPlugin, error: BaseException) -> None:
    raised = pytest.raises(PluginCodeError, match="'trick' raised in raise_it, in a step")
    with raised as caught, attribute_errors([trick], "in a step"):
        raise_it(trick, error)
    assert "trick.py:11 in raise_it" in (caught.value.where or "")
    assert caught.value.__cause__ is error


def test_a_cause_further_down_counts(trick: LoadedPlugin) -> None:
    def traced() -> None:
        try:
            raise_it(trick, IndexError("out"))
        except IndexError as error:
            raise RuntimeError("while tracing") from error

    with pytest.raises(PluginCodeError), attribute_errors([trick], "in a step"):
        traced()


def test_a_tracer_that_tells_frames_in_its_text(trick: LoadedPlugin) -> None:
    text = f'Observed exception\nfrom user code:\n  File "{trick.origin.file}", line 11, in x'
    with pytest.raises(PluginCodeError) as caught, attribute_errors([trick], "in a step"):
        raise RuntimeError(text)
    assert "line 11, in x: Observed exception" in (caught.value.where or "")


def test_a_keyboard_interrupt_without_a_signal_is_the_plugin_s(trick: LoadedPlugin) -> None:
    with pytest.raises(PluginCodeError), attribute_errors([trick], "in a step"):
        raise_it(trick, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), attribute_errors([trick], "in a step"):
        signal.raise_signal(signal.SIGINT)


def test_a_stream_closed_during_an_error_of_a_plugin_ends(trick: LoadedPlugin) -> None:
    def stream() -> Generator[str]:
        with attribute_errors([trick], "for the next token"):
            yield "begun"

    begun = stream()
    next(begun)
    try:
        raise_it(trick, IndexError("out"))
    except IndexError:
        begun.close()


def test_what_the_core_found_is_given_the_version(trick: LoadedPlugin) -> None:
    offered = replace(trick, distribution="dist", version="1.0")
    with pytest.raises(PluginCodeError) as caught, attribute_errors([offered], "in a step"):
        raise PluginCodeError("trick", "Gate.forward", did="returned None from")
    caught.value.happened("at step 7")
    said = "plugin 'trick' (dist 1.0) returned None from Gate.forward, at step 7"
    assert caught.value.what == said


@pytest.mark.parametrize("error", [OutOfMemory("full"), KeyboardInterrupt(), ValueError("ours")])
def test_the_rest_passes(trick: LoadedPlugin, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, attribute_errors([trick], "in a step"):
        raise error
    assert caught.value is error
