"""Runs a plugin's own code and turns whatever it raises into an error that names the plugin."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from minillm_core.errors import MinillmError, PluginCodeError
from minillm_core.plugins.watch import running
from minillm_core.text import plain

__all__ = [
    "advice",
    "chain",
    "own_frames",
    "own_function",
    "plugin_code",
    "watch_signals",
    "within",
]

_SHOWN_FRAMES = 4
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


@contextmanager
def plugin_code(name: str, hook: str, *, root: str, offered_by: str | None) -> Iterator[None]:
    """Contain the plugin's code that runs inside: SystemExit and its like as well.

    What the core raised on the way (a MinillmError) passes through, under the plugin's name, with
    the plugin's own line, and with the plugin and the hook as its place if it has none. So does
    the KeyboardInterrupt that a signal brought. While it lasts, the watch knows of it.

    Args:
        name: the plugin's.
        hook: what is running: ``build_model``, ``import``.
        root: the folder or file whose frames are the plugin's own.
        offered_by: distribution and version, for whom to tell.

    Raises:
        PluginCodeError: the plugin's code raised.
    """
    whose = f"plugin '{name}'" + (f" ({offered_by})" if offered_by else "")
    with watch_signals() as interrupted, running(f"{whose}, {hook}"):
        try:
            yield
        except MinillmError as error:
            error.where = error.where or f"plugin '{name}', {hook}"
            if (own := own_frames(error, root)) and error.line is None:
                place = f"{own[-1].filename}:{own[-1].lineno}"
                error.line = None if own[-1].filename in error.where else place
            if f"'{name}'" not in f"{error} '{error.what.split()[0]}'":
                error.what = f"plugin '{name}': {error.what}"
            if offered_by and offered_by not in error.where:
                place = "" if hook in error.where else f", {hook}"
                error.where += f"{place}, of {offered_by}"
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted():
                raise
            raise PluginCodeError(
                name,
                hook,
                offered_by=offered_by,
                where=_own_frames(error, root),
                fix=advice(error, name, offered_by),
            ) from error


@contextmanager
def watch_signals() -> Iterator[Callable[[], bool]]:
    """Tell a KeyboardInterrupt that a signal brought from one that a plugin raised by itself.

    Signals are handled in the main thread alone, by the handlers that were there before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = False

    def watched(previous: Callable[[int, FrameType | None], object]) -> Callable[..., None]:
        def watch(number: int, frame: FrameType | None) -> None:
            nonlocal seen
            seen = True
            previous(number, frame)

        return watch

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    watching = {number: watched(one) for number, one in before.items() if callable(one)}
    for number, watch in watching.items():
        signal.signal(number, watch)
    try:
        yield lambda: seen
    finally:
        for number, watch in watching.items():
            if signal.getsignal(number) is watch:
                signal.signal(number, before[number])


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def own_frames(error: BaseException, root: str) -> list[traceback.FrameSummary]:
    """The frames of ``error`` that are within ``root``, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if within(frame.filename, root)]


def own_function(error: BaseException, root: str) -> str | None:
    """``Gate.forward``: the function within ``root`` that was called from elsewhere."""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if within(code.co_filename, root):
            return code.co_qualname
        at = at.tb_next
    return None


def _own_frames(error: BaseException, root: str) -> str:
    """The innermost frames within ``root``, then the error itself, a line each."""
    frames = traceback.extract_tb(error.__traceback__)
    own = own_frames(error, root)
    if isinstance(error, SyntaxError):  # its place is in no frame
        last = [f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"]
    else:
        own = own or frames[-1:]
        last = traceback.format_exception_only(error)[:1]
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-_SHOWN_FRAMES:]]
    lines += last
    return "\n         ".join(plain(line) for line in lines)


def within(file: str, root: str) -> bool:
    """Whether ``file`` is ``root`` or lies in it."""
    path = Path(file)
    return path == Path(root) or Path(root) in path.parents


def advice(error: BaseException, name: str, offered_by: str | None) -> str:
    """What to do about what a plugin raised."""
    leave = f"leave out '{name}'"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides the module '{plain(error.name)}', or {leave}"
    if offered_by is None:
        return "mend the file; --debug shows the whole traceback"
    return f"tell the authors of {offered_by}, or {leave}"
