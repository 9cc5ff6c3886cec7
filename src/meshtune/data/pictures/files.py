"""Pictures of records, checked by their headers, and pictures decoded for a model.

Read are PNG, JPEG and WEBP, turned as their EXIF data say and converted to RGB as `transformers.image_utils.load_image`
does (CMYK too; transparency is dropped). Refused are animations, samples of 16 and 32 bits (which that conversion would
clip), files that end before their last block, and pictures of more than MAX_PIXELS, before anything is decoded.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import re
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from meshtune.data.conversation import Conversation, Document, Picture, PlacedPicture, Sample, map_documents
from meshtune.data.formats.pictures import check_no_mark
from meshtune.errors import UserError, pip_install

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485  # Pillow's own limit of a decompression bomb
MAX_BYTES = 1 << 26
FORMATS = ("PNG", "JPEG", "WEBP")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_DATA_URI = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_TURNED = (5, 6, 7, 8)  # values of EXIF's orientation that exchange width and height
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@functools.cache
def pillow() -> Any:
    """The package Pillow, without its warning of large pictures, which are refused. Raises UserError where it is
    missing."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as problem:
        raise UserError(
            "pictures are read with the package Pillow, which is missing", fix=pip_install("images")
        ) from problem
    warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)
    return PIL


def _open(data: bytes, where: str) -> Image:
    """The picture in `data`, of which only the header was read. Raises UserError as `decode_picture`, but for damage
    behind the header."""
    library = pillow()
    if len(data) > MAX_BYTES:
        raise UserError(f"the picture has {len(data):,} bytes, more than {MAX_BYTES:,}", where=where, fix=_SMALLER)
    try:
        image = library.Image.open(io.BytesIO(data), formats=FORMATS)
        frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1  # of MPO the first is the picture
    except (library.Image.DecompressionBombError, library.Image.DecompressionBombWarning) as problem:
        raise UserError(f"the picture is too large: {problem}", where=where, fix=_SMALLER) from problem
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, OverflowError) as problem:
        kind = "empty" if not data else "damaged, or none of PNG, JPEG and WEBP"
        raise UserError(f"the picture cannot be read: it is {kind}", where=where, fix=_AGAIN) from problem
    if image.width * image.height > MAX_PIXELS:
        problem = f"the picture has {image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS:,}"
        raise UserError(problem, where=where, fix=_SMALLER)
    if frames > 1:
        fix = "save the frames that matter as pictures, and list them in order"
        raise UserError(f"the picture is an animation of {frames} frames", where=where, fix=fix)
    if image.mode in _DEEP:
        problem = f"the picture has samples of more than 8 bits (Pillow's mode {image.mode}), and models read 8"
        raise UserError(problem, where=where, fix="scale its values to 0 to 255, and save it with 8 bits")
    return image


_SMALLER = "save it smaller: models read a few million pixels at most"
_AGAIN = "save or download it again, as PNG, JPEG or WEBP"


def read_size(data: bytes, where: str) -> tuple[int, int]:
    """The width and height of a picture as it is shown, from its header. Raises UserError as `decode_picture`."""
    image = _open(data, where)
    if not _is_complete(data, str(image.format)):
        raise UserError("the picture is truncated: its end is missing", where=where, fix=_AGAIN)
    turned = (image.format != "PNG" or b"eXIf" in data or b"Orientation" in data) and (
        image.getexif().get(0x0112) in _TURNED
    )
    return (image.height, image.width) if turned else image.size


def decode_picture(data: bytes, where: str) -> Image:
    """The picture in `data`, in RGB and turned as it is shown.

    Raises UserError, naming `where`, for a file of another kind, that is damaged, or that the module's description
    refuses.
    """
    library, image = pillow(), _open(data, where)
    try:
        return library.ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError) as problem:
        raise UserError(f"the picture is truncated or damaged: {problem}", where=where, fix=_AGAIN) from problem


def _is_complete(data: bytes, kind: str) -> bool:
    """Whether a file has its last block: damage in between shows when it is decoded."""
    if kind == "PNG":
        return b"IEND" in data
    if kind == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] != 0xDA:  # to the samples
        is_filler = data[position + 1] == 0xFF
        position += 1 if is_filler else 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return data.find(b"\xff\xd9", position if position < len(data) else 2) >= 0


