"""Generation: continue a text token by token, and write the samples of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from minillm_core.backends.base import Decoding, Model, lone_row
from minillm_core.data import Documents, OnBatch, Tokenizer
from minillm_core.errors import NonFinite, Refusal
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.text import printable, printable_so_far
from minillm_core.train.predict import require, require_counts, row_of_ids

Say = Callable[[str], None]


@dataclass(eq=False)
class Window:
    """The context window of a growing sequence: its newest ids, ``context`` at most.

    When there are more, the oldest are dropped so that context // 2 remain, which start again from
    position 0; a KV cache is filled again. So the model sees the same ids with and without a KV cache.
    """

    model: Model
    context: int  # most columns of a pass
    _: KW_ONLY
    cached: bool = True  # use a KV cache: feed only the new ids
    on_batch: OnBatch | None = None  # the plugins'; takes all ids in the window
    say: Say = lambda line: None  # prints a line, once, when ids are dropped
    _ids: list[int] = field(default_factory=list)
    _decoding: Decoding | None = None
    _past: int = 0  # columns in the KV cache

    def next_logits(self, new: Sequence[int]) -> np.ndarray:
        """Feed further ids; return the logits after them, float32 (V,)."""
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
            f"\nthe model sees {self.context:,} tokens at most: it continues from the last {stay:,}"
        )
        self.say = lambda line: None


@dataclass
class Generation:
    """A continuation: iterate over it once to draw its ids."""

    window: Window
    new: Sequence[int]  # ids to feed first
    choose: Callable[[np.ndarray], int]  # float32 (V,) -> id
    ends: frozenset[int]  # ids that end the text
    tokens: int
    ids: list[int] = field(default_factory=list)  # drawn so far
    ended: bool = False  # an id that ends the text was drawn

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
    """A text that is being generated: iterate over it once for its pieces.

    Attributes:
        generation: its ``ids`` so far, and whether it ``ended``.
        pieces: printable pieces of the text.
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
class TextGenerator:
    """A model with its tokenizer, ready to continue texts."""

    model: Model
    vocabulary: Tokenizer
    context: int  # most columns that the model sees
    on_batch: OnBatch | None = None
    plugins: tuple[LoadedPlugin, ...] = ()  # errors of their nodes are raised under their names

    def generate(
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

        Ids outside the tokenizer's vocabulary (padding rows of the embedding) are never drawn.

        Args:
            prompt: text; or ids, which begin as documents do.
            sampling: how ids are drawn.
            tokens: most ids to draw; the end of the text ends it earlier.
            ends: further ids that end it.
            seed: of the draws, which use no other random state.
            cached: use a KV cache.
            say: prints a line when the beginning of the text is dropped.

        Raises:
            Refusal: an argument cannot be used.
        """
        require_counts(max_tokens=tokens)
        require_counts(0, seed=seed)
        require(cached in (True, False), "cached", cached, "True or False")
        if isinstance(prompt, str) and (lone := re.search("[\ud800-\udfff]", prompt)):
            what, fix = "the prompt holds a lone surrogate", "write the character whole, or drop it"
            raise Refusal(what, where=f"its character {lone.start()}", fix=fix)
        known, random = self.vocabulary.used_ids(), np.random.default_rng(seed)

        def choose(logits: np.ndarray) -> int:
            return int(known[sampling.draw(logits[known], random)])

        last = [self.vocabulary.end_of_text, *ends] if isinstance(ends, Iterable) else ends
        ending = frozenset(row_of_ids(last, "ends").tolist())
        if isinstance(prompt, str):
            ids = [self.vocabulary.start, *self.vocabulary.encode([prompt])[0].tolist()]
        else:
            ids = row_of_ids(prompt, "prompt").tolist()
        window = Window(self.model, self.context, cached=cached, on_batch=self.on_batch, say=say)
        return Generation(window, ids, choose, ending, tokens)

    def text(self, generation: Generation, prompt: str = "") -> Iterator[str]:
        """Yield the prompt and its continuation, in printable pieces, as they are drawn.

        Raises:
            PluginCodeError: a plugin's node raised.
        """
        with attribute_errors(self.plugins, "for the next token"):
            yield from pieces(generation, self.vocabulary.stream(), prompt)


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of generation.

    Args:
        temperature: logits are divided by it; 0: greedy decoding, nothing is drawn.
        top_k: draw from the k likeliest ids; None: all.
        top_p: of those, draw from the fewest likeliest whose probabilities sum to top_p.

    Raises:
        Refusal: one of them is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        heat, most, number = self.temperature, self.top_p, int | float | np.number
        allowed = isinstance(heat, number) and 0 <= heat < np.inf
        require(allowed, "temperature", heat, "0 for the likeliest, or more, like 0.8")
        require_counts(top_k=self.top_k)
        allowed = isinstance(most, number) and 0 < most <= 1
        require(allowed, "top_p", most, "more than 0 and at most 1, like 0.95")

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
        """Compute weights proportional to the sampling probabilities, float64 (n,); 0: never drawn.

        Args:
            logits: float (n,), finite; the temperature is above 0.
        """
        exact = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # -inf: never drawn at this temperature
            weights = np.exp((exact - exact.max()) / self.temperature)
        if self.top_k is None and self.top_p == 1:
            return weights
        order = np.argsort(-exact, kind="stable")[: self.top_k]  # the likeliest first
        if self.top_p < 1:  # at 1 the rounding of sums must not drop the least likely id
            before = np.cumsum(weights[order]) - weights[order]
            order = order[before < self.top_p * weights[order].sum()]
        kept = np.zeros_like(weights)
        kept[order] = weights[order]
        return kept


def pieces(ids: Iterable[int], decode: Callable[[int], str], before: str = "") -> Iterator[str]:
    """Yield the text of ids in pieces, as they are drawn; joined they are ``printable`` of the whole.

    An unfinished control sequence is held back, also where it begins in ``before``; half a character
    at the end is left out.

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
"""Most tokens of a sample."""

SECONDS = 15.0
"""Seconds after which a sample ends: a large model on a slow machine."""

_LOOKED_AT = 64  # documents that are searched for prompts
_PARTS = 8  # places in a long document that are searched as well
_READ = 64  # tokens that are read at each place
_WORDS, _LONGEST = 8, 60  # most words and characters of a prompt


def sample(
    writer: TextGenerator,
    prompt: str | Sequence[int] = "",
    *,
    ends: Iterable[int] = (),
    tokens: int = TOKENS,
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
        tokens: most tokens to draw; the end of the document ends it earlier.
        seed: of the draws, which use no other random state.
        stopped: polled before every token; the sample ends where it returns true.
        seconds: time limit of the sample.
        clock: a monotonic clock, in seconds.

    Returns:
        The text after the prompt, without terminal control sequences and without half a character
        at its end.
    """
    ids = iter(writer.generate(prompt, Sampling(), tokens=tokens, ends=ends, seed=seed))
    until = clock() + seconds

    def in_time() -> Iterator[int]:
        while not stopped() and clock() < until and (one := next(ids, None)) is not None:
            yield one

    return "".join(pieces(in_time(), writer.vocabulary.stream()))


def prompts(documents: Documents, tokenizer: Tokenizer, count: int) -> list[str]:
    """Return at most ``count`` prompts: up to eight words of the first line of documents, or half of a short one."""
    found: list[str] = []
    for text in _texts(documents, tokenizer, count):
        if len(found) == count:
            break
        beginning = _beginning(text)
        if beginning and beginning not in found:
            found.append(beginning)
    return found


def _texts(documents: Documents, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Yield texts to find prompts in: beginnings of documents, then lines inside long ones."""
    for index in range(min(len(documents), _LOOKED_AT)):
        yield tokenizer.decode(documents[index][:_READ].tolist())
    for index in range(min(len(documents), count)):
        ids = documents[index]
        for part in range(1, _PARTS):
            inside = ids[len(ids) * part // _PARTS :][:_READ].tolist()
            yield tokenizer.decode(inside).partition("\n")[2]


def _beginning(text: str) -> str | None:
    """Return the first words of a text, or the first half of a short one, if long enough to continue."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    words = line.split()
    short = " ".join(words[:_WORDS])[:_LONGEST].rstrip("\ufffd ")
    if short == " ".join(text.split()):  # nothing is left to continue
        short = " ".join(words[: len(words) // 2]) or short[: len(short) // 2]
    letters = sum(character.isalpha() for character in short)
    return short if letters >= 6 and not short.startswith("#!") else None
