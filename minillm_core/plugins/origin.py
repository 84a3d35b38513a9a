"""Where a plugin came from, and its own code run under its name."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from minillm_core.plugins.guard import plugin_code, within

__all__ = ["Origin", "digest_of", "root_of"]


@dataclass(frozen=True)
class Origin:
    """The name of a plugin, who offers it, and the file that defines its class."""

    name: str
    distribution: str | None  # None: a single file
    version: str | None
    source: str  # "minillm_muon.muon:Muon", or "./my_trick.py:MyTrick" as it was named
    file: str
    digest: str  # sha256 of the file when it was imported
    root: str  # the folder or file whose code is the plugin's own

    @property
    def offered_by(self) -> str | None:
        """Distribution and version."""
        return f"{self.distribution} {self.version}" if self.distribution else None

    @property
    def called(self) -> str:
        """The plugin and its version, for people: ``plugin 'x' (minillm-x 1.0)``."""
        return f"plugin '{self.name}'" + (f" ({self.offered_by})" if self.offered_by else "")

    def holds(self, file: str) -> bool:
        """Whether a file's code is the plugin's own."""
        return within(file, self.root)

    def contain(self, doing: str) -> AbstractContextManager[None]:
        """Run the plugin's code inside: ``with origin.contain("build_model"): ...``.

        Raises:
            PluginCodeError: the plugin's code raised.
        """
        return plugin_code(self.name, doing, root=self.root, offered_by=self.offered_by)


def digest_of(file: str) -> str:
    """sha256 of a file, in hexadecimal digits."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def root_of(module: str, file: str) -> str:
    """The folder of the module's top package, or the file of a module without one."""
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).parents[depth - 1]) if depth else file
