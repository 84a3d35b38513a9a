"""NVIDIA's cards and driver, found without any framework."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Nvidia", "find_nvidia"]

_VENDOR, _DISPLAY = "0x10de", "0x03"  # of PCI


@dataclass(frozen=True)
class Nvidia:
    """What there is."""

    cards: tuple[str, ...] = ()  # names, where the driver says them
    driver: str | None = None  # its version; None: none is loaded

    @property
    def major(self) -> int:
        """The driver's first number; 0: unknown."""
        found = re.match(r"\d+", self.driver or "")
        return int(found[0]) if found else 0


def find_nvidia(root: Path = Path("/")) -> Nvidia:
    """Ask the kernel, then ``nvidia-smi``, then the PCI bus, which also knows a card undriven.

    Args:
        root: of the file system.
    """
    return _from_kernel(root) or _from_tool() or _from_bus(root)


def _from_kernel(root: Path) -> Nvidia | None:
    folder = root / "proc" / "driver" / "nvidia"
    try:
        version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", (folder / "version").read_text())
    except OSError:
        return None
    cards = []
    for path in sorted(folder.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
        cards.append(found[1] if found else "an NVIDIA GPU")
    return Nvidia(tuple(cards), version[1] if version else "?") if cards else None


def _from_tool() -> Nvidia | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ask = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    if not rows:
        return None
    return Nvidia(tuple(name.strip() for name, _, _ in rows), rows[0][2].strip())


def _from_bus(root: Path) -> Nvidia:
    cards = []
    for device in sorted((root / "sys" / "bus" / "pci" / "devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY):
            cards.append("an NVIDIA GPU")
    return Nvidia(tuple(cards))
