"""The slots that a plugin takes on a preset, for ``minillm plugins info``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm_core.plugins.manager import LoadedPlugin

__all__ = ["slots_on"]


def slots_on(preset: str) -> Callable[[LoadedPlugin], Sequence[str]]:
    """What plans ``preset`` with one plugin, and says what that plugin put into the plan.

    Of a preset that names plugins its shape and training are taken.

    Raises:
        ConfigError: there is no such preset.
    """
    from minillm_core.config.load import load
    from minillm_core.plan import build_plan
    from minillm_core.plan.slots_of import slots_of

    config = load(preset=preset, default_preset=lambda: (preset, "asked for")).config
    config = config.model_copy(update={"plugins": {}})

    def slots(plugin: LoadedPlugin) -> Sequence[str]:
        return slots_of(build_plan(config, [plugin]), plugin.name)

    return slots
