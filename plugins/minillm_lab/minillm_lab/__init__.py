"""Experiments with minillm: ablations, hyperparameter search, benchmarks, and HTML pages of their results.

- ``study``: runs on one corpus that share the expensive parts, trained whole or stepped by hand; every
  measurement below uses it.
- ``ablate``: implements ``minillm ablate``. ``variants`` are the plugin sets, ``ablation`` trains
  the runs, ``worth`` has the statistics, ``cards`` builds technique cards, ``result_diff`` explains why
  the runs in a folder cannot be resumed.
- ``search``: implements ``minillm search``. ``space`` defines the search space, ``successive_halving`` runs
  the rounds, ``paired_runs`` trains the runs, ``confirm`` makes the final comparison, ``search_page`` the page.
- ``members``: stores the runs of an ablation or a search.
- ``tune``: implements ``minillm tune``.
- ``bench``: implements ``minillm bench``; ``profiling`` profiles a training step on each framework.
- ``report``: implements ``minillm report``. ``history`` reads a run's folder.
- ``markup``, ``figure``, ``page``: HTML and SVG from pure functions of data; ``run_page``,
  ``ablation_page``, ``comparison``: the pages.
- ``doctor``: checks of this machine and its packages; ``cli``: the commands.

- ``card`` and ``speeds``: technique cards, and throughput of finished runs, both shown by ``minillm plugins info``
  and ``minillm plan`` (entry points ``minillm.measured``).

Only public names of the core are used: ``minillm_core``, ``minillm_core.commands``, ``.documents``,
``.studies`` and ``.inspection``.
"""
