"""Our Triton kernels, imported with the kit's language on CPU tensors."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from minillm_kit.triton_language import modules


@pytest.fixture(scope="session")
def kernels() -> Iterator[Callable[..., Any]]:
    """Return a function that imports an op's kernel module with that language.

    With a replacement in its source it is a separate module: a faulty kernel.
    """
    package, apart = "minillm_triton.kernels.", count()

    def made(name: str, there: str = "", instead: str = "") -> Any:
        # Only during the import: torch itself looks for Triton.
        with pytest.MonkeyPatch.context() as patch:
            for triton, module in modules(random.Random(0)).items():
                patch.setitem(sys.modules, triton, module)
            found = importlib.import_module(package + name)
            if not there:
                return found
            source = inspect.getsource(found)
            assert there in source
            module = ModuleType(f"{name}_{next(apart)}")
            source = source.replace(there, instead).replace(
                '"minillm_triton::', f'"{module.__name__}::'
            )
            exec(source, vars(module))
            return module

    yield made
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]
