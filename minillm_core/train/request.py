"""From a request to a run: flags -> config -> backend and device -> plugins -> training.

Slow imports happen inside functions: ``minillm train`` prints its first line at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm_core.backends import detect
from minillm_core.backends.ranks import join, launched
from minillm_core.errors import BackendError, DataError, Refusal, Stopped
from minillm_core.train.progress import LineDisplay, display
from minillm_core.train.record import RUN, RUNS, choose_out, names_run, note_no_run
from minillm_core.train.settings import fit_vocabulary
from minillm_core.train.signals import stop_on_signals

if TYPE_CHECKING:
    from minillm_core.backends.base import Backend
    from minillm_core.config.load import Loaded
    from minillm_core.plan import Plan
    from minillm_core.plugins.manager import LoadedPlugin
    from minillm_core.train.run_folder import RunFolder

_TEXT = ("data.paths", "data.val", "data.seed", "model.vocab")
"""Settings that may change the tokenizer from that of the run that a run branches from."""


@dataclass(frozen=True)
class RunRequest:
    """The request of a command line or a program: settings, plugins, and the earlier run."""

    plugins: str | None = None
    preset: str | None = None
    file: Path | None = None
    assignments: Sequence[str] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)  # "--steps" -> value, None: not given
    settings: Mapping[str, Any] | None = None  # from Python: key -> value
    resume: Path | None = None  # the folder of the run to resume
    branch: str | None = None  # RUN[@STEP] that a new run begins with
    command: tuple[str, ...] = ()  # the command line as typed
    task: str | None = None  # the plugin set by --task
    memory: str | None = None  # most memory of a step: "20GiB"

    @property
    def sources(self) -> dict[str, Any]:
        """The settings of this request, which override those of a preset or of another run."""
        names = ("preset", "file", "assignments", "flags", "settings")
        return {name: getattr(self, name) for name in names}

    def given(self, key: str) -> Any:
        """Return the value that this request gives to a setting; None: it gives none."""
        from minillm_core.config.load import given

        return given(key, **self.sources)


@dataclass(frozen=True)
class Prepared:
    """A request, resolved up to the plan."""

    loaded: Loaded
    earlier: RunFolder | None  # the run that is resumed
    plugins: tuple[LoadedPlugin, ...] = ()
    detected: detect.Detected | None = None  # None: no installed backend can train
    request: RunRequest | None = None  # None: the plan was made by the caller

    @property
    def dtype(self) -> str | None:
        """The dtype of ``auto`` on this device; None: the setting's own, or float32."""
        on_gpu = self.detected is not None and self.detected.device != "cpu"
        return "bfloat16" if on_gpu and self.loaded.config.train.dtype == "auto" else None


def load_settings(request: RunRequest, *, to_run: bool, fit: bool = True) -> Prepared:
    """Load the settings of a request, over those of the run that it resumes or branches from.

    Args:
        request: the request.
        to_run: check that the data exist.
        fit: fit the vocabulary size to the text, which imports NumPy.

    Returns:
        The settings, without plugins and device.

    Raises:
        ConfigError: a setting cannot be used.
        DataError: a path of the data does not exist or holds no data.
        Refusal: the run to resume, branch from or start from cannot be read.
    """
    from minillm_core.config.load import absolute, load

    def preset_here() -> tuple[str, str]:
        backend, device = (str(request.given(key) or "auto") for key in ("backend", "device"))
        return detect.default_preset(detect.probe(), backend, device)

    # reading runs and model directories imports NumPy, which would delay a run's first line
    earlier, below, initial, notes = None, None, None, list[str]()
    branch, init, place = None, request.given("init"), ""
    if request.branch is not None and init is not None:
        what = "--branch and --init both say where the weights come from"
        raise Refusal(what, where=f"--branch {request.branch} --init {init}", fix="one of them")
    of_run = request.resume is None and init is not None and names_run(init)
    if request.branch is not None or of_run:
        from minillm_core.train.initial import Branch

        branch = Branch.of(request.branch or str(init), notes.append, weights_only=of_run)
        below = branch.base_layer(other_text=any(request.given(key) is not None for key in _TEXT))
    elif request.resume:
        from minillm_core.train.run_folder import RunFolder

        if (earlier := RunFolder.find(request.resume)) is not None:
            below = earlier.layer()
    if below is None and init is not None:
        from minillm_core.train.initial import initial_layer

        initial, place = initial_layer(init, notes.append)
    loaded = load(
        plugins=request.plugins,
        recorded=below,
        branch=branch is not None,
        initial=initial,
        default_preset=preset_here,
        **request.sources,
    )
    config, notes = loaded.config, (*loaded.notes, *notes)
    if initial is not None or of_run:  # a run's weights are recorded like a branch's
        config = config.model_copy(update={"init": place or None})
    changed = {"config": absolute(config), "notes": notes, "command": request.command}
    loaded = replace(loaded, branch=branch, **changed)
    if below is None and fit:
        try:
            loaded = fit_vocabulary(loaded)
        except DataError:
            if to_run:
                raise
    return Prepared(loaded, earlier, request=request)


