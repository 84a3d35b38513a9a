"""The options that several commands share, each written once: its name, type, default and help.

Values are checked where settings are loaded, so that a wrong flag, a wrong line in a file and a
wrong ``key=value`` are refused in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minillm_core.cli.console import say
from minillm_core.config.presets import SHAPES, recipe_names

if TYPE_CHECKING:
    from minillm_core.train.generate import Sampling
    from minillm_core.train.progress import Display
    from minillm_core.train.request import RunRequest
    from minillm_core.train.run import Run

_CHOICE = "What and where"
_SETTINGS = "Settings"
_MACHINE = "Machine"


def value(metavar: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option with a value, on a panel of the help page."""
    return typer.Option(
        *more.pop("names", ()), metavar=metavar, help=help, rich_help_panel=panel, **more
    )


def switch(names: str, help: str, panel: str | None = None) -> Any:
    """Declare a switch by its names; its metavar is empty, or the help would show "<bool>" beside it."""
    return typer.Option(*names.split(), metavar="", help=help, rich_help_panel=panel)


def option(
    metavar: str, help: str, panel: str | None = None, default: Any = None, **more: Any
) -> Any:
    """Declare an option of a bundle: a field with its default and its typer option."""
    return field(default=default, metadata={"option": value(metavar, help, panel, **more)})


def folder(text: str) -> Path:
    """Return the path of a folder to write to; an empty one, of an unset variable, would be the current folder.

    A word with a dash is the next option, taken for the value that is missing: ``--out --resume``.

    Raises:
        typer.BadParameter: it is empty, or begins with a dash.
    """
    if not text.strip() or text.startswith("-"):
        what = f"'{text}' begins with a dash, as options do" if text.strip() else "it is empty"
        raise typer.BadParameter(f"{what}; . is the current folder")
    return Path(text).expanduser()  # no shell expands --out=~/x


_choice = partial(option, panel=_CHOICE)
_setting = partial(option, panel=_SETTINGS)
_machine = partial(option, panel=_MACHINE)


def _switched(names: str, help: str, panel: str | None = None) -> Any:
    """Declare a switch of a bundle, which is off."""
    return field(default=False, metadata={"option": switch(names, help, panel)})


Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run.")]
Model = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder of a run, or a model directory.")
]
Plugins = Annotated[
    str | None,
    value(
        "A,B", "Plugins to add; -NAME removes one; ./file.py:Class loads a single file.", _CHOICE
    ),
]
RunPlugins = Annotated[
    str | None,
    value(
        "A,./B.py:C",
        "The run's single-file plugins, given again: OUT alone never loads code.",
        names=("--plugins",),
    ),
]
Steps = Annotated[int | None, value("N", "Number of optimizer steps.", _SETTINGS)]
Backend = Annotated[str | None, value("auto|torch|mlx", "Framework to use.", _MACHINE)]
Device = Annotated[str | None, value("NAME", "cpu, cuda, cuda:1 or mps; gpu for mlx.", _MACHINE)]
Gpus = Annotated[
    int | None,
    value("N", "Train on N NVIDIA GPUs of this machine, one process per GPU.", _MACHINE, min=1),
]
Verbose = Annotated[
    bool,
    switch(
        "-v --verbose", "Show plugins, kernels, the plan's hash and notes before the first step."
    ),
]
AsJson = Annotated[bool, switch("--json", "Write one JSON document to stdout and nothing else.")]


def examples(*lines: str) -> str:
    """Format the examples of a help page, one per paragraph."""
    return "\n\n".join(("Examples:", *lines))


