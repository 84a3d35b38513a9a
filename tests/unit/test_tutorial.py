"""Tests that the runner of pages detects mismatches."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from tools.tutorial import PageError, blocks, run_page

PAGE = """# A page

```python title=deep/said.py
print("one  two", 1 / 3)
```

and then

```console
$ python deep/said.py
one two 0.3...
$ cd deep
$ ls
said.py
```

```console
$ python -c "raise SystemExit(3)"
$ echo $?
3
$ printf 'a\\nb\\nc\\n'
a
...
c
```
"""


def typed(page: str, folder: Path) -> int:
    here = Path(sys.executable).parent  # many systems have no `python` on PATH
    return run_page(page, folder, {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}"})


def test_a_page_that_is_so_is_run_from_top_to_end(tmp_path: Path) -> None:
    assert typed(PAGE, tmp_path) == 5
    assert (tmp_path / "deep" / "said.py").is_file()


@pytest.mark.parametrize(
    ("so", "not_so", "line", "says"),
    [
        ("two 0.3...", "two 0.4...", 10, "one  two 0.333"),
        ("said.py\n```\n\n", "said.pyc\n```\n\n", 13, "said:\nsaid.py"),
        ("$ echo $?\n3\n", "", 18, "ended with 3"),
        ("3\n$ printf", "4\n$ printf", 19, "said:\n3"),
        ("\nc\n```", "\nd\n```", 21, "b\nc"),
        ("```python title=deep/said.py", "```python", 3, "neither a file"),
        ("$ python -c", "python -c", 17, "neither a file"),
        ("```\n\nand", "``` \n\nand", None, "does not end"),
    ],
)
def test_what_is_not_so_is_found(
    so: str, not_so: str, line: int | None, says: str, tmp_path: Path
) -> None:
    assert PAGE.count(so) == 1
    with pytest.raises(PageError) as caught:
        typed(PAGE.replace(so, not_so), tmp_path)
    assert says in str(caught.value)
    assert line is None or str(caught.value).startswith(f"line {line}:")


@pytest.mark.parametrize("between", ["", "2\n", "2\n\n2.5\n"])
@pytest.mark.parametrize("end", ["3", "...", ""])
def test_a_line_of_dots_stands_for_any_lines_or_none(
    between: str, end: str, tmp_path: Path
) -> None:
    command = f"$ printf '{between}1\n{between}3\n'".replace("\n", "\\n")
    page = f"```console\n{command}\n...\n1\n...\n{end}\n```\n"
    assert typed(page, tmp_path) == 1
    with pytest.raises(PageError):
        typed(page.replace("...\n1\n", "...\n.1\n"), tmp_path)


@pytest.mark.parametrize(("shown", "so"), [("loss 4.1, 9:59", True), ("lr 4.1, 9:59", False)])
def test_figures_may_differ_where_the_page_says_so(shown: str, so: bool, tmp_path: Path) -> None:
    page = f"```console figures=any\n$ echo loss 12,345.678, 0:07\n{shown}\n```\n"
    with nullcontext() if so else pytest.raises(PageError):
        assert typed(page, tmp_path) == 1
    with pytest.raises(PageError):
        typed(page.replace(" figures=any", ""), tmp_path)


def test_minillm_is_started_once_and_where_a_shell_is_needed(tmp_path: Path) -> None:
    (tmp_path / "minillm").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "minillm").chmod(0o755)
    (tmp_path / "deep").mkdir()
    called = list[tuple[Sequence[str], Path]]()

    def program(words: Sequence[str], folder: Path) -> tuple[int, str]:
        called.append((words, folder))
        return 2, "called"

    page = """```console
$ minillm plan
started
$ cd deep
$ minillm plan 'a.b=[0, 1]' c
called
$ echo $?
2
$ minillm plan | cat
started
```
"""
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert run_page(page, tmp_path, environment, program) == 4
    assert called == [(["plan", "a.b=[0, 1]", "c"], tmp_path / "deep")]
    with pytest.raises(PageError, match="shown:\ncalled\n\nsaid:\nstarted"):
        run_page(page, tmp_path, environment)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        typed(PAGE.replace("cd deep", "cd shallow"), tmp_path)


def test_every_block_has_its_line() -> None:
    assert [block.line for block in blocks(PAGE)] == [3, 9, 17]
