r"""A base model is trained, tuned on chats and exported, by minillm's commands.

    python -m benchmarks.chat_tuning --text english_train.jsonl.xz --tokenizer bpe50k.json \
        --chats sft_gsm8k_train.jsonl.xz --minutes 3 --steps 300

1. ``minillm train --preset small`` on the text.
2. ``minillm train --init BASE --task sft`` on the chats but for the last 500, all weights and with ``lora``:
   speed, peak memory and checkpoint size.
3. ``minillm eval --chats`` on held-out chats: before tuning (one step with learning rate 0), after, and
   with the adapters.
4. ``minillm export``; the same questions are answered, by greedy decoding, by minillm, by
   Transformers and by mlx-lm in float32: the number of answers with equal ids.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minillm_core as minillm
from benchmarks.command import measuring, written
from minillm_chat.talk import ChatModel

HELD_OUT = 500
PATTERN = r"#### (-?[\d.,]+)"
LONGEST = 200
"""Maximum tokens of a compared answer."""


def typed(*words: str) -> str:
    """Run ``minillm``; return its stdout, and pass stderr through."""
    print("$ minillm", *words, flush=True)
    command = [sys.executable, "-m", "minillm_core", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def trained(out: Path) -> dict[str, Any]:
    """Read a run's own measurements: the median step, the peak, the losses, a checkpoint's bytes."""
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in events if one["event"] == "step"]
    losses = [one["val_loss"] for one in events if one["event"] == "eval"]
    newest = max((out / "checkpoints").iterdir())
    rates = {
        kind: round(statistics.median(one["tokens_per_second"][kind] for one in steps))
        for kind in ("real", "padded", "supervised")
    }
    record = json.loads((out / "run.json").read_text())
    return {
        "steps": len(steps),
        "seconds": record["seconds"],
        "tokens_per_second": rates,
        "peak_bytes": max(one["peak_bytes"] or 0 for one in steps),
        "held_out_loss": [losses[0], losses[-1]],
        "checkpoint_bytes": sum(one.stat().st_size for one in newest.iterdir()),
        "parameters": sum(one["size"] for one in sizes(record)),
        "data": record["data"]["description"],
    }


def sizes(record: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yield the size of every parameter in the plan of a run."""
    for found in record["plan"]["model"]["parameters"].values():
        size = 1
        for width in found["shape"]:
            size *= width
        yield {"size": size}


def compared(run: Path, exported: Path, questions: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Answer the questions with three programs, and count the answers with equal ids."""
    import mlx.core as mx
    import torch
    from mlx_lm import load, stream_generate
    from mlx_lm.sample_utils import make_sampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened = ChatModel.of(minillm.Run.open(run, device="cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    mx.set_default_device(mx.cpu)
    model, own = load(str(exported))[:2]
    model.set_dtype(mx.float32)
    ends = {*opened.ends, opened.run.specials["end_of_text"]}
    equal, tokens = {"transformers": 0, "mlx_lm": 0}, 0
    for messages in questions:
        prompt = opened.ids(opened.template.prompt(messages))
        rendered = [
            one.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for one in (tokenizer, own)
        ]
        assert list(rendered[0]) == list(rendered[1]) == prompt
        drawn = opened.run.stream(prompt, ends=opened.ends, max_tokens=LONGEST, temperature=0)
        text = "".join(drawn)
        ids = drawn.generation.ids
        with torch.no_grad():
            given = torch.tensor([prompt])
            mask = torch.ones_like(given)
            said = theirs.generate(
                given, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False
            )[0, len(prompt) :].tolist()
        heard = [
            one.token
            for one in stream_generate(
                model, own, prompt, max_tokens=LONGEST, sampler=make_sampler(0.0)
            )
        ]
        found = {"transformers": said, "mlx_lm": heard}
        for name, answer in found.items():
            equal[name] += [one for one in answer if one not in ends] == ids
        tokens += len(ids)
        print(repr(text[-60:]), flush=True)
    return {"questions": len(questions), "tokens": tokens, "equal": equal}


def main() -> None:
    """Measure, and write the result."""
    parser = measuring(__doc__, "chat_tuning")
    parser.add_argument("--text", type=Path, required=True, help="of the base model")
    parser.add_argument("--chats", type=Path, required=True, help="a .jsonl.xz file")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; must be new")
    parser.add_argument("--preset", default="small")
    parser.add_argument(
        "--vocab", type=int, default=50_304, help="more rows than the tokenizer has"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of the base model")
    parser.add_argument("--steps", type=int, default=300, help="of tuning")
    parser.add_argument("--lr", type=float, default=5e-4, help="of tuning")
    parser.add_argument("--judge", type=int, default=200, help="chats that are answered")
    parser.add_argument("--compare", type=int, default=10, help="chats that three programs answer")
    parser.add_argument("setting", nargs="*", help="of all runs: train.rows=8")
    run(parser.parse_args())


def run(given: argparse.Namespace) -> None:
    """Train, tune, evaluate, export and compare."""
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    with lzma.open(given.chats, "rt", encoding="utf-8") as file:
        chats = file.readlines()
    tune, held = folder / "tune.jsonl", folder / "held_out.jsonl"
    tune.write_text("".join(chats[:-HELD_OUT]))
    held.write_text("".join(chats[-HELD_OUT:]))
    base, figures = folder / "base", {}
    settings = ["eval.samples=0", *given.setting]
    typed(
        *("train", "--preset", given.preset, "--data", str(given.text), "--out", str(base)),
        *(f"data.tokenizer={given.tokenizer}", f"model.vocab={given.vocab}"),
        *(f"train.minutes={given.minutes}", *settings),
    )
    figures["base"] = trained(base)
    ways = {
        "before": ("best_fit", 1, 1e-12),
        "all weights": ("best_fit", given.steps, given.lr),
        "lora": ("best_fit,lora", given.steps, given.lr),
    }
    for way, (plugins, steps, lr) in ways.items():
        out = folder / way.replace(" ", "_")
        typed(
            *("train", "--init", str(base), "--task", "sft", "--data", str(tune)),
            *("--plugins", plugins, "--steps", str(steps), "--out", str(out)),
            *(f"train.lr={lr}", f"data.val={held}", *settings),
        )
        judged = typed(
            *("eval", str(out), "--chats", str(held), "--pattern", PATTERN, "--json"),
            *("--limit", str(given.judge)),
        )
        figures[way] = {**trained(out), "judged": json.loads(judged)}
        print(way, json.dumps(figures[way]), flush=True)
    tuned = folder / "all_weights"
    typed("export", str(tuned), "--to", str(folder / "exported"))
    asked = [json.loads(line)["messages"][:1] for line in chats[-HELD_OUT:][: given.compare]]
    figures["exported"] = compared(tuned, folder / "exported", asked)
    print(json.dumps(figures["exported"]))
    print(written(given, figures))


if __name__ == "__main__":
    main()
