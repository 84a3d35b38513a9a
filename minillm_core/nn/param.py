"""Declarations of modules: parameters, constants, and State that the update writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minillm_core.errors import PlanError
from minillm_core.nn.init import Init, Normal, zeros


class Declaration:
    """The base of Param, Buffer and State; a declaration belongs to the attribute it is first assigned to."""

    shape: tuple[int, ...]
    owned: bool = False
    init: Init = zeros  # a Buffer has none

    def claim(self, attribute: str) -> None:
        """Record that ``attribute`` owns this declaration.

        Raises:
            PlanError: its ``init`` is not an initialiser.
            ValueError: another attribute already owns it. To tie weights, keep one owner and pass the
                array to the others; one of the frameworks would silently split two owners.
        """
        if self.owned:
            what = f"'{attribute}' is given a {type(self).__name__} that already has an owner"
            fix = "keep one owner, and pass the array to the others as an argument"
            raise ValueError(f"{what}: {fix}")
        self.owned = True
        if not isinstance(self.init, Init):
            what = f"init={getattr(self.init, '__name__', self.init)!r} is not an initialiser"
            known = "zeros, ones, Normal(std), Uniform(bound), Constant(value) or fan_in(inputs)"
            raise PlanError(what, fix=f"{known}; or a function, in model.init(parameter, function)")


class Param(Declaration):
    """A trained parameter.

    Args:
        shape: its shape; matrices are (out, in).
        axes: logical names of the axes: ``heads``, ``kv_heads`` and ``hidden``, which tensor
            parallelism slices, ``dim``, ``vocab`` and any others.
        init: the initialiser.
        role: a path by which optimizers and exports select parameters: attention.q, .k, .v, .o,
            mlp.gate, mlp.up, mlp.down, embedding.token, embedding.bigram, head, norm, gate, scalar.
        lr_mul: factor on the learning rate.
        wd_mul: factor on the weight decay.
        rows: the argument of ``forward`` whose ids, int32 (B, T), select the rows that it reads, only
            through ``ops.embedding``: such a table may be updated by rows (``optimizer.rows``), and a
            step then holds only those rows. The argument is a batch field, the module a stream of
            the model (``model.stream``).

    ::

        self.part = Param((geometry.kv_heads, 1), init=zeros, role="scalar", wd_mul=0.0)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        axes: tuple[str, ...] = (),
        init: Init = Normal(0.02),  # noqa: B008  (frozen)
        role: str,
        lr_mul: float = 1.0,
        wd_mul: float = 1.0,
        rows: str = "",
    ) -> None:
        for name, factor in (("lr_mul", lr_mul), ("wd_mul", wd_mul)):
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                fix = f"a schedule goes into optimizer.set(where, {name}=...)"
                raise PlanError(f"a Param's {name} is a number, not {factor!r}", fix=fix)
        self.shape, self.axes, self.init, self.role = tuple(shape), axes, init, role
        if axes and len(axes) != len(self.shape):
            what = f"a Param of shape {self.shape} has axes={axes!r}"
            raise PlanError(what, fix="a tuple with a name for each axis, or leave axes out")
        self.lr_mul, self.wd_mul, self.rows = lr_mul, wd_mul, rows


class Buffer(Declaration):
    """A constant array, computed on the host; never trained nor saved.

    Args:
        shape: its shape.
        fn: a function without arguments that returns the array.
    """

    def __init__(self, shape: tuple[int, ...], fn: Callable[[], np.ndarray]) -> None:
        self.shape, self.fn = tuple(shape), fn


class State(Declaration):
    """An array without a gradient that the update writes once per step (a router's bias, an amax).

    ``next_state`` of its module returns the new value from the step's statistics; checkpoints contain it.

    Args:
        shape: its shape.
        init: the initialiser.
    """

    def __init__(self, shape: tuple[int, ...], init: Init) -> None:
        self.shape, self.init = tuple(shape), init
