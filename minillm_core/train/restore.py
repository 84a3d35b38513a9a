"""Models from a run's folder: its plan rebuilt, a valid checkpoint, and the model for inference.

A model that was read may also be the frozen reference of another run.

Only plugins that shaped the model, its data and its loss are needed for it, and of these not the kernels of
layers that have a plain form. Kernels, observers, the optimizer and initial values were for the run's machine:
where such a plugin does not run, the run is read without it, and a line is printed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.backends.base import Backend, Model
from minillm_core.backends.bind import create_backend, requests_here
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint.read import chosen_or_refuse, fitting
from minillm_core.config.kernels import AUTO, parse_policy
from minillm_core.config.selection import Spec
from minillm_core.data import Tokenizer
from minillm_core.errors import BackendError, DataError, PlanError, PluginError, Refusal
from minillm_core.nn.node import Node
from minillm_core.ops.select import Candidate, Choice, Request, choose_all
from minillm_core.optim.views import VIEWED, with_views
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.diff import differences, in_words
from minillm_core.plugins import manager
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.plugins.discover import installed_names
from minillm_core.text import few, plain
from minillm_core.train.record import read_record
from minillm_core.train.resume import edited_plugins
from minillm_core.train.run_folder import TOKENIZER, RunFolder

SETTINGS = {
    **{f"data.{key}": f"train.{key}" for key in ("rows", "seq_len")},
    "optimizer.clip": "train.clip",
    "plugins.": "",
    **dict.fromkeys(("model.spec", "model.parameters", "model.inits")),
    **{key: key for key in ("model.", "data.seed", "data.val", "train.")},
}
"""Prefix of a path in a plan -> prefix of the setting that it repeats; None: it is derived."""

RESTORE = "restore run.json from a copy"

Create = Callable[[Detected, Plan], Backend]
"""Binds a plan to a backend and device."""


@dataclass(frozen=True)
class SavedModel:
    """A trained model on no device: its plan, its tokenizer, and arrays that are read when needed."""

    plan: Plan
    tokenizer: Tokenizer | None  # None: it was trained on ids
    path: Path  # the folder that its arrays are in
    step: int  # optimizer steps taken; 0 if unknown
    # reads the model's parameters and state, float32, under the names of Model.load
    arrays: Callable[[], dict[str, np.ndarray]]

    def model(
        self,
        detected: Detected,
        *,
        exact: bool = False,
        max_positions: int | None = None,
        say: Callable[[str], None],
        create: Create | None = None,
    ) -> Model:
        """Load the trained model on a device, which may differ from the run's.

        Plugins that only training needed may be missing: see :func:`inference_plan`.

        Args:
            detected: the backend and device.
            exact: use float32, eager mode, and the best kernels for them.
            max_positions: longest row to feed; default: the run's seq_len.
            say: prints a line for each plugin that the model is read without.
            create: builds the backend; default: :func:`minillm_core.backends.bind.create_backend`.

        Raises:
            Refusal: a plugin that shaped the model, its data or its loss does not run there, or the
                checkpoint does not fit the plan.
        """
        wanted = self.plan
        if exact:
            wanted = wanted.with_train(dtype="float32", compile="off")
            # the kernels in the settings were for training, perhaps in another dtype
            config = wanted.config.model_copy(update={"kernels": "auto"})
            wanted = replace(wanted, config=config)
        with attribute_errors(wanted.active, "while kernels are chosen"):
            plan = inference_plan(wanted, detected, say)
            backend = (create or create_backend)(detected, plan)
        model = backend.model(plan, plan.config.seed, max_positions=max_positions)
        with fitting(self.path, "model"):
            model.load(self.arrays())
        return model


def open_run(
    out: Path,
    *,
    plugins: Mapping[str, Spec] | None = None,
    step: int | None = None,
    best: bool = False,
    say: Callable[[str], None],
) -> SavedModel:
    """Read a run's folder, without changes to it and without a framework.

    Args:
        out: the folder.
        plugins: name -> spec, for plugins that must be named again.
        step: the checkpoint's; default: the newest that verifies.
        best: the checkpoint with the lowest held-out loss.
        say: prints notes for the user.

    Raises:
        Refusal: OUT holds no run or no such checkpoint, or a plugin that shaped its model, its data
            or its loss is unknown.
        NoCheckpoint: none verifies.
        PluginCodeError: a plugin's own code raised.
    """
    folder = RunFolder(out, read_record(out))
    plan = _planned(folder, folder.specs(folder.config, plugins or {}), say)
    checkpoint = chosen_or_refuse(out, say, step=step, best=best)
    folder.check_seed(checkpoint)
    tokenizer, read = folder.tokenizer(checkpoint, say), checkpoint.arrays

    def arrays() -> dict[str, np.ndarray]:
        """Read from the checkpoint its state, and its parameters or the weights evaluated in their place."""
        return with_views(read("model.") | read("state.") | read(VIEWED))

    return SavedModel(plan, tokenizer, checkpoint.path, checkpoint.step, arrays)


def _planned(folder: RunFolder, specs: Mapping[str, Spec], say: Callable[[str], None]) -> Plan:
    """Rebuild a run's plan, with its plugins; without missing ones that shaped nothing needed.

    Raises:
        PluginError: a plugin is not available, and the record does not prove that it shaped nothing.
        Refusal: the plan differs from the one that the run was trained with.
    """
    record, config = folder.record, folder.config
    named = {name for name, spec in specs.items() if name == spec}
    absent = named - installed_names() if named else named
    here = {name: spec for name, spec in specs.items() if name not in absent}
    active = manager.load(here, config.plugins)
    try:
        plan = build_plan(config, active)
    except PlanError:
        if absent:  # an installed plugin may depend on a missing one
            manager.load(specs, config.plugins)  # raises, with what to install
        raise
    if absent and not is_compatible(record.get("plan"), plan):
        manager.load(specs, config.plugins)
    for name in sorted(absent):
        say(
            f"plugin '{name}' is not installed here: it shaped neither the model nor its data nor "
            "its loss, and the run is read without it"
        )
    if not absent and plan.hash != record["plan_hash"]:  # without one of them it differs
        _check_same_model(folder, plan, say)
    return plan


def _check_same_model(folder: RunFolder, plan: Plan, say: Callable[[str], None]) -> None:
    """Print the differences between a plan and the recorded one that do not affect reading.

    Raises:
        Refusal: the model, loss or batches differ from those of the run.
    """
    record, where = folder.record, folder.where
    planned = json.loads(json.dumps(plan.data()))
    try:
        found = differences(record["plan"], planned)
    except (AttributeError, KeyError, TypeError) as error:
        raise Refusal("run.json holds no plan", where=where, fix=RESTORE) from error
    if not found:
        raise Refusal(
            "run.json was changed: its plan and plan_hash disagree", where=where, fix=RESTORE
        )
    edited, rest = edited_plugins(found, plan.active)
    versions = {
        k.removeprefix("versions."): v for k, v in rest.items() if k.startswith("versions.")
    }
    others = [f"{name} {old}, here {new}" for name, (old, new) in versions.items()]
    others += [f"other code of {few(sorted(edited))}"] if edited else []
    if is_compatible(record["plan"], plan):
        by = "; ".join(others) or "a changed run.json"
        say(
            f"note: trained with {plain(by)}: only its training differs, and the model is read as it "
            "was trained"
        )
        return
    if settings := _settings(rest):
        raise Refusal(
            f"run.json was changed: the run was trained with other settings: {few(settings, 6)}",
            where=f"{where}: config, plan",
            fix=f"put them back as they were (on the left), or {RESTORE}",
        )
    named = [line for line in in_words(rest) if not line.startswith(("versions.", "digests."))]
    raise Refusal(
        f"the model read here would differ from the run's: {few(named)}",
        where="; ".join(others) or f"{where}: the plan was changed, or the program was",
        fix="install the versions that run.json names" if others else RESTORE,
    )


def _settings(found: Mapping[str, Any]) -> list[str]:
    """Format ``train.seq_len: 256 -> 32`` for each difference of two plans that a setting made."""
    lines = []
    for path, pair in found.items():
        begin = next((begin for begin in SETTINGS if path.startswith(begin)), None)
        if begin is not None and (name := SETTINGS[begin]) is not None:
            (line,) = in_words({name + path.removeprefix(begin): pair})
            lines.append(line)
    return lines


UNREAD = ("kernel[", "on_evaluated", "on_event", "opt.", "model.init[")
"""Prefixes of the slots that do not affect a trained model's loss and text."""


