"""Directories of models that no other program implements, with the modeling files that compute them.

    config.json             sizes, and the names of the code files
    modeling_minillm.py     for Transformers: from_pretrained(..., trust_remote_code=True)
    modeling_mlx.py         for mlx-lm: load(..., trust_remote_code=True)
    model.safetensors       the run's arrays, under the run's names: model.layers.0.attention.q.weight

Neither file imports minillm. Both are generated from the plan:

    copying     definitions copied from plugins' source, with everything that they use
    writing     a whole file: docstring, copied definitions, the model, the framework's classes
    decoder     the plan's filled slots as straight-line code;
                blocks, attention: of a layer; batch_fields: plugins' fields, computed from the ids
    draft       a file being generated: its classes so far, construction and calls of nodes
    literals    headings, names and constants as text
    known       the supported slots and attributes: all others are refused
    tidying     removal of arguments that only training reads; wrapping of long lines
    parts_*     fixed parts of the files, for each framework and for both
    directory   the layout ``own`` of ``minillm export``
"""
