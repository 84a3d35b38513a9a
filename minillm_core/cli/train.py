"""``minillm train``."""

from __future__ import annotations

from minillm_core.cli import options

__all__ = ["EXAMPLES", "train"]

EXAMPLES = """Examples:

minillm train

minillm train --data my_texts/ --steps 2000 train.lr=0.002

minillm train --plugins muon,paired_heads --preset gpt2-124m --out runs/both

minillm train --preset speedrun --data texts/ --plugins -smear

minillm train --resume --out runs/both --steps 4000

minillm train -c run.toml --plugins ./my_trick.py:MyTrick my_trick.width=8
"""


def train(
    assignments: options.Assignments = None,
    plugins: options.Plugins = None,
    preset: options.Preset = None,
    data: options.Data = None,
    init: options.Init = None,
    out: options.Out = None,
    resume: options.Resume = False,
    steps: options.Steps = None,
    seed: options.Seed = None,
    file: options.SettingsFile = None,
    backend: options.Backend = None,
    device: options.Device = None,
    deterministic: options.Deterministic = False,
    kernels: options.Kernels = None,
    debug: options.Debug = False,
    show_help: options.Help = False,
) -> None:
    """Train a language model on text.

    Without arguments: a tiny model on the sources of Python's standard library, in minutes.
    """
    from minillm_core.cli.prepare import Asked, prepare

    asked = Asked.of(
        plugins=plugins,
        preset=preset,
        file=file,
        assignments=assignments,
        data=data,
        steps=steps,
        seed=seed,
        backend=backend,
        device=device,
        deterministic=deterministic,
        kernels=kernels,
        init=init,
        resume=resume,
        out=out,
    )
    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None  # or it would have been refused

    from minillm_core.cli.cache import cache_folder
    from minillm_core.cli.console import say
    from minillm_core.train.run import train as run

    run(
        prepared.loaded,
        prepared.plugins,
        prepared.detected,
        out=out,
        resume=resume,
        cache=cache_folder(),
        say=say,
    )
