"""A run, for Python and the commands: train, evaluate, generate, save, export, resume."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.backends import detect
from minillm_core.backends.base import Binding, Model, Trainer
from minillm_core.checkpoint import directories, layout
from minillm_core.checkpoint.directories import ModelDirectory, TrainedModel
from minillm_core.config.folders import cache_folder
from minillm_core.config.load import Loaded
from minillm_core.config.selection import select
from minillm_core.data import OnBatch, Tokenizer, ValidationBatches, bytes_per_token, open_documents
from minillm_core.data.corpus import reserved
from minillm_core.errors import DataError, Refusal
from minillm_core.optim.views import with_views
from minillm_core.plan import Plan
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.train.events import Evaluated, Event
from minillm_core.train.feed import Feed
from minillm_core.train.generate import Sampling, Say, Stream, TextGenerator
from minillm_core.train.hooks import plan_hook
from minillm_core.train.initial import open_directory
from minillm_core.train.job import Job, with_settings
from minillm_core.train.predict import Predictor, require, require_counts
from minillm_core.train.progress import Display, LineDisplay
from minillm_core.train.record import RUN, read_record
from minillm_core.train.request import Prepared, RunRequest, load_settings, prepare
from minillm_core.train.restore import Create, SavedModel, open_run
from minillm_core.train.session import Session, Shared
from minillm_core.train.signals import StopRequest, stop_on_signals
from minillm_core.train.validation import Validation, validation

Paths = str | Path | Sequence[str | Path]


def load(
    preset: str | None = None,
    *,
    plugins: str | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    data: Paths | None = None,
    file: str | Path | None = None,
) -> Loaded:
    """Load the settings of a run: preset < file < ``settings``, each value with its origin.

    ::

        config = minillm.load(preset="tiny", plugins="muon,paired_heads", settings={"train.steps": 200})
        config.train.lr, config.origins["train.lr"]

    Args:
        preset: a recipe by name (``tiny``, ``small``, ...); default: the one for this machine.
        plugins: names, or single files (``./my_trick.py:MyTrick``), separated by commas or as a
            list; ``-name`` removes one that the preset names. Nothing is imported yet.
        settings: key -> value: ``{"train.steps": 200, "muon.momentum": 0.9}``, or a whole table:
            ``{"train": {"steps": 200}}``.
        data: files or folders of text or ids; default: the standard library's sources.
        file: a TOML file of settings, such as a run's run.toml.

    Raises:
        ConfigError: a setting is unknown or out of range, with where it was set and a fix.
        DataError: a path of the data does not exist or holds no data.
    """
    request = RunRequest(
        plugins=_joined(plugins),
        preset=None if preset is None else str(preset),
        file=None if file is None else Path(file),
        flags={"--data": None if data is None else _listed(data)},
        settings=settings,
    )
    return load_settings(request, to_run=True).loaded


def _joined(plugins: str | Sequence[str] | None) -> str | None:
    if plugins is None or isinstance(plugins, str):
        return plugins
    if not isinstance(plugins, Iterable) or not all(isinstance(one, str) for one in plugins):
        raise Refusal(
            "plugins are given by name",
            where=f"plugins={plugins!r}",
            fix='"muon,normuon"; a class of your own by its file: "./trick.py:Trick"',
        )
    return ",".join(plugins)


def _listed(paths: Paths) -> list[str]:
    given = [paths] if isinstance(paths, str | Path) else paths
    listed = [str(path) for path in given] if isinstance(given, Iterable) else []
    if not listed:  # a pattern that matched nothing: not the default text
        raise DataError("no file is named", where=f"data={paths!r}", fix="a path, or several")
    return listed


def _folder(path: str | Path) -> Path:
    named = isinstance(path, str | Path) and str(path).strip()
    require(named, "the path of a folder", path, 'like "runs/a"; the current folder is "."')
    return Path(path).expanduser()


class Run:
    """A plan bound to this machine; or, from :meth:`open`, an existing run.

    ::

        run = minillm.Run(minillm.build_plan(config), out="runs/a")
        for event in run.steps():  # or run.train()
            if isinstance(event, minillm.Stepped):
                print(event.step, event.loss)
        print(run.generate("def main"))

    Args:
        plan: from :func:`minillm_core.build_plan` with loaded settings.
        out: the run's folder, without a run in it; None: nothing is written anywhere.
        say: prints notes and progress, line by line; None: silence.
        cache: the folder of tokens and tokenizers; default: minillm's own.
        create: builds the backend; default: the one that the settings choose for this machine.
        shared: text and machine shared by several runs (``minillm_core.studies``).

    Attributes:
        plan: the plan.
        out: the run's folder.

    Raises:
        Refusal: the folder, the data, the device or a plugin cannot be used; nothing was written.
        PluginCodeError: a plugin's own code raised.
        OutOfMemory: the model alone does not fit.
    """

    def __init__(
        self,
        plan: Plan,
        out: str | Path | None = None,
        *,
        say: Say | None = None,
        cache: str | Path | None = None,
        create: Create | None = None,
        shared: Shared | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            fix = "Run(build_plan(load(...)), out=...); Run.open(out) opens a run's folder"
            raise Refusal("Run needs a plan", where=f"Run({type(plan).__name__})", fix=fix)
        plan = with_settings(plan)
        assert plan.settings is not None
        self._set_up(out, say, cache, create)
        if shared is not None:
            self._session.shared, self._session.stop = shared, shared.stop
            detected = shared.detected
        else:
            detected = detect.choose(detect.probe(), plan.config.backend, plan.config.device)
        prepared = Prepared(plan.settings, None, plan.active, detected)
        self._session.bind(prepared, plan)

    @classmethod
    def open(
        cls,
        out: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        plugins: str | Sequence[str] | None = None,
        step: int | None = None,
        best: bool = False,
        backend: str = "auto",
        device: str = "auto",
        say: Say | None = None,
        cache: str | Path | None = None,
        shown: Display | None = None,
        create: Create | None = None,
    ) -> Run:
        """Open a run's folder, to evaluate, generate, export, or resume it with :meth:`train`.

        Model directories of other programs open too, to evaluate, generate and export.

        Args:
            out: the folder.
            settings: for resuming: ``{"train.steps": 400}`` extends the run.
            plugins: plugins that must be named again: single files, and all of a folder that another
                account owns.
            step: the checkpoint to read; default: the newest that verifies.
            best: read the checkpoint with the lowest held-out loss.
            backend: for reading the model; it may differ from the run's.
            device: as for the backend.
            say: prints notes and progress; None: silence.
            cache: the folder of tokens; default: minillm's own.
            shown: shows notes and progress, instead of ``say``.
            create: builds the backend; default: the one that the machine offers.

        Raises:
            Refusal: the folder holds no run and is not a model directory.
            ConfigError: a setting is unknown or out of range.
            PluginError: it is a model directory that no installed distribution reads.
        """
        run = cls.__new__(cls)
        run._set_up(_folder(out), say, cache, create, shown)
        assert run.out is not None
        if not os.path.lexists(run.out / RUN):
            run._directory = directories.read_directory(run.out)
            unread = (run.out / "config.json").is_file() and not directories.offers()
            if run._directory is None and unread:
                raise directories.absent(f"{out} looks like a model directory and cannot be read")
        if run._directory is None:
            read_record(run.out)  # raises for a folder without a run
        elif step is not None or best:
            raise Refusal(
                "a model directory has no checkpoints to choose from",
                where=f"{out}, {'best' if best else f'step {step}'}",
                fix="leave step and best out",
            )
        run._read, run._where = {"step": step, "best": best}, {"backend": backend, "device": device}
        flags = {
            f"--{key}": None if value == "auto" else value for key, value in run._where.items()
        }
        named = _joined(plugins)
        resume = run.out if run._directory is None else None
        run._request = RunRequest(named, flags=flags, settings=settings, resume=resume)
        if settings:  # an unknown one is refused now, even if the run is only read
            load_settings(run._request, to_run=False)
        return run

    def _set_up(
        self,
        out: str | Path | None,
        say: Say | None,
        cache: str | Path | None,
        create: Create | None,
        shown: Display | None = None,
    ) -> None:
        self.out = None if out is None else _folder(out)
        self._session = Session(  # not bound in an opened run that is not resumed
            self.out,
            cache=cache_folder() if cache is None else Path(cache),
            shown=shown or LineDisplay(say or (lambda line: None)),
            stop=StopRequest(patient=False),
            create=create,
        )
        self._models: dict[tuple[str, int], Model] = {}
        self._request = RunRequest()  # to resume an opened run; below: which state to read
        self._read: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._directory: ModelDirectory | None = None  # set if it was opened instead of a run

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._job.plan if self._job else self._saved.plan

    @property
    def step(self) -> int:
        """Optimizer steps that the model has taken."""
        return self._session.step if self._job else self._saved.step

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint that is read, or of the newest one; None: there is none."""
        if self._job is None:
            return self._saved.path
        kept = layout.folders(self.out) if self.out is not None else []
        return kept[0][1] if kept else None

    @property
    def binding(self) -> Binding:
        """The backend, device, dtype and kernels that the model runs with here."""
        return self._reader().binding

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's text; None: it is trained on ids."""
        return self._job.corpus.tokenizer if self._job else self._saved.tokenizer

    @property
    def model(self) -> Any:
        """The ``torch.nn.Module`` or ``mlx.nn.Module`` itself, with its current weights.

        With an ``optimizer.view``, after an evaluation and until the next step, it has the evaluated weights
        instead of the trained ones.
        """
        return self._reader().model

    @property
    def trainer(self) -> Trainer:
        """The model with its optimizer and compiled step, which takes the batches of :meth:`batches`.

        Raises:
            Refusal: the run was opened, and is not resumed.
        """
        return self._bound("trainer").trainer

    def batches(self, step: int = 0) -> Feed:
        """Open the dataloader of training: an iterator of one ``StepBatch`` a step, and a context manager.

        The batches begin at the start of the text, and are made for the steps that follow ``step``.

        Raises:
            Refusal: the run was opened, and is not resumed.
        """
        return Feed(self._bound("batches"), None, step=step)

    def _bound(self, where: str) -> Job:
        if self._job is None:
            fix = "Run(plan), or train the opened run first"
            raise Refusal("an opened run reads its model alone", where=where, fix=fix)
        return self._job

    def steps(self) -> Iterator[Event]:
        """Train; yields typed events (Started, Stepped, Evaluated, Sampled, Saved, ...) live.

        Leaving the loop early pauses the run: evaluate, generate and save it, and call this again to
        continue. An opened run resumes from its newest valid checkpoint.

        Raises:
            Refusal: nothing was started.
            NonFinite: too many steps were not finite.
            OutOfMemory: with settings for the same tokens per step.
            PluginCodeError: a plugin's own code raised.
        """
        if (session := self._trained()) is not None:
            yield from session.steps()

    def train(self) -> Run:
        """Train to the end. Ctrl-C ends training after the step, with a checkpoint if the run has a folder.

        Raises:
            Stopped: a signal ended training after a checkpoint.
            Interrupted: a signal ended training, and nothing was saved.
        """
        with stop_on_signals(request=self._session.stop):
            if (session := self._trained()) is not None:
                session.run()
        return self

    def close(self) -> None:
        """Stop training and release the folder; its checkpoints can be resumed."""
        self._session.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _trained(self) -> Session | None:
        """Return the session that trains; an opened run is planned again. None: it is finished."""
        if self._directory is not None:
            raise Refusal(
                "a model directory is not a run, so it cannot be resumed",
                where=str(self.out),
                fix='start a run from it: settings={"init": ...}, or minillm train --init DIR',
            )
        if self._job is None:
            self._session.resume = True
            if not self._session.bind(prepare(self._request, to_run=True)):
                return None
        return self._session

    @property
    def _job(self) -> Job | None:
        """The run, bound to this machine; None: an opened run that is not resumed."""
        return self._session.job

    def save(self) -> Path:
        """Write a checkpoint of the current model, unless this step has one.

        Returns:
            The checkpoint's folder.

        Raises:
            Refusal: the run has no folder, keeps no checkpoints, or has made no step.
            MinillmError: the checkpoint could not be written.
        """
        if self.out is None:
            raise Refusal("the run is in memory alone", where="save", fix="Run(plan, out=FOLDER)")
        if self._job is not None and self._job.config.checkpoint.every == 0:
            raise Refusal("the run keeps no checkpoints", where="checkpoint.every=0")
        self._session.save()
        if (kept := self.checkpoint) is None:
            raise Refusal("there is no step to save yet", where="save", fix="train first")
        return kept

    def validate(self, tokens: int | None = None) -> Evaluated:
        """Compute the loss on the run's held-out text, as training does at its end.

        Args:
            tokens: predictions; default: ``eval.tokens``.

        Raises:
            Refusal: the run was opened, and is not resumed.
            DataError: there is nothing to predict.
        """
        job = self._bound("validate")
        require_counts(tokens=tokens)
        measure = validation(job, tokens or job.config.eval.tokens, cancelled=lambda: False)
        found = measure(self.step)
        assert found is not None  # never cancelled
        return found

    def evaluate(
        self, data: Paths, *, seq_len: int | None = None, max_tokens: int | None = None
    ) -> Evaluated:
        """Compute the loss on text, in file order, in windows that do not overlap.

        Args:
            data: files or folders of text or ids.
            seq_len: tokens in a window; default: the run's.
            max_tokens: predictions to stop after; default: all.

        Returns:
            ``val_loss`` (nats per token), ``bits_per_byte`` (None without a tokenizer), ``tokens``
            (predictions made) and ``step``.

        Raises:
            Refusal: there is nothing to predict, or the text cannot be read.
        """
        require_counts(seq_len=seq_len, max_tokens=max_tokens)
        config, paths, shown = self.plan.config, _listed(data), self._session.shown
        longest, vocab = config.train.seq_len, config.model.vocab
        if self._job is not None and seq_len is not None and seq_len > longest:
            raise Refusal(
                f"the model that is trained takes rows of {longest} tokens",
                where=f"seq_len={seq_len}",
                fix="save the run, and evaluate Run.open(out)",
            )
        tokenizer, seen, text = self.tokenizer, Counter[str](), ", ".join(paths)
        when = "while documents are read"
        with shown.phase("reading the data"), attribute_errors(self.plan.active, when):
            documents = open_documents(
                paths,
                tokenizer=tokenizer,
                vocab=vocab,
                cache=self._session.cache,
                say=shown.say,
                progress=shown.progress,
                asked=self.plan.sourcing,
            )
        rows, seq_len = config.train.rows, seq_len or longest
        read = min(documents.tokens, max_tokens or documents.tokens)
        needed = -(-read // longest) * longest  # a multiple, as plugins may require
        if seq_len > needed:
            shown.say(f"note: all {read:,} tokens to read fit into one window of {seq_len:,}")
            rows, seq_len = 1, needed
        batches = ValidationBatches(
            documents,
            rows=rows,
            seq_len=seq_len,
            tokens=max_tokens,
            seed=None,
            on_batch=plan_hook(self.plan, seen=seen, specials=self.specials),
        )
        if not len(batches):
            raise Refusal("there is nothing to predict", where=text, fix="give more text")
        evaluation = Validation(
            self._reader(positions=seq_len),
            {"": batches},
            bytes_per_token(tokenizer, vocab) if tokenizer else None,
            text=text,
            seen=seen,
            progress=lambda done: shown.evaluating(done, batches.predictions),
        )
        found = evaluation(self.step)
        assert found is not None  # never cancelled
        return found

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        cached: bool = True,
    ) -> str:
        """Continue a prompt.

        Args:
            prompt: the text to continue; empty: a new document begins.
            max_tokens: most new tokens; the end of the document ends the text earlier.
            temperature: divisor of the logits; 0: greedy decoding.
            top_k: sample from the k likeliest tokens; None: from all.
            top_p: sample from the fewest likeliest tokens whose probabilities sum to top_p.
            seed: of the draws.
            cached: use a KV cache; False: compute each token from the whole text, slowly.

        Returns:
            The prompt and its continuation, as ``minillm generate`` prints them.

        Raises:
            Refusal: the run has no tokenizer, or an argument is out of range.
        """
        if not isinstance(prompt, str):
            fix = "a text; stream(ids) continues ids"
            raise Refusal("a prompt is a text", where=f"generate({prompt!r})"[:160], fix=fix)
        writer, sampling = self.writer(), Sampling(temperature, top_k, top_p)
        drawn = writer.generate(
            prompt,
            sampling,
            tokens=max_tokens,
            seed=seed,
            cached=cached,
            say=self._session.shown.say,
        )
        return "".join(writer.text(drawn, prompt))

    def stream(
        self,
        prompt: str | Sequence[int] = "",
        *,
        ends: Sequence[int] = (),
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Stream:
        """Continue a prompt; return the text after it as a stream of pieces.

        ::

            for piece in run.stream("Once upon a time"):
                print(piece, end="", flush=True)

        Args:
            prompt: text, as for :meth:`generate`; or ids, the first of which begins a document.
            ends: ids that end the text, beside the end of the document.
            max_tokens: as for :meth:`generate`, like the rest.
            temperature: as there.
            top_k: as there.
            top_p: as there.
            seed: as there.

        Raises:
            Refusal: the run has no tokenizer, or an argument is out of range.
        """
        writer, sampling = self.writer(), Sampling(temperature, top_k, top_p)
        say = self._session.shown.say
        drawn = writer.generate(prompt, sampling, tokens=max_tokens, ends=ends, seed=seed, say=say)
        return Stream(drawn, writer.text(drawn))

    def writer(self) -> TextGenerator:
        """Return the writer that continues texts token by token.

        An opened run is read in float32: bfloat16 rounds the logits of one new column differently from
        those of a whole row, and the KV cache would change the text.

        Raises:
            Refusal: the run has no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise Refusal(
                "the run has no tokenizer, so it cannot continue a text: it was trained on ids",
                where=str(self.out or "data"),
                fix="train on text, or with data.tokenizer=tokenizer.json",
            )
        plan, model, hook = self.plan, self._reader(exact=True), self._inference_hook()
        return TextGenerator(model, tokenizer, plan.config.train.seq_len, hook, plan.active)

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Compute the logits of the next token after each prefix.

        Args:
            ids: int (T,), the tokens of one row, 1 <= T <= train.seq_len; a document begins with
                the tokenizer's ``end_of_text``.

        Returns:
            float32 (T, V).

        Raises:
            DataError: an id is outside the vocabulary, or the row is longer than the model's.
        """
        return self._predictor(exact=True).logits(ids)

    def losses(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
        """Compute the loss of each token of some rows, as one batch.

        Shorter rows are padded to the longest: pass rows of similar length together. Cut a document
        longer than a row into rows that overlap by one token, as :meth:`evaluate` does.

        ::

            ids = [run.tokenizer.end_of_text, *run.tokenizer.encode([text])[0]]
            (nats,) = run.losses([ids])
            nats.sum() / math.log(2) / len(text.encode())  # bits per byte

        Args:
            rows: int (n,) each, 2 <= n <= train.seq_len + 1; a document begins with the tokenizer's
                ``end_of_text``.

        Returns:
            float32 (n - 1,) for each row: nats of each token but the first, given those before it.

        Raises:
            DataError: an id is outside the vocabulary, or a row is too long or too short.
        """
        return self._predictor().losses(rows)

    def scores(
        self, rows: Sequence[Sequence[int] | np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Compute the loss of each token of some rows, and whether it is the argmax there.

        Rows are those of :meth:`losses`, computed as one batch. The logits of all rows are held at once:
        ``rows x tokens x model.vocab`` numbers must fit in memory.

        Args:
            rows: as for :meth:`losses`.

        Returns:
            For each row float32 (n - 1,), as :meth:`losses` returns, and bool (n - 1,).

        Raises:
            DataError: as :meth:`losses`.
        """
        return self._predictor().scores(rows)

    def _predictor(self, *, exact: bool = False) -> Predictor:
        config, hook = self.plan.config, self._inference_hook()
        return Predictor(self._reader(exact=exact), config, self.tokenizer, hook)

    def export(
        self,
        to: str | Path,
        *,
        layout: str | None = None,
        shard_bytes: int = 5 * 10**9,
        dtype: str = "float32",
    ) -> dict[str, Any]:
        """Export the model for Transformers, vLLM and mlx-lm.

        Args:
            to: the model directory, which must not exist, or be empty.
            layout: replaces the plan's: ``peft``, the adapters of ``lora`` alone; ``own``, the model with
                modeling files that compute it, used for every model that other programs do not know.
            shard_bytes: most bytes of a file of tensors.
            dtype: of the tensors: float32, or bfloat16, rounded to nearest.

        Returns:
            ``directory``, ``layout``, ``parameters``, ``files`` (name -> bytes), ``loading``
            (program -> what to type), ``step`` and ``checkpoint``.

        Raises:
            Refusal: ``to`` is taken, a plugin prevents the export, or minillm-hf is not installed.
        """
        to = _folder(to)
        require_counts(shard_bytes=shard_bytes)
        directories.refuse_taken(to)
        plan, kept = directories.export_checked(self.plan), self.checkpoint
        arrays = with_views(self._job.trainer.arrays()) if self._job else self._saved.arrays()
        arrays = {
            name: one for name, one in arrays.items() if name.startswith(("model.", "state."))
        }
        record = read_record(self.out) if self.out and os.path.lexists(self.out / RUN) else {}
        model = TrainedModel(plan, arrays, self.tokenizer, self.step, record, self.specials)
        options = {"shard_bytes": shard_bytes, "dtype": dtype}
        form = directories.exporting(plan, layout)
        parameters = form.write(to, model, self._session.shown.say, **options)
        return {
            "directory": str(to),
            "layout": layout or plan.export.layout,
            "parameters": parameters,
            "files": {path.name: path.stat().st_size for path in sorted(to.iterdir())},
            "loading": dict(form.loading(str(to))),
            "step": self.step,
            "checkpoint": None if kept is None else str(kept),
        }

    @cached_property
    def _saved(self) -> SavedModel:
        """The plan and checkpoint of the folder, or the model of the directory, read at first use."""
        assert self.out is not None
        if self._directory is not None:
            return open_directory(self._directory, self._request, self._session.shown.say)
        specs = select({}, self._request.plugins)[0]
        return open_run(self.out, plugins=specs, say=self._session.shown.say, **self._read)

    def _reader(self, *, exact: bool = False, positions: int | None = None) -> Model:
        """Return the model to read from: the trained one, or a saved one.

        Args:
            exact: load a saved one in float32.
            positions: longest row to feed; default: the run's seq_len.
        """
        if self._job is not None:
            return self._job.trainer
        saved = self._saved
        dtype = "float32" if exact else saved.plan.config.train.dtype
        longest = max(positions or 0, saved.plan.config.train.seq_len)
        found = next(
            (m for (kind, most), m in self._models.items() if kind == dtype and most >= longest),
            None,
        )
        if found is None:
            detected, say = detect.choose(detect.probe(), **self._where), self._session.shown.say
            with self._session.shown.phase("loading the model"):
                found = saved.model(
                    detected,
                    exact=exact,
                    max_positions=longest,
                    say=say,
                    create=self._session.create,
                )
            self._models[dtype, longest] = found
        return found

    def _inference_hook(self) -> OnBatch | None:
        """Compose the plugins' ``on_batch`` for inference."""
        return self._job.hook() if self._job else plan_hook(self.plan, specials=self.specials)

    @property
    def specials(self) -> Mapping[str, int]:
        """The ids of the special tokens that the plan's plugins ask for, by name; and ``end_of_text``."""
        if self._job is not None:
            return self._job.corpus.specials
        plan = self.plan
        return reserved(self.tokenizer, plan.sourcing, plan.config.model.vocab)
