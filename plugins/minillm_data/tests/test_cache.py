"""``minillm data cache`` lists the entries of the token cache, and removes them on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a token cache of three texts, and a folder that is not minillm's."""
    from minillm_core.config.schema import DataConfig
    from minillm_core.data import open_corpus

    folder = tmp_path / "cache"
    monkeypatch.setenv("MINILLM_CACHE", str(folder))
    for number in range(3):
        path = tmp_path / f"{number}\x1b]0;x.txt"
        path.write_text(f"text number {number}, " * (40 * number + 40))
        config = DataConfig.model_validate({"paths": (str(path),)})
        open_corpus(config, 300, 8, cache=folder, say=lambda line: None)
    (folder / "tokens" / "notes").mkdir()
    return folder / "tokens"


def test_the_entries_are_listed(program: Program, cache: Path) -> None:
    code, out, err = program("data", "cache", "list")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert f"3 entries, 0.0 MB in {cache}" in out.replace("\n", "")
    first, *lines, _ = out.splitlines()
    assert first.split() == ["key", "size", "tokens", "vocabulary", "made", "last", "used"]
    origins = [line.strip() for line in lines if line.startswith("    ")]
    assert sorted(origins) == [str(cache.parent.parent / str(n)) for n in range(3)]  # not cut
    assert max(len(line) for line in lines if line.strip() not in origins) < 80
    code, out, err = program("data", "cache", "list", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["folder"] == str(cache)
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"])
    assert {entry["key"] for entry in found["entries"]} == {
        path.name for path in cache.iterdir() if path.name != "notes"
    }
    for entry in found["entries"]:
        assert (entry["state"], entry["vocab"], entry["documents"]) == ("complete", 300, 1)
        assert entry["tokens"] > 50
        assert entry["used"] >= entry["made"] > 0


def test_one_entry_or_all_are_removed_and_nothing_else(program: Program, cache: Path) -> None:
    keys = sorted(path.name for path in cache.iterdir() if path.name != "notes")
    code, out, _ = program("data", "cache", "clear", keys[1][:8])
    assert code == 0
    assert out.startswith("1 entry removed from ")
    assert not (cache / keys[1]).exists()
    code, _, err = program("data", "cache", "clear", keys[1])
    assert code == 2
    assert "no entries of the cache begin with" in err
    code, out, _ = program("data", "cache", "clear", "--json")
    assert sorted(entry["key"] for entry in json.loads(out)["entries"]) == [keys[0], keys[2]]
    assert [path.name for path in cache.iterdir()] == ["notes"]


def test_a_cache_that_is_not_there_is_empty(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "none"))
    assert program("data", "cache", "list")[1].startswith("0 entries")
    assert program("data", "cache", "clear")[0] == 0
