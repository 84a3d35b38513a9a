"""Training a byte-level BPE, in its own process if that takes longer than starting one.

The trainer is native code that handles no signal until it is done. A separate process can be killed at
any moment, and the waiting process can show the elapsed time. That process runs this file as a script, so
the file imports nothing of minillm.
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

_HERE = 1 << 16  # characters; training on them takes less time than starting a process
_SECONDS = 0.2  # between two checks of the process, and two calls of ``beat``
_LENGTH = struct.Struct("<I")


def train_bpe(
    texts: Iterable[str], vocab: int, beat: Callable[[], None], specials: Sequence[str] = ()
) -> str:
    """Train a BPE on some texts; return its tokenizer.json, the same one for the same texts.

    Args:
        texts: words longer than a few thousand characters take hours.
        vocab: most entries of the vocabulary.
        beat: called several times a second.
        specials: texts of the special tokens after the end of text, with ids from 1 on.

    Raises:
        OSError: the texts cannot be passed to another process.
        ChildProcessError: the training process failed, with the reason.
    """
    waiting, count = iter(texts), 0
    here = []
    for text in waiting:
        here.append(text)
        if (count := count + len(text)) > _HERE:
            if not sys.executable:  # Python is embedded in another program
                break
            return _train_in_process(chain(here, waiting), vocab, beat, specials)
    return _train(chain(here, waiting), vocab, specials)


def frame(text: str) -> bytes:
    """Encode a text as a frame of a file: its length in bytes, and its UTF-8."""
    data = text.encode("utf-8")
    return _LENGTH.pack(len(data)) + data


def frames(file: IO[bytes]) -> Iterator[str]:
    """Yield the texts of a file of frames."""
    while length := file.read(_LENGTH.size):
        yield file.read(_LENGTH.unpack(length)[0]).decode("utf-8")


def _train_in_process(
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
    """Return the command of another Python process with this one's module path, which runs ``code``.

    Args:
        code: one line, with its arguments in sys.argv from 2 on.
        arguments: the arguments.
    """
    first = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
    return [sys.executable, "-P", "-c", f"{first}; {code}", json.dumps(sys.path), *arguments]


def reason(code: int, errors: IO[bytes]) -> str:
    """Return the reason for a process's exit code: the last line that it wrote to ``errors``."""
    if code == -signal.SIGKILL:
        return "it was killed, as happens if memory runs out"
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
    """End this process with its parent, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _child(vocab: int, parent: int, specials: Sequence[str]) -> None:
    """Train on the frames in stdin; write the tokenizer.json to stdout."""
    serve(parent)
    texts = frames(sys.stdin.buffer)
    sys.stdout.buffer.write(_train(texts, vocab, specials).encode("utf-8"))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _child(int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
