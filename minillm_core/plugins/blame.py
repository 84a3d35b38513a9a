"""Whose code raised: for what plugins run deep inside a framework, where no hook is being called.

A node's ``forward``, an optimizer stage or an initial value is called by the core or by a
framework's tracer. Their frames are in the traceback, or, from a tracer, in the error's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from minillm_core.errors import MinillmError, PluginCodeError
from minillm_core.plugins.guard import advice, chain, own_frames
from minillm_core.plugins.manager import LoadedPlugin

__all__ = ["blaming"]


@contextmanager
def blaming(plugins: Iterable[LoadedPlugin], doing: str) -> Iterator[None]:
    """Turn what a plugin's own code raised inside into an error that names the plugin.

    Args:
        plugins: the active ones.
        doing: what is running: ``a step``.

    Raises:
        PluginCodeError: the plugin's code raised; anything else passes through.
    """
    try:
        yield
    except (MinillmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        for plugin in plugins:
            where = _place(error, plugin)
            if where is not None:
                fix = advice(error, plugin.name, plugin.origin.offered_by)
                raise PluginCodeError(plugin.name, doing, where=where, fix=fix) from error
        raise


def _place(error: BaseException, plugin: LoadedPlugin) -> str | None:
    """File, line and what was raised, if the plugin's code did; None: it did not."""
    for one in chain(error):
        frames = own_frames(one, plugin.origin.root)
        if frames:
            last = frames[-1]
            return f"{last.filename}:{last.lineno} in {last.name}: {type(one).__name__}: {one}"
        told = [line.strip() for line in str(one).splitlines() if plugin.origin.root in line]
        if told:  # a tracer tells the frames of what it traced in its text
            return f"{told[-1]}: {str(one).splitlines()[0]}"
    return None
