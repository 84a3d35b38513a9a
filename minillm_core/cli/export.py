"""``minillm export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write
from minillm_core.train.progress import LineDisplay

EXAMPLES = options.examples(
    "minillm export runs/tiny-1 --to my_model",
    "minillm export runs/tiny-1 --to my_model --best",
    "minillm export runs/tiny-1 --to my_model --dtype bfloat16",
    "minillm export runs/tiny-1 --to my_adapter --layout peft",
    "minillm export runs/tiny-1 --to my_model --layout own",
    "minillm export runs/tiny-1 --to my_model --json",
)


def export(
    out: options.Model,
    to: Annotated[
        Path,
        options.value("DIR", "Folder to write the model to: new or empty.", parser=options.folder),
    ],
    read: Annotated[options.InferenceOptions, options.LeaveOut("backend device")],
    dtype: Annotated[
        str, options.value("DTYPE", "Data type: float32, or bfloat16, half as large.")
    ] = "float32",
    layout: Annotated[
        str | None,
        options.value(
            "LAYOUT",
            "peft: only the adapters of plugin lora. own: the model with its own modeling files. "
            "Default: a layout that other programs know, or else own.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Export a trained model for Transformers, vLLM and mlx-lm.

    A model that they do not know is written with its own modeling files, for Transformers and mlx-lm.
    """
    from minillm_core.plan.plan import OWN  # imports NumPy, which a help page does not need

    result = read.open(out, LineDisplay(say)).export(to, dtype=dtype, layout=layout)
    if as_json:
        emit(result)
        return
    folder, files = result["directory"], result["files"]
    width = max(map(len, files))
    kind = "self-contained" if result["layout"] == OWN else result["layout"]
    # a model directory has no steps
    state = f"was after step {result['step']:,}" if result["step"] else f"is in {out}"
    write(
        f"{folder}: a {kind} model of {result['parameters']:,} parameters in {dtype}, as it {state}"
    )
    for name, size in files.items():
        write(f"  {name:{width}}  {size:>15,} bytes")
    if loading := result["loading"]:
        write("load it with")
        for program, typed in loading.items():
            write(f"  {program:12}  {typed}")
