"""Mix sources in given proportions, or select documents that resemble a target.

The documents of the sources are interleaved so that the proportions hold over any stretch, by the
rule that mixes rows in training (:func:`minillm_core.documents.next_source`). After any number of
documents each source has its share of the text written, to within the longest document. The common
rule of taking the source that lags most does not guarantee that with many sources.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from minillm_core import ConfigError, DataError
from minillm_core.documents import Progress, Tokenizer, grouped, next_source, weighted_path
from minillm_data.files import ANY, Malformed, tell_repeated
from minillm_data.output import Output, check_outside, key_of
from minillm_data.report import page
from minillm_data.rows import Row, Rows, text_of
from minillm_lab.page import section, table

Say = Callable[[str], None]

_TOGETHER = 1 << 20  # bytes of lines measured per call
_PRECISION = 10**9  # denominator of integer shares
_NO_BYTES = (
    "the document holds ids, whose bytes of text are not known",
    "count tokens: --tokenizer tokenizer.json",
)


@dataclass(frozen=True)
class Input:
    """A source of a mixture.

    Attributes:
        path: a file or folder.
        weight: its relative weight in the mixture; None: by size.
    """

    path: str
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(
                f"the weight {self.weight:g} is not above 0",
                where=self.path,
                fix="leave the source out, or give it a weight such as 0.5",
            )

    @classmethod
    def parse(cls, text: str) -> Input:
        """Parse ``PATH`` or ``PATH:WEIGHT``: the text after the last colon is a weight if it is a number.

        A path with such an ending needs an explicit weight: ``a:1:0.5`` is the file ``a:1``.

        Raises:
            ConfigError: the weight is not above 0.
        """
        return cls(*weighted_path(text))


def mix(
    inputs: Sequence[str | Path | Input],
    to: str | Path,
    *,
    temperature: float | None = None,
    like: Sequence[str | Path] = (),
    size: int | None = None,
    repeat: bool = False,
    tokenizer: str | Path | None = None,
    doremi: int | None = None,
    preset: str | None = None,
    seed: int | None = None,
    malformed: Malformed = "strict",
    say: Say = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a mixture of sources; the documents of each keep their order and bytes.

    Shares are of the text's bytes in UTF-8, or of tokens if a tokenizer is given, counting each
    document's end-of-text id. After a kill the same call resumes.

    The mixture ends as soon as the source that is next in turn has no document left, so that the
    shares hold to the end; the report has the used part of the others. With shares by size all
    sources end together.

    Args:
        inputs: sources; as text, ``PATH`` or ``PATH:WEIGHT``; either all or none with a weight.
        to: the folder to write, which must not exist.
        temperature: without weights: shares are proportional to size ** (1 / temperature); 1, the
            default, uses everything, higher values upsample small sources (Devlin et al. 2019, Conneau
            et al. 2020).
        like: a target: instead of mixing, select from all sources documents that resemble it, see
            :mod:`minillm_data.importance`; needs ``size``.
        size: maximum bytes of text, or tokens, of the mixture.
        repeat: restart exhausted sources. Without ``size``, the mixture ends when every source
            has been read once.
        tokenizer: a tokenizer.json that counts tokens.
        doremi: without weights: learn them in two small runs of this many steps, see
            :mod:`minillm_data.doremi`.
        preset: shape and training of these runs; default: ``tiny``.
        seed: seed of the sampling of ``like``; default: 0.
        malformed: handling of documents that cannot be read.
        say: prints a line.
        progress: called with the bytes read, or written.

    Returns:
        The report, as in report.json.

    Raises:
        ConfigError: an option is invalid, or has no effect.
        DataError: a document cannot be read or measured, the first one exceeds the size, or the folder
            cannot be written.
    """
    found = [one if isinstance(one, Input) else Input.parse(str(one)) for one in inputs]
    _check(found, temperature, like, size, repeat, seed, doremi, preset)
    check_outside(Path(to), [one.path for one in found])
    measure = Measure(None if tokenizer is None else Path(tokenizer))
    sources = [Rows([one.path], malformed, say) for one in found]
    if len(found) > 1:
        tell_repeated([source for rows in sources for source in rows.sources], say)
    if like:
        from minillm_data.importance import pick

        assert size is not None
        target = Rows([str(path) for path in like], malformed, say)
        drawn = 0 if seed is None else seed
        return pick(
            found, sources, target, Path(to), size, measure, drawn, malformed, say, progress
        )
    learnt = None if doremi is None else {"steps": doremi, "preset": preset or "tiny"}
    mixing = Mixing(found, sources, measure, 1.0 if temperature is None else temperature, learnt)
    return mixing.write(Path(to), size, repeat, malformed, say, progress)


