"""The folders of a board: where it keeps jobs, and which paths may be read and written through it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import unicodedata

from meshtune.errors import UserError

FOLDER = "meshtune-board"  # below the root
MAX_PATH, MAX_NAME = 4000, 255  # characters; bytes of one name in a path
MAX_ID = 200  # characters of an id on the hub
HUB_ID = re.compile(r"(modelscope:)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


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

    def to_read(self, text: object, where: str | None = None) -> pathlib.Path:
        """The absolute path of `text`, relative to the root, without symbolic links. The path need not exist.

        It is resolved once: what is opened is the path that this returns. Raises: UserError for what is not a plain
        path (`..`, `~`, a variable, an address, spaces around it, control characters), and for a path that leads
        outside of the root and the readable folders.
        """
        return self._resolve(text, (self.root, *self.readable), where)

    def to_write(self, text: object, where: str | None = None) -> pathlib.Path:
        """As `to_read`, of a path that is to be written: below the root alone, and not one of the board's own."""
        path = self._resolve(text, (self.root,), where)
        if path == self.root or path.is_relative_to(self.folder):
            raise UserError(
                "this folder is the board's own", where=where, fix="give a folder of its own, as runs/first"
            )
        return path

    def source(self, text: object, where: str | None = None) -> str:
        """A model or data set as commands take it: a path as `to_read` resolves it, shown as people write it, or an id
        of the hub that no local path hides. Raises: UserError."""
        if (
            isinstance(text, str)
            and len(text) <= MAX_ID
            and HUB_ID.fullmatch(text)
            and not os.path.lexists(self.root / text)
        ):
            return text
        path = self.to_read(text, where)
        shown = self.shown(path)
        return str(path) if shown.startswith("-") else shown

    def shown(self, path: pathlib.Path) -> str:
        """A path as people write it: relative to the root where it is below it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def _resolve(self, text: object, folders: tuple[pathlib.Path, ...], where: str | None) -> pathlib.Path:
        if not isinstance(text, str) or (problem := _oddity(text)):
            problem = "it is not a text" if not isinstance(text, str) else _oddity(text)
            fix = f"give a plain path, relative to {self.root} or absolute"
            raise UserError(f"{_brief(text)} is not a path that the board takes: {problem}", where=where, fix=fix)
        try:
            path = pathlib.Path(os.path.realpath(self.root / text))
        except (ValueError, OSError) as error:  # a loop of links
            raise UserError(f"{_brief(text)} is not a path: {error}", where=where, fix="give another path") from error
        if any(path.is_relative_to(folder) for folder in folders):
            return path
        allowed = ", ".join(map(str, folders))
        raise UserError(
            f"the path leads to {path}, outside of {allowed}",
            where=where or text,
            fix="give a path inside, or start the board with another --root (to write) or --read (to read)",
        )


def _oddity(text: str) -> str | None:
    """Why a text is no plain path; None for one that is. Two readers could take such a text for two paths."""
    parts = re.split(r"[/\\]", text)
    if not text.strip():
        return "it is empty"
    if text != text.strip():
        return "there is a space before or behind it"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        return "it holds a control character"
    if ".." in (part.strip() for part in parts):
        return "it holds `..`"
    if text.startswith("~"):
        return "`~` is not expanded"
    if re.search(r"\$\{|\$\(|^\$|/\$", text):
        return "variables are not expanded"
    if re.match(r"[A-Za-z][\w+.-]*:/", text):
        return "it is an address"
    if len(text) > MAX_PATH or any(len(part.encode()) > MAX_NAME for part in parts):
        return "it is too long"
    return None


def _brief(text: object) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


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
