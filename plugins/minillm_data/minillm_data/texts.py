"""Texts: documents of files as tokenizer input, long texts in pieces."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from minillm_core.documents import Document, Reading, Record, documents_of
from minillm_data.files import Files
from minillm_data.rows import CHATS


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
            if source.format.records is not None:
                records = source.format.records(source.path, source.packing, reading)
                yield from documents_of(_without_chats(records, reading), reading)
            else:
                assert source.format.read is not None
                yield from source.format.read(source.path, source.packing, reading)
            source.check_unchanged()


def _without_chats(records: Iterable[Record], reading: Reading) -> Iterator[Record]:
    """Yield the records that are not chats, and report the chats as malformed."""
    for place, line, record in records:
        chat = record.keys() & {*CHATS}
        if not chat or record.keys() & {"text", "ids"}:
            yield place, line, record
            continue
        command = shlex.join(["minillm", "train", "--task", "sft", "--data", str(place.path)])
        error = place.error(
            f'chat data: "{min(chat)}", and neither "text" nor "ids"',
            f"train on the chats as they are, a chat template writes them as text: {command}",
            reason="chat data, which minillm train --task sft reads",
        )
        reading.malformed(error)
