"""Whose code it is: for what plugins run deep inside a framework, where no hook is being called.

A node's ``forward``, an optimizer stage or an initial value is called by the core or by a
framework's tracer. Their frames are in the traceback, or, from a tracer, in the error's text; and
on the stack, while they last.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from minillm_core.errors import MinillmError, PluginCodeError
from minillm_core.plugins.guard import advice, chain, own_frames, own_function, watch_signals
from minillm_core.plugins.manager import LoadedPlugin

__all__ = ["at_work", "blaming"]


@contextmanager
def blaming(plugins: Iterable[LoadedPlugin], when: str) -> Iterator[None]:
    """Turn what a plugin's own code raised inside into an error that names the plugin.

    Args:
        plugins: the active ones.
        when: what is running: ``in a step``.

    Raises:
        PluginCodeError: the plugin's code raised; anything else passes through, and so does the
            KeyboardInterrupt that a signal brought.
    """
    plugins = tuple(plugins)
    by_name = {plugin.name: plugin.origin.offered_by for plugin in plugins}
    with watch_signals() as interrupted:
        try:
            yield
        except MinillmError as error:
            if isinstance(error, PluginCodeError):
                error.offered(by_name.get(error.plugin))
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted():
                raise
            for plugin in plugins:
                if (found := _place(error, plugin)) is not None:
                    raise _named(plugin, *found, error, when) from error
            raise


def at_work(plugins: Iterable[LoadedPlugin]) -> Callable[[str], str | None]:
    """Says, whoever asks, which plugin's code this thread is in; None: in nobody's.

    The function that comes back takes what the thread is about: ``at step 7``.
    """
    thread, plugins = threading.get_ident(), tuple(plugins)

    def asked(when: str) -> str | None:
        said, line, frame = None, "", sys._current_frames().get(thread)
        while frame is not None:  # from the innermost on; the outermost is what the core called
            code = frame.f_code
            for plugin in plugins:
                if plugin.origin.holds(code.co_filename):
                    line = line or f"{code.co_filename}:{frame.f_lineno}"
                    said = f"{plugin.origin.called}, {code.co_qualname}, {when} ({line})"
            frame = frame.f_back
        return said

    return asked


def _named(
    plugin: LoadedPlugin, function: str, where: str, error: BaseException, when: str
) -> PluginCodeError:
    offered_by = plugin.origin.offered_by
    named = PluginCodeError(
        plugin.name,
        function,
        offered_by=offered_by,
        where=where,
        fix=advice(error, plugin.name, offered_by),
    )
    named.happened(when)
    return named


def _place(error: BaseException, plugin: LoadedPlugin) -> tuple[str, str] | None:
    """The function, and file, line and what was raised, if the plugin's code did; None: it did not."""
    root = plugin.origin.root
    for one in chain(error):
        frames = own_frames(one, root)
        if frames:
            last = frames[-1]
            where = f"{last.filename}:{last.lineno} in {last.name}: {type(one).__name__}: {one}"
            return own_function(one, root) or last.name, where
        told = [line.strip() for line in str(one).splitlines() if root in line]
        if told:  # a tracer tells the frames of what it traced in its text
            return "its code", f"{told[-1]}: {str(one).splitlines()[0]}"
    return None
