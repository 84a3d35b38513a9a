"""Tests that lines of code are counted correctly, and that the core does not grow unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.size import File, count, packages, summary

CEILING = 23_852
"""Maximum lines of code of the core.

It is the core's current size, rounded up; each step lowers the number. The target is
17,500, with 18,500 as the last ceiling; docs/internals.md explains why it is not reached. To raise the
number, describe here what the lines are for.

20,200 to 20,400: claims of order and packer in build_data (180 lines: pieces, checked rows, their
counts and cursor); `progress` of on_batch and fastokens (90); formats by entry points and .zst
(75). Listing and clearing the token cache (66) and its commands (70) moved to minillm-data.

20,400 to 20,600: data mixtures (the source of a document, weighted rows with their cursor, a held-out
part and a loss per source, ranks that read together).

20,600 to 21,300: documents from plugins. The claim, the accepted types and their checks (150);
fields beside ids and targets, cached, read and packed (55); special tokens reserved,
found or added, and their ids for on_batch (65); one corpus for the plans of a study (25).
The rest: reads and choices of the loss (350 lines): the op `token_losses` on both frameworks
(40); a frozen reference model, opened, checked, computed in a step and counted in the plan
(160); weights of positions, weight fields of targets and a fraction of the rows, on the device (115);
`Run.losses` (35).

21,300 to 21,500: changing batch sizes (train.stages and its checks, the claim data.shapes, its
effect on plan, estimate and dataloader, each size compiled before the first step).

21,500 to 21,600: windows, rows in a plugin's order.

