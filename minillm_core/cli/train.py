"""``minillm train``."""

from __future__ import annotations

import typer

from minillm_core.cli.options import Gpus, RunOptions, Verbose, examples

EXAMPLES = examples(
    "minillm train",
    "minillm train --data my_texts/ --steps 2000 train.lr=0.002",
    "minillm train --plugins muon,paired_heads --preset gpt2-124m --out runs/both",
    "minillm train --preset speedrun --data texts/ --plugins -backout",
    "minillm train --resume --out runs/both --steps 4000",
    "minillm train --branch runs/both@2000 --out runs/lower train.lr=0.0005",
    "minillm train -c runs/both/run.toml",
    "minillm train --preset gpt2-124m --plugins muon --gpus 2",
    "minillm train --preset gpt2-124m --data my_texts/ --memory 20GiB",
    'minillm train --data my_texts/ --prompt "Once upon a time" eval.samples=1',
    "minillm train -c run.toml --plugins ./my_trick.py:MyTrick my_trick.width=8",
)


def train(
    context: typer.Context, run: RunOptions, verbose: Verbose = False, gpus: Gpus = None
) -> None:
    """Train a language model on text.

    Without arguments: a small model for this machine, on the sources of Python's standard library.
    """
    from minillm_core.backends import ranks
    from minillm_core.train import request

    prepared = request.prepare(run.request(command=context.obj), to_run=True, fit=False)
    if gpus is not None:
        assert prepared.detected is not None
        if (code := ranks.launch(prepared.detected, gpus, context.obj[1:])) is not None:
            raise typer.Exit(code)

    from minillm_core.cli.console import say
    from minillm_core.config.folders import cache_folder

    request.train(
        prepared, out=run.out, resume=run.resume, cache=cache_folder(), say=say, verbose=verbose
    )
