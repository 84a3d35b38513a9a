"""Reading a run's folder: its run.json, with settings and plugins, and its tokenizer.

The folder may be untrusted: its content is checked before it is used or names code to run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from minillm_core.checkpoint.read import Checkpoint, newest
from minillm_core.config.origins import Layer, Setting
from minillm_core.config.schema import Config
from minillm_core.config.selection import Spec
from minillm_core.data import Tokenizer
from minillm_core.data.tokenizer import LARGEST_TOKENIZER
from minillm_core.disk import read_file
from minillm_core.errors import Refusal
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.options import named_again
from minillm_core.text import plain, quoted
from minillm_core.train.record import RUN, names_run, read_record, unwritable
from minillm_core.train.settings import config_of, layer_of

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, as described by its run.json."""

    out: Path
    record: Mapping[str, Any]  # run.json

    @classmethod
    def find(cls, out: Path) -> Self | None:
        """Read the folder of a run to resume; None: it has no run.json.

        Raises:
            Refusal: its run.json cannot be read, or it is RUN@STEP of a run.
        """
        return cls(out, read_record(out)) if names_run(str(out)) else None

    @property
    def where(self) -> str:
        """The path of run.json."""
        return str(self.out / RUN)

    @cached_property
    def config(self) -> Config:
        """The run's settings."""
        return config_of(self.record["config"], where=self.where)

    @cached_property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verified at the first look-up."""
        return newest(self.out)

    def part(self, key: str) -> Mapping[str, Any]:
        """Return an object of the record; empty if it is missing or of another type."""
        found = self.record.get(key)
        return found if isinstance(found, Mapping) else {}

    def check_seed(self, checkpoint: Checkpoint) -> None:
        """Refuse a run.json whose seed differs from that of a checkpoint.

        Raises:
            Refusal: they differ.
        """
        seed = self.config.seed
        held = checkpoint.scalars.get("seed", seed)
        if held != seed and self.record.get("branched_from") is None:
            raise Refusal(
                f"run.json was changed: its seed is {seed}, and the run was trained with {held}",
                where=self.where,
                fix=f"put back {held}, or restore run.json from a copy",
            )

    def layer(self) -> Layer:
        """Return the run's settings as the lowest layer of those of a resumed run.

        A tokenizer that was given as a file is read from the run's folder.

        Raises:
            Refusal: the record's config is invalid.
        """
        layer = layer_of(self.record["config"], where=self.where)
        if "data.tokenizer" in layer.settings and (found := self.digest()) is not None:
            own, expected = str(self.out / TOKENIZER), self.digests()
            if expected and found not in expected:
                raise Refusal(
                    f"{TOKENIZER} is not the one that the run was trained with: it was changed",
                    where=own,
                    fix="restore it from a copy, or move it away: the original is then used, where "
                    "it still is",
                )
            layer.settings["data.tokenizer"] = Setting(own, "the run", self.where)
        return layer

    def specs(self, config: Config, named: Mapping[str, Spec]) -> dict[str, Spec]:
        """Choose the code to load: installed plugins by name, and plugins that are named again.

        These names choose the code to run, so another account's folder must not set them.

        Args:
            config: the settings that name the plugins.
            named: plugin -> its spec, as typed.

        Raises:
            Refusal: a single-file plugin, or any plugin of an OUT that another account owns, is not named;
                or a named plugin is not one of the run's.
        """
        for name in named:
            if name not in config.plugins:
                raise Refusal(
                    f"the run was not trained with a plugin '{name}'",
                    where=self.where,
                    fix=f"its plugins are: {', '.join(config.plugins) or 'none'}",
                )
        files = {
            entry.get("name"): entry.get("source")
            for entry in self.record.get("plugins") or ()
            if isinstance(entry, Mapping) and entry.get("distribution") is None
        }
        foreign = hasattr(os, "getuid") and (self.out / RUN).stat().st_uid != os.getuid()
        for name in config.plugins:
            if name not in named and (foreign or name in files):
                why = "another account owns its folder" if foreign else "it is a single file"
                again = files.get(name, name)
                raise Refusal(
                    f"the run's plugin '{name}' must be named again: {why}",
                    where=self.where,
                    fix=f"--plugins {quoted(again)}, if you trust that code: it runs with your rights",
                )
        return {name: named.get(name, name) for name in config.plugins}

    # tokenizer

    def digest(self) -> str | None:
        """Return the sha256 of tokenizer.json; None if there is none.

        Raises:
            Refusal: it is a link, not a regular file, or larger than a tokenizer can be.
        """
        path = self.out / TOKENIZER
        try:
            return hashlib.sha256(read_file(path, LARGEST_TOKENIZER)).hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise Refusal(
                f"the tokenizer cannot be read: {error}",
                where=str(path),
                fix="restore it from a copy; minillm writes it as a file",
            ) from error

    def digests(self, scalars: Mapping[str, Any] | None = None) -> tuple[str, ...] | None:
        """List the digests that the tokenizer may have; empty for a run on ids; None: unknown.

        The checkpoint's digest is binding. A resumed run may have rewritten the file since its newest
        checkpoint, with another version of the library and the same ids.

        Args:
            scalars: the checkpoint's; None: read the record alone.
        """
        ours, scalars = self.part("tokenizer").get("sha256"), scalars or {}
        if "tokenizer" not in scalars:
            if "tokenizer" not in self.record:
                return None
            return () if self.record["tokenizer"] is None else (str(ours),)
        saved = scalars["tokenizer"]
        if saved is None:
            return ()
        return (str(saved), str(ours)) if ours and self.record.get("resumed") else (str(saved),)

    def tokenizer(self, checkpoint: Checkpoint, say: Callable[[str], None]) -> Tokenizer | None:
        """Load the run's tokenizer and check its digest; None: the run was trained on ids.

        Raises:
            Refusal: the file is missing, or differs from the one that the run was trained with.
            DataError: it cannot be read.
        """
        path, found = self.out / TOKENIZER, self.digest()
        expected = self.digests(checkpoint.scalars)
        if expected and found not in expected:
            again = "minillm train --resume with the run's data, which writes it again"
            if found is None:
                what = f"{TOKENIZER} is missing: the run was trained with one"
                raise Refusal(what, where=str(path), fix=f"restore it from a copy; or {again}")
            raise Refusal(
                f"{TOKENIZER} is not the one that the run was trained with: it was changed or "
                "replaced",
                where=f"{path}: sha256 {found[:16]}..., of the run's {expected[0][:16]}...",
                fix=f"restore it from a copy; or move it away and {again}",
            )
        if found is None:
            return None
        if expected is None:
            say(f"the run's version kept no digest of {TOKENIZER}: the tokenizer is used unchecked")
        elif not expected:
            say(
                f"the run was trained on ids, and {TOKENIZER} was added later: the tokenizer is "
                "used unchecked"
            )
        return Tokenizer.load(path, self.config.model.vocab, self.config.data.end_of_text)


def keep_tokenizer(
    out: Path, tokenizer: Tokenizer | None, earlier: RunFolder | None, say: Callable[[str], None]
) -> str | None:
    """Write the tokenizer of a run into its folder, unless it is there already.

    Args:
        out: the run's folder, locked.
        tokenizer: the data's, whose fingerprint was compared; None: the data are ids.
        earlier: the resumed run.
        say: prints a line.

    Returns:
        The sha256 of the file, for the run's record and its checkpoints; None: there is no file.

    Raises:
        Refusal: the folder holds no run, and another tokenizer.
        MinillmError: the disk refused.
    """
    if tokenizer is None:
        return None
    folder, path = RunFolder(out, {}), out / TOKENIZER
    found, expected = folder.digest(), earlier.digests() if earlier else None
    if found is not None and expected and found in expected:
        return found
    if not earlier and found and path.read_bytes() != tokenizer.text().encode("utf-8"):
        what = f"{path} is not the tokenizer of this run"
        raise Refusal(what, where=str(path), fix="move it away, or name another folder")
    with unwritable(path):
        tokenizer.save(path)
    if expected:
        was = "missing" if found is None else "changed"
        say(f"{TOKENIZER} of the run was {was}, and is written again: its data give the same ids")
    return folder.digest()


def check_named_again(
    plugins: Sequence[LoadedPlugin], is_given: Callable[[str], bool], out: Path
) -> None:
    """Refuse options that send data away (``again``) if only run.json sets them.

    Args:
        plugins: those of the resumed run, loaded.
        is_given: whether this command line, or its file, sets an option.
        out: the run's folder.

    Raises:
        Refusal: such an option is not given again.
    """
    for one in plugins:
        for option in named_again(one.plugin):
            key, value = f"{one.name}.{option}", plain(str(getattr(one.plugin, option)), 80)
            if not is_given(key):
                raise Refusal(
                    f"{key}={value} of the run must be named again: a run's folder alone does not "
                    "decide where data are sent",
                    where=str(out / RUN),
                    fix=f"{key}={value}, or {key}=VALUE for another",
                )
