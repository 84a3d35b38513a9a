"""Generation: a trained model goes on with a text, id by id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from minillm_core.backends.base import Decoding, Model, lone_row
from minillm_core.backends.detect import choose, probe
from minillm_core.data import OnBatch
from minillm_core.errors import Refusal
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.restore import Create, Run, open_run
from minillm_core.train.sampling import Sampling
from minillm_core.train.streaming import pieces

__all__ = ["Generation", "Vocabulary", "Window", "Writer", "open_writer"]

Say = Callable[[str], None]


class Vocabulary(Protocol):
    """The part of a tokenizer that writing needs."""

    end_of_text: int

    def known(self) -> np.ndarray:
        """The ids in use, int32 (n,)."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        ...

    def stream(self) -> Callable[[int], str]:
        """What takes ids one by one and gives the text that each of them completes."""
        ...


class Window:
    """What a model is shown of a growing sequence: its newest ids, ``context`` at most.

    When there are more, the oldest are dropped so that context // 2 remain, which start again from
    position 0: with a cache it is filled anew. So both modes show the model the same.

    Args:
        model: gives the logits.
        context: columns at most.
        cached: feed only what is new, and let the model keep the rest.
        on_batch: the plugins'; it is given all ids that the model is shown.
        say: is told, once, when ids are dropped.
    """

    def __init__(
        self,
        model: Model,
        context: int,
        *,
        cached: bool = True,
        on_batch: OnBatch | None = None,
        say: Say = lambda line: None,
    ) -> None:
        self._model, self._context, self._cached = model, context, cached
        self._on_batch, self._say = on_batch, say
        self._ids: list[int] = []
        self._decoding: Decoding | None = None
        self._past = 0  # columns that it was fed

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """float32 (V,): the logits after some more ids. Waits."""
        self._ids += new
        if len(self._ids) > self._context:
            self._forget()
        batch = lone_row(np.array(self._ids, np.int32))
        if self._on_batch is not None:
            batch = self._on_batch(dict(batch), "decode")
        if not self._cached:
            return self._model.next_logits(batch)
        if self._decoding is None:
            self._decoding, self._past = self._model.decoding(), 0
        columns = {name: array[:, self._past :] for name, array in batch.items()}
        self._past = len(self._ids)
        return self._decoding.feed(columns)

    def _forget(self) -> None:
        stay = max(self._context // 2, 1)
        del self._ids[:-stay]
        self._decoding = None
        self._say(
            f"the model is shown {self._context:,} tokens at most: it goes on from the last {stay:,}"
        )
        self._say = lambda line: None


@dataclass
class Generation:
    """Ids that a model goes on with; made by iterating, once."""

    window: Window
    new: Sequence[int]  # what the window is to be shown first
    choose: Callable[[np.ndarray], int]  # float32 (V,) -> id
    end_of_text: int
    tokens: int
    ids: list[int] = field(default_factory=list)  # drawn so far
    ended: bool = False  # the end of the text was drawn

    def __iter__(self) -> Iterator[int]:
        new = self.new
        while len(self.ids) < self.tokens:
            drawn = self.choose(self.window.next_logits(new))
            if drawn == self.end_of_text:
                self.ended = True
                return
            self.ids.append(drawn)
            yield drawn
            new = [drawn]


@dataclass(frozen=True)
class Writer:
    """A model with what it takes to write text."""

    model: Model
    vocabulary: Vocabulary
    context: int  # columns that the model is shown at most
    on_batch: OnBatch | None = None
    plugins: tuple[LoadedPlugin, ...] = ()  # to be blamed for what their nodes raise

    def go_on(
        self,
        prompt: str,
        sampling: Sampling,
        *,
        tokens: int,
        seed: int = 0,
        cached: bool = True,
        say: Say = lambda line: None,
    ) -> Generation:
        """The ids that follow a prompt, which begins a document.

        Ids that the vocabulary does not know, rows of padding in the embedding, are never drawn.

        Args:
            prompt: without lone surrogates.
            sampling: how ids are drawn.
            tokens: how many at most; the end of the text ends it earlier.
            seed: of the draws, which move no other randomness.
            cached: let the model keep what it computed for earlier ids.
            say: is told when the beginning is forgotten.
        """
        known, random = self.vocabulary.known(), np.random.default_rng(seed)

        def choose(logits: np.ndarray) -> int:
            return int(known[sampling.draw(logits[known], random)])

        end_of_text = self.vocabulary.end_of_text
        (ids,) = self.vocabulary.encode([prompt])
        window = Window(self.model, self.context, cached=cached, on_batch=self.on_batch, say=say)
        return Generation(window, [end_of_text, *ids.tolist()], choose, end_of_text, tokens)

    def text(self, generation: Generation, prompt: str = "") -> Iterator[str]:
        """The prompt and what follows it, in pieces that can be printed as they come.

        Raises:
            PluginCodeError: a plugin's node raised.
        """
        with blaming(self.plugins, "for the next token"):
            yield from pieces(generation, self.vocabulary.stream(), prompt)


def open_writer(
    out: Path,
    *,
    backend: str = "auto",
    device: str = "auto",
    plugins: Mapping[str, str] | None = None,
    say: Say,
    create: Create | None = None,
) -> tuple[Writer, Run]:
    """The writer of a run's newest good checkpoint, in float32: bfloat16 rounds the logits of one
    new column otherwise than those of the whole row, and the cache would change the text.

    Args:
        out: the run's folder.
        backend: as for training; it need not be the run's.
        device: as for training.
        plugins: name -> what to load for it, for plugins that must be named again.
        say: is told what a person should know.
        create: makes the backend; default: :func:`minillm_core.backends.create`.

    Raises:
        Refusal: OUT holds no run, no checkpoint or no tokenizer, or anything given cannot be used.
        NoCheckpoint: none verifies.
        PluginCodeError: a plugin's own code raised.
    """
    detected = choose(probe(), backend, device)
    run = open_run(out, plugins=plugins, say=say)
    tokenizer = run.tokenizer
    if tokenizer is None:
        raise Refusal(
            "the run has no tokenizer, so there is no text to go on with: it was trained on ids",
            where=str(out),
            fix="train on text, or with data.tokenizer=tokenizer.json",
        )
    exact = {"dtype": "float32", "compile": "off"}
    train = run.config.train.model_copy(update=exact)
    # the kernels that were asked for were for training, perhaps in another dtype
    config = run.config.model_copy(update={"train": train, "kernels": "auto"})
    run = replace(run, config=config, plan=replace(run.plan, config=config))
    model = run.model(detected, say=say, create=create)
    return Writer(model, tokenizer, train.seq_len, run.batch_hook(), run.plugins), run
