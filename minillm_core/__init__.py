"""minillm trains small language models fast; every technique is a plugin.

The public names are listed in ``__init__.pyi``, and are imported on first use.
"""

from minillm_core.public import public_names

_look_up, __dir__ = public_names(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name on first use.

    Raises:
        AttributeError: the name is not public.
    """
    if name != "__version__":
        return _look_up(name)
    from importlib.metadata import version

    return version("minillm-core")
