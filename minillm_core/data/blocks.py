"""Documents in blocks (data.block): training reads the first ones while another process tokenises the rest.

Reading and encoding in the process that trains would hold Python's lock and delay its steps, so
another process does both, at a lower priority. It writes blocks into the token cache one by one;
training opens each when it reaches it. A start after a kill finds the finished blocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from minillm_core.data.bpe import python, reason, serve
from minillm_core.data.documents import Columns, Documents, digest
from minillm_core.data.sources import Source
from minillm_core.data.store import Bookmark, place_of, read_meta
from minillm_core.data.tokenise import Encoding, TokenCache
from minillm_core.data.tokenizer import Tokenizer
from minillm_core.errors import DataError, MinillmError
from minillm_core.plugins.sourcing import PLAIN, Reserved

_SECONDS = 0.05  # between two checks for a block
_NICE = 10
_REFUSED = 2  # exit code of that process if the text cannot be used
_RUN = "from minillm_core.data import blocks; blocks.tokenise_rest(json.loads(sys.argv[2]))"


class Blocks:
    """Documents that are read block by block, like :class:`~minillm_core.data.documents.Documents`.

    Args:
        cache: the token cache, with the first block opened.
        first: its documents in the training part.
        tokenizer: its file, and the token that begins documents; None: the documents are ids.
        tokens: of all blocks, estimated.
    """

    def __init__(
        self, cache: TokenCache, first: Documents, tokenizer: tuple[Path, str] | None, tokens: int
    ) -> None:
        self._cache, self._tokenizer, self._about = cache, tokenizer, tokens
        self._opened, self._place = [first], cache.first.place
        self._lock = threading.Lock()
        self._tokenising: _Tokenising | None = None
        self.vocab = first.vocab
        self.digest = digest(f"{first.digest} and blocks of {cache.block} tokens: {cache.key}")
        self._begin()

    @property
    def tokens(self) -> int:
        """The number of tokens of all blocks; an estimate until the last one is open."""
        if self._place is None:
            return sum(one.tokens for one in self._opened)
        return self._about

    def room(self, tokens: int) -> Columns:
        """Return arrays of zeros for this many tokens."""
        return self._opened[0].room(tokens)

    def block(self, number: int) -> Documents | None:
        """Open a block, from 0, and wait until it is tokenised; None: there are fewer.

        Raises:
            DataError: the text cannot be read or tokenised, or a file changed since the start.
        """
        with self._lock:
            while number >= len(self._opened):
                if self._place is None:
                    return None
                self._opened.append(self._next())
            return self._opened[number]

    def check_unchanged(self) -> None:
        """Check that the files behind the open blocks have not changed since they were opened.

        Raises:
            DataError: one was written to.
        """
        for one in self._opened:
            one.check_unchanged()

    def _next(self) -> Documents:
        number = len(self._opened)
        while (entry := self._cache.opened(number)) is None:
            if self._tokenising is None or self._tokenising.ended():
                self._begin()
            time.sleep(_SECONDS)
        self._place = entry.place
        return entry.documents

    def _begin(self) -> None:
        """Start a process at the first block that the cache lacks, if one is missing."""
        number, place = len(self._opened), self._place
        while place is not None:
            folder = self._cache.folder_of(self._cache.key, number)
            try:
                place = place_of(read_meta(folder))
            except (OSError, ValueError, KeyError, TypeError):
                break
            number += 1
        if place is not None:
            self._tokenising = _Tokenising(self._cache, number, place, self._tokenizer)


class _Tokenising:
    """A process that tokenises the blocks from ``number`` on."""

    def __init__(
        self, cache: TokenCache, number: int, place: Bookmark, tokenizer: tuple[Path, str] | None
    ) -> None:
        what = {
            "paths": list(cache.paths),
            "vocab": cache.vocab,
            "folder": str(cache.folder),
            "specials": [one._asdict() for one in cache.asked.specials],
            "block": cache.block,
            "key": cache.key,
            "files": _stamp(cache.sources),
            "number": number,
            "place": place,
            "tokenizer": tokenizer and [str(tokenizer[0]), tokenizer[1]],
            "end_of_text": cache.first.end_of_text,
            "parent": os.getpid(),
        }
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read when it has ended
        # Ctrl-C in a terminal is for the process that trains, which ends this one.
        self._process = subprocess.Popen(
            python(_RUN, json.dumps(what)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process, self._errors)

    def ended(self) -> bool:
        """Return whether the process has ended.

        Raises:
            DataError: it failed.
        """
        code = self._process.poll()
        if not code:
            return code == 0
        if code == _REFUSED:
            self._errors.seek(0)
            raise DataError(**json.loads(self._errors.read(1 << 16).splitlines()[-1]))
        raise DataError(
            "the process that tokenises the text beside training has failed",
            where=reason(code, self._errors),
            fix="continue with --resume; data.block=0 tokenises all of the text first",
        )


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    errors.close()


def _stamp(sources: Sequence[Source]) -> str:
    """Return a digest of the names, sizes and times of files."""
    return digest(json.dumps([[str(one.path), one.size, one.modified] for one in sources]))


def tokenise_rest(what: dict[str, Any]) -> None:
    """Tokenise blocks until the text ends, as the main function of a process; errors go to stderr as JSON."""
    serve(what["parent"])
    os.nice(_NICE)
    try:
        specials = tuple(Reserved(**one) for one in what["specials"])
        quiet = (lambda line: None), (lambda line: None), None
        asked = replace(PLAIN, specials=specials)
        cache = TokenCache(
            what["paths"], what["vocab"], Path(what["folder"]), *quiet, asked, what["block"]
        )
        if _stamp(cache.sources) != what["files"]:
            why = "the files changed since the run began to read them"
            raise DataError(why, where=cache.where, fix="start again when nothing writes to them")
        path, token = what["tokenizer"] or (None, None)
        tokenizer = Tokenizer.load(Path(path), what["vocab"], token) if path else None
        place = place_of(what)
        assert place is not None
        by = Encoding(tokenizer, what["end_of_text"])
        for _ in cache.made(what["key"], what["number"], place, by):
            pass
    except MinillmError as error:
        said = {"what": error.what, "where": error.where, "fix": error.fix}
        print(json.dumps(said), file=sys.stderr)
        sys.exit(_REFUSED)
