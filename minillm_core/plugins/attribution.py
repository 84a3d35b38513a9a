"""Error attribution: an exception raised by a plugin's own code becomes an error that names the plugin.

Hooks are called through :meth:`Origin.contain`. A node's ``forward``, an optimizer stage or an
initial value is called by the core or by a framework's tracer instead; its frames are then in the
traceback or, from a tracer, in the error's text (:func:`attribute_errors`), and on the stack while
it runs (:func:`at_work`).
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from minillm_core.errors import MinillmError, PlanError, PluginCodeError
from minillm_core.plugins.watch import running
from minillm_core.text import plain

_SHOWN_FRAMES = 4
SIGNALS: list[int] = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Ctrl-C, a scheduler's notice, a closed terminal: signals that end a program; not every system has all."""


@contextmanager
def watch_signals() -> Iterator[Callable[[], bool]]:
    """Distinguish a signal's KeyboardInterrupt from one that a plugin raised itself.

    Signals are handled in the main thread only; the previous handlers still run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: one for number, one in handlers.items() if callable(one)}
    seen = False

    def watch(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        before[number](number, frame)

    for number in before:
        signal.signal(number, watch)
    try:
        yield lambda: seen
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) is watch:
                signal.signal(number, previous)


def own_frames(error: BaseException, root: str) -> list[traceback.FrameSummary]:
    """Return the frames of ``error`` that are within ``root``, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if within(frame.filename, root)]


def shown_frames(error: BaseException, root: str) -> str:
    """List the innermost frames within ``root``, then the error itself, a line each."""
    frames = traceback.extract_tb(error.__traceback__)
    own = own_frames(error, root)
    if isinstance(error, SyntaxError):  # its location is in no frame
        last = [f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"]
    else:
        own = own or frames[-1:]
        last = traceback.format_exception_only(error)[:1]
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-_SHOWN_FRAMES:]]
    lines += last
    return "\n         ".join(plain(line) for line in lines)


def within(file: str, root: str) -> bool:
    """Return whether ``file`` is ``root`` or is inside it."""
    return Path(file).is_relative_to(root)


@dataclass(frozen=True)
class Origin:
    """A plugin's name, the distribution that offers it, and the file that defines its class."""

    name: str
    distribution: str | None  # None: a single file
    version: str | None
    source: str  # "minillm_muon.muon:Muon", or "./my_trick.py:MyTrick" as typed
    file: str
    digest: str  # sha256 of the file when it was imported
    root: str  # the folder or file whose code is the plugin's own

    @classmethod
    def of_file(cls, name: str, source: str, file: str, **more: Any) -> Self:
        """Return the origin of a plugin that a single file defines."""
        return cls(name, None, None, source, file, digest_of(file), file, **more)

    @property
    def offered_by(self) -> str | None:
        """Distribution and version."""
        return f"{self.distribution} {self.version}" if self.distribution else None

    @property
    def called(self) -> str:
        """The plugin and its version in a message: ``plugin 'x' (minillm-x 1.0)``."""
        return f"plugin '{self.name}'" + (f" ({self.offered_by})" if self.offered_by else "")

    @contextmanager
    def contain(self, doing: str) -> Iterator[None]:
        """Turn an exception of the plugin's code inside, SystemExit included, into a PluginCodeError.

        ::

            with origin.contain("build_model"): ...

        A MinillmError raised by the core passes through; the plugin's name and own line are added, and
        plugin and hook as its place if it has none. The KeyboardInterrupt of a signal passes through too.
        The watch reports the hook if it runs for long.

        Raises:
            PluginCodeError: the plugin's code raised.
        """
        with watch_signals() as interrupted, running(f"{self.called}, {doing}"):
            try:
                yield
            except MinillmError as error:
                self._complete(error, doing)
                raise
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and interrupted():
                    raise
                raise self.error(doing, shown_frames(error, self.root), error) from error

    def _complete(self, error: MinillmError, doing: str) -> None:
        """Add the plugin, its line and its distribution to an error of the core, if they are missing."""
        if isinstance(error, PlanError):
            error.plugins = error.plugins or (self.name,)
        error.where = error.where or f"plugin '{self.name}', {doing}"
        if (own := own_frames(error, self.root)) and error.line is None:
            place = f"{own[-1].filename}:{own[-1].lineno}"
            error.line = None if own[-1].filename in error.where else place
        if f"'{self.name}'" not in f"{error} '{error.what.split()[0]}'":
            error.what = f"plugin '{self.name}': {error.what}"
        if self.offered_by and self.offered_by not in error.where:
            place = "" if doing in error.where else f", {doing}"
            error.where += f"{place}, of {self.offered_by}"

    def error(self, doing: str, where: str, error: BaseException) -> PluginCodeError:
        """Return the error that reports where the plugin's code raised ``error``, and the fix."""
        fix = f"leave out '{self.name}'"
        if isinstance(error, ModuleNotFoundError) and error.name:
            fix = f"install what provides the module '{plain(error.name)}', or {fix}"
        elif self.offered_by is None:
            fix = "correct the file; --debug shows the whole traceback"
        else:
            fix = f"tell the authors of {self.offered_by}, or {fix}"
        return PluginCodeError(self.name, doing, offered_by=self.offered_by, where=where, fix=fix)


