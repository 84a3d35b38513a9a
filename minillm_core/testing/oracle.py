"""The oracle: the planned model in NumPy float64, forward only, with the weights that backends get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minillm_core.backends.numpy.model import last_logits, materialise
from minillm_core.nn.module import declared
from minillm_core.nn.node import Scope
from minillm_core.nn.param import Param
from minillm_core.plan import Plan
from minillm_core.testing.check import NotApplicable
from minillm_core.testing.small import Batch, moved, supervised
from minillm_core.testing.subject import Subject

__all__ = ["Oracle"]


class Oracle:
    """A plan's model.

    Args:
        subject: whose plan it is.
        plan: what is materialised.
        stirred: every parameter is moved as in ``Subject.stirred``; else the initial values.

    Raises:
        NotApplicable: the plugin does not run on NumPy.
    """

    def __init__(self, subject: Subject, plan: Plan, *, stirred: bool = True) -> None:
        if "numpy" not in subject.found.cls.manifest.backends:
            raise NotApplicable("the plugin does not support numpy, the oracle")
        self.plan, self.model = plan, materialise(plan, 0)
        self.places = {
            name: (module, attribute)
            for name, module, attribute, _ in declared(self.model, Param)
            if name in plan.parameters
        }
        if stirred:
            self.load({name: moved(name, self.get(name)) for name in self.places})

    def get(self, name: str) -> np.ndarray:
        """A parameter, float64."""
        module, attribute = self.places[name]
        return getattr(module, attribute)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Parameter -> its values."""
        for name, array in arrays.items():
            module, attribute = self.places[name]
            setattr(module, attribute, np.asarray(array, np.float64))

    def loss(self, batch: Batch) -> float:
        """The main target's, as a step reports it."""
        return float(self._called(batch).sums[0]) / supervised([batch])

    def objective(self, batch: Batch) -> float:
        """What is differentiated."""
        return float(self._called(batch).objective)

    def hidden(self, batch: Batch) -> np.ndarray:
        """(B, T, C), what the head is given."""
        with np.errstate(all="ignore"):
            return self.model.hidden(dict(batch), self._values(batch))[0]

    def logits(self, row: Batch) -> np.ndarray:
        """(V,) after the last column of one row."""
        with np.errstate(all="ignore"):  # what is not finite is told by who asks
            return last_logits(self.plan, self.model)(row, Scope)

    def _called(self, batch: Batch) -> Any:
        with np.errstate(all="ignore"):
            return self.model(dict(batch), self._values(batch))

    def _values(self, batch: Batch) -> dict[str, float]:
        values = self.plan.values(1 / (self.plan.config.train.steps or 1))
        return {**values, "normaliser": 1 / supervised([batch])}