@dataclass
class Measure:
    """The size of documents: bytes of text in UTF-8, or tokens.

    Args:
        tokenizer: a tokenizer.json; None: bytes.

    Raises:
        DataError: the tokenizer cannot be read.
    """

    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        self._native = Tokenizer.load(self.tokenizer, ANY) if self.tokenizer else None

    @property
    def digest(self) -> str:
        """A digest of the inputs that determine sizes."""
        return self.unit if self._native is None else self._native.digest

    @property
    def unit(self) -> str:
        """The unit of sizes."""
        return "bytes" if self._native is None else "tokens"

    def sized(self, rows: Iterable[Row]) -> Iterator[tuple[Row, int]]:
        """Yield rows with their sizes.

        Raises:
            DataError: a row holds ids while the unit is bytes.
        """
        for group in grouped(rows, lambda row: len(row.line), _TOGETHER if self._native else 1):
            yield from zip(group, self._sizes(group), strict=True)

    def _sizes(self, rows: Sequence[Row]) -> list[int]:
        if self._native is None:
            return [len(text_of(row, *_NO_BYTES).encode("utf-8")) for row in rows]
        texts = [row.text for row in rows if row.text is not None]
        counts = iter([len(ids) for ids in self._native.encode(texts)])
        own = self._native.end_of_text  # ids may begin with it

        def size(row: Row) -> int:
            if row.text is not None:
                return 1 + next(counts)
            ids = row.record["ids"]
            return len(ids) + (ids[0] != own)

        return [*map(size, rows)]


@dataclass
class Stream:
    """A resumable stream of a source's documents.

    Attributes:
        rows: the source.
        measure: measures its documents.
        state: the saved state: ``used`` (bytes or tokens written), ``documents`` written, ``taken``
            (rows of this pass), ``epochs`` (whole passes), ``whole`` (size of a pass; 0: unknown) and,
            after a pass, ``left_out``, its notes.
        repeat: restart at the end.
        tell: called as bytes are read.
        done: bytes read of the source's files in this pass.
        next: the next document and its size; None: exhausted.
    """

    rows: Rows
    measure: Measure
    state: dict[str, Any]
    repeat: bool
    tell: Callable[[], None]
    done: int = 0
    next: tuple[Row, int] | None = None
    _reading: Iterator[tuple[Row, int]] = field(default_factory=lambda: iter(()))

    def begin(self) -> None:
        """Resume reading after the rows already taken.

        Raises:
            DataError: the source has no document.
        """
        rows = islice(self.rows.read("mixing", self._progress), self.state["taken"], None)
        self._reading = self.measure.sized(rows)
        self.next = next(self._reading, None)
        if self.next is None and not self.state["taken"]:
            raise DataError(
                "the source has no document",
                where=", ".join(map(str, self.rows.paths)),
                fix="leave it out",
            )
        if self.next is None:
            self._turn()

    def advance(self) -> None:
        """Count the next document as written, and read the one after it."""
        assert self.next is not None
        self.state["used"] += self.next[1]
        self.state["documents"] += 1
        self.state["taken"] += 1
        self.next = next(self._reading, None)
        if self.next is None:
            self._turn()

    def _turn(self) -> None:
        """Record the size and the notes of a pass at its end; begin another one where sources repeat."""
        self.state["whole"] = self.state["whole"] or self.state["used"]
        self.state.setdefault("left_out", dict(self.rows.notes))
        if self.repeat:
            self.state["epochs"] += 1
            self.state["taken"] = 0
            self.begin()

    @property
    def left_out(self) -> Counter[str]:
        """The notes of a whole pass, or else of the part that was read."""
        return Counter(self.state.get("left_out", self.rows.notes))

    def close(self) -> None:
        """Close the source's file, which is open if the mixture ended within it."""
        self._reading = iter(())  # the iterator of the file refers to this object: a cycle

    def count_rest(self) -> None:
        """Read to the end, to measure the size of a pass."""
        if not self.state["whole"] and self.next is not None:
            rest = sum(size for _, size in self._reading)
            self.state["whole"] = self.state["used"] + self.next[1] + rest

    def _progress(self, what: str, done: int, total: int) -> None:
        self.done = done
        self.tell()


