"""The folder where a fit keeps its feature caches and checkpoints."""

from __future__ import annotations

from pathlib import Path

from halopose.errors import HaloposeError

CACHES = {"train", "val", "store"}  # feature caches, each with a manifest
COPIES = "copies"  # feature cache of corrupted copies


def work_folder(artifact: Path, given: Path | None = None) -> Path:
    """Return the work folder of an artifact: ``mine-work`` for ``mine.safetensors``.

    Args:
        artifact: Artifact that will be written.
        given: Folder that the user chose instead.

    Raises:
        HaloposeError: The folder holds files that no fit has written there.
    """
    folder = given or artifact.with_name(f"{artifact.stem}-work")
    foreign = sorted(path.name for path in folder.iterdir() if not _ours(path)) if folder.is_dir() else []
    if foreign:
        raise HaloposeError(f"{folder} holds files of another kind ({foreign[0]}): choose another folder with --work")
    return folder


def _ours(path: Path) -> bool:
    """Return whether a fit may have written a file or folder."""
    if path.name in CACHES or path.name == COPIES:
        inside = {entry.name for entry in path.iterdir()} if path.is_dir() else {"a file"}
        return "manifest.json" in inside or all(name.startswith(".") for name in inside)
    return path.name.startswith((".", "training."))
