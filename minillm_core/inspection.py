"""Looks inside plans, plugins, modules, kernels and optimizers, for tools of other distributions.

The contract kit (minillm-kit) is written with :mod:`minillm_core`, :mod:`minillm_core.commands` and
this module, and with nothing beneath them; so can other checkers, profilers and backends be. Names
are imported when they are first used: the plugin look-up brings neither numpy nor a framework in.

Plugins, installed or in a file
    :func:`find_plugin` imports one, ``with_options`` makes it ready for a plan; ``installed_plugins``
    and ``read_class`` read metadata and source, and import nothing. ``check_support`` and ``unmet``
    say why a plugin cannot run here, ``own_frames`` which frames of an error are its own code, and
    ``PluginCodeError`` is raised where that code raised. ``bad_name`` and ``local_package`` serve
    those who write new plugins.

Settings as they are typed
    ``from_assignments`` parses ``key=value``, ``check_option`` refuses what no option can be, and
    ``read_value`` reads the text behind ``=``.

This machine and its distributions
    ``probe`` looks for frameworks and devices (a ``Machine`` with an ``InstalledFramework`` each) and imports
    none; ``choose`` and ``default_preset`` are a run's decisions there, ``DEVICES`` the backends that
    there are, ``memory_limit`` the container's bytes. ``entry_points`` of the group ``GROUP`` and
    ``unreadable`` read metadata; ``version_mix`` compares our ``DISTRIBUTIONS`` with the ``CORE``, and
    ``FRAMEWORKS`` are packages that a pip line keeps as they are.

A plan, step by step
    :func:`trainer` runs steps on batches given by hand; :func:`batch_hook`, ``observers`` and
    ``Evidence`` are the rest of what the loop does. :class:`minillm_core.Run` is the whole loop.

A framework of your own, such as the NumPy oracle of minillm-kit
    It extends ``Framework``: ``ops`` (``NumPyArrays`` and :func:`reference_op` are the ones
    of the float64 reference, ``CONTRACTS`` says what each op promises), ``placing``, ``fill``,
    ``host``, ``checkpoint`` and ``witness``, over a base class whose ``__setattr__`` calls ``record``.
    ``materialise`` makes a plan's model on it, ``materialising`` any module; ``declared`` yields what
    its modules declare, ``initial_values`` the first values of that, ``generator`` the random numbers
    of one parameter, and ``call_names`` the arguments of a ``forward``. ``Scope`` is how a decoder's
    modules see the sequence.

The update
    ``Group`` and ``Member`` say which parameters a rule updates together, ``groups_of`` makes them;
    ``update`` is one step of the stages on any backend's ops, ``joined`` and ``apart`` stack the
    arrays of a group and undo it.

Export
    ``export_layout`` is the published layout that a plan's model fits, ``exported`` its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.backends.base import Trainer
    from minillm_core.backends.detect import (
        DEVICES,
        InstalledFramework,
        Machine,
        choose,
        default_preset,
        probe,
    )
    from minillm_core.backends.memory import memory_limit
    from minillm_core.backends.native import materialise
    from minillm_core.checkpoint.huggingface import export_layout, exported
    from minillm_core.config.check import check_option
    from minillm_core.config.origins import from_assignments
    from minillm_core.config.schema import Config
    from minillm_core.config.values import read_value
    from minillm_core.data import OnBatch
    from minillm_core.errors import PluginCodeError
    from minillm_core.install import FRAMEWORKS, unmet
    from minillm_core.nn.init import generator
    from minillm_core.nn.initial import initial_values
    from minillm_core.nn.module import Framework, declared, materialising, record
    from minillm_core.nn.node import Scope, call_names
    from minillm_core.ops.contract import CONTRACTS
    from minillm_core.ops.reference import NumPyArrays
    from minillm_core.optim.groups import Group, Member, groups_of
    from minillm_core.optim.update import apart, joined, update
    from minillm_core.plan import Plan
    from minillm_core.plugins.attribution import own_frames
    from minillm_core.plugins.discover import (
        GROUP,
        bad_name,
        entry_points,
        installed_plugins,
        local_package,
        unreadable,
    )
    from minillm_core.plugins.first_party import CORE, DISTRIBUTIONS, version_mix
    from minillm_core.plugins.manager import FoundPlugin, LoadedPlugin, check_support, with_options
    from minillm_core.plugins.manifest import read_class
    from minillm_core.train.evidence import Evidence
    from minillm_core.train.hooks import observers

__all__ = [
    "CONTRACTS",
    "CORE",
    "DEVICES",
    "DISTRIBUTIONS",
    "FRAMEWORKS",
    "GROUP",
    "Config",
    "Evidence",
    "FoundPlugin",
    "Framework",
    "Group",
    "InstalledFramework",
    "LoadedPlugin",
    "Machine",
    "Member",
    "NumPyArrays",
    "OnBatch",
    "PluginCodeError",
    "Scope",
    "Trainer",
    "apart",
    "bad_name",
    "batch_hook",
    "call_names",
    "check_option",
    "check_support",
    "choose",
    "declared",
    "default_preset",
    "entry_points",
    "export_layout",
    "exported",
    "find_plugin",
    "from_assignments",
    "generator",
    "groups_of",
    "initial_values",
    "installed_plugins",
    "joined",
    "local_package",
    "materialise",
    "materialising",
    "memory_limit",
    "observers",
    "own_frames",
    "plugin_name",
    "probe",
    "read_class",
    "read_value",
    "record",
    "reference_op",
    "trainer",
    "unmet",
    "unreadable",
    "update",
    "version_mix",
    "with_options",
]

_HOME = {
    "backends.base": ("Trainer",),
    "backends.detect": (
        "DEVICES",
        "InstalledFramework",
        "Machine",
        "choose",
        "default_preset",
        "probe",
    ),
    "backends.memory": ("memory_limit",),
    "backends.native": ("materialise",),
    "checkpoint.huggingface": ("export_layout", "exported"),
    "config.check": ("check_option",),
    "config.origins": ("from_assignments",),
    "config.schema": ("Config",),
    "config.values": ("read_value",),
    "data": ("OnBatch",),
    "errors": ("PluginCodeError",),
    "install": ("FRAMEWORKS", "unmet"),
    "nn.init": ("generator",),
    "nn.initial": ("initial_values",),
    "nn.module": ("Framework", "declared", "materialising", "record"),
    "nn.node": ("Scope", "call_names"),
    "ops.contract": ("CONTRACTS",),
    "ops.reference": ("NumPyArrays",),
    "optim.groups": ("Group", "Member", "groups_of"),
    "optim.update": ("apart", "joined", "update"),
    "plugins.attribution": ("own_frames",),
    "plugins.discover": (
        "GROUP",
        "bad_name",
        "entry_points",
        "installed_plugins",
        "local_package",
        "unreadable",
    ),
    "plugins.first_party": ("CORE", "DISTRIBUTIONS", "version_mix"),
    "plugins.manager": ("FoundPlugin", "LoadedPlugin", "check_support", "with_options"),
    "plugins.manifest": ("read_class",),
    "train.evidence": ("Evidence",),
    "train.hooks": ("observers",),
}
"""Where each name that is not defined here lives: a module of the core -> its names."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used.

    Raises:
        AttributeError: the name is not public.
    """
    for module, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"minillm_core.{module}"), name)
            return value
    raise AttributeError(f"module 'minillm_core.inspection' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__]


def plugin_name(spec: str, *, where: str = "plugin") -> str:
    """Return a plugin's name: ``muon`` -> muon, ``./my_trick.py:MyTrick`` -> my_trick.

    Args:
        spec: a name, or a file and its class, as ``--plugins`` takes them.
        where: the place that an error names.

    Raises:
        ConfigError: it is neither, or its name is reserved.
    """
    from minillm_core.config.selection import name_of

    return name_of(spec, where=where)


def find_plugin(spec: str, *, where: str = "plugin") -> FoundPlugin:
    """Import one plugin's class.

    Args:
        spec: a name, or a file and its class; as :func:`plugin_name`.
        where: the place that an error names.

    Returns:
        The class (``cls``) and where it comes from (``origin``).

    Raises:
        ConfigError: as :func:`plugin_name`.
        PluginError: unknown, broken, of another hook API, or of another version than the core.
        PluginCodeError: its module raised while it was imported.
    """
    from minillm_core.config.selection import spec_of
    from minillm_core.plugins.manager import find

    return find(spec_of(spec, where=where))


def trainer(
    plan: Plan,
    backend: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    compiler: Callable[..., Any] | None = None,
) -> Trainer:
    """Make a plan's model and optimizer on a device, to be stepped by hand.

    ::

        run = trainer(plan, "torch")
        values = plan.values(0.5)  # of the schedule, half way
        result = run.read(run.step([batch], values, supervised=int((batch["labels"] >= 0).sum())))
        run.arrays()["model.head.weight"]  # float32 (V, C)

    Batches hold int32 (B, T) arrays ``ids``, ``labels``, ``documents`` and ``positions``, and what
    the plan's ``batch_fields`` declare.

    Args:
        plan: the plan.
        backend: ``torch`` or ``mlx``; it is imported.
        seed: of the initial values.
        device: ``cpu``, ``cuda``, ``mps`` or ``gpu``.
        compiler: takes the place of ``torch.compile`` where steps are compiled; torch alone.

    Raises:
        BackendError: no kernel serves an op here, or the framework does not see the device.
    """
    from minillm_core.backends.bind import bind, create
    from minillm_core.backends.detect import Detected

    detected = Detected(backend, device, "inspection")
    if backend != "torch" or compiler is None:
        return create(detected, plan).trainer(plan, seed)
    from minillm_core.backends.torch.backend import TorchBackend

    return TorchBackend(*bind(detected, plan), compiler=compiler).trainer(plan, seed)


def batch_hook(plan: Plan, plugins: Iterable[LoadedPlugin]) -> OnBatch | None:
    """Join the plugins' ``on_batch`` into one function of (batch, phase), as a run of seed 0 begins.

    Args:
        plan: says in which order they are called, and the vocabulary.
        plugins: those of the plan, in any order.

    Returns:
        The function, which raises PluginCodeError where a plugin raises or returns no batch of the
        shape that it was given; None where no plugin has the hook.
    """
    from collections import Counter

    from minillm_core.plugins.streams import Streams
    from minillm_core.train import hooks

    vocab = plan.config.model.vocab
    return hooks.batch_hook(plan.on_batch, plugins, Counter(), vocab, Streams(0))


def reference_op(name: str) -> Callable[..., Any]:
    """Return an op's reference: NumPy in float64, forward only.

    Args:
        name: a key of ``CONTRACTS``.

    Raises:
        AttributeError: there is no such op.
    """
    from minillm_core.ops import reference

    return getattr(reference, name)
