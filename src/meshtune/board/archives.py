"""A zip of pictures with a table, that comes through the page: unpacked below ROOT/data within bounds, or refused."""

from __future__ import annotations

import pathlib
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool

from meshtune.board.uploads import FOLDER_NAME, MAX_NAME, TEXT_TYPES
from meshtune.board.workspace import Workspace
from meshtune.data.pictures.files import MAX_BYTES, read_size
from meshtune.errors import UserError

ZIP = ".zip"
PICTURE_TYPES = (".png", ".jpg", ".jpeg", ".webp")
MOST_ENTRIES, MOST_BYTES = 20_000, 1 << 32  # of an archive, unpacked
MOST_ARCHIVE, MOST_TABLE = 1 << 31, 1 << 28  # bytes
DEPTH = 8
_NOISE = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|Thumbs\.db$)")


async def receive_archive(workspace: Workspace, name: str, chunks: AsyncIterator[bytes]) -> pathlib.Path:
    """Unpacks an upload into a new folder below ROOT/data and returns the table in it.

    Raises UserError for a file that is no zip or holds anything but pictures and one table; for names that lead
    elsewhere, links, encryption, damaged pictures, and more than the bounds. Nothing is left of it then.
    """
    if not re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", name) or len(name) > MAX_NAME:
        raise UserError(f"{name!r} is not a plain file name", where="name", fix="rename the file")
    folder = workspace.to_write(FOLDER_NAME, "name")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        async for chunk in chunks:
            if file.tell() + len(chunk) > MOST_ARCHIVE:
                fix = f"copy its files to {FOLDER_NAME}/ of the board's root instead"
                raise UserError(f"the archive is larger than {MOST_ARCHIVE >> 20} MiB", where=name, fix=fix)
            file.write(chunk)
        return await run_in_threadpool(_unpack, file, folder, name)


def _unpack(file: object, folder: pathlib.Path, name: str) -> pathlib.Path:
    try:
        archive = zipfile.ZipFile(file)  # pyright: ignore[reportArgumentType]
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UserError(f"the file is no zip archive: {error}", where=name, fix="make the archive again") from error
    entries = [entry for entry in archive.infolist() if not entry.is_dir() and not _NOISE.search(entry.filename)]
    paths = [_checked_path(entry, name) for entry in entries]
    if len(entries) > MOST_ENTRIES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        message = f"the archive has {len(entries):,} files of {sum(entry.file_size for entry in entries):,} bytes"
        fix = f"give at most {MOST_ENTRIES:,} files of {MOST_BYTES:,} bytes, in several archives"
        raise UserError(message, where=name, fix=fix)
    tables = [path for path in paths if path.suffix.lower() in TEXT_TYPES]
    if len(tables) != 1:
        listed = ", ".join(map(str, tables[:3])) or "none"
        fix = f"put one beside the pictures ({', '.join(TEXT_TYPES)}), which names them by their paths from it"
        raise UserError(f"the archive needs one table of records; it has {listed}", where=name, fix=fix)
    target = _new_folder(folder, pathlib.PurePath(name).stem)
    try:
        for entry, path in zip(entries, paths, strict=True):
            content = _content(archive, entry, f"{name}, {entry.filename[:MAX_NAME]}")
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as out:
                out.write(content)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise UserError("a name is in the archive twice", where=name, fix="make the archive again") from error
        raise
    return target / tables[0]


def _checked_path(entry: zipfile.ZipInfo, name: str) -> pathlib.PurePosixPath:
    """The path of an entry below its folder."""
    where, text = f"{name}, {entry.filename[:MAX_NAME]}", entry.filename
    path = pathlib.PurePosixPath(text)
    is_plain = not path.is_absolute() and not re.search(r"[\\\x00-\x1f:]", text) and len(text) <= MAX_NAME
    if not is_plain or len(path.parts) > DEPTH or any(part.startswith(".") for part in path.parts):
        raise UserError("a name in the archive is no plain path below its folder", where=where, fix="rename the file")
    is_file = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG) and not entry.flag_bits & 1
    if not is_file or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        fix = "make the archive again as plain zip, of the files themselves, without a password"
        raise UserError("an entry of the archive is a link, encrypted or of another compression", where=where, fix=fix)
    if path.suffix.lower() not in (*PICTURE_TYPES, *TEXT_TYPES):
        kinds = ", ".join((*PICTURE_TYPES, *TEXT_TYPES))
        raise UserError(f"files of type '{path.suffix}' are not taken", where=where, fix=f"give {kinds}")
    return path


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> bytes:
    """The bytes of a picture whose header was checked, or of a text."""
    is_text = pathlib.PurePosixPath(entry.filename).suffix.lower() in TEXT_TYPES
    most = MOST_TABLE if is_text else MAX_BYTES
    try:
        with archive.open(entry) as source:
            content = source.read(most + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UserError(f"the archive is damaged: {error}", where=where, fix="make it again") from error
    if len(content) > most:
        raise UserError(f"the file is larger than {most:,} bytes", where=where, fix="give a smaller one")
    if not is_text:
        read_size(content, where)
        return content
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the table is not UTF-8 text: {error.reason}", where=where, fix="save it as UTF-8") from error
    if not text.strip() or "\0" in text:
        raise UserError("the table is empty, or not text", where=where, fix="save it as UTF-8 text")
    return content


def _new_folder(folder: pathlib.Path, stem: str) -> pathlib.Path:
    """A folder that did not exist: STEM, or else STEM-2 and so on."""
    number = 1
    while True:
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path
