r"""The data commands, and the dataloader alone: seconds, memory, and equality of ids.

    python -m benchmarks.data_commands --data english_train.jsonl.xz --tokenizer bpe50k.json

1. ``minillm data tokenize`` of the packed file and of the same lines unpacked; then each document's
   ids are compared with those of ``tokenizers``.
2. The dataloader from those shards, without a model, plain and with the plugins' packers.
3. ``minillm data dedup``: the fraction of documents with a near-duplicate.
4. Two starts of ``minillm train`` on many files that repeat the text several times: up to step 1, with an
   empty cache and with the cache of the first start; and one in blocks (data.block), with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import minillm_core as minillm
from benchmarks.environment import write
from minillm_core.config.schema import DataConfig
from minillm_core.data import Loader, open_corpus
from minillm_core.documents import END_OF_TEXT, map_shard

PLUGINS = ("shuffle_rows", "best_fit", "eos_align")

SECONDS = 5.0
"""Seconds of loading for each shape."""


def timed(folder: Path, *arguments: str, until: str | None = None) -> dict[str, Any]:
    """Run the program; time it, or its time to a line, and read its peak memory.

    The peak is an upper bound: on Linux it includes this process's memory when the other was started.

    Args:
        folder: its cache.
        arguments: of the command.
        until: the beginning of the line to time.
    """
    began, reached = time.monotonic(), None
    command = [sys.executable, "-m", "minillm_core", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MINILLM_CACHE": str(folder / "cache")},
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if until and reached is None and line.startswith(until):
                reached = time.monotonic() - began
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began if until is None else reached
    scale = 1 if sys.platform == "darwin" else 1024
    found = {
        "arguments": [Path(one).name for one in arguments],
        "exit": child.returncode,
        "seconds": seconds and round(seconds, 2),
        "peak_bytes": usage.ru_maxrss * scale,
    }
    print(found["arguments"][:2], found["exit"], found["seconds"], found["peak_bytes"] >> 20, "MiB")
    return found


def unlike(shards: Path, lines: Path, tokenizer: Path) -> dict[str, int]:
    """Count the documents whose ids differ from those of ``tokenizers``."""
    native = tokenizers.Tokenizer.from_file(str(tokenizer))
    native.encode_special_tokens = True
    ids = np.concatenate([map_shard(path)[0] for path in sorted(shards.glob("*.bin"))])
    starts = np.flatnonzero(ids == native.token_to_id(END_OF_TEXT))
    spans = iter(zip(starts, [*starts[1:], len(ids)], strict=True))
    documents = different = 0
    with lines.open(encoding="utf-8") as file:
        while texts := [json.loads(line)["text"] for line in islice(file, 64)]:
            for one in native.encode_batch_fast(texts, add_special_tokens=False):
                first, last = next(spans)
                documents += 1
                different += one.ids != ids[first + 1 : last].tolist()
    return {"documents": documents, "different": different, "left_over": len(list(spans))}


def loader(shards: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the dataloader's tokens per second from shards, for shapes of a step and for plugins."""
    config = DataConfig.model_validate({"paths": (str(shards),)})
    corpus = open_corpus(config, 65_536, 1024, cache=folder / "cache", say=print)
    found = []
    shapes = [(64, 1, ""), (64, 8, ""), (16, 4, ""), *((64, 8, plugin) for plugin in PLUGINS)]
    for rows, accumulate, plugin in shapes:
        plan = minillm.build_plan(minillm.load("tiny", plugins=plugin or None))
        shape = {"rows": rows, "accumulate": accumulate, "seq_len": 1024}
        with Loader(corpus.train, **shape, seed=0, by=plan.arrangement) as batches:
            next(batches)
            tokens, began = 0, time.perf_counter()
            while (spent := time.perf_counter() - began) < SECONDS:
                tokens += next(batches).padded
        rate = round(tokens / spent)
        print("loader", rows, accumulate, plugin, f"{rate:,}")
        found.append(
            {"rows": rows, "accumulate": accumulate, "plugin": plugin, "tokens_per_second": rate}
        )
    return found


def many_files(lines: Path, folder: Path, times: int, files: int) -> Path:
    """Write the lines ``times`` times, into about ``files`` files."""
    folder.mkdir()
    whole = lines.read_bytes().splitlines(keepends=True)
    each = -(-len(whole) * times // files)
    for turn in range(times):
        for first in range(0, len(whole), each):
            name = folder / f"{turn:03d}-{first:07d}.jsonl"
            name.write_bytes(b"".join(whole[first : first + each]))
    return folder


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl.xz file")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--times", type=int, default=10, help="the text in many files, so often")
    parser.add_argument("--files", type=int, default=10_000)
    given = parser.parse_args()
    data, tokenizer = str(given.data.resolve()), str(given.tokenizer.resolve())
    figures: dict[str, Any] = {"data": given.data.name}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lines = folder / "plain.jsonl"
        with lzma.open(data) as packed:
            lines.write_bytes(packed.read())
        shards = folder / "plain"
        common = ("--tokenizer", tokenizer, "--to")
        figures["tokenize"] = [
            timed(folder, "data", "tokenize", data, *common, str(folder / "packed")),
            timed(folder, "data", "tokenize", str(lines), *common, str(shards)),
        ]
        figures["ids"] = unlike(shards, lines, given.tokenizer)
        print(figures["ids"])
        figures["loader"] = loader(shards, folder)
        figures["dedup"] = timed(folder, "data", "dedup", data, "--to", str(folder / "dedup"))
        figures["dedup"]["report"] = json.loads((folder / "dedup" / "report.json").read_bytes())
        figures["dedup"]["report"] |= {"files": [given.data.name], "examples": None}
        many = many_files(lines, folder / "many", given.times, given.files)
        small = ("--preset", "cpu", "--steps", "1", "checkpoint.every=0", "eval.tokens=256")
        figures["many_files"] = {
            "files": sum(1 for _ in many.iterdir()),
            "bytes": sum(path.stat().st_size for path in many.iterdir()),
            "starts": [
                timed(folder, "train", "--data", str(many), "--out", str(folder / out), *small,
                      until="step 1/")
                for out in ("first", "second")
            ],
        }  # fmt: skip
        store = folder / "cache"
        store.rename(folder / "whole")
        figures["many_files"]["in_blocks"] = timed(
            folder, "train", "--data", str(many), "--out", str(folder / "blocks"), *small,
            "data.block=20000000", until="step 1/",
        )  # fmt: skip
        figures["first_step"] = timed(
            folder, "train", "--data", data, "--out", str(folder / "one"), *small, until="step 1/"
        )
    print(write("data_commands", figures))


if __name__ == "__main__":
    main()
