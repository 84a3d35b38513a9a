"""Toolkit for distributions that read, generate or change training data.

    for source in find(paths, say):                          # files of a folder, in order
        for document in source.format.read(source.path, source.packing, reading):
            ...                                              # str, or ids: an int array
        for place, line, record in read_records(source.path, source.packing, reading):
            ...                                              # a line of JSON, as it stands and parsed

A :class:`Reading` holds a reader's context: the bound of ids, the progress, the notes, and the policy for
unreadable documents: ``malformed`` raises, or counts the document and returns.

A source of documents (``data.source``) yields text, ids, or lists of :class:`Segment`, whose tokens
have values of the source's fields; a :class:`Special` represents a special token.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
