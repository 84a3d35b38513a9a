"""Tests of the choice of backend, device and preset, for every kind of machine."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import install
from minillm_core.backends import detect
from minillm_core.backends.detect import (
    DEVICES,
    InstalledFramework,
    Machine,
    choose,
    default_preset,
)
from minillm_core.errors import BackendError

FRAMEWORKS = st.none() | st.builds(
    InstalledFramework, st.just("1.0"), st.booleans(), st.none() | st.just("its library is missing")
)
MACHINES = st.builds(Machine, st.booleans(), st.integers(0, 2), FRAMEWORKS, FRAMEWORKS)
TORCH, CUDA_TORCH, MLX = (
    InstalledFramework("2.13"),
    InstalledFramework("2.13", cuda=True),
    InstalledFramework("0.32"),
)
BROKEN = InstalledFramework("0.32", broken="its library libmlx is missing")


def usable(framework: InstalledFramework | None) -> bool:
    return framework is not None and framework.broken is None


@given(MACHINES)
def test_auto_follows_its_rule(machine: Machine) -> None:
    if not usable(machine.torch) and not usable(machine.mlx):
        with pytest.raises(BackendError):
            choose(machine)
        return
    seen = machine.torch if usable(machine.torch) else None
    torch_cuda = machine.nvidia and seen is not None and seen.cuda
    if torch_cuda:
        wanted = "torch"
    elif machine.apple and usable(machine.mlx):
        wanted = "mlx"
    else:
        wanted = "torch" if usable(machine.torch) else "mlx"
    detected = choose(machine)
    assert detected.backend == wanted
    assert detected.device in DEVICES[wanted]
    assert detected.device != "mps"
    assert detected.reason


@given(MACHINES, st.sampled_from(sorted(DEVICES)), st.sampled_from(["auto", "cpu", "cuda:1"]))
def test_a_named_backend_is_used_or_refused(machine: Machine, backend: str, device: str) -> None:
    serves = device == "auto" or device.partition(":")[0] in DEVICES[backend]
    serves = serves and (machine.apple or device != "mps")
    if usable(getattr(machine, backend)) and serves:
        detected = choose(machine, backend, device)
        assert detected.backend == backend
        assert device in ("auto", detected.device)
    else:
        with pytest.raises(BackendError):
            choose(machine, backend, device)


@given(MACHINES, st.sampled_from(["cuda", "mps", "gpu"]))
def test_a_device_brings_its_backend(machine: Machine, device: str) -> None:
    backend = "mlx" if device == "gpu" else "torch"
    if usable(getattr(machine, backend)) and (machine.apple or device != "mps"):
        assert choose(machine, device=device).backend == backend
    else:
        with pytest.raises(BackendError):
            choose(machine, device=device)


@given(MACHINES, st.sampled_from(["auto", "torch", "mlx"]))
def test_the_preset_is_small_on_a_gpu_alone(machine: Machine, backend: str) -> None:
    name, reason = default_preset(machine, backend)
    try:
        on_cpu = choose(machine, backend).device == "cpu"
    except BackendError:
        on_cpu = True
    assert name == ("tiny" if on_cpu else "small")
    assert reason


@pytest.mark.parametrize(
    ("machine", "arguments", "backend", "device"),
    [
        (Machine(nvidia=1, torch=CUDA_TORCH, mlx=MLX), (), "torch", "cuda"),
        (Machine(nvidia=1, torch=TORCH), (), "torch", "cpu"),
        (Machine(apple=True, torch=TORCH, mlx=MLX), (), "mlx", "gpu"),
        (Machine(apple=True, torch=TORCH), (), "torch", "cpu"),
        (Machine(apple=True, torch=TORCH, mlx=MLX), ("torch", "mps"), "torch", "mps"),
        (Machine(apple=True, torch=TORCH, mlx=MLX), ("auto", "cpu"), "mlx", "cpu"),
        (Machine(torch=TORCH, mlx=MLX), (), "torch", "cpu"),
        (Machine(mlx=MLX), (), "mlx", "cpu"),
        (Machine(torch=TORCH, mlx=BROKEN), (), "torch", "cpu"),
        (Machine(nvidia=1, mlx=InstalledFramework("0.32", cuda=True)), ("mlx",), "mlx", "gpu"),
    ],
)
def test_machines(machine: Machine, arguments: tuple[str, ...], backend: str, device: str) -> None:
    detected = choose(machine, *arguments)
    assert (detected.backend, detected.device) == (backend, device)


@pytest.mark.parametrize(
    ("machine", "arguments", "what", "fix"),
    [
        (Machine(), (), "no backend is installed", "'minillm-core[mlx]'"),
        (Machine(), (), "no backend is installed", "'minillm-core[torch]'"),
        (Machine(mlx=BROKEN), (), "libmlx is missing", "pip install 'minillm-core[mlx]'"),
        (
            Machine(torch=TORCH),
            ("mlx",),
            "mlx is not installed",
            f"pip install 'minillm-core[mlx]' torch==={TORCH.version}",
        ),
        (Machine(mlx=MLX), ("torch",), "torch is not installed", "'minillm-core[torch]'"),
        (
            Machine(torch=TORCH, mlx=BROKEN),
            ("mlx",),
            "mlx 0.32 is installed and cannot be imported: its library libmlx is missing",
            "pip install 'minillm-core[mlx]'",
        ),
        (Machine(torch=TORCH), ("jax",), "there is no backend 'jax'", "--backend auto, torch"),
        (Machine(torch=TORCH), ("torch", "gpu"), "torch knows no device 'gpu'", "--backend mlx"),
        (Machine(torch=TORCH), ("auto", "tpu"), "no backend knows a device 'tpu'", "cuda, gpu"),
        (Machine(torch=TORCH), ("auto", "gpu"), "mlx is not installed", "'minillm-core[mlx]'"),
        (Machine(torch=TORCH), ("auto", "cuda:x"), "only cuda devices have", "--device cuda:1"),
        (Machine(torch=TORCH), ("auto", "cpu:3"), "only cuda devices have", "--device cpu"),
        (Machine(torch=TORCH), ("auto", "tpu:0"), "no backend knows a device 'tpu'", "one of cpu"),
        (Machine(torch=TORCH), ("auto", "auto:1"), "no device 'auto:1'", "--device cpu or cuda"),
    ],
)
def test_refusals(machine: Machine, arguments: tuple[str, ...], what: str, fix: str) -> None:
    with pytest.raises(BackendError) as caught:
        choose(machine, *arguments)
    assert what in caught.value.what
    assert fix in (caught.value.fix or "")


def installed(folder: Path, files: tuple[str, ...]) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("cuda: Optional[str] = '12.8'\n" if path.name == "version.py" else "")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), None),
        (("mlx/nn/layers.py",), None),
        (("mlx/core.so",), "its library libmlx is missing"),
        (("mlx/core.so", "mlx/lib/libmlx.so"), "usable"),
        (("mlx/core.so", "mlx/lib/libmlx.dylib"), "usable"),
    ],
)
def test_mlx_is_usable_with_its_library_alone(tmp_path, monkeypatch, files, found) -> None:
    installed(tmp_path, files)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    mlx = detect.probe().mlx
    assert (mlx and (mlx.broken or "usable")) == found


@pytest.mark.parametrize(("cuda", "files"), [(True, ("torch/version.py",)), (False, ())])
def test_what_torch_is_built_for_is_read_from_its_files(
    tmp_path, monkeypatch, cuda: bool, files: tuple[str, ...]
) -> None:
    installed(tmp_path, ("torch/__init__.py", *files))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    torch = detect.probe().torch
    assert torch is not None
    assert torch.cuda == cuda


def test_a_module_without_a_spec_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = type(sys)("torch")
    monkeypatch.setitem(sys.modules, "torch", stub)
    assert detect.probe().torch is None


def test_the_probe_imports_no_framework() -> None:
    script = (
        "import sys; from minillm_core.backends import detect; detect.probe();"
        "print(sorted({'torch', 'mlx'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_mps_is_refused_where_there_is_none() -> None:
    with pytest.raises(BackendError, match="this machine has no mps"):
        choose(Machine(nvidia=1, torch=TORCH), device="mps")


class Driver:
    """CUDA's driver library with GPUs of some capabilities, one of whose functions may fail."""

    def __init__(self, *found: tuple[int, int], failing: str = "") -> None:
        self._found, self._failing = found, failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self._failing:
                return 100  # CUDA_ERROR_NO_DEVICE
            match name, [getattr(one, "_obj", one) for one in arguments]:
                case "cuDeviceGetCount", [count]:
                    count.value = len(self._found)
                case "cuDeviceGet", [gpu, number]:
                    gpu.value = 7 + number  # a handle, which need not be the number
                case "cuDeviceGetAttribute", [value, attribute, gpu]:
                    value.value = self._found[gpu - 7][{75: 0, 76: 1}[attribute]]
            return 0

        return call


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (None, ()),
        (Driver(), ()),
        (Driver((8, 6), (9, 0)), ((8, 6), (9, 0))),
        (Driver((9, 0), failing="cuInit"), ()),
        (Driver((9, 0), failing="cuDeviceGetCount"), ()),
        (Driver((9, 0), failing="cuDeviceGetAttribute"), ((0, 0),)),
    ],
)
def test_the_driver_gives_the_capability_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, found: tuple[tuple[int, int], ...]
) -> None:
    def loaded(name: str) -> Driver:
        if driver is None or name != "libcuda.so.1":
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert install.gpu_capabilities() == found
    assert detect.probe().nvidia == len(found)


@pytest.mark.gpu
def test_the_driver_and_torch_agree() -> None:
    torch = pytest.importorskip("torch")
    count = torch.cuda.device_count()
    theirs = tuple(torch.cuda.get_device_capability(number) for number in range(count))
    assert install.gpu_capabilities() == theirs