@dataclasses.dataclass(frozen=True)
class PictureFiles:
    """Opens the pictures of records. Relative addresses are below `base` (vision.media_dir), by default the folder of
    the data. Pictures that are in the data themselves are written to `cache`, once each."""

    cache: str
    base: str | None = None

    def open(self, address: str | bytes, folder: str | None, where: str) -> Picture:
        """The picture at an address, or of some bytes, after a check of its header. `folder` is that of the data, None
        for data of a hub. Raises UserError, naming `where`."""
        if isinstance(address, bytes):
            return self._store(address, where)
        if address[:5].lower() == "data:":
            return self._store(data_of_uri(address, where), where)
        if _ADDRESS.match(address):
            problem = f"the picture is an address, which is never fetched: {address[:80]}"
            fix = "download it, and write its path below the folder of the data (or vision.media_dir)"
            raise UserError(problem, where=where, fix=fix)
        path = self._confine(address, folder, where)
        try:
            status = path.stat()
            return _check_file(path, (status.st_mtime_ns, status.st_size, status.st_ino))
        except UserError as problem:
            raise UserError(problem.what, where=f"{where}, {path}", fix=problem.fix) from None
        except OSError as problem:
            raise UserError(
                f"the picture cannot be read: {problem.strerror or problem}: {path}",
                where=where,
                fix="check the path, or set vision.media_dir to the folder that paths of pictures are below",
            ) from problem

    def _confine(self, address: str, folder: str | None, where: str) -> pathlib.Path:
        """The absolute path of an address below the folder of pictures."""
        base = self.base or folder
        if base is None:
            fix = "set vision.media_dir to the folder that paths of pictures are below"
            raise UserError(f"the picture is a path, and the data have no folder: {address[:80]}", where=where, fix=fix)
        base = os.path.abspath(os.path.expanduser(base))
        path = os.path.normpath(os.path.join(base, address))
        if os.path.commonpath([base, path]) != base:
            problem = f"the picture is not below the folder of pictures {base}: {address[:80]}"
            raise UserError(problem, where=where, fix="set vision.media_dir to a folder that holds all pictures")
        # Files of a snapshot in the hub's cache are links into the repository's folder.
        root = os.path.realpath(base).partition(f"{os.sep}snapshots{os.sep}")[0]
        if os.path.commonpath([root, real := os.path.realpath(path)]) != root:
            fix = "copy it there; or write absolute paths, and set vision.media_dir to the folder that holds them"
            problem = f"the picture is a link out of the folder of pictures {base}: {address[:80]} leads to {real}"
            raise UserError(problem, where=where, fix=fix)
        return pathlib.Path(path)

    def _store(self, data: bytes, where: str) -> Picture:
        """The picture of some bytes, as a file of the cache."""
        width, height = read_size(data, where)
        digest = picture_digest(data)
        path = pathlib.Path(self.cache, digest[:2], digest)
        if not path.exists() or path.stat().st_size != len(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(draft, path)
        return Picture(str(path), digest, width, height)


def data_of_uri(address: str, where: str) -> bytes:
    """The bytes in a data URI. Raises UserError where it is none of a picture in base64, or too long."""
    header = _DATA_URI.match(address)
    if header is None:
        problem = f"not a data URI of a picture: {address[:40]}"
        raise UserError(problem, where=where, fix="write data:image/png;base64,... (or jpeg, webp)")
    if len(address) > MAX_BYTES * 4 // 3 + 256:
        raise UserError(f"the picture has more than {MAX_BYTES:,} bytes", where=where, fix=_SMALLER)
    try:
        return base64.b64decode(address[header.end() :], validate=True)
    except binascii.Error as problem:
        raise UserError(f"the data URI is not base64: {problem}", where=where, fix="encode it again") from problem


@functools.lru_cache(maxsize=1 << 16)
def _check_file(path: pathlib.Path, _status: tuple[int, ...]) -> Picture:
    """The picture of a file, remembered in this process until the file is written to."""
    data = read_file(path, str(path))
    width, height = read_size(data, str(path))
    return Picture(str(path), picture_digest(data), width, height)


def read_file(path: pathlib.Path, where: str) -> bytes:
    """The bytes of a file of at most MAX_BYTES. Raises UserError for a larger one, OSError as opening does."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"the picture has more than {MAX_BYTES:,} bytes: {path}", where=where, fix=_SMALLER)
    return data


def picture_digest(data: bytes) -> str:
    """The digest of a picture's file."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load_picture(picture: Picture, where: str) -> Image:
    """The decoded picture of a file that was checked. Raises UserError where the file has changed since, and as
    `decode_picture`."""
    try:
        data = read_file(pathlib.Path(picture.path), where)
    except OSError as problem:
        message = f"the picture cannot be read any more: {problem.strerror or problem}: {picture.path}"
        raise UserError(message, where=where, fix="put it back; pictures are read while training") from problem
    if picture_digest(data) != picture.digest:
        message = f"the picture has changed since the data were prepared: {picture.path}"
        raise UserError(message, where=where, fix="put it back, or start a new run, which prepares the data again")
    return decode_picture(data, f"{where}, {picture.path}")


def thumbnail(image: Image, side: int = 160) -> str:
    """A small JPEG of a picture, `side` pixels at most, as a data URI: a page that shows it does not read the file."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((side, side))
    small.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def open_pictures(sample: Sample, files: PictureFiles | None, folder: str | None) -> Sample:
    """The sample with its pictures checked. Raises UserError as `PictureFiles.open`, for a mark without a picture, and
    for pictures where `files` is None, since the recipe reads text only."""
    if files is None:
        return map_documents(sample, _check_no_pictures)
    return map_documents(sample, lambda document: _open_document(document, files, folder))


def _check_no_pictures(document: Document) -> Document:
    if isinstance(document, Conversation) and any(message.pictures for message in document.messages):
        raise UserError(
            "the record has pictures, and the recipe reads text only",
            where=str(document.origin),
            fix="set vision: {} with a model that sees; or columns: {images: null} to train without them, and remove "
            "parts that are pictures",
        )
    return document


def _open_document(document: Document, files: PictureFiles, folder: str | None) -> Document:
    if not isinstance(document, Conversation):
        return document
    check_no_mark(document)
    if not any(message.pictures for message in document.messages):
        return document
    messages = []
    for index, message in enumerate(document.messages):
        placed = []
        for number, place in enumerate(message.pictures):
            where = f"{document.origin}, turn {index}, picture {number}"
            assert isinstance(place.picture, str | bytes)
            placed.append(PlacedPicture(place.offset, files.open(place.picture, folder, where)))
        messages.append(dataclasses.replace(message, pictures=tuple(placed)) if placed else message)
    return dataclasses.replace(document, messages=tuple(messages))
