"""How a plugin's effect on the loss changes with the size of the model and the length of its training.

A meta-regression over the plugin's cards: effect = a + b log10(N) + c log10(D / N), with N parameters and D
tokens per run, each card weighted by the inverse variance of its own pairs. c needs at least four cards, and
tokens that do not follow from the size. Without it, the line has one slope for the size and the tokens that
grew with it, if they did. If the cards scatter about the line more than their pairs explain, the errors are
scaled up by that factor, and the interval has only the cards' degrees of freedom (Knapp and Hartung, 2003);
with three cards it is then wide, as it should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import NonNegativeFloat

from minillm_core.commands import amount
from minillm_lab.card import Card, Interval, Positive, interval, signed
from minillm_lab.worth import quantile

SIZES = 3
"""Fewest sizes of model from which a line is fitted."""

BEYOND = 3.0
"""The size for which the effect is predicted, over the largest measured one."""

ALIKE = 1.2
"""Sizes, or tokens per parameter, within this factor count as one."""


class Transfer(Interval):
    """A plugin's predicted effect on the loss at equal tokens, for a model larger than all measured ones."""

    parameters: Positive  # of that model
    tokens: Positive  # of its training: the cards' tokens, continued by ``growth``
    slope: Interval  # change of the effect per tenfold parameters; above 0: the benefit fades
    growth: Positive  # of the tokens, per tenfold parameters
    cards: int  # fitted
    sizes: int
    company: tuple[str, ...] = ()  # of the fitted cards
    misfit: NonNegativeFloat  # scatter about the line over what the pairs explain; 1 or less: none

    @property
    def words(self) -> str:
        """Format the prediction and the slope, each with its interval."""
        tenfold = interval(signed, self.slope.effect, self.slope.low, self.slope.high)
        moves = "fades" if self.slope.effect > 0 else "grows"
        verdict = f"{moves} with size" if self.slope.excludes(0) else "no trend beyond noise"
        shown = interval(signed, self.effect, self.low, self.high)
        longer = abs(math.log10(self.growth)) > math.log10(ALIKE)
        length = f"with {self.growth:.3g} times the tokens" if longer else "at equal tokens"
        return (
            f"{shown if self.excludes(0) else f'within noise: {shown}'} predicted for "
            f"{amount(self.parameters)} parameters and {amount(self.tokens)} tokens beside the same plugins, "
            f"from {self.cards} cards of {self.sizes} sizes; {verdict}: {tenfold} per tenfold size {length}"
        )


def transfer_of(cards: Sequence[Card]) -> Transfer | None:
    """Fit the effect of a plugin to its cards.

    Args:
        cards: of one plugin, the newest first. Only cards of equal company, options and unit are fitted
            together: those of the most sizes, the first ones where several have as many.

    Returns:
        The prediction for :data:`BEYOND` times the largest size; None if fewer than :data:`SIZES` sizes
        were measured.
    """
    groups = [[one for one in cards if one.setting == first.setting] for first in cards]
    alike = max(groups, key=lambda group: _distinct(_sizes(group)))
    size = _sizes(alike)  # (n,)
    tokens = np.log10([float(one.scale.tokens) for one in alike])  # (n,)
    sizes = _distinct(size)
    if sizes < SIZES:
        return None
    largest = int(np.argmax(size))
    beyond = size[largest] + math.log10(BEYOND)
    columns, at = [np.ones_like(size), size], [1.0, beyond]
    rise, start = np.polyfit(size, tokens, 1)  # of the tokens with the size
    if len(alike) > SIZES and np.abs(tokens - rise * size - start).max() > math.log10(ALIKE):
        rise, start = 1.0, tokens[largest] - size[largest]
        columns.append(tokens - size)
        at.append(start)
    design = np.stack(columns, axis=1)  # (n, p)
    effect = np.array([one.effect for one in alike])
    error = np.array([_error(one) for one in alike])
    weight = 1 / np.maximum(error, 1e-12) ** 2
    covariance = np.linalg.pinv(design.T @ (weight[:, None] * design))  # (p, p)
    fitted = covariance @ design.T @ (weight * effect)
    free = len(alike) - np.linalg.matrix_rank(design)
    scatter = float(np.sum(weight * (effect - design @ fitted) ** 2))
    misfit = scatter / free if free else 0.0
    if misfit > 1:
        covariance, freedom = covariance * misfit, int(free)
    else:
        freedom = sum(len(one.seeds) - 1 for one in alike)
    return Transfer(
        **_estimate(np.array(at), fitted, covariance, freedom).model_dump(),
        parameters=BEYOND * alike[largest].scale.parameters,
        tokens=10 ** (rise * beyond + start),
        slope=_estimate(np.eye(len(columns))[1], fitted, covariance, freedom),
        growth=10**rise,
        cards=len(alike),
        sizes=sizes,
        company=alike[0].company,
        misfit=misfit,
    )


def _sizes(cards: Sequence[Card]) -> np.ndarray:
    """Return the logarithms of the models' parameters, (n,)."""
    return np.log10([float(one.scale.parameters) for one in cards])


def _error(card: Card) -> float:
    """Return the standard error of a card's effect, from its interval."""
    return (card.high - card.low) / 2 / quantile(len(card.seeds) - 1)


def _distinct(logarithms: np.ndarray) -> int:
    """Count values that are further apart than the factor ALIKE."""
    return 1 + int(np.sum(np.diff(np.sort(logarithms)) > math.log10(ALIKE)))


def _estimate(at: np.ndarray, fitted: np.ndarray, covariance: np.ndarray, freedom: int) -> Interval:
    """Evaluate the fit: ``at`` (p,) times the coefficients, with its 95 % interval."""
    value = float(at @ fitted)
    half = quantile(freedom) * math.sqrt(max(float(at @ covariance @ at), 0.0))
    return Interval(effect=value, low=value - half, high=value + half)
