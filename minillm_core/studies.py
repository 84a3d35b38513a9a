"""The toolkit of measuring: for distributions that train a text several times, time steps, or read runs.

Whole studies are minillm-lab's (``minillm_lab.study``), as docs/python.md shows. Unlike
:mod:`minillm_core.commands` this module is not light: a command imports it when it runs, and not for
its ``--help``.

- Runs: :func:`read_corpus` reads a text once, and :class:`Shared` gives it to every
  :class:`~minillm_core.Run` of a study, which has a ``trainer`` and its ``batches`` to step by hand.
- Plans: :func:`prepare` makes settings, plugins and machine (:class:`Prepared`) of a command line,
  which ``StudyOptions.asked`` gives as a :class:`RunRequest`. Of a text such as
  ``muon,-xsa``: :func:`added`, :func:`taken_away`; of a preset: :func:`plugins_of`; :func:`recipe_names`.
- A run's folder: :func:`read_record`, :func:`read_events`, :func:`read_json`; names of files.
- Writing: :func:`lock` a folder, :func:`replace_file` atomically, :func:`refuse_unwritable` before
  anything is started; :func:`stop_on_signals` lets a run end well.
- Facts of a result: :func:`hardware` and :func:`versions`.
- Numbers in words: :func:`amount`, :func:`sized`; a setting's value as it is typed: :func:`show_value`.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
