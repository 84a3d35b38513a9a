"""Tests of the doctor's findings on the machine: system, disk, NVIDIA GPUs."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import psutil
import pytest

from minillm_core.backends.memory import memory_limit
from minillm_lab.doctor.finding import STATES, Finding, can_run
from minillm_lab.doctor.machine import Nvidia, disk_finding, find_nvidia, system_findings


def states(findings: object) -> dict[str, str]:
    return {one.part: one.state for one in findings}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("python", "state"), [((3, 10, 9), "broken"), ((3, 12, 0), "ok")])
def test_an_old_python_is_broken(python: tuple[int, ...], state: str) -> None:
    findings = list(system_findings(python))
    assert states(findings)["python"] == state
    assert can_run(findings) == (state == "ok")
    assert {one.state for one in findings} <= set(STATES)


def test_without_a_compiler_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = {one.part: one for one in system_findings()}["compiler"]
    assert (found.state, bool(found.command)) == ("missing", True)


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "max", None),
        ("memory.max", "1048576", 1048576),
        ("memory/memory.limit_in_bytes", "4096", 4096),
        ("memory.max", str(1 << 62), None),
    ],
)
def test_the_limit_of_a_container_is_read(
    tmp_path: Path, file: str, text: str, limit: int | None
) -> None:
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert memory_limit(tmp_path) == limit
    memory = {one.part: one.what for one in system_findings(root=tmp_path)}["memory"]
    assert ("this container may use" in memory) == (limit is not None)
    assert f"{psutil.virtual_memory().total / 2**30:,.1f} GiB" in memory


def test_the_disk_under_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet"
    found = disk_finding(cache)
    assert found.state in ("ok", "warning")
    assert str(cache) in found.what
    assert not cache.exists()


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5))
    found = disk_finding(tmp_path)
    assert found.state == "warning"
    assert "MINILLM_CACHE" in str(found.command)


def test_a_cache_that_is_a_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert disk_finding(tmp_path / "cache").state == "broken"


def fake_kernel(root: Path, model: str = "NVIDIA H100 80GB HBM3") -> None:
    card = root / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 1\n")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC: 12\n"
    (root / "proc/driver/nvidia/version").write_text(version)


def fake_bus(root: Path, vendor: str, kind: str) -> None:
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_the_kernel_tells_cards_and_driver(tmp_path: Path) -> None:
    fake_kernel(tmp_path)
    found = find_nvidia(tmp_path)
    assert found == Nvidia(("NVIDIA H100 80GB HBM3",), "580.95.05")
    assert found.major == 580


def test_the_tool_tells_where_the_kernel_does_not(tmp_path: Path, tools: Path) -> None:
    tool = tools / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA A10, 535.183.01'\necho 'NVIDIA, Inc. T4, 535.183.01'\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    assert find_nvidia(tmp_path) == Nvidia(("NVIDIA A10", "NVIDIA, Inc. T4"), "535.183.01")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert find_nvidia(tmp_path) == Nvidia()


@pytest.mark.parametrize(
    ("vendor", "kind", "cards"),
    [("0x10de", "0x030200", 1), ("0x10de", "0x020000", 0), ("0x8086", "0x030000", 0)],
)
def test_the_bus_knows_a_card_without_a_driver(
    tmp_path: Path, tools: Path, vendor: str, kind: str, cards: int
) -> None:
    fake_bus(tmp_path, vendor, kind)
    found = find_nvidia(tmp_path)
    assert (len(found.cards), found.driver, found.major) == (cards, None, 0)


def test_what_is_found_cannot_command_a_terminal() -> None:
    assert Finding("torch", "ok", "\x1b[2Jtwo\nlines").line == "two lines"
