"""The model interface of lm-evaluation-harness for a run.

    loglikelihood           of a continuation after a context, and whether greedy decoding gives it
    loglikelihood_rolling   of a whole text, in windows if it is longer than a row
    generate_until          generated text, up to a stop sequence or a number of tokens

Documents begin with the same token as in training. Input longer than a row of the model is truncated
on the left, as in the harness's own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from minillm_core import Refusal, Run
from minillm_core.commands import plain

__all__ = ["HarnessModel"]

LOGITS = 1 << 28
"""Maximum number of logits in a batch: 1 GiB."""

ANSWER = 256
"""Default maximum tokens of a generated text, where the task sets none."""

_OBEYED = frozenset(["until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"])
"""Generation settings of tasks that have an effect here, by their names in the harness."""

Progress = Callable[[str, int, int, str], None]


class HarnessModel(TemplateLM):
    """A harness model backed by a run, opened or just trained.

    Args:
        run: a run with a tokenizer.
        progress: called with the name of the work, the requests done, their total, and their unit.
        say: prints a line.

    Raises:
        Refusal: the run has no tokenizer.
    """

    def __init__(
        self,
        run: Run,
        progress: Progress = lambda what, done, total, unit: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__()
        if run.tokenizer is None:
            raise Refusal(
                "the run has no tokenizer, and tasks are text: it was trained on ids",
                where=str(run.out or "run"),
                fix="train on text, or with data.tokenizer=tokenizer.json",
            )
        self.run, self.vocabulary = run, run.tokenizer
        self.longest = run.plan.config.train.seq_len
        self._progress, self._say = progress, say
        self._said = set[str]()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.vocabulary.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a document."""
        return self.vocabulary.start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; prepend the token that begins a document unless ``add_special_tokens`` is False."""
        ids = self.vocabulary.encode([string])[0].tolist()
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a pair; a continuation that the tokenizer merges into its context is encoded alone."""
        given, wanted = super()._encode_pair(context, continuation)
        if not wanted:
            spaces = context[len(context.rstrip()) :]  # they belong to the continuation
            wanted = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return given, wanted

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Compute each continuation's log-likelihood in nats, and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Compute each text's log-likelihood in nats, every token predicted once."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.longest,
                context_len=1,
            ):
                windows.append(((None, None), *make_disjoint_window(window)))
                owners.append(owner)
        total = np.zeros(len(requests))
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            total[owner] += nats
        return total.tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate continuations, until a stop sequence, the end of the document or the token limit."""
        texts = []
        for done, request in enumerate(requests):
            self._progress("writing answers", done, len(requests), "answers")
            context, given = request.args
            texts.append(self._continued(context, dict(given), seed=done))
        self._progress("writing answers", len(requests), len(requests), "answers")
        return texts

    def _continued(self, context: str, given: dict[str, Any], *, seed: int) -> str:
        rule, stops = _rule(given)
        tokens = min(rule["max_gen_toks"], max(self.longest // 2, 1))
        if tokens < rule["max_gen_toks"]:
            self._note(
                f"answers have at most {tokens:,} tokens, half a row of the model; the task asks for "
                f"{rule['max_gen_toks']:,}"
            )
        if ignored := sorted(rule.keys() - _OBEYED):
            self._note(
                f"note: {', '.join(ignored)} of a task's generation_kwargs has no effect here"
            )
        prompt = self.tok_encode(context)[-max(self.longest - tokens, 1) :]
        most = 1.0 if rule.get("top_p") is None else rule["top_p"]  # 0: the likeliest token alone
        drawn = self.run.stream(
            prompt,
            max_tokens=tokens,
            temperature=(rule.get("temperature") or 0.0) if most else 0.0,
            top_k=rule.get("top_k") or None,
            top_p=most or 1.0,
            seed=seed,
        )
        text = ""
        for piece in drawn:
            text += piece if text else self._beginning(piece, drawn.generation.ids)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.partition(stop)[0]
        return text

    def _beginning(self, piece: str, ids: Sequence[int]) -> str:
        """Return the first piece of an answer without the space in front that decoding drops (SentencePiece)."""
        dropped = piece.startswith(" ") and not self.vocabulary.decode(ids).startswith(" ")
        return piece[1:] if dropped else piece

    def _note(self, line: str) -> None:
        """Print a line once."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations of token ids, in batches of rows of similar length."""
        rows = [[*context, *wanted][-(self.longest + 1) :] for _, context, wanted in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        done = 0
        for batch in self._batches(rows):
            self._progress("measuring continuations", done, len(rows), "continuations")
            for index, (nats, likeliest) in zip(
                batch, self.run.scores([rows[index] for index in batch]), strict=True
            ):
                count = len(requests[index][2])
                if count > len(nats):
                    raise Refusal(
                        f"a continuation has {count:,} tokens, and a row of the model {len(nats):,}",
                        where="--tasks",
                        fix="another task, or a model with a longer train.seq_len",
                    )
                if count:
                    total = -float(nats[-count:].sum(dtype=np.float64))
                    found[index] = total, bool(likeliest[-count:].all())
            done += len(batch)
        self._progress("measuring continuations", done, len(rows), "continuations")
        return found

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield batches of row indices, the longest rows first."""
        config = self.run.plan.config
        most = min(
            config.train.rows * config.train.seq_len,
            max(LOGITS // config.model.vocab, 1),
        )
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        while order:
            fits = max(most // len(rows[order[0]]), 1)
            batch, order = order[:fits], order[fits:]
            yield batch


def _rule(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a task's generation settings by their names in the harness, and its stop sequences.

    Raises:
        Refusal: a setting has a value that it cannot have.
    """
    try:
        rule: dict[str, Any] = {**normalize_gen_kwargs(given, ANSWER)}
        stops = [one for one in rule["until"] if one]
        if wrong := [one for one in stops if not isinstance(one, str)]:
            raise TypeError(f"until holds {wrong[0]!r}, which is not text")
        if rule["max_gen_toks"] < 1:
            raise ValueError(f"max_gen_toks is {rule['max_gen_toks']}, and 1 is the least")
    except (TypeError, ValueError, OverflowError) as error:  # int() and float() raise them
        raise Refusal(
            f"generation_kwargs of a task cannot be read: {plain(str(error), 200)}",
            where=f"--tasks: generation_kwargs {plain(repr(given), 200)}",
            fix="mend the task's YAML, or name another task",
        ) from error
    return rule, stops