@dataclass(frozen=True)
class RunOptions:
    """The options that describe a run; a parameter of this type stands for all of them.

    ``Annotated[RunOptions, LeaveOut("prompts")]`` leaves some out; these keep their defaults.
    """

    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings: train.lr=0.001, eval.tokens=10000 (all of them: docs/settings.md); "
            "a plugin's options: NAME.option=value.",
            show_default=False,
        ),
    ] = None
    plugins: Plugins = None
    task: str | None = _choice(
        "NAME", "Training task: sft, the answers of chats. Default: all text."
    )
    preset: str | None = _choice(
        "NAME",
        f"{', '.join(SHAPES)}; with plugins: {', '.join(recipe_names())}; or a settings file, "
        "./best.toml. Default: tiny on a CPU, small on a GPU or Mac.",
    )
    data: list[str] | None = _choice(
        "PATH[:WEIGHT]",
        "A text file or folder; may be repeated. With weights: a mixture in these proportions. "
        "Default: the sources of Python's standard library.",
    )
    init: Path | None = _choice(
        "RUN|DIR",
        "Start from the weights, shape and tokenizer of a run (RUN\\[@STEP]), of a model directory "
        "(Hugging Face format), or of a model of the hub: OWNER/NAME\\[@REVISION].",
        parser=folder,
    )
    out: Path | None = _choice("DIR", "Folder of the run; default: runs/PRESET-N.", parser=folder)
    resume: bool = _switched(
        "--resume", "Resume the run in --out from its newest valid checkpoint.", _CHOICE
    )
    branch: Path | None = _choice(
        "RUN[@STEP]",
        "Start a new run from a checkpoint of RUN, with its settings and those given here. "
        "Default: the newest; @STEP: that step's; @best: the best.",
        parser=folder,
    )
    steps: Steps = None
    depth: int | None = _setting(
        "N", "Layers of preset depth, 4 to 24: width, heads, batch, rate and steps follow."
    )
    seed: int | None = _setting(
        "N", "Seed of the initial weights and all other randomness; data.seed fixes the data order."
    )
    prompts: list[str] | None = _setting(
        "TEXT",
        "Prompt of the samples that are generated at the end; may be repeated. Default: the "
        "beginnings of held-out documents.",
        names=("--prompt",),
    )
    file: Path | None = _setting("TOML", "Settings file.", names=("-c", "--config"))
    backend: Backend = None
    device: Device = None
    memory: str | None = _machine(
        "SIZE",
        "Memory that a step may take, as `minillm plan` counts it, such as 20GiB: a step's rows are "
        "split into micro-batches that fit. Default: train.rows and train.accumulate as they are.",
    )
    deterministic: bool = _switched(
        "--deterministic", "Make results repeatable bit for bit on the same GPU.", _MACHINE
    )
    kernels: str | None = _machine(
        "auto|strict|reference|OP=NAME,..",
        "Kernels to use: a policy, kernels by op, or both: strict,attention=sdpa; "
        "OP=reference uses an op's plain implementation.",
    )

    def request(
        self,
        *,
        plugins: str | None = None,
        steps: int | None = None,
        command: Sequence[str] | None = None,
    ) -> RunRequest:
        """Build the request for settings, plugins and a machine.

        Args:
            plugins: the plugins of a command with its own option for them.
            steps: the steps of a command with its own option for them.
            command: the command as typed.

        Raises:
            Refusal: ``--resume`` without ``--out``, or with ``--branch``.
        """
        from minillm_core.config.origins import FLAGS
        from minillm_core.errors import Refusal
        from minillm_core.train.request import RunRequest

        if self.resume and self.branch is not None:
            what = "--resume continues a run, --branch starts a new one"
            fix = "one of them; a branch that was stopped is resumed by --resume --out alone"
            raise Refusal(what, where=f"--resume --branch {self.branch}", fix=fix)
        if self.resume and self.out is None:
            fix = "--resume --out with the folder of the run, such as runs/tiny-1"
            raise Refusal("--resume does not say which run", where="--resume", fix=fix)
        flags = {flag: getattr(self, flag.removeprefix("--"), None) for flag in FLAGS}
        flags |= {"--prompt": self.prompts, "--init": str(self.init) if self.init else None}
        flags["--steps"] = self.steps if steps is None else steps
        named = [one for one in (self.task, plugins or self.plugins) if one]
        return RunRequest(
            ",".join(named) or None,
            self.preset,
            self.file,
            tuple(self.assignments or ()),
            flags,
            resume=self.out if self.resume else None,
            branch=str(self.branch) if self.branch else None,
            command=tuple(command or ()),
            task=self.task,
            memory=self.memory,
        )


@dataclass(frozen=True)
class InferenceOptions:
    """The options that choose a checkpoint of a run and a machine to read it on.

    A parameter of this type stands for all of them, as with :class:`RunOptions`.
    """

    step: int | None = option("N", "Read the checkpoint of step N. Default: the newest.", min=1)
    best: bool = _switched(
        "--best",
        "Read the checkpoint with the lowest held-out loss, which checkpoint.best=true keeps.",
    )
    plugins: RunPlugins = None
    backend: Backend = None
    device: Device = None

    def open(self, out: Path, shown: Display, settings: Mapping[str, Any] | None = None) -> Run:
        """Open a run's folder.

        Args:
            out: the folder, or a model directory.
            shown: display for notes and progress.
            settings: for a model directory, further settings that a command needs.

        Raises:
            Refusal: it holds no run.
        """
        from minillm_core.train.run import Run

        return Run.open(
            out,
            settings=settings,
            plugins=self.plugins,
            step=self.step,
            best=self.best,
            backend=self.backend or "auto",
            device=self.device or "auto",
            shown=shown,
        )


_sampling = partial(option, panel="Sampling")


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling options; a parameter of this type stands for all of them."""

    temperature: float = _sampling(
        "T", "Lower is less random; 0 always takes the most likely token.", default=0.8
    )
    top_k: int | None = _sampling("K", "Sample from the K most likely tokens. Default: all.")
    top_p: float = _sampling(
        "P",
        "Sample from the most likely tokens whose probabilities add up to P; 1: all.",
        default=1.0,
    )
    seed: int | None = _sampling(
        "N", "Seed of the sampling. Default: a new one each time, which is shown.", min=0
    )

    def rule(self) -> Sampling:
        """Return the sampling rule.

        Raises:
            Refusal: an option is out of range.
        """
        from minillm_core.train.generate import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p)

    def chosen_seed(self) -> int:
        """Return the given seed, or a new one, which is shown where it matters."""
        if self.seed is not None:
            return self.seed
        seed = SystemRandom().getrandbits(32)
        if self.temperature > 0:
            say(f"drawn with --seed {seed}")
        return seed


@dataclass(frozen=True)
class LeaveOut:
    """The options that a command leaves out of a bundle, separated by spaces."""

    names: str


PlanOptions = Annotated[RunOptions, LeaveOut("prompts")]
"""The run options of a command that plans and does not train."""

StudyOptions = Annotated[
    RunOptions, LeaveOut("plugins task init out resume branch steps prompts memory deterministic")
]
"""The run options of a command that trains to measure: it has its own options for plugins and steps."""
