"""The toolkit of model directories: for distributions that read or write models of other programs.

An entry point of the group ``minillm.directories`` has the name of a layout of tensors, as ``export=`` of
a plugin says it, and names a :class:`DirectoryFormat`: it recognises and reads directories (``--init``,
each a :class:`ModelDirectory`, whose ``fit`` gives a :class:`Fitted`), checks while planning that a model
is of the layout, and writes a :class:`TrainedModel` (``minillm export``).

A directory comes from anywhere. :func:`parse_json` takes one object of bounded size, without a key
twice or NaN; :func:`tensor_places` reads the header of a safetensors file, each tensor a ``Stored`` of a
dtype of ``WIDTHS``, and :func:`tensor_file` gives the bytes of one, to be written with
:func:`stream_file`. :func:`refuse_taken`, :func:`name_aside`, :func:`write_file`, :func:`sync_path` and
:func:`rename_path` make a folder that is there whole or not at all.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