@dataclass
class Mixing:
    """A mixture by shares.

    Attributes:
        inputs: paths and weights.
        sources: the inputs' rows.
        measure: measures documents.
        temperature: temperature of shares by size, without weights.
        learnt: steps and preset of the runs that learn the weights; None: not learnt.
    """

    inputs: Sequence[Input]
    sources: Sequence[Rows]
    measure: Measure
    temperature: float
    learnt: dict[str, Any] | None = None

    def write(
        self,
        to: Path,
        size: int | None,
        repeat: bool,
        malformed: Malformed,
        say: Say,
        progress: Progress | None,
    ) -> dict[str, Any]:
        """Write the mixture into a folder; see :func:`mix`."""
        weights = [one.weight for one in self.inputs]
        asked = {
            "weights": None if None in weights else weights,
            "temperature": self.temperature if None in weights and not self.learnt else None,
            "doremi": self.learnt,
            "size": size,
            "repeat": repeat,
            "unit": self.measure.unit,
        }
        every = [source for rows in self.sources for source in rows.sources]
        groups = [len(rows.sources) for rows in self.sources]
        key = key_of(
            "mix", every, **asked, by=self.measure.digest, groups=groups, malformed=malformed
        )
        with ExitStack() as reading, Output(to, key) as output:
            if output.note:
                say(output.note)
            more, state = output.state.more, output.state
            if "shares" not in more:
                if self.learnt:
                    more["learnt"] = self._learn(say, progress)
                more["shares"], whole = self._shares(more.get("learnt"), progress)
                fresh = {"used": 0, "documents": 0, "taken": 0, "epochs": 0}
                more["streams"] = [{**fresh, "whole": size} for size in whole]
                output.close_part()
            shares: list[int] = more["shares"]
            streams = [
                Stream(rows, self.measure, kept, repeat, lambda: None)
                for rows, kept in zip(self.sources, more["streams"], strict=True)
            ]
            for stream in streams:
                reading.callback(stream.close)
            ended = self._interleave(streams, shares, size, repeat, output, progress)
            if size is None:
                for stream in streams:
                    stream.count_rest()
            report = {
                "command": "mix",
                **asked,
                "tokenizer": None
                if self.measure.tokenizer is None
                else str(self.measure.tokenizer),
                "documents": state.rows,
                "total": sum(stream.state["used"] for stream in streams),
                "ended": ended,
                "sources": self._sources(streams, shares),
                "left_out": dict(sorted(sum((one.left_out for one in streams), Counter()).items())),
                **({"learnt": more["learnt"]} if self.learnt else {}),
            }
            output.finish(report, mixture_page(report))
        return report

    def _learn(self, say: Say, progress: Progress | None) -> dict[str, Any]:
        """Learn the weights of the sources in two small runs."""
        from minillm_data.doremi import learn_weights  # imports the trainer

        assert self.learnt is not None
        paths = [one.path for one in self.inputs]
        return learn_weights(paths, say=say, progress=progress, **self.learnt)

    def _shares(
        self, learnt: Mapping[str, Any] | None, progress: Progress | None
    ) -> tuple[list[int], list[int]]:
        """Return integers proportional to the shares, and the sources' sizes, 0 where unknown."""
        sizes = [0] * len(self.inputs)
        parts = learnt["weights"] if learnt else [one.weight or 0.0 for one in self.inputs]
        if not any(parts):
            sizes = [self._size(rows, progress) for rows in self.sources]
            if self.temperature == 1:
                return sizes, sizes
            parts = [(size / max(sizes)) ** (1 / self.temperature) for size in sizes]
        parts = [part / max(parts) for part in parts]  # whose sum is finite
        return [max(1, round(part / sum(parts) * _PRECISION)) for part in parts], sizes

    def _size(self, rows: Rows, progress: Progress | None) -> int:
        what = f"measuring {rows.paths[0]}"
        size = sum(size for _, size in self.measure.sized(rows.read(what, progress)))
        if not size:
            raise DataError(
                "the source has no document", where=str(rows.paths[0]), fix="leave it out"
            )
        return size

    def _interleave(
        self,
        streams: Sequence[Stream],
        shares: Sequence[int],
        size: int | None,
        repeat: bool,
        output: Output,
        progress: Progress | None,
    ) -> str:
        """Write documents until the mixture ends; return the reason of the end."""
        disk = sum(rows.size for rows in self.sources)

        def tell() -> None:
            if progress is None:
                return
            if size is not None and self.measure.unit == "bytes":
                progress("mixing", sum(stream.state["used"] for stream in streams), size)
            else:
                progress("mixing", min(sum(stream.done for stream in streams), disk), disk)

        for stream in streams:
            stream.tell = tell
            stream.begin()
        used = [stream.state["used"] for stream in streams]
        # An exhausted source counts as having a document of one byte until its turn.
        sizes = [1 if stream.next is None else stream.next[1] for stream in streams]
        while True:
            turn = next_source(shares, used, sizes)
            stream = streams[turn]
            if repeat and size is None and all(one.state["epochs"] for one in streams):
                return "every source was read once"
            if stream.next is None:
                if all(one.next is None for one in streams):
                    return "every source is used up"
                return f"{self.inputs[turn].path} is used up"
            row, length = stream.next
            if size is not None and sum(used) + length > size:
                if not any(used):
                    raise DataError(
                        f"the first document of the mixture has more than {size:,} {self.measure.unit}",
                        where="--size",
                        fix=f"{length} or more",
                    )
                return "the size is reached"
            output.write(row.line)
            stream.advance()
            used[turn] = stream.state["used"]
            sizes[turn] = 1 if stream.next is None else stream.next[1]
            output.dealt_with()

    def _sources(self, streams: Sequence[Stream], shares: Sequence[int]) -> list[dict[str, Any]]:
        total = sum(stream.state["used"] for stream in streams) or 1
        return [
            {
                "path": one.path,
                "weight": one.weight,
                "share": share / sum(shares),
                "share_written": stream.state["used"] / total,
                "written": stream.state["used"],
                "documents": stream.state["documents"],
                "epochs": stream.state["used"] / whole
                if (whole := stream.state["whole"])
                else None,
                "unused": max(0, whole - stream.state["used"]) if whole else None,
            }
            for one, stream, share in zip(self.inputs, streams, shares, strict=True)
        ]


