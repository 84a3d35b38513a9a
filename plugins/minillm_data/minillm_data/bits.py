"""Bits per byte of documents, one by one, under a run's checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from minillm_core import DataError, Refusal, Run

TOKENS = 2048
"""Tokens of a document that are measured, at most: its beginning."""


def checkpoint_of(out: str | Path) -> str:
    """Name the checkpoint of a run that is read: the newest that verifies.

    Raises:
        Refusal: the folder holds no run.
    """
    return str(Run.open(out).checkpoint)


class Bits:
    """A checkpoint that says how well it predicts a document; a context manager.

    Args:
        out: the folder of a run.
        folder: for files that are needed meanwhile; it is removed at the end.

    Raises:
        Refusal: the folder holds no run, or the run has no tokenizer.
    """

    def __init__(self, out: str | Path, folder: Path) -> None:
        self._folder, self._text, self._cache = folder, folder / "document.txt", folder / "cache"
        self._run = Run.open(out, cache=self._cache)
        if self._run.tokenizer is None:
            raise Refusal(
                "the run was trained on ids: it cannot read text",
                where=f"--model {out}",
                fix="name a run that was trained on text",
            )
        folder.mkdir(exist_ok=True)

    def __enter__(self) -> Bits:
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, text: str) -> float:
        """Measure the beginning of a document, as ``minillm eval`` measures a file.

        Args:
            text: of the document, not empty.

        Returns:
            Bits per byte over its first TOKENS tokens.
        """
        try:
            self._text.write_text(text, "utf-8", newline="")
            found = self._run.evaluate(self._text, max_tokens=TOKENS)
            shutil.rmtree(self._cache)  # it keeps the tokens of each text
        except OSError as error:
            raise DataError(
                f"a file of the measurement cannot be written: {error.strerror}",
                where=str(self._folder),
                fix="make room there",
            ) from error
        assert found.bits_per_byte is not None  # there is a tokenizer
        return found.bits_per_byte
