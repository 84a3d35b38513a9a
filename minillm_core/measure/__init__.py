"""Measuring: what a plugin is worth, how fast a run is, and pages that show it.

- ``rig``: one machine and one text; trains variants of a run and times them, compiled once each.
- ``paired``: the effect of a change from paired runs, with its interval.
- ``variants``, ``ablation``, ``ablate``: what is compared, the runs, the whole job.
- ``card``, ``carding``: technique cards, and how an ablation makes them.
- ``markup``, ``ticks``, ``figure``, ``page``: HTML and SVG by functions of data alone.
- ``effects``, ``curves``, ``ablation_page``: an ablation's page.
- ``history``, ``tables``, ``run_page``, ``report``: a run's page.
"""
