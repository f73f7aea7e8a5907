"""The folder that a conversion makes: complete under its name, or not there at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jdllm.checkpoint_format import RECORD
from jdllm.convert.errors import ConvertError


def check_target(target: Path, overwrite: bool, sources: list[Path]) -> None:
    """Refuse a DST that must not be replaced.

    Raises:
        ConvertError: it exists without ``--overwrite``, is something else than a jdllm checkpoint or an empty folder,
            or replacing it would delete a source.
    """
    for source in sources:
        if source == target or target in source.parents:
            raise ConvertError(f"DST {target} holds the source {source}; give another DST")
    if not target.exists():
        return
    if not overwrite:
        raise ConvertError(f"DST {target} exists; give another name, or --overwrite to replace it")
    if not target.is_dir() or (any(target.iterdir()) and not (target / RECORD).is_file()):
        raise ConvertError(f"DST {target} is not a jdllm checkpoint; --overwrite replaces nothing else")


@contextlib.contextmanager
def written_at_once(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends, and vanishes when it raises."""
    made = _make_parents(target.parent)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    old = target.parent / f".{target.name}.replaced-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and its parents; the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def check_space(target: Path, nbytes: int) -> None:
    """Refuse a disk that is too small before writing for minutes."""
    there = next(path for path in target.parents if path.exists())
    if (free := shutil.disk_usage(there).free) < nbytes:
        raise ConvertError(f"DST {target} needs {nbytes / 1e9:.1f} GB; {there} has {free / 1e9:.1f} GB free")


def leftovers(target: Path) -> list[Path]:
    """Unfinished folders of runs that were killed."""
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.partial-"))
