"""A subset of Triton's language on torch CPU tensors, with checks: kernels are tested without a GPU.

A launch runs its programs one after another in a shuffled order. Each access is checked: it must be within
the tensor, not at an address that another program of the launch writes, and not a read of uninitialised
memory. It does not model speed or compilation. Put the modules in ``sys.modules`` while a kernel's module is
imported, and no longer, since torch itself looks for Triton:

    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules(random.Random(0)).items():
            patch.setitem(sys.modules, name, module)
        kernels = importlib.import_module("my_plugin.kernels")
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["KernelFault", "modules"]

NEVER = -1
ANY = -2  # read by several programs


class KernelFault(AssertionError):
    """An access that is undefined on a device."""


@dataclass
class Memory:
    """A tensor's values, and the program of this launch that wrote and read each."""

    flat: Any
    writers: Any = field(init=False)
    readers: Any = field(init=False)

    def __post_init__(self) -> None:
        self.writers = torch.full(self.flat.shape, NEVER)
        self.readers = torch.full(self.flat.shape, NEVER)


@dataclass(frozen=True)
class Pointer:
    """Addresses within a tensor."""

    memory: Memory
    at: Any  # int64

    @property
    def dtype(self) -> Any:
        """Return the pointer's type."""
        return SimpleNamespace(element_ty=self.memory.flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def checked(self, mask: Any, program: int, doing: str) -> Any:
        """Return the addresses used.

        Raises:
            KernelFault: an address is outside the tensor, or written by another program.
        """
        used = self.at if mask is None else self.at[mask.broadcast_to(self.at.shape)]
        size = self.memory.flat.numel()
        if bool(((used < 0) | (used >= size)).any()):
            worst = int(used.max()), int(used.min())
            raise KernelFault(f"program {program} {doing} at {worst}, outside of {size} numbers")
        writers = self.memory.writers[used]
        if bool(((writers != NEVER) & (writers != program)).any()):
            raise KernelFault(f"program {program} {doing} where another program writes")
        return used


class Launch:
    """The language from the view of one program of a launch."""

    def __init__(self) -> None:
        self.program, self.programs = 0, 1

    def program_id(self, axis: int) -> int:
        assert axis == 0
        return self.program

    def num_programs(self, axis: int) -> int:
        assert axis == 0
        return self.programs

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
        used = pointer.checked(mask, self.program, "reads")
        memory = pointer.memory
        numbers = memory.flat[used].clone()  # for a single address torch returns a view
        if numbers.is_floating_point() and bool(numbers.isnan().any()):
            raise KernelFault(f"program {self.program} reads what was never written")
        readers = memory.readers[used]
        memory.readers[used] = torch.where(
            (readers == NEVER) | (readers == self.program), self.program, ANY
        )
        if mask is None:
            return numbers.reshape(pointer.at.shape)
        found = torch.full(pointer.at.shape, other, dtype=memory.flat.dtype)
        found[mask.broadcast_to(found.shape)] = numbers
        return found

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        used = pointer.checked(mask, self.program, "writes")
        memory = pointer.memory
        readers = memory.readers[used]
        if bool(((readers != NEVER) & (readers != self.program)).any()):
            raise KernelFault(f"program {self.program} writes where another program reads")
        memory.writers[used] = self.program
        numbers = torch.as_tensor(value, dtype=memory.flat.dtype).broadcast_to(pointer.at.shape)
        where = ... if mask is None else mask.broadcast_to(pointer.at.shape)
        memory.flat[used] = numbers[where].reshape(used.shape)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis: function(x, dim=axis)


def modules(order: random.Random) -> dict[str, ModuleType]:
    """Return ``triton`` and ``triton.language`` for sys.modules; programs run in the given order."""
    launch = Launch()

    class Kernel:
        """A function under ``triton.jit``: called by a kernel, or launched over a grid."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __call__(self, *arguments: Any) -> Any:
            return self.function(*arguments)

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(*arguments: Any, num_warps: int, num_stages: int = 1, **constants: Any) -> None:
                assert num_warps & (num_warps - 1) == 0
                assert num_stages > 0
                memories: dict[int, Memory] = {}

                def passed(value: Any) -> Any:
                    if not isinstance(value, Tensor):
                        return value
                    value = value.detach()
                    whole = value if value.is_contiguous() else value.mT  # a transposed matrix
                    memory = memories.setdefault(value.data_ptr(), Memory(whole.view(-1)))
                    return Pointer(memory, torch.zeros((), dtype=torch.int64))

                given = [passed(value) for value in arguments]
                programs = list(range(grid[0]))
                order.shuffle(programs)
                launch.programs = grid[0]
                for launch.program in programs:
                    self.function(*given, **constants)

            return run

    language: Any = ModuleType("triton.language")
    language.constexpr = object
    for name in ("float32", "int32", "int64"):
        setattr(language, name, getattr(torch, name))
    language.float8e5 = torch.float8_e5m2
    for name in ("program_id", "num_programs", "load", "store"):
        setattr(language, name, getattr(launch, name))
    for name in ("arange", "where", "zeros", "exp", "log", "sigmoid"):
        setattr(language, name, getattr(torch, name))
    language.full = lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
    language.maximum = lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y)))
    language.minimum = lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y)))
    language.sum, language.max = _reduction(torch.sum), _reduction(torch.amax)
    language.dot = lambda a, b, total, input_precision: total + a.float() @ b.float()
    language.trans, language.cast = torch.t, lambda x, dtype: torch.as_tensor(x, dtype=dtype)
    language.static_range = range
    language.range = lambda *bounds, loop_unroll_factor: range(*bounds)
    language.debug_barrier = lambda: None
    triton: Any = ModuleType("triton")
    triton.jit, triton.language = Kernel, language
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    return {"triton": triton, "triton.language": language}
