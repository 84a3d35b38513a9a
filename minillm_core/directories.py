"""Toolkit for distributions that read or write model directories of other programs.

An entry point of the group ``minillm.directories`` is named after a tensor layout, the value of a plugin's
``export=``, and refers to a :class:`DirectoryFormat`. It recognises and reads directories (``--init``;
each is a :class:`ModelDirectory`, whose ``fit`` returns a :class:`Fitted`), checks while planning that a
model has the layout, and writes a :class:`TrainedModel` (``minillm export``).

A directory is untrusted input. :func:`parse_json` parses one object of bounded size, without duplicate
keys or NaN; :func:`tensor_places` reads the header of a safetensors file, each tensor a ``Stored`` with a
dtype in ``WIDTHS``, and :func:`tensor_file` returns the bytes of such a file, to be written with
:func:`stream_file`. :func:`refuse_taken`, :func:`name_aside`, :func:`write_file`, :func:`sync_path` and
:func:`rename_path` create a folder atomically: complete or not at all.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
