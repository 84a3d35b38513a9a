"""Models of the Hugging Face hub: ``OWNER/NAME[@REVISION]`` becomes a model directory in the hub's cache.

Only config, tokenizer and safetensors are fetched: no pickles, no code. A branch is resolved to its
current commit; the cache folder of a commit never changes, so a run records the commit that it starts
from. Transformers and other programs use the same cache (``HF_HOME``).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm_core import Refusal
from minillm_core.commands import display, pip_line, plain
from minillm_core.commands import say as say_now
from minillm_hf.write import INDEX, WEIGHTS

CONFIG = "config.json"
OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Files of a tokenizer that Transformers reads, if a directory has them."""

WANTED = (
    *(CONFIG, "generation_config.json", *OF_TOKENIZER),
    *(WEIGHTS, INDEX, "model-*-of-*.safetensors"),
)
"""Patterns of the files to fetch."""

PATIENCE = 15.0
"""Timeout in seconds for resolving a name to a commit."""

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = re.compile(r"models--(.+?)--(.+)")


def fetch(given: str, say: Callable[[str], None]) -> Path | None:
    """Fetch a model, with progress on stderr; if the hub is unreachable, use the cached copy.

    Args:
        given: ``OWNER/NAME``, or ``OWNER/NAME@REVISION``: a branch, a tag or a commit.
        say: prints the commit, and whether a cached copy is used.

    Returns:
        The folder of its commit; None: the name has another form.

    Raises:
        Refusal: the model is unknown or has no safetensors, or the hub is unreachable and the cache empty.
    """
    if (asked := _NAME.fullmatch(given)) is None:
        return None
    name, revision = asked.groups()
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise Refusal(
            f"there is no folder {given}, and to fetch a model of the hub needs huggingface_hub",
            where=f"--init {given}",
            fix=pip_line("minillm-hf[hub]"),
        ) from error
    if revision and _COMMIT.fullmatch(revision) and (here := _copy(name, revision)) is not None:
        return here  # a commit never changes
    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=PATIENCE)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _refused(given, error) from error
    except Exception as error:  # a network error of huggingface_hub's HTTP client
        if (here := _copy(name, revision)) is not None:
            say(
                f"the hub cannot be reached ({_reason(error)}): {given} is the copy that is here, "
                f"of commit {here.name}"
            )
            return here
        raise Refusal(
            f"the hub cannot be reached, and no whole copy of {given} is here",
            where=_reason(error),
            fix="connect, or give the folder of a model as --init DIR",
        ) from error
    assert found.sha is not None
    sizes = {one.rfilename: one.size or 0 for one in found.siblings or ()}
    _check(given, sizes)
    folder = _download(given, name, revision, found.sha, sizes)
    say(f"{name} of the hub at commit {folder.name}, in {folder}")
    return folder


def cached(given: str) -> Path | None:
    """Return the cached copy of a model of the hub, without asking the hub.

    Args:
        given: as for :func:`fetch`.

    Returns:
        The folder of its commit; None: there is no whole copy, or the name has another form.
    """
    asked = _NAME.fullmatch(given)
    try:
        return asked and _copy(*asked.groups())
    except ImportError:  # without huggingface_hub
        return None


def published(folder: Path) -> str | None:
    """Return the hub model of a folder in the cache: ``OWNER/NAME@COMMIT``.

    Returns:
        The name; None: the folder is not in the hub's cache.
    """
    *_, kept, kind, commit = ("", "", "", *folder.absolute().parts)
    model = _FOLDER.fullmatch(kept)
    if model is None or kind != "snapshots" or not _COMMIT.fullmatch(commit):
        return None
    return f"{model[1]}/{model[2]}@{commit}"


def _check(given: str, names: dict[str, int]) -> None:
    """Check before fetching that a model has config.json and safetensors."""
    if CONFIG not in names:
        lack = f"no {CONFIG}: it is not a model directory"
    elif WEIGHTS not in names and INDEX not in names:
        pickled = sorted(one for one in names if one.endswith((".bin", ".pt", ".pth")))
        lack = f"neither {WEIGHTS} nor {INDEX}"
        if pickled:
            lack += f", only {pickled[0]}: a pickle, which may run code, and is not fetched"
    else:
        return
    raise Refusal(
        f"{given} of the hub has {lack}",
        where=_page(given),
        fix="choose a model in safetensors; or load and save it with Transformers, and --init DIR",
    )


def _download(
    given: str, name: str, revision: str | None, commit: str, sizes: dict[str, int]
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """A silent progress bar: the command's display shows progress."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "disable": True})

    if _copy(name, commit) is None:
        patterns = [re.compile(one.replace(".", r"\.").replace("*", r"[^/]*")) for one in WANTED]
        total = sum(n for one, n in sizes.items() if any(p.fullmatch(one) for p in patterns))
        say_now(f"fetching {name} of the hub at commit {commit[:12]}: {total / 1e6:,.1f} MB")
    else:
        total = 0
    try:
        with _watched(f"fetching {name}", name, total):
            # by the given revision: the cache then maps it to the commit, for offline use
            folder = snapshot_download(
                name, revision=revision, allow_patterns=[*WANTED], tqdm_class=Silent
            )
    except Exception as error:  # of the network or the disk
        raise _refused(given, error) from error
    return Path(folder)


@contextmanager
def _watched(what: str, name: str, total: int) -> Iterator[None]:
    """Show the bytes downloaded so far; a thread polls the cache."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"

    def there(*, whole: bool = False) -> int:
        """Sum the file sizes (``whole``: of complete files); partial files count as this download's."""
        size = 0
        for path in blobs.glob("*"):
            try:
                if not whole or path.suffix != ".incomplete":
                    size += path.stat().st_size
            except OSError:  # renamed meanwhile
                continue
        return size

    before, over = there(whole=True), threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            shown.progress(what, min(max(there() - before, 0), total), total)

    with display(say_now) as shown:
        watcher = threading.Thread(target=look, name="fetching", daemon=True)
        if total:
            watcher.start()
        try:
            yield
        finally:
            over.set()
            if total:
                watcher.join()


def _copy(name: str, revision: str | None) -> Path | None:
    """Return the cache folder of a revision; None: not cached, or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=[*WANTED], local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder) if _is_whole(Path(folder)) else None


def _is_whole(folder: Path) -> bool:
    """Return whether config and weights are complete: a download may have been interrupted."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / WEIGHTS).is_file():
        return True
    try:
        held = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return all((folder / one).is_file() for one in held.values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def _refused(given: str, error: Exception) -> Refusal:
    """Return the error for a model that cannot be fetched."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what, fix = (
        f"{given} could not be fetched: {_reason(error)}",
        ("make room or connect again, and give the same command: what has come is kept"),
    )
    if isinstance(error, GatedRepoError):
        what = f"{given} is a gated model: its terms must be accepted first"
        fix = "accept them on its page, then hf auth login, or set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        what = f"{given} is neither a folder here nor a model of the hub that can be read"
        fix = "check the name; for a private model hf auth login, or set HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        what = f"{given}: the model has no such revision"
        fix = "--init OWNER/NAME, or @ with a branch, a tag or a commit of it"
    return Refusal(what, where=_page(given), fix=fix)


def _page(given: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{given.partition('@')[0]}"


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    first = next(iter(str(error).splitlines()), "")
    return plain(first, 200) or type(error).__name__