def prepare(request: RunRequest, *, to_run: bool, fit: bool = True) -> Prepared:
    """Load the settings, detect the backend, and import the named plugins.

    Args:
        request: the request.
        to_run: require a backend; else only one that is named.
        fit: fit the vocabulary size to the text, which imports NumPy.

    Raises:
        ConfigError: a setting cannot be used.
        BackendError: a backend or device is not available.
        PluginError: a plugin is unknown or broken, or does not run here.
        PluginCodeError: a plugin's own code raised.
    """
    from minillm_core.config.selection import added, name_of

    prepared = load_settings(request, to_run=to_run, fit=fit)
    config, specs = prepared.loaded.config, prepared.loaded.specs
    if (source := prepared.loaded.branch or prepared.earlier) is not None:
        specs = source.specs(config, added(request.plugins))
    by_name = config.backend != "auto" or config.device != "auto"
    try:
        prepared = replace(
            prepared, detected=detect.choose(detect.probe(), config.backend, config.device)
        )
    except BackendError:
        if to_run or by_name:
            raise
    if not specs:
        return prepared

    from minillm_core.plugins import manager

    with redirect_stdout(sys.stderr):  # stdout is the command's, whatever an import prints
        plugins = manager.load(specs, config.plugins)
    if (task := request.task) is not None and not any(
        one.name == name_of(task, where="--task") and one.plugin.manifest.task for one in plugins
    ):
        what = f"'{task}' is not a task: it does not say what to train on"
        fix = f"--task sft trains on chats; a plugin is added by --plugins {task}"
        raise Refusal(what, where=f"--task {task}", fix=fix)
    if prepared.earlier:
        from minillm_core.train.run_folder import check_named_again

        out = prepared.earlier.out
        check_named_again(plugins, lambda key: request.given(key) is not None, out)
    if detected := prepared.detected:
        manager.check_support(plugins, detected.backend, detected.device)
    return replace(prepared, plugins=plugins)


def train(
    prepared: Prepared,
    *,
    out: Path | None = None,
    resume: bool = False,
    runs: Path = RUNS,
    cache: Path,
    say: Callable[[str], None],
    verbose: bool = False,
    create: Callable[[detect.Detected, Plan], Backend] | None = None,
) -> int:
    """Run ``minillm train``; its first line is printed at once.

    Args:
        prepared: settings, plugins and machine.
        out: the run's folder; default: runs/<preset>-<n>.
        resume: resume the run in ``out``.
        runs: parent of folders whose names are chosen.
        cache: where tokenizers and tokens are kept.
        say: prints a line.
        verbose: print every note before the first step.
        create: builds the backend; default: :func:`minillm_core.backends.bind.create_backend`.

    Returns:
        0.

    Raises:
        Refusal: nothing was started, nothing was written into OUT.
        MinillmError: any other end of the run; its class has the exit code.
    """
    from minillm_core.config.origins import TOML

    preset, plugins, detected = prepared.loaded.preset, prepared.plugins, prepared.detected
    assert detected is not None
    rank, size = launched()
    if rank:  # rank 0 chooses, prints and writes
        place, say = out or runs, lambda line: None
    else:
        place = choose_out(preset, out, runs=runs, resume=resume)
        file = None if resume or prepared.request is None else prepared.request.file
        if file is not None and file.resolve() == (place / TOML).resolve():
            what = f"the run would overwrite {file}, from which its settings are read"
            raise Refusal(
                what, where=f"-c {file}", fix="another --out, or another name for the file"
            )
    verb = "resuming" if resume and (place / RUN).is_file() else "writing to"
    say(
        f"{detected.backend} on {detected.device}, preset {preset}, {verb} {place} "
        f"({detected.reason})"
    )
    if resume and verb != "resuming":
        say(note_no_run(place))
    shown_by = LineDisplay if rank else display
    with stop_on_signals(patient=False) as stop, shown_by(say) as shown, ExitStack() as stack:
        from minillm_core.train.errors import interrupted, resume_line
        from minillm_core.train.memory import fit_memory
        from minillm_core.train.session import Session

        with shown.phase(f"joining {size} processes") if size > 1 else nullcontext():
            ranks = join(detected)
        stack.callback(ranks.close)
        here = replace(detected, device=ranks.device or detected.device)
        prepared = replace(prepared, detected=here)
        session = Session(
            place,
            cache=cache,
            shown=shown,
            stop=stop,
            create=create,
            resume=resume,
            runs=None if out is not None else runs,
            verbose=verbose,
            ranks=ranks,
        )
        try:
            if prepared.loaded.branch is None and not (resume and (place / RUN).exists()):
                prepared = replace(prepared, loaded=fit_vocabulary(prepared.loaded))
            if session.bind(fit_memory(prepared)):
                session.run()
            ranks.broadcast()  # rank 0 has written everything: if one process ends, its launcher ends all
        except KeyboardInterrupt:
            folder = session.out if session.job else out  # nothing is written to a folder before
            raise interrupted(folder, stop, plugins, shown.broken_off) from None
        except Stopped as error:
            ranks.broadcast()
            error.fix = resume_line(session.out or place, plugins)
            raise
    return 0
