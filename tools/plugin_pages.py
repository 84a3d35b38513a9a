"""Generator of the tables of plugins, options and commands in README.md and in each distribution's README.

python -m tools.plugin_pages             # report the pages that are out of date
python -m tools.plugin_pages --write     # write them

Text between ``<!-- made: NAME -->`` and ``<!-- /made -->`` is generated from entry points,
docstrings, options and cards; the rest of a page is written by hand.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from minillm_core.plugins.manifest import doc_summary
from tools import worth
from tools.markdown import table
from tools.pages import Page, main
from tools.repository import ROOT

__all__ = ["PAGES"]


def offered(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a distribution's name, and its plugins' classes by name."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    targets = project["entry-points"].get("minillm.plugins", {})
    return project["name"], {n: EntryPoint(n, targets[n], "").load() for n in sorted(targets)}


def summary_cell(cls: Any) -> str:
    """Return a plugin's summary, formatted for a table cell."""
    said = cls.summary().rstrip(".")
    first = said.split()[0]
    name = first[1:] != first[1:].lower() or first.endswith("'s")  # RMSNorm, AdamW, Muon's
    return said if name else said[0].lower() + said[1:]


def all_plugins() -> str:
    """Tabulate every plugin of the repository, its distribution, and its measured effect."""
    rows, cards, changed = [], [], []
    for page in PAGES[1:]:
        name, plugins = offered(page.path.parent)
        for plugin, cls in plugins.items():
            card = worth.card_of(plugin, cls)
            if card:
                cards.append(card)
                changed += worth.changed(card, cls)
            rows.append((f"`{plugin}`", f"`{name}`", summary_cell(cls), *worth.cells(card)))
    head = ("plugin", "distribution", "what it does", *worth.HEAD)
    return f"{table(head, sorted(rows))}\n\n{worth.measurement_notes(cards, changed)}"


def plugins_of(folder: Path) -> str:
    """Tabulate the plugins of one distribution."""
    rows = [(f"`{name}`", summary_cell(cls)) for name, cls in offered(folder)[1].items()]
    return table(("plugin", "what it does"), rows)


def options_of(folder: Path) -> str:
    """Tabulate the options of one distribution's plugins, with their defaults in command-line form."""
    return table(("option", "default", "what it is"), _options(folder))


def commands_of(folder: Path) -> str:
    """Tabulate the commands of one distribution."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    rows = []
    for name, target in sorted(project["entry-points"]["minillm.commands"].items()):
        module, _, function = target.partition(":")
        source = (folder / Path(*module.split("."))).with_suffix(".py").read_bytes()
        rows.append((f"`minillm {name.replace('.', ' ')}`", doc_summary(source, function)))
    return table(("command", "what it does"), rows)


def _options(folder: Path) -> Iterator[tuple[str, str, str]]:
    for name, cls in offered(folder)[1].items():
        for option, field in cls.__pydantic_fields__.items():
            given = "none" if field.default is None else field.default
            default = "to be given" if field.is_required() else given
            if default is field.default:
                default = f"`{json.dumps(default)}`"
            yield f"`{name}.{option}`", default, field.description or ""


PARTS: Mapping[str, Callable[[Path], str]] = {
    "all": lambda _: all_plugins(),
    "plugins": plugins_of,
    "options": options_of,
    "commands": commands_of,
}


def page(path: Path) -> Page:
    """Return a README with its marked tables regenerated."""
    marked = {
        name: make for name, make in PARTS.items() if f"<!-- made: {name} -->" in path.read_text()
    }
    return Page(
        path, {name: partial(make, path.parent) for name, make in marked.items()}, others=True
    )


PAGES = [page(one) for one in (ROOT / "README.md", *sorted(ROOT.glob("plugins/*/README.md")))]

if __name__ == "__main__":
    main(__doc__, *PAGES)
