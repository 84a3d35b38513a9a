"""Measuring: what a plugin is worth, how fast a run is, and pages that show it.

- ``rig``: one machine and one text; trains variants of a run and times them, compiled once each.
- ``paired``: the effect of a change from paired runs, with its interval.
- ``variants``, ``ablation``, ``ablate``: what is compared, the runs, the whole job.
"""
