"""Toolkit for distributions that add commands to the program ``minillm``.

A command is a function with typer's annotations, named by an entry point of the group
``minillm.commands``; docs/python.md has a complete example. Importing this module imports neither numpy,
pydantic, torch nor mlx, so that a command's ``--help`` starts fast.

- Options shared by all commands: the annotations ``Plugins``, ``Steps``, ``AsJson``, ... and the
  bundle ``StudyOptions``: every option that describes a run, as one parameter.
- Output: :func:`say` (a line on stderr), :func:`write` (text on stdout), :func:`emit` (one JSON
  document on stdout), :func:`display` (progress: a bar on a terminal, lines elsewhere).
- Folders of the user: :func:`cache_folder`, :func:`data_folder`; and :func:`pip_line` for advice.
- Tables and figures as the core prints them: :func:`columns`, :func:`amount` (1.05 M), :func:`sized` (MiB, GiB).
- Untrusted text is printed through :func:`plain` (one line) or :func:`printable`.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
