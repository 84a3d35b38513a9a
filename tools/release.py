"""Releases: one version for every distribution, their sdists and wheels, and the tag that publishes them.

python -m tools.release show              # each distribution with its version
python -m tools.release set 0.2.0         # write the version and the plugins' minimum versions everywhere
python -m tools.release tag v0.2.0        # reject a tag that differs from the common version
python -m tools.release build [--to dist] # build all, and check them as a package index would

It imports nothing of minillm, so that ``make wheels`` needs only the build tools.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import chdir
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

__all__ = ["CORE", "ROOT", "ReleaseError", "build", "check_tag", "distributions", "set_version"]

ROOT = Path(__file__).parents[1]
CORE = "minillm-core"

_BUILDING = ".building"
_BUILT = re.compile(r"minillm_\w+-[^-]+(\.tar\.gz|-py3-none-any\.whl)")


class ReleaseError(Exception):
    """A release that is rejected, with the reason."""


def distributions(root: Path = ROOT, *homes: str) -> dict[Path, dict[str, Any]]:
    """Find the distributions of a checkout.

    Args:
        root: the checkout.
        homes: folders whose subfolders are distributions; default: ``plugins``, the published ones.

    Returns:
        Folder -> its ``[project]`` table, the core's first.
    """
    places = [
        root,
        *(one for home in homes or ("plugins",) for one in sorted(root.glob(f"{home}/*"))),
    ]
    files = [place / "pyproject.toml" for place in places]
    return {f.parent: tomllib.loads(f.read_text())["project"] for f in files if f.is_file()}


def version(root: Path = ROOT) -> str:
    """Return the common version of all distributions.

    Raises:
        ReleaseError: the distributions carry different versions.
    """
    found = {one["name"]: one["version"] for one in distributions(root).values()}
    if len(set(found.values())) != 1:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        raise ReleaseError(f"versions differ: {listed}; python -m tools.release set VERSION")
    return found[CORE]


def check_tag(tag: str, root: Path = ROOT) -> None:
    """Compare a tag with the version of every distribution and with the changelog.

    Raises:
        ReleaseError: it is not ``v`` and that version, or the changelog has no dated entry for it.
    """
    wanted = f"v{version(root)}"
    if tag != wanted:
        raise ReleaseError(f"the tag is {tag}, and the version of all is that of {wanted}")
    (entry,) = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    if not re.fullmatch(rf"\[{re.escape(tag[1:])}\] - \d{{4}}-\d\d-\d\d", entry):
        raise ReleaseError(
            f"CHANGELOG.md starts with '{entry}'; a release starts with '[{tag[1:]}] - YYYY-MM-DD'"
        )


def set_version(new: str, root: Path = ROOT) -> list[Path]:
    """Write a version into every distribution, and as the minimum version in requirements on them.

    Args:
        new: in the form 0.2.0 or 0.2.0rc1.
        root: the checkout.

    Returns:
        The changed files, including examples.

    Raises:
        ReleaseError: not a valid version.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", new):
        raise ReleaseError(f"'{new}' is not a version: as 0.2.0 or 0.2.0rc1")
    found = distributions(root, "plugins", "examples")
    names = "|".join(re.escape(one["name"]) for one in found.values())
    changed = []
    for folder in found:
        path = folder / "pyproject.toml"
        before = path.read_text()
        after = re.sub(
            r'^version = ".+"$', f'version = "{new}"', before, count=1, flags=re.MULTILINE
        )
        after = re.sub(rf'"((?:{names})(?:\[[\w,-]+\])?)>=[^",;]+', rf'"\1>={new}', after)
        if after != before:
            path.write_text(after)
            changed.append(path)
    return changed


def build(to: Path, folders: Sequence[Path] | None = None) -> dict[str, tuple[Path, Path]]:
    """Build each distribution's sdist, its wheel from the sdist, and check both as an index would.

    Args:
        to: the output folder; files of earlier builds are deleted, so that they are not published.
        folders: of the distributions; default: all published ones.

    Returns:
        Distribution -> its sdist and its wheel.

    Raises:
        ReleaseError: versions differ, the folder holds files that no build wrote, or a build did not
            produce exactly one sdist and one wheel.
        subprocess.CalledProcessError: the check failed; its output is printed.
    """
    version()
    projects = distributions(ROOT, "plugins", "examples")
    to = to.resolve()
    _empty(to)
    built = {}
    for folder in distributions() if folders is None else folders:
        name, number = projects[folder]["name"], projects[folder]["version"]
        out = to / _BUILDING
        _build(folder, out)
        stem = f"{name.replace('-', '_')}-{number}"
        sdist, wheel = f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"
        found = {path.name for path in out.iterdir()}
        if found != {sdist, wheel}:
            raise ReleaseError(f"{name}: built {sorted(found)}, expected {sdist} and {wheel}")
        built[name] = ((out / sdist).rename(to / sdist), (out / wheel).rename(to / wheel))
        out.rmdir()
    _run("twine", "check", "--strict", *(path for pair in built.values() for path in pair))
    return built


def _build(folder: Path, out: Path) -> None:
    """Build an sdist, and a wheel from it, by the hooks of the build backend (PEP 517) in this process.

    Raises:
        ReleaseError: the project wants another backend, or another version than the one here.
    """
    # Here, for the other commands need nothing but Python.
    from hatchling.build import build_sdist, build_wheel
    from packaging.requirements import Requirement

    wanted = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
    here = {"hatchling": installed("hatchling")}
    needed = {one.name: one.specifier for one in map(Requirement, wanted["requires"])}
    if wanted["build-backend"] != "hatchling.build" or needed.keys() != here.keys():
        raise ReleaseError(f"{folder}: built by {wanted}, expected hatchling alone")
    if not needed["hatchling"].contains(here["hatchling"]):
        raise ReleaseError(f"{folder}: needs hatchling{needed['hatchling']}; here is {here}")
    out.mkdir(parents=True)
    with chdir(folder):
        sdist = build_sdist(str(out))
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(out / sdist) as archive:
            archive.extractall(unpacked, filter="data")
        with chdir(Path(unpacked, sdist.removesuffix(".tar.gz"))):
            build_wheel(str(out))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder / _BUILDING, ignore_errors=True)
    old = list(folder.iterdir()) if folder.exists() else []
    strange = sorted(path.name for path in old if not _BUILT.fullmatch(path.name))
    if strange:
        raise ReleaseError(
            f"{folder} holds {', '.join(strange)}, which no build made: move it away"
        )
    for path in old:
        path.unlink()


def _run(*words: str | Path) -> None:
    # -P: a folder named build, which other tools leave in a checkout, is not the package build.
    command = [sys.executable, "-P", "-m", *map(str, words)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    except subprocess.CalledProcessError as error:
        print(error.stdout, error.stderr, sep="\n", file=sys.stderr)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show")
    commands.add_parser("set").add_argument("version")
    commands.add_parser("tag").add_argument("tag")
    commands.add_parser("build").add_argument("--to", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    try:
        if given.command == "show":
            for folder, one in distributions().items():
                print(f"{one['name']:<16} {one['version']:<10} {folder.relative_to(ROOT)}")
            version()
        elif given.command == "set":
            for path in set_version(given.version):
                print(path.relative_to(ROOT))
        elif given.command == "tag":
            check_tag(given.tag)
        else:
            for name, pair in build(given.to).items():
                print(f"{name:<16} {', '.join(path.name for path in pair)}")
    except (ReleaseError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
