"""``minillm eval``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write
from minillm_core.errors import PluginError, Refusal
from minillm_core.install import pip_line
from minillm_core.plugins.discover import entry_points
from minillm_core.train.progress import display

EXAMPLES = options.examples(
    "minillm eval runs/tiny-1 --data my_text.txt",
    "minillm eval runs/tiny-1 --data my_text.txt --step 90",
    "minillm eval runs/chat --chats held_out.jsonl --pattern '#### (.+)'",
    "minillm eval runs/tiny-1 --data my_texts/ --seq-len 512 --max-tokens 100000 --json",
)


JUDGES = "minillm.judges"
"""Entry points of functions that judge a run by data: ``chats`` is what --chats names."""


def evaluate(
    out: options.Model,
    data: Annotated[
        list[str] | None,
        options.value(
            "PATH", "Text to evaluate on: a file or a folder, read in file order; may be repeated."
        ),
    ] = None,
    chats: Annotated[
        list[str] | None,
        options.value(
            "PATH", "Chats whose last answers are judged, for a run of --task sft; may be repeated."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        options.value(
            "REGEX",
            "With --chats: what is compared of an answer, its first group. Default: all of it.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        options.value("N", "With --chats: answer the first N alone. Default: all.", min=1),
    ] = None,
    seq_len: Annotated[
        int | None,
        options.value(
            "N", "Context length; windows do not overlap. Default: the run's train.seq_len.", min=1
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, options.value("M", "Stop after M predictions. Default: all.", min=1)
    ] = None,
    *,
    read: options.InferenceOptions,
    as_json: options.AsJson = False,
) -> None:
    """Measure a run's loss and bits per byte on text, or judge its answers to chats.

    Runs on any machine, and needs only the plugins that change the model, its data or its loss.
    """
    of_data = {"--seq-len": seq_len, "--max-tokens": max_tokens}
    of_chats = {"--pattern": pattern, "--limit": limit}
    _check(data, chats, of_data if chats else of_chats)
    if chats:
        judge = _judge("chats", "minillm-chat")
        with display(say) as shown:
            run = read.open(out, shown)
            figures = judge(run, chats, shown, pattern=pattern, limit=limit)
        if as_json:
            emit({**figures, "step": run.step, "checkpoint": str(run.checkpoint)})
            return
        for name, figure in figures.items():
            shown_as = f"{figure:,}" if isinstance(figure, int) else f"{figure:.4f}"
            write(f"{name:<13}  {shown_as}")
        return
    assert data is not None
    with display(say) as shown:
        run = read.open(out, shown)
        found = run.evaluate(data, seq_len=seq_len, max_tokens=max_tokens)
    rate = found.bits_per_byte
    if as_json:
        emit(
            {
                "val_loss": found.val_loss,
                "bits_per_byte": rate,
                "tokens": found.tokens,
                "step": found.step,
                "checkpoint": str(run.checkpoint),
            }
        )
        return
    write(f"val_loss       {found.val_loss:.4f}")
    write(f"bits_per_byte  {'unknown: no tokenizer' if rate is None else f'{rate:.4f}'}")
    write(f"tokens         {found.tokens:,}")


def _check(
    data: list[str] | None, chats: list[str] | None, without_effect: Mapping[str, object]
) -> None:
    """Refuse options that say nothing, or too much.

    Raises:
        Refusal: not one of --data and --chats is given, or an option of the other.
    """
    if bool(data) == bool(chats):
        raise Refusal(
            "one of --data and --chats says what the run is evaluated on",
            where="--data, --chats: " + ("both" if data else "neither"),
            fix="--data with text, or --chats with chats; minillm eval --help",
        )
    for name, given in without_effect.items():
        if given is not None:
            raise Refusal(
                f"{name} has no effect beside {'--chats' if chats else '--data'}",
                where=f"{name} {given}",
                fix="leave it out",
            )


def _judge(name: str, distribution: str) -> Callable[..., Mapping[str, float]]:
    """Import what judges a run.

    Raises:
        PluginError: no installed distribution offers it.
    """
    found = [one for one in entry_points(group=JUDGES) if one.name == name]
    if not found:
        raise PluginError(
            f"no installed distribution judges {name}",
            where=f"--{name}",
            fix=pip_line(distribution),
        )
    return found[0].load()