def epochs(one: Mapping[str, Any]) -> str:
    """Format how often a source was read: ``0.53 epochs, 1,234 unused``."""
    if one["epochs"] is None:
        return "a part of one epoch"
    left = f", {one['unused']:,} unused" if one["unused"] else ""
    return f"{one['epochs']:.2f} epochs{left}"


def mixture_page(report: Mapping[str, Any]) -> str:
    """Render the page of a mixture's report."""
    unit = report["unit"]
    rows = (
        (
            one["path"],
            f"{100 * one['share']:.2f} %",
            f"{100 * one['share_written']:.2f} %",
            f"{one['written']:,}",
            f"{one['documents']:,}",
            epochs(one),
        )
        for one in report["sources"]
    )
    head = ["source", ">share asked", ">share written", f">{unit}", ">documents", "how often"]
    about = {
        unit: f"{report['total']:,}",
        "temperature": report["temperature"],
        "most": report["size"],
        "ended because": report["ended"],
        "tokenizer": report["tokenizer"],
    }
    if asked := report["doremi"]:
        about["weights"] = f"DoReMi, two runs of {asked['steps']:,} steps, preset {asked['preset']}"
    counts = {f"from {one['path']}": one["documents"] for one in report["sources"]}
    return page("A mixture", about, counts, {}, section("Sources", table(head, rows)))


def _check(
    inputs: Sequence[Input],
    temperature: float | None,
    like: Sequence[str | Path],
    size: int | None,
    repeat: bool,
    seed: int | None,
    doremi: int | None,
    preset: str | None,
) -> None:
    weighted = [one for one in inputs if one.weight is not None]
    if not inputs:
        raise ConfigError("nothing to mix", where="PATH", fix="name a source")
    paths = Counter(str(Path(one.path).resolve()) for one in inputs)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise ConfigError("a source is named twice", where=twice[0], fix="name it once")
    if weighted and len(weighted) < len(inputs):
        bare = next(one for one in inputs if one.weight is None)
        raise ConfigError(
            "some sources have a weight, and others have none",
            where=bare.path,
            fix=f"give it one too, {bare.path}:0.5, or remove the weights of the others",
        )
    if temperature is not None and not 0 < temperature < math.inf:
        raise ConfigError(
            f"the temperature {temperature:g} is not above 0",
            where="--temperature",
            fix="1 or more",
        )
    if size is not None and size < 1:
        raise ConfigError(f"a mixture of size {size}", where="--size", fix="1 or more")
    if doremi is not None and doremi < 1:
        raise ConfigError(f"runs of {doremi} steps", where="--doremi", fix="such as --doremi 500")
    useless = {
        "--doremi with weights": doremi is not None and bool(weighted),
        "--doremi with --temperature": doremi is not None and temperature is not None,
        "--doremi with --like": doremi is not None and bool(like),
        "--doremi with one source": doremi is not None and len(inputs) == 1,
        "--preset without --doremi": preset is not None and doremi is None,
        "--temperature with weights": temperature is not None and bool(weighted),
        "--temperature with one source": temperature is not None and len(inputs) == 1,
        "weights with --like": bool(weighted and like),
        "--temperature with --like": temperature is not None and bool(like),
        "--repeat with --like": repeat and bool(like),
        "--seed without --like": seed is not None and not like,
        "--repeat without --size, with shares by size": (
            repeat
            and size is None
            and not (weighted or like or doremi)
            and temperature in (None, 1)
        ),
    }
    if found := [name for name, here in useless.items() if here]:
        raise ConfigError(f"{found[0]} has no effect", where=found[0], fix="leave one of them out")
    if like and size is None:
        raise ConfigError(
            "picking what resembles a target needs a size",
            where="--like",
            fix="add --size BYTES: how much to pick",
        )
