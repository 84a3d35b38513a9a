"""torch's operations on lists of tensors: a few kernels for all of them, not one for each.

Their names start with an underscore, and there are no others: torch's own optimizers are made of
them. They are named here only.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from torch import _foreach_add_ as add_
from torch import _foreach_copy_ as copy_
from torch import _foreach_norm as norm

__all__ = ["add_", "copy_", "norm"]