def shapes_model(plan: Plan, name: str) -> bool:
    """Return whether a plugin shapes the model, data or loss that a checkpoint of the plan needs."""
    return any(p.owner == name and not p.slot.startswith(UNREAD) for p in plan.placements)


def _has_plain_forms(plan: Plan, name: str) -> bool:
    """Return whether every part of the model that a plugin gives it is a sublayer with a plain form."""
    parts = (part for block in plan.spec.blocks for part in (block.attention, block.mlp))
    ours = [one for one in parts if isinstance(one, Node) and one.owner == name and one.plain_form]
    filled = [p for p in plan.placements if p.owner == name and not p.slot.startswith(UNREAD)]
    return len(ours) == len(filled)


def is_compatible(recorded: Any, plan: Plan) -> bool:
    """Return whether a plan can read the checkpoints of another: the same model, loss and batches.

    Args:
        recorded: the other's :meth:`Plan.data`, from run.json; anything else is not compatible.
        plan: the plan.
    """
    try:
        return _inferred(recorded) == _inferred(json.loads(json.dumps(plan.data())))
    except (AttributeError, KeyError, TypeError):
        return False


def inference_plan(plan: Plan, detected: Detected, say: Callable[[str], None]) -> Plan:
    """Reduce a run's plan to the parts needed for reading, where this machine does not support the rest.

    It drops such plugins' kernels and initial values, unsupported kernels of others, and a policy for
    kernels that are not available: each with a line.

    Args:
        plan: the run's.
        detected: the machine that reads it.
        say: prints notes for the user.

    Raises:
        PluginError: a plugin that is needed does not run here, or a package that it requires is
            missing.
        BackendError: no kernel supports an op.
    """
    unserved: dict[str, str] = {}
    for one in plan.active:
        try:
            manager.check_support((one,), detected.backend, detected.device)
        except PluginError as error:
            how = "the run is read without it"
            if shapes_model(plan, one.name):
                if not _has_plain_forms(plan, one.name):
                    raise
                how = "the run is read without its kernels"
            unserved[one.name] = f"{error.what}; {how}"
    here = _without(plan, unserved)
    requests, candidates = requests_here(detected, here)
    policy = parse_policy(here.config.kernels)
    try:
        choices = choose_all(requests, candidates, policy)
    except BackendError as error:
        if policy == AUTO:
            raise
        choices = choose_all(requests, candidates)
        say(f"{error.what}; the run's --kernels {policy} is replaced by auto")
        here = replace(here, config=here.config.model_copy(update={"kernels": str(AUTO)}))
    serving = {choice.op: choice for choice in choices}
    for name, why in unserved.items():
        ops = [c.op for owner, c in plan.candidates if owner == name]
        instead = ", ".join(f"{serving[op].kernel} serves {op}" for op in ops)
        say(why + (f": {instead}" if instead else ""))
    idle = _unsupported_kernels(here, {request.op: request for request in requests}, serving)
    for name, kernels in idle.items():
        say(f"plugin '{name}': " + "; ".join(kernels.values()))
    kept = [(o, c) for o, c in here.candidates if (c.op, c.name) not in idle.get(o, ())]
    return replace(here, candidates=tuple(kept))


