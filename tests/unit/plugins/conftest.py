"""Distributions that look installed: a folder with packages and .dist-info on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

GOOD = '''
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin


class Trick(Plugin, api=1):
    """A trick.

    More about it.
    """

    width: int = option(12, ge=1, help="features read")
    layers: Layers = option("all", help="where it goes")

    def build_attention(self, attn):
        attn.append(self.width)
'''


class Site:
    """A site-packages of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def install(
        self,
        distribution: str,
        points: Mapping[str, str],
        files: Mapping[str, str] | None = None,
        version: str = "1.0",
    ) -> None:
        """Write the metadata of a distribution, its entry points, and its files."""
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        self.write(f"{info}/entry_points.txt", f"[minillm.plugins]\n{lines}")
        self.write(f"{info}/METADATA", f"Name: {distribution}\nVersion: {version}\n\nLong.\n")
        for path, text in (files or {}).items():
            self.write(path, text)

    def trick(self, name: str, source: str = GOOD, *, point: str | None = None) -> None:
        """Install ``dist-<name>`` with one plugin in ``pkg_<name>/trick.py``."""
        self.install(
            f"dist-{name}",
            {name: point or f"pkg_{name}.trick:Trick"},
            {f"pkg_{name}/__init__.py": "", f"pkg_{name}/trick.py": source},
        )


@pytest.fixture
def good() -> str:
    """The source of a plugin without a fault, class Trick."""
    return GOOD


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site-packages at the head of the path; what it brings in is forgotten after."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith(("pkg_", "minillm_file_")):
            del sys.modules[name]


@pytest.fixture
def make_plugin(site: Site, good: str) -> Callable[..., str]:
    """Install a plugin whose source is the good one with one text replaced; give its name."""

    def make(old: str = "", new: str = "", name: str = "trick", prelude: str = "") -> str:
        assert old in good
        site.trick(name, prelude + good.replace(old, new) if old else prelude + good)
        return name

    return make
