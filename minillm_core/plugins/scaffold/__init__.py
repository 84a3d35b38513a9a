"""Writes the package of a new plugin: its files are in templates/, one folder a kind.

Standard library only: ``minillm plugins new`` starts at once.
"""

from minillm_core.plugins.scaffold.names import Names, checked
from minillm_core.plugins.scaffold.package import KINDS, write_package

__all__ = ["KINDS", "Names", "checked", "write_package"]
