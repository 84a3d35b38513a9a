"""Generation: a trained model continues a text, id by id; and the samples that a run writes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from minillm_core.backends.base import Decoding, Model, lone_row
from minillm_core.data import Documents, OnBatch, Tokenizer
from minillm_core.errors import NonFinite, Refusal
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.plugins.discover import offered
from minillm_core.plugins.first_party import installing
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.sourcing import Sourcing
from minillm_core.text import printable, printable_so_far

Say = Callable[[str], None]


@dataclass(eq=False)
class Window:
    """The part of a growing sequence that a model is shown: its newest ids, ``context`` at most.

    When there are more, the oldest are dropped so that context // 2 remain, which start again from
    position 0: with a KV cache it is filled anew. So both modes show the model the same.
    """

    model: Model
    context: int  # columns at most
    _: KW_ONLY
    cached: bool = True  # feed only what is new, and let the model keep the rest
    on_batch: OnBatch | None = None  # the plugins'; is given all ids that the model is shown
    say: Say = lambda line: None  # prints a line, once, when ids are dropped
    _ids: list[int] = field(default_factory=list)
    _decoding: Decoding | None = None
    _past: int = 0  # columns that it was fed

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """Feed some more ids; waits for the logits after them, float32 (V,)."""
        self._ids += new
        if len(self._ids) > self.context:
            self._forget()
        batch = lone_row(np.array(self._ids, np.int32))
        if self.on_batch is not None:
            batch = self.on_batch(dict(batch), "decode")
        if not self.cached:
            return self.model.next_logits(batch)
        if self._decoding is None:
            self._decoding, self._past = self.model.decoding(), 0
        columns = {name: array[:, self._past :] for name, array in batch.items()}
        self._past = len(self._ids)
        return self._decoding.feed(columns)

    def _forget(self) -> None:
        stay = max(self.context // 2, 1)
        del self._ids[:-stay]
        self._decoding = None
        self.say(
            f"the model sees {self.context:,} tokens at most: it continues from the last {stay:,}"
        )
        self.say = lambda line: None


@dataclass
class Generation:
    """A continuation: iterate over it once to draw its ids."""

    window: Window
    new: Sequence[int]  # what the window is to be shown first
    choose: Callable[[np.ndarray], int]  # float32 (V,) -> id
    ends: frozenset[int]  # ids that end the text
    tokens: int
    ids: list[int] = field(default_factory=list)  # drawn so far
    ended: bool = False  # one that ends the text was drawn

    def __iter__(self) -> Iterator[int]:
        new = self.new
        while len(self.ids) < self.tokens:
            drawn = self.choose(self.window.next_logits(new))
            if drawn in self.ends:
                self.ended = True
                return
            self.ids.append(drawn)
            yield drawn
            new = [drawn]


@dataclass(frozen=True)
class Stream:
    """A text that is being drawn: iterate over it once for its pieces.

    Attributes:
        generation: its ``ids`` so far, and whether it ``ended``.
        pieces: of text that can be printed as they come.
    """

    generation: Generation
    pieces: Iterator[str]

    def __iter__(self) -> Iterator[str]:
        return self.pieces

    def __next__(self) -> str:
        return next(self.pieces)

    @property
    def ended(self) -> bool:
        """Whether an id that ends the text was drawn."""
        return self.generation.ended


@dataclass(frozen=True)
class Writer:
    """A model with what it takes to write text."""

    model: Model
    vocabulary: Tokenizer
    context: int  # columns that the model is shown at most
    on_batch: OnBatch | None = None
    plugins: tuple[LoadedPlugin, ...] = ()  # to be blamed for what their nodes raise

    def go_on(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        tokens: int,
        ends: Iterable[int] = (),
        seed: int = 0,
        cached: bool = True,
        say: Say = lambda line: None,
    ) -> Generation:
        """Prepare the continuation of a prompt, which begins a document.

        Ids that the vocabulary does not know, rows of padding in the embedding, are never drawn.

        Args:
            prompt: without lone surrogates; or ids, which begin as documents do.
            sampling: how ids are drawn.
            tokens: how many at most; the end of the text ends it earlier.
            ends: further ids that end it.
            seed: of the draws, which move no other randomness.
            cached: let the model keep what it computed for earlier ids.
            say: prints a line when the beginning is dropped.
        """
        known, random = self.vocabulary.known(), np.random.default_rng(seed)

        def choose(logits: np.ndarray) -> int:
            return int(known[sampling.draw(logits[known], random)])

        end_of_text = self.vocabulary.end_of_text
        if isinstance(prompt, str):
            prompt = [self.vocabulary.start, *self.vocabulary.encode([prompt])[0].tolist()]
        window = Window(self.model, self.context, cached=cached, on_batch=self.on_batch, say=say)
        return Generation(window, prompt, choose, frozenset({end_of_text, *ends}), tokens)

    def text(self, generation: Generation, prompt: str = "") -> Iterator[str]:
        """Yield the prompt and its continuation, in pieces that can be printed as they come.

        Raises:
            PluginCodeError: a plugin's node raised.
        """
        with attribute_errors(self.plugins, "for the next token"):
            yield from pieces(generation, self.vocabulary.stream(), prompt)


@dataclass(frozen=True)
class Sampling:
    """The rule by which an id is drawn.

    Args:
        temperature: logits are divided by it; 0: the likeliest is taken, nothing is drawn.
        top_k: only so many of the likeliest may be drawn; None: all.
        top_p: of those, only the fewest likeliest that have this probability together.

    Raises:
        Refusal: one of them is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        likely = "0 for the likeliest, or more, like 0.8"
        for name, given, allowed, fix in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, likely),
            ("top-k", self.top_k, self.top_k is None or self.top_k >= 1, "1 or more, like 50"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1, like 0.95"),
        ):
            if not allowed:
                raise Refusal(f"{name} cannot be {given}", where=f"--{name}", fix=fix)

    def draw(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """Draw an index of ``logits``.

        Args:
            logits: float (n,), n > 0.
            random: one number is drawn from it, none at temperature 0.

        Raises:
            NonFinite: a logit is not a number.
        """
        if not np.isfinite(logits).all():
            raise NonFinite(
                "the model's logits are not finite, so nothing can be drawn from them",
                fix="train it again, with a lower train.lr",
            )
        if self.temperature == 0:
            return int(np.argmax(logits))
        weights = self.weights(logits)
        (kept,) = np.nonzero(weights)
        edges = np.cumsum(weights[kept])
        return int(kept[np.searchsorted(edges, random.random() * edges[-1], side="right")])

    def weights(self, logits: np.ndarray) -> np.ndarray:
        """Compute weights proportional to the probability of being drawn, float64 (n,); 0: never.

        Args:
            logits: float (n,), finite; the temperature is above 0.
        """
        exact = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # -inf: at this temperature it is never drawn
            weights = np.exp((exact - exact.max()) / self.temperature)
        if self.top_k is None and self.top_p == 1:
            return weights
        order = np.argsort(-exact, kind="stable")[: self.top_k]  # the likeliest first
        if self.top_p < 1:  # at 1 the rounding of sums must not take the least likely away
            before = np.cumsum(weights[order]) - weights[order]
            order = order[before < self.top_p * weights[order].sum()]
        kept = np.zeros_like(weights)
        kept[order] = weights[order]
        return kept


def pieces(ids: Iterable[int], decode: Callable[[int], str], before: str = "") -> Iterator[str]:
    """Yield the text of ids, piece by piece as they come; joined it is ``printable`` of the whole.

    A control sequence that is not over yet is held back, also where it begins in ``before``; half
    a character at the end is left out.

    Args:
        ids: of the text.
        decode: id -> the text that it completes, as ``Tokenizer.stream`` gives it.
        before: the text that they continue: the first piece.
    """
    settled, held = printable_so_far(before)
    if settled:
        yield settled
    for index in ids:
        settled, held = printable_so_far(held + decode(index))
        if settled:
            yield settled
    if rest := printable(held):
        yield rest


TOKENS = 96
"""Of a sample, at most."""

SECONDS = 15.0
"""After which a sample ends where it is: a large model on a slow machine."""

_LOOKED_AT = 64  # documents in which beginnings are looked for
_PARTS = 8  # places in a long document where they are looked for as well
_READ = 64  # tokens that are read of each
_WORDS, _LONGEST = 8, 60  # most words and characters of a prompt


def sample(
    writer: Writer,
    prompt: str | Sequence[int] = "",
    *,
    ends: Iterable[int] = (),
    tokens: int = TOKENS,
    temperature: float = 0.8,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Continue a prompt.

    Args:
        writer: the model and its tokenizer.
        prompt: without lone surrogates; empty: the beginning of a document; or ids.
        ends: further ids that end it.
        tokens: how many at most; the end of the document ends it earlier.
        temperature: lower is safer.
        seed: of the draws, which move no other randomness.
        stopped: polled before every token; the sample ends where it returns true.
        seconds: after which it ends as well.
        clock: seconds that never go back.

    Returns:
        The text after the prompt, without terminal control sequences and without half a character
        at its end.
    """
    ids = iter(writer.go_on(prompt, Sampling(temperature), tokens=tokens, ends=ends, seed=seed))
    until = clock() + seconds

    def in_time() -> Iterator[int]:
        while not stopped() and clock() < until and (one := next(ids, None)) is not None:
            yield one

    return "".join(pieces(in_time(), writer.vocabulary.stream()))


def questions_of(
    asked: Sourcing, tokenizer: Tokenizer | None, specials: Mapping[str, int], say: Say
) -> Any | None:
    """Make what asks questions in the place of prompts, where a plan's source writes them; None: none does.

    It is of an entry point of the group ``minillm.questions``: its class is made of the same, and has
    ``held_out(documents, count)``, ``ids(question)``, up to where the answer begins, and ``ends``.

    Args:
        asked: the plan's, of its source.
        tokenizer: of the run's text; None: it is trained on ids.
        specials: the ids of special tokens, by name.
        say: prints a note where no installed distribution asks questions.
    """
    if asked.prompt is None or tokenizer is None:
        return None
    if (found := offered("minillm.questions", "chats", "ask the questions of chats")) is None:
        say(
            f"note: samples continue texts, and answer no questions: {installing(['minillm-chat'])}"
        )
        return None
    return found.load()(asked, tokenizer, specials)


def prompts(documents: Documents, tokenizer: Tokenizer, count: int) -> list[str]:
    """Take beginnings of documents as prompts: of the first line as many as eight words; fewer where few do."""
    found: list[str] = []
    for text in _texts(documents, tokenizer, count):
        if len(found) == count:
            break
        beginning = _beginning(text)
        if beginning and beginning not in found:
            found.append(beginning)
    return found


def _texts(documents: Documents, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Yield texts to find prompts in: beginnings of documents, then lines within long ones."""
    for index in range(min(len(documents), _LOOKED_AT)):
        yield tokenizer.decode(documents[index][:_READ].tolist())
    for index in range(min(len(documents), count)):
        ids = documents[index]
        for part in range(1, _PARTS):
            inside = ids[len(ids) * part // _PARTS :][:_READ].tolist()
            yield tokenizer.decode(inside).partition("\n")[2]


def _beginning(text: str) -> str | None:
    """Take the first words of a text, where they are worth continuing."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    words = re.findall(r"\S+", line)
    short = " ".join(words[:_WORDS])[:_LONGEST].rstrip("\ufffd ")
    letters = sum(character.isalpha() for character in short)
    return short if letters >= 6 and not short.startswith("#!") else None
