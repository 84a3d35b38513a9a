"""Training a byte-level BPE, in a process of its own where that takes longer than starting one.

The trainer is native code that hears no signal until it is done. In a process of its own it can be
ended at any moment, and the process that waits for it can show the time that passes. That process
runs this file as a script, so it imports nothing of minillm.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import IO

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

_HERE = 1 << 16  # characters; so many are trained on in less time than a process takes to start
_SECONDS = 0.2  # between two looks at the process, and two calls of ``beat``
_LENGTH = struct.Struct("<I")


def learn(
    texts: Iterable[str], vocab: int, beat: Callable[[], None], specials: Sequence[str] = ()
) -> str:
    """Train a BPE on some texts; return its tokenizer.json, the same one for the same texts.

    Args:
        texts: words longer than a few thousand characters take hours.
        vocab: the most entries that it may have.
        beat: called several times a second.
        specials: texts of the special tokens behind the end of text, whose ids begin with 1.

    Raises:
        OSError: the texts cannot be handed to another process.
        ChildProcessError: the process that trained has failed; the reason.
    """
    waiting, count = iter(texts), 0
    here = []
    for text in waiting:
        here.append(text)
        if (count := count + len(text)) > _HERE:
            if not sys.executable:  # Python is embedded in another program: there is none to start
                break
            return _apart(chain(here, waiting), vocab, beat, specials)
    return _train(chain(here, waiting), vocab, specials)


def frame(text: str) -> bytes:
    """Encode a text for a file of many: its length in bytes, and its UTF-8."""
    data = text.encode("utf-8")
    return _LENGTH.pack(len(data)) + data


def frames(data: bytes) -> Iterator[str]:
    """Yield the texts in some frames."""
    place = 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        yield data[place - length : place].decode("utf-8")


def _apart(
    texts: Iterable[str], vocab: int, beat: Callable[[], None], specials: Sequence[str]
) -> str:
    file = tempfile.TemporaryFile
    with file() as given, file() as made, file() as errors:
        beat()
        while some := list(islice(texts, 256)):
            given.write(b"".join(map(frame, some)))
            beat()
        given.seek(0)
        here = __file__, str(vocab), str(os.getpid()), json.dumps(specials)
        command = python("import runpy; runpy.run_path(sys.argv[2], run_name='__main__')", *here)
        process = subprocess.Popen(command, stdin=given, stdout=made, stderr=errors)
        try:
            while process.poll() is None:
                beat()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ChildProcessError(reason(process.returncode, errors))
        made.seek(0)
        return made.read().decode("utf-8")


def python(code: str, *arguments: str) -> list[str]:
    """Write the command of another Python that finds the modules of this one, and runs ``code``.

    Args:
        code: one line, which finds the arguments in sys.argv from 2 on.
        arguments: for it.
    """
    first = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
    return [sys.executable, "-P", "-c", f"{first}; {code}", json.dumps(sys.path), *arguments]


def reason(code: int, errors: IO[bytes]) -> str:
    """Return the reason why a process ended with a code: by the last line that it wrote to ``errors``."""
    if code == -signal.SIGKILL:
        return "it was killed, as it is where memory runs out"
    errors.seek(0)
    lines = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
    return f"exit code {code}" + (f", {lines[-1][:200]}" if lines else "")


def _train(texts: Iterable[str], vocab: int, specials: Sequence[str]) -> str:
    native = tokenizers.Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    native.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(  # type: ignore
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    native.train_from_iterator(texts, trainer)
    return native.to_str()


def serve(parent: int) -> None:
    """Let this process end with the one that it serves, whose Ctrl-C is its own affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _child(vocab: int, parent: int, specials: Sequence[str]) -> None:
    """Train on the frames of stdin; write the tokenizer.json to stdout."""
    serve(parent)

    def texts() -> Iterator[str]:
        while length := sys.stdin.buffer.read(_LENGTH.size):
            yield sys.stdin.buffer.read(_LENGTH.unpack(length)[0]).decode("utf-8")

    sys.stdout.buffer.write(_train(texts(), vocab, specials).encode("utf-8"))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _child(int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
