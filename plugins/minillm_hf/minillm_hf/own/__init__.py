"""Directories of models that no other program knows: with the modeling files that compute them.

    config.json             its sizes, and which files have its code
    modeling_minillm.py     for Transformers: from_pretrained(..., trust_remote_code=True)
    modeling_mlx.py         for mlx-lm: load(..., trust_remote_code=True)
    model.safetensors       the run's arrays, under the run's names: model.layers.0.attention.q.weight

Neither file imports minillm. They are written from the plan:

    copying     definitions of plugins, copied with all that they use
    writing     a whole file: its head, what is copied, the model, what the framework calls
    decoder     the plan's slots as straight-line code, of which only what is filled is there;
                blocks, attention: of a layer; batch_fields: what plugins compute of the ids
    draft       such a file under way: its classes so far, how nodes are made and called
    literals    headings, names and constants as text
    known       what the writer knows, so that nothing else is left out in silence
    tidying     arguments that only training reads, taken out; lines of a readable length
    parts_*     what such files have besides the model, for either framework
    directory   the layout ``own`` of ``minillm export``
"""
