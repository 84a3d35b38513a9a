"""The toolkit of commands: for distributions that add commands to the program ``minillm``.

A command is a function with typer's annotations, named by an entry point of the group
``minillm.commands``; docs/python.md shows one whole. This module is light: neither numpy, pydantic,
torch nor mlx is imported with it, so that a command's ``--help`` comes at once.

- Options that mean the same everywhere: the annotations ``Plugins``, ``Steps``, ``AsJson``, ... and
  the bundle ``StudyOptions``: every option that says which run is meant, as one parameter.
- Output: :func:`say` (a line on stderr), :func:`write` (text on stdout), :func:`emit` (one JSON
  document on stdout), :func:`display` (progress: a bar on a terminal, lines elsewhere).
- Folders of the user: :func:`cache_folder`, :func:`data_folder`; and :func:`pip_line` for advice.
- Text that comes from outside is printed through :func:`plain` (one line) or :func:`printable`.
"""

from minillm_core.cli.console import emit, say, write
from minillm_core.cli.options import AsJson, Plugins, RunPlugins, Steps, StudyOptions
from minillm_core.config.folders import cache_folder, data_folder
from minillm_core.install import pip_line
from minillm_core.text import counted, few, listed, nearest, plain, printable, rounded
from minillm_core.train.progress import display, duration

__all__ = [
    "AsJson",
    "Plugins",
    "RunPlugins",
    "Steps",
    "StudyOptions",
    "cache_folder",
    "counted",
    "data_folder",
    "display",
    "duration",
    "emit",
    "few",
    "listed",
    "nearest",
    "pip_line",
    "plain",
    "printable",
    "rounded",
    "say",
    "write",
]