21,600 to 21,000: reading and writing model directories moved to minillm-hf (690), with new code to find it
(130: the seam, the format's interface, the error where none is installed).

21,000 to 21,500: settings of published models (model.norm_eps, model.head_dim, data.end_of_text: 45);
evaluation and generation directly from directories (100); text in blocks: cached one by one,
resumed after a kill (90), tokenised during training in a separate process (160), a stream and windows
of blocks (40).

21,500 to 21,700: support for chats: --task, the text of a file as a setting, documents with
weights that are longer than a row, a prompt of ids with stop ids and streaming, judges of eval.

21,700 to 21,800: vectorised layout of packers' rows and windows, 3 to 5 times as fast.

21,800 to 21,900: frozen parameters (the claim and its conflicts, plan, estimate and table, both backends:
60) and a second layout of an export (15).

21,900 to 22,000: runs that start from the weights of another run (--init RUN).

22,000 to 22,100: the head at supervised positions only. The claim, its conflicts, plan and estimate (45);
the positions of a micro-batch (25); gathered rows with a hand-written gradient, on three frameworks (30); a
graph per size, compiled on first use outside a run's clocks (30); its lines in plan and console (25).

22,100 to 21,800: the ops in float64 moved to minillm-kit (158); removed: duplicate names
(ops, checkpoint, backends, errors: 90), and code that no setting, plugin or run used.

21,800 to 22,100: support for evaluating chats and third-party models. `eval --tasks` and its
options, results of judges in metrics.jsonl (60); `Run.scores` on both backends (35); samples that answer
questions (60) and their claim; steps and schedule of a fine-tuning run (45); texts of a directory that
start with its tokenizer's initial tokens (15); the warning about a rising held-out loss.

22,100 to 22,600: row-wise tables, of which a step holds only the rows it looks up. The rule's interface, and the
step of rows by the group's own stages (85); the claim and its conflicts, plan, estimate and facts (130); rows of a
step, their indices, and their checkpoint form (65); rows gathered, updated, written back, brought up
to date for readers, saved and resumed, on torch (150) and on MLX (100). The rule itself is in minillm-modded.

22,600 to 22,700: the op `gram` on both frameworks (35), names for `minillm kernels` (10), a note where
a stage for every rule removes another one's state.

22,700 to 22,800: residual sources to which several plugins add (15); ten array functions on two
frameworks, including a scan (55).

22,800 to 22,900: plugins' verdicts on an evaluation: the hook and its return values (55), runs ended
by a verdict, resumed or not (25), and their entries in run.json and studies (15).

22,900 to 23,100: views, which replace parameters in evaluation: calls and checks (40); a stage after the
write, also with torch's fused kernel (20); the claim (15); views set, removed and saved on torch and MLX (35),
read by --init, eval and export (10), and counted in the plan (15).

23,100 to 23,300: attention slots for plugins. Attention functions (the claim, their inputs, plan, estimate
and skipped kernels: 70), taps of attention arrays (30), arrays cached by a node in decoding (35), plugins
that extend another's frequencies (15). A general rule refuses slots of a replaced attention (5 fewer).

23,300 to 23,500: the gradient chain and its report (60); state in bfloat16 and in 8 bits, packed, counted,
saved (100); stages that run every n-th update: schedule, a graph for each on both frameworks, their count in a
checkpoint (60); claims that override others (25); `ops.qr` (10).

23,500 to 23,700: distributed training. The seam and its provider (60); parts of a step, figures and
statistics over all ranks, evaluation in parts (50); a clock, a signal, verdicts and a folder agreed on (70);
conflicts (25).

23,700 to 23,800: parameters in blocks (the claim and its conflicts: 40, divided stacks, views by block:
30), schedules by plugins (20), norms of layers (20), and attributes of the optimizer's builder (10).

23,800 to 24,000: named inputs of nodes. Separate inputs of attention, q, k, v and MLP, with their
conflicts (75); streams computed at a site, passed on by blocks and checked in the order of a
layer's sites (65); products of linear modules with further inputs (30).

24,000 to 24,100: --memory, a step's rows in micro-batches that fit (60). It runs between settings and plan, before
any hook: plugins are called with final sizes.

24,100 to 24,300: parameters that equal another one for a fraction of the run. The claim and its conflicts (75);
shared gradients on both frameworks (35), initial values (25), --init of such runs (30);
a factor on the run's schedule (25); the form of logits for terms, the bytes of ids for on_batch (15).

24,300 to 24,400: repeated blocks (the claim and its conflicts 35, the order of blocks and a
KV cache for each round 35, their FLOPs and activations 20).

24,400 to 24,500: several GPUs in `minillm plan` (options, the seam, a note: 45), and the plugins refused by
each parallelism axis, with the supported number of processes (45).

24,500 to 24,600: sharded updates: the seam of shards, torch's trainer and optimizer on
a shard (85), the choice of sharding (mesh.shard, its check and its line in the plan, 25), saves gathered from all
ranks (20), evidence of all ranks (20). Layout and communication are in minillm-mesh.

24,600 to 24,700: context parallelism, rows shared by processes. A scope of some columns with attention, and its
place in the decoder, blocks and attention (40); queries at the end of their keys, for two kernels (25); columns of
a batch and of evaluation, and the rows of each rank (30).

24,700 to 24,800: pipeline parallelism, layers shared by processes. The decoder's pass in parts called by a
stage (25), losses of a step by a stage, and the parts of each rank (30), FLOPs of attention by layer (5); three
settings (17).

24,800 to 24,900: settings derived from another one, in a preset or a file: read and checked (45), applied
between sources and settings, before any hook (20), and the dial --depth (25).

24,900 to 23,800: studies left for minillm-lab (285 lines), and a run that takes its text from one, with its
trainer and batches for steps by hand, came (40). Technique cards and measured speeds left for minillm-lab (270);
the entry points by which the core finds them came (30). Tables that are updated by rows went to minillm-modded
(240), questions of chats and the length of a tuning to minillm-chat (85). Options of commands, facts of cached
entries, saved models and hooks are declared once (430). Divided weights that are never whole at the start came (60).

23,920 to 23,940: train.checkpointing=selective (20 lines): a fifth less memory for at most 1 % of the time. It
changes how the step is compiled, for which there is no slot.

23,900 to 23,920: the masters of a stacked group, and their gradients, as one array each (25 lines). Its
graph has three inputs where it had three for every matrix: on an H200 a first step of gpt2-124m with muon takes
36 s where it took 83, and an update 4.4 ms where it took 6.5.

23,800 to 23,900: errors that users and authors of plugins had met as defects, or not at all. Mistakes of plugins
(dtypes, loss terms, statistics, initialisers, metrics, ranges, rates: 25); texts given twice, broken links, weights
in names, tokenizers beside ids, windows longer than a text (30); arguments of Python's API (30); resumes to fewer
steps, and short runs that were mostly not finite (10). Waits for checkpoints, and graphs kept for later processes (20).
A stage's state that is one of its arguments is copied. Stages are refused whose update has another dtype, or is
modified in place, or whose arguments are in another order (30). Commands print a note for an option given twice, and
refuse a rule that updates no parameter and an output folder that is the current one (30).

23,940 to 23,861: rules that were written twice are one (the arguments of hooks, the signals that end a run, exit
codes, frames of texts), and so are the reading of runs and of frozen references.
"""

SOURCE = '''\
"""A module.

With a second paragraph.
"""

from a import (  # a comment beside code
    b,

    c,
)

NAME = """text that is a value:

all of its lines are code"""
"""A string after a value is not a docstring to Python: a statement, and code."""


class Thing:
    """Does nothing."""

    def method(self):  # one line with a comment
        # a comment alone
        """Returns nothing."""
        import d

        if self: return """x"""


async def later():
    """One line."""; return 1
'''


def test_code_is_neither_blank_nor_comment_nor_docstring() -> None:
    counted = count("folder/inner/file.py", SOURCE)
    # the import 4, NAME 3, the string after it 1, class 1, method 3, later 1
    assert (counted.code, counted.imports) == (13, 5)
    assert (counted.lines, counted.room) == (len(SOURCE.splitlines()), "folder")
    assert count("file.py", "").code == 0
    assert count("file.py", "").room == ""


def test_a_summary_names_long_files() -> None:
    files = [count("short.py", "import a\n"), count("long.py", "x = 1\n" * 601)]
    whole = summary(files)
    assert (whole["files"], whole["code"], whole["code_per_file"]) == (2, 602, 301.0)
    assert whole["import_share"] == round(1 / 602, 4)
    assert whole["long"] == {"long.py": 601}
    assert summary([])["code_per_file"] == 0


@pytest.fixture(scope="module")
def whole(repository: Path) -> dict[str, list[File]]:
    """Count the packages of this checkout."""
    return packages(repository)


@pytest.mark.slow
def test_a_checkout_a_distribution_and_a_package_are_counted(
    repository: Path, whole: dict[str, list[File]]
) -> None:
    assert next(iter(whole)) == "minillm_core"
    plugin = repository / "plugins" / "minillm_muon"
    assert packages(plugin) == {"minillm_muon": whole["minillm_muon"]}
    assert packages(plugin / "minillm_muon") == {"minillm_muon": whole["minillm_muon"]}
    with pytest.raises(FileNotFoundError):
        packages(repository / "docs")


def test_the_command_prints_a_table_or_json(repository: Path) -> None:
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "tools.size", *words]
        return subprocess.run(
            command, cwd=repository, capture_output=True, text=True, check=True
        ).stdout

    found = json.loads(run("--json", "plugins/minillm_track"))["minillm_track"]
    assert sum(room["code"] for room in found["rooms"].values()) == found["code"]
    assert f"{found['code']:,}" in run("plugins/minillm_track")


def test_the_core_does_not_grow(whole: dict[str, list[File]]) -> None:
    core = summary(whole["minillm_core"])
    assert core["code"] <= CEILING, "take lines out, or raise CEILING and write beside it why"
    assert core["import_share"] <= 0.09, "let a small file stand where it is used"