def digest_of(file: str) -> str:
    """Return the sha256 of a file, in hexadecimal digits."""
    import hashlib  # with OpenSSL, which no help page needs

    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def root_of(module: str, file: str) -> str:
    """Return the folder of the module's top package, or the file of a module without one."""
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).parents[depth - 1]) if depth else file


@contextmanager
def attribute_errors(plugins: Iterable[Origin], when: str) -> Iterator[None]:
    """Turn an exception of a plugin's own code inside into an error that names the plugin.

    Args:
        plugins: the active plugins.
        when: the phase of the run: ``in a step``.

    Raises:
        PluginCodeError: the plugin's code raised; anything else passes through, and so do the
            KeyboardInterrupt of a signal and the GeneratorExit of a stream that is closed early.
    """
    by_name = {plugin.name: plugin for plugin in plugins}
    with watch_signals() as interrupted:
        try:
            yield
        except (MinillmError, GeneratorExit) as error:
            if isinstance(error, PluginCodeError) and error.plugin in by_name:
                error.offered(by_name[error.plugin].offered_by)
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted():
                raise
            # plugins of one package have one root: first the one whose own file raised
            for one in sorted(by_name.values(), key=lambda p, e=error: not own_frames(e, p.file)):
                if found := _place(error, one.root):
                    named = one.error(*found, error)
                    named.happened(when)
                    raise named from error
            raise


def at_work(plugins: Iterable[Origin]) -> Callable[[str], str | None]:
    """Return a function that finds the plugin whose code this thread is running; None: no plugin's.

    Any thread may call it, with the phase that this thread is in: ``at step 7``.
    """
    thread, plugins = threading.get_ident(), tuple(plugins)

    def find(when: str) -> str | None:
        found, line, frame = None, "", sys._current_frames().get(thread)
        while frame is not None:  # innermost first; the last match is what the core called
            code = frame.f_code
            for plugin in sorted(plugins, key=lambda p: p.file == code.co_filename):
                if within(code.co_filename, plugin.root):
                    line = line or f"{code.co_filename}:{frame.f_lineno}"
                    found = f"{plugin.called}, {code.co_qualname}, {when} ({line})"
            frame = frame.f_back
        return found

    return find


def _place(error: BaseException, root: str) -> tuple[str, str] | None:
    """Return (function, "file:line in name: error") where code within ``root`` raised; None if none did."""
    at: BaseException | None = error
    while at is not None:
        if frames := own_frames(at, root):
            last = frames[-1]
            where = f"{last.filename}:{last.lineno} in {last.name}: {type(at).__name__}: {at}"
            return _entered(at, root), where
        traced = [line.strip() for line in str(at).splitlines() if root in line]
        if traced:  # a tracer writes the frames of the traced code into its error's text
            return "its code", f"{traced[-1]}: {str(at).splitlines()[0]}"
        at = at.__cause__ or at.__context__
    return None


def _entered(error: BaseException, root: str) -> str:
    """Return the function within ``root`` that was called from outside it: ``Gate.forward``."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return next(code.co_qualname for code in codes if within(code.co_filename, root))
