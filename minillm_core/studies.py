"""Toolkit for distributions that measure: train on a text several times, time steps, or read runs.

Complete studies are in minillm-lab (``minillm_lab.study``), as docs/python.md shows. Unlike
:mod:`minillm_core.commands` this module imports heavy packages: a command imports it when it runs, not for
its ``--help``.

- Runs: :func:`read_corpus` reads a text once, and :class:`Shared` shares it among all
  :class:`~minillm_core.Run` objects of a study; a run has a ``trainer`` and ``batches`` to step by hand.
- Plans: :func:`prepare` turns a command line, the :class:`RunRequest` of ``StudyOptions.asked``, into
  settings, plugins and machine (:class:`Prepared`). For a text such as ``muon,-xsa``: :func:`added`,
  :func:`taken_away`; for a preset: :func:`plugins_of`; :func:`recipe_names`.
- A run's folder: :func:`read_record`, :func:`read_events`, :func:`read_json`; names of files.
- Writing: :func:`lock` a folder, :func:`replace_file` atomically, :func:`refuse_unwritable` before
  anything is started; :func:`stop_on_signals` ends a run cleanly.
- Facts for a result: :func:`hardware` and :func:`versions`.
- Formatted numbers: :func:`amount`, :func:`sized`; a setting's value as typed: :func:`show_value`.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
