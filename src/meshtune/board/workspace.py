"""The folders of a board: where it keeps jobs, and which paths may be read and written through it."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from meshtune.errors import UserError

FOLDER = "meshtune-board"  # below the root


@dataclasses.dataclass(frozen=True)
class Workspace:
    """`root` is the directory that commands are run in and written below; `readable` are others that may be read.

    All are absolute and without symbolic links (`workspace_at`).
    """

    root: pathlib.Path
    readable: tuple[pathlib.Path, ...] = ()

    @property
    def folder(self) -> pathlib.Path:
        """The board's own files."""
        return self.root / FOLDER

    @property
    def jobs(self) -> pathlib.Path:
        """A folder for each job (board.job)."""
        return self.folder / "jobs"

    @property
    def uploads(self) -> pathlib.Path:
        """Files that came through the page."""
        return self.folder / "uploads"

    def to_read(self, text: str, where: str | None = None) -> pathlib.Path:
        """The absolute path of `text`, relative to the root. Raises: UserError if it leaves root and readable folders.

        Symbolic links are followed before the comparison. The path need not exist.
        """
        return self._confined(text, (self.root, *self.readable), where)

    def to_write(self, text: str, where: str | None = None) -> pathlib.Path:
        """As `to_read`, of a path that is to be written: below the root alone."""
        return self._confined(text, (self.root,), where)

    def shown(self, path: pathlib.Path) -> str:
        """A path as people write it: relative to the root where it is below it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def _confined(self, text: str, folders: tuple[pathlib.Path, ...], where: str | None) -> pathlib.Path:
        try:
            path = pathlib.Path(os.path.realpath(self.root / pathlib.Path(text).expanduser()))
        except (ValueError, RuntimeError, OSError) as error:  # a null byte; the home of nobody; a loop of links
            raise UserError(f"{text!r} is not a path: {error}", where=where, fix="give another path") from error
        if any(path.is_relative_to(folder) for folder in folders):
            return path
        allowed = ", ".join(map(str, folders))
        raise UserError(
            f"the path leads to {path}, outside of {allowed}",
            where=where or text,
            fix="give a path inside, or start the board with another --root (to write) or --read (to read)",
        )


def workspace_at(root: pathlib.Path, readable: tuple[pathlib.Path, ...] = ()) -> Workspace:
    """The workspace at `root`, whose folders are created. Raises: UserError where that is impossible."""
    for folder in readable:
        if not folder.expanduser().is_dir():
            raise UserError("there is no such directory", where=f"--read {folder}", fix="give one that exists")
    base, folders = _absolute(root), dict.fromkeys(map(_absolute, readable))
    # What lies in another of them is listed there.
    outer = [
        folder for folder in folders if not any(folder.is_relative_to(other) for other in {base, *folders} - {folder})
    ]
    workspace = Workspace(base, tuple(outer))
    try:
        for folder in (workspace.jobs, workspace.uploads):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the board's folder cannot be made: {error.strerror}",
            where=str(workspace.folder),
            fix="give a --root that can be written",
        ) from error
    return workspace


def _absolute(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path.expanduser()))
