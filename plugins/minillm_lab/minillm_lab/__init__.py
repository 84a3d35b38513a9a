"""The laboratory of minillm: the worth of a plugin, the speed of a run, and pages that show both.

- ``study``: runs of one text that share what is expensive, trained whole or stepped by hand; all that
  measures stands on it.
- ``ablate``: the whole job of ``minillm ablate``. ``variants`` are the plugin sets, ``ablation`` makes
  the runs, ``worth`` has the statistics, ``cards`` makes technique cards, ``result_diff`` tells why
  the runs in a folder cannot be continued.
- ``search``: the whole job of ``minillm search``. ``space`` says what may be tried, ``race`` tries it
  in rounds, ``heats`` makes the runs, ``confirm`` compares in the end, ``search_page`` shows it. ``members`` keeps the runs of an ablation and of a search.
- ``tune``: the whole job of ``minillm tune``.
- ``bench``: the whole job of ``minillm bench``; ``profiling`` looks into a step on each framework.
- ``report``: the whole job of ``minillm report``. ``history`` reads a run's folder.
- ``markup``, ``figure``, ``page``: HTML and SVG by functions of data alone; ``run_page``,
  ``ablation_page``, ``comparison``: the pages.
- ``doctor``: what this machine can run; ``cli``: the commands.

- ``card`` and ``speeds``: technique cards, and speeds of finished runs, which ``minillm plugins info``
  and ``minillm plan`` show (entry points ``minillm.measured``).

Only public names of the core are used: ``minillm_core``, ``minillm_core.commands``, ``.documents``,
``.studies`` and ``.inspection``.
"""
