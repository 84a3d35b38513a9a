"""Texts: documents of files as tokenizer input, long texts in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from minillm_core.documents import Document, Reading
from minillm_data.files import Files


class Texts(Files):
    """The documents of files, in order, as tokenizer input: long texts in pieces."""

    no_shards = (
        "this is a token shard already",
        "give the text that it was made from, or train on it as it is",
    )

    def read(self, reading: Reading) -> Iterator[Document]:
        """Read every document.

        Raises:
            DataError: a file cannot be read, or a document where ``malformed`` is strict.
        """
        for source in self.sources:
            assert source.format.read is not None
            yield from source.format.read(source.path, source.packing, reading)
            source.check_unchanged()
