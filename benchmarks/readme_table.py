"""Generator of the README's table of measurements, from the files in results/.

python -m benchmarks.readme_table             # check that the page is up to date
python -m benchmarks.readme_table --write     # write it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT
from benchmarks.page import table as markdown
from benchmarks.provenance import unique
from tools.pages import Page, main

FILES = ("torch_throughput", "mlx_throughput", "main_job_gpu")
HEAD = ("what", "tokens/s", "compared with, in the same run", "ratio", "peak GiB of both")
GIB = 2**30

Document = Mapping[str, Any]


def table(folder: Path = RESULTS) -> str:
    """Generate Markdown: the table, and a line on its environment."""
    torch, mlx, job = (json.loads((folder / f"{name}.json").read_text()) for name in FILES)
    of_torch, of_mlx = torch["figures"]["variants"], mlx["figures"]["variants"]
    sizes = sorted(int(name.removeprefix("plain B=")) for name in of_torch if "plain B=" in name)
    rows = [
        *(compared(f"PyTorch, B = {b}", "nanoGPT", of_torch, "plain", "nanogpt", b) for b in sizes),
        *(
            compared(f"with `muon`, B = {b}", "without", of_torch, "muon", "plain", b)
            for b in sizes
        ),
        compared("MLX, B = 8", "hand-written MLX", of_mlx, "plain", "hand-written"),
        main_job(job["figures"]),
    ]
    return f"{markdown(HEAD, rows, text=(0, 2))}\n\n{provenance([torch, mlx, job])}\n"


def compared(
    what: str, who: str, variants: Document, ours: str, theirs: str, rows: int | None = None
) -> tuple[str, ...]:
    """Format a row comparing two variants of the same run."""
    suffix = "" if rows is None else f" B={rows}"
    a, b = variants[ours + suffix], variants[theirs + suffix]
    fast, slow = a["tokens_per_second"], b["tokens_per_second"]
    peaks = " / ".join(f"{one['peak_bytes'] / GIB:.1f}" for one in (a, b))
    return what, f"{fast:,}", f"{who}: {slow:,}", f"{fast / slow:.3f}", peaks


def main_job(figures: Document) -> tuple[str, ...]:
    """Format the row of the default run, from benchmarks.main_job or its figures alone."""
    job = figures["jobs"][-1] if "jobs" in figures else figures
    speed, mfu = (job.get(f"{name}_median", job.get(name)) for name in ("tokens_per_second", "mfu"))
    said = (
        f"MFU {mfu:.2f}; {job['wall_seconds']:.0f} s in all, validation loss {job['val_loss']:.2f}"
    )
    what = f"`minillm train`, preset `{job['preset']}`"
    return what, f"{speed:,.0f}", said, "", f"{job['peak_bytes'] / GIB:.1f}"


def provenance(documents: Iterable[Document]) -> str:
    """Describe hardware, versions and commit; all of them if they differ."""
    environments = [document["environment"] for document in documents]
    gpus = unique(gpu["name"] for e in environments for gpu in e["hardware"]["gpus"])
    commits = unique(e["commit"][:7] for e in environments)
    versions = ", ".join(
        f"{label} {unique(e['versions'][name] for e in environments)}"
        for label, name in (("PyTorch", "torch"), ("MLX", "mlx"), ("Python", "python"))
    )
    return (
        "All rows but the last: preset `gpt2-124m`, bfloat16, compiled, T = 1,024; PyTorch 524,288 "
        f"tokens per step. One {gpus}; {versions}; commit {commits}. Every repetition is in "
        "[benchmarks/results](benchmarks/results/README.md)."
    )


PAGE = Page(ROOT / "README.md", {"measured": table}, others=True)

if __name__ == "__main__":
    main(__doc__, PAGE)