def _without(plan: Plan, names: Iterable[str]) -> Plan:
    """Remove the kernels and the initial values of some plugins from a plan."""
    names = set(names)
    given = {p.slot for p in plan.placements if p.owner in names}
    return replace(
        plan,
        candidates=tuple((owner, c) for owner, c in plan.candidates if owner not in names),
        inits={n: init for n, init in plan.inits.items() if f"model.init[{n}]" not in given},
    )


def _unsupported_kernels(
    plan: Plan, requests: Mapping[str, Request], serving: Mapping[str, Choice]
) -> dict[str, dict[tuple[str, str], str]]:
    """Map plugins to their unsupported kernels that would end a run, each with the reason."""
    found = {}
    for owner in dict(plan.candidates):
        kernels = [candidate for name, candidate in plan.candidates if name == owner]
        idle = [c for c in kernels if serving[c.op].kernel != c.name]
        if len(idle) == len(kernels) or any(c.disable_option for c in idle):
            found[owner] = {
                (c.op, c.name): _why_idle(c, requests[c.op], serving[c.op]) for c in idle
            }
    return found


def _why_idle(candidate: Candidate, request: Request, choice: Choice) -> str:
    why = candidate.refusal(request) or choice.reason
    kernel = f"{candidate.op}={candidate.name}"
    return f"its kernel {kernel} does not serve here, {choice.kernel} does ({why})"


