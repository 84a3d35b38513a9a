"""What every test run needs: a BLAS under MLX that is fast enough, and the tiers' odds and ends.

MLX's wheel for Linux bundles the reference BLAS (4 GFLOP/s on one core). libmlx looks three
symbols up when it is loaded, so a shim that was loaded before it may answer with those of the
``scipy-openblas32`` wheel, some 25 times as fast. Without gcc or the wheel, tests run on the
bundled one.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROUTINES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
JUMP = {"x86_64": "jmp scipy_{0}@PLT", "aarch64": "b scipy_{0}"}
BLAS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what ends in "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so nohup starts what it starts
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.stash[BLAS] = "bundled with MLX" if "mlx.core" in sys.modules else _openblas()
    # torch complains of itself: where torch.compile makes an instance of every autograd.Function
    # that it traces, and where Inductor is imported.
    for warning in (".*should not be instantiated", ".torch.jit.script_method. is deprecated"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:DeprecationWarning")


def pytest_report_header(config: pytest.Config) -> str:
    return f"BLAS of MLX: {config.stash[BLAS]}"


@pytest.fixture(scope="session")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> its wheel, built here from the working tree."""
    built = {}
    found = (repository.glob(f"{home}/*/pyproject.toml") for home in ("plugins", "examples"))
    for folder in (repository, *(path.parent for home in found for path in sorted(home))):
        out = tmp_path_factory.mktemp("wheel")
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder],
            check=True,
            capture_output=True,
        )
        (wheel,) = out.glob("*.whl")
        built[wheel.name.partition("-")[0].replace("_", "-")] = wheel
    return built


def _openblas() -> str:
    """Load the shim into this process; returns what MLX will use, and why not the faster one."""
    jump, gcc = JUMP.get(platform.machine()), shutil.which("gcc")
    if sys.platform != "linux" or jump is None:
        return "the platform's own"
    if gcc is None:
        return "bundled reference (slow): no gcc to build a shim to OpenBLAS"
    try:
        import scipy_openblas32 as openblas
    except ImportError:
        return "bundled reference (slow): no scipy-openblas32 wheel"
    lines = (f".globl {r}\\n{r}: {jump.format(r)}\\n" for r in ROUTINES)
    source = "".join(f'__asm__("{line}");\n' for line in lines)
    library = Path(openblas.get_lib_dir()) / f"lib{openblas.get_library()}.so"
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "shim.so"
        command = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(shim)]
        try:
            subprocess.run(command, input=source, text=True, check=True, capture_output=True)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"bundled reference (slow): the shim to OpenBLAS failed: {error}"
    return f"OpenBLAS of scipy-openblas32 {openblas.__version__}"