def _inferred(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a plan's data that affects reading."""
    model, batch = dict(data["model"]), data["data"]
    model.pop("inits")
    parameters = {name: info["shape"] for name, info in model.pop("parameters").items()}
    read = {name: value for name, value in batch.items() if name not in ("order", "packer")}
    if source := read.get("source"):  # its code made the documents; reading the model makes none
        read["source"] = {name: value for name, value in source.items() if name != "code"}
    return {
        "model": model,
        "parameters": parameters,
        "data": {"fields": [], "on_batch": [], **read},
    }


class FrozenModel:
    """The newest checkpoint of a run, as a reference model of another run: ``loss.reference(name, model)``.

    Constructing it reads nothing: a trained model whose reference is gone can still be read.

    Args:
        path: the run's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.notes: list[str] = []  # to show to the user once it is read

    @cached_property
    def saved(self) -> SavedModel:
        """The saved model in the folder.

        Raises:
            Refusal: the folder holds no run, or plugins make its batches.
        """
        saved = open_run(Path(self.path), say=self.notes.append)
        if saved.plan.on_batch:
            raise Refusal(
                f"on_batch of plugin '{saved.plan.on_batch[0]}' made the batches of this model, so "
                "it cannot read those of another run",
                where=self.path,
                fix="a reference that was trained without it",
            )
        return saved

    @property
    def plan(self) -> Plan:
        """The plan of the frozen model."""
        return self.saved.plan

    def arrays(self) -> dict[str, np.ndarray]:
        """Read the model's parameters and state, float32, by their names in a checkpoint."""
        return self.saved.arrays()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The model's identity: its plan's hash, and sha256 of its arrays."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return {"plan_hash": self.plan.hash, "weights": digest.hexdigest()}


def described(plan: Plan) -> dict[str, Any]:
    """Describe the references of a plan for run.json, by name."""
    return {one.name: {"path": one.model.path, **one.model.identity} for one in plan.references}


def check_references(
    plan: Plan, tokenizer: Tokenizer | None, recorded: Mapping[str, Any] | None
) -> Iterator[str]:
    """Check the reference models of a plan; yields notes for the user.

    Args:
        plan: the plan.
        tokenizer: of the run's text.
        recorded: :func:`described` of the resumed run; None: the run is new.

    Raises:
        Refusal: a reference cannot be read, or differs from the one that the run began with.
        DataError: a reference has another vocabulary or tokenizer.
    """
    for one in plan.references:
        model, vocab, before = one.model, plan.config.model.vocab, (recorded or {}).get(one.name)
        own, held = model.plan.config.model.vocab, model.saved.tokenizer
        fix = f"train with its tokenizer: data.tokenizer={model.path}/{TOKENIZER} model.vocab={own}"
        if own != vocab:
            what = f"the reference has {own:,} ids, but model.vocab is {vocab:,}"
            raise DataError(what, where=model.path, fix=fix)
        if held is not None and tokenizer is not None and held.digest != tokenizer.digest:
            what = "the tokenizer of the reference is not the run's"
            raise DataError(what, where=model.path, fix=fix)
        if recorded is not None and before != {**(before or {}), **model.identity}:
            what = f"the reference '{one.name}' is not the model that the run began with"
            fix = "restore the folder as it was: a checkpoint saved later changes it"
            raise Refusal(what, where=model.path, fix=fix)
        yield from (f"reference '{one.name}': {line}" for line in model.notes)
