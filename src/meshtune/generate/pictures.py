"""The pictures of a prompt: read from messages, their patches, and the tokens whose embeddings are features."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.conversation import Picture
    from meshtune.data.pictures.reader import PictureLayout, PictureReader


class PatchArrays(NamedTuple):
    """The patches of a picture, the tile (from 1) that each is in, and its place (row, column, rows, columns) there."""

    patches: Float[np.ndarray, "P K"]
    segments: Int[np.ndarray, "P"]
    grid: Int[np.ndarray, "P 4"]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedPicture:
    """A picture as a model takes it: its tokens, and its P patches.

    `digest` (hexadecimal) is that of the picture, `size` its width and height. `read` gives the patches once their
    features are to be computed.
    """

    digest: str
    size: tuple[int, int]
    layout: PictureLayout
    read: Callable[[], PatchArrays]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture whose first token is at position `start` of a prompt."""

    start: int
    loaded: LoadedPicture

    @property
    def visual(self) -> Int[np.ndarray, "n"]:
        """The feature of each of its tokens: k + 1 for feature k of the picture, -1 for the model's vector after a row
        of features, 0 for the token's own embedding."""
        return self.loaded.layout.visual

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.visual)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of a prompt of L tokens, in their order; there may be none where tokens see later ones.

    `rope_positions` are those of M-RoPE, and `offset` is the difference of such a position and a token's place after
    the prompt. `reach` is the last position that each token sees, 0 its own. None: the model has no such thing.
    """

    pictures: tuple[PromptPicture, ...]
    rope_positions: Int[np.ndarray, "L 3"] | None = None
    offset: int = 0
    reach: Int[np.ndarray, "L"] | None = None

    @cached_property
    def end(self) -> int:
        """The position after the last picture's last token."""
        return self.pictures[-1].end if self.pictures else 0

    @property
    def patches(self) -> int:
        """The number of patches."""
        return sum(picture.loaded.layout.patches for picture in self.pictures)

    def keys(self, ids: Sequence[int]) -> list[int]:
        """The prompt's ids, with a negative number for each token whose embedding is a feature. It is made of the
        picture and the place in it, so a cache of such a token serves the same place of the same picture only. So it is
        with each token of a prompt that sees its end."""
        keys = list(ids)
        for picture in self.pictures:
            number = int(picture.loaded.digest, 16) << 32
            for place in np.flatnonzero(picture.visual):
                keys[picture.start + place] = -1 - (number + int(place))
        if self.prefix:
            number = int(hashlib.sha256(repr(keys).encode()).hexdigest(), 16) << 32
            return [-1 - (number + place) for place in range(len(keys))]
        return keys

    @property
    def prefix(self) -> bool:
        """Whether all tokens of the prompt see each other."""
        return self.reach is not None and int(self.reach[0]) == len(self.reach) - 1

    def first_after(self, position: int) -> int:
        """The number of the first picture that has a token at or after this position."""
        return next(n for n, picture in enumerate(self.pictures) if picture.end > position)

    def index(self, first: int, start: int, end: int) -> Int[np.ndarray, "T"]:
        """The features of the tokens from `start` to `end`, numbered as in `PromptPicture.visual`, among all features
        of the pictures from number `first` on."""
        index, before = np.zeros(max(end, self.end), np.int32), 0
        for picture in self.pictures[first:]:
            visual = picture.visual
            index[picture.start : picture.end] = np.where(visual > 0, visual + before, visual)
            before += picture.loaded.layout.features
        return index[start:end]

    def read(self, first: int) -> PatchArrays:
        """The patches of the pictures from number `first` on; no two pictures share a tile."""
        arrays, before = list[PatchArrays](), 0
        for picture in self.pictures[first:]:
            patches, segments, grid = picture.loaded.read()
            arrays.append(PatchArrays(patches, segments + before, grid))
            before = int(arrays[-1].segments.max())
        return PatchArrays(*map(np.concatenate, zip(*arrays, strict=True)))

    def rope_from(self, start: int, end: int) -> Int[np.ndarray, "T 3"] | None:
        """The M-RoPE positions of the tokens from `start` to `end`, some of which may be after the prompt."""
        if self.rope_positions is None:
            return None
        after = np.arange(len(self.rope_positions), max(end, len(self.rope_positions)))[:, None] + self.offset
        return np.concatenate([self.rope_positions, np.broadcast_to(after, (len(after), 3))])[start:end].astype(
            np.int32
        )

    def reach_from(self, start: int, end: int) -> Int[np.ndarray, "T"] | None:
        """The last position that each token from `start` to `end` sees."""
        if self.reach is None:
            return None
        return np.pad(self.reach, (0, max(0, end - len(self.reach))))[start:end]

    def piece_end(self, end: int) -> int:
        """The end of a piece that would end here, but not inside a run of tokens that see each other both ways."""
        return end if self.reach is None or not 0 < end <= len(self.reach) else max(end, int(self.reach[end - 1]) + 1)


class TokenPrompt(NamedTuple):
    """The ids of a prompt, with its pictures."""

    ids: list[int]
    pictures: PromptPictures | None = None


Messages = Sequence[Mapping[str, object]]
_KEYS = ("image", "image_url", "url", "path")
_PARTS = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text")


def split_pictures(messages: Messages) -> tuple[list[dict[str, object]], list[object]]:
    """(messages as chat templates read them, the pictures of their parts in order). Content of text only becomes one
    text. Raises UserError for parts that are neither text nor pictures."""
    pictures: list[object] = []
    plain: list[dict[str, object]] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            plain.append(dict(message))
            continue
        before, parts = len(pictures), []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _TEXTS and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind in _PARTS:
                pictures.append(_source(part))
                parts.append({"type": "image"})
            else:
                raise UserError(
                    f"a part of type {kind!r} is neither text nor a picture",
                    where=f"message {number}, field content",
                    fix='write {"type": "text", "text": ...} or {"type": "image", "image": FILE}; frames of a video',
                )
        text = "".join(str(part.get("text", "")) for part in parts)
        plain.append({**message, "content": parts if len(pictures) > before else text})
    return plain, pictures


def text_only() -> UserError:
    """The error for a picture where the model has no tower for it."""
    fix = "leave the picture out, or give a model that sees (`meshtune families` lists them)"
    return UserError("there is a picture, and this model reads text only", where="messages", fix=fix)


def _source(part: Mapping[str, object]) -> object:
    value = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    return value.get("url") if isinstance(value, Mapping) else value


def picture_file(source: str | os.PathLike[str], where: str) -> bytes:
    """The bytes of a picture's file, by its path or in a data URI. Raises UserError for an address: none is fetched."""
    from meshtune.data.pictures import files

    if isinstance(source, str) and source[:5].lower() == "data:":
        return files.data_of_uri(source, where)
    if isinstance(source, str) and re.match(r"(?i)[a-z][a-z0-9+.-]*://", source):
        raise UserError(
            f"addresses of pictures are never fetched: {source[:80]}",
            where=where,
            fix="download the picture, and give its file or a data URI (data:image/png;base64,...)",
        )
    path = pathlib.Path(source).expanduser()
    try:
        return files.read_file(path, where)
    except OSError as problem:
        message = f"the picture cannot be read: {problem.strerror or problem}: {path}"
        raise UserError(message, where=where, fix="check the path") from problem


def load_picture(reader: PictureReader, source: Any, where: str) -> LoadedPicture:
    """A picture as the model takes it, from its path, a data URI, the bytes of its file or a PIL image.

    Raises UserError, naming `where`, for an address (none is fetched), a file that is missing or is no picture that can
    be read, and one that the model cannot take.
    """
    from meshtune.data.pictures import files

    if isinstance(source, LoadedPicture):
        return source
    if isinstance(source, str | os.PathLike):
        name, source = str(source), picture_file(source, where)
        where = where if name[:5].lower() == "data:" else f"{where}, {name}"
    if isinstance(source, bytes):
        image, digest = files.decode_picture(source, where), files.picture_digest(source)
    elif isinstance(source, files.pillow().Image.Image):
        image = source.convert("RGB")
        digest = files.picture_digest(repr(image.size).encode() + image.tobytes())
    else:
        fix = "give the path of a file, its bytes, a data URI or a PIL image"
        raise UserError(f"a picture is no {type(source).__name__}", where=where, fix=fix)
    try:
        layout, arrays = reader.layout(*image.size), PatchArrays(*reader.patches(image))
        return LoadedPicture(digest, image.size, layout, lambda: arrays)
    except UserError as problem:
        raise UserError(problem.what, where=problem.where or where, fix=problem.fix) from problem


def load_parts(
    reader: PictureReader, prompt: str | Sequence[Mapping[str, str]], folder: str, where: str
) -> str | list[Mapping[str, object]]:
    """A message's content with its pictures, whose paths are below `folder`. Raises UserError as `load_picture`."""
    if isinstance(prompt, str):
        return prompt
    return [
        {**part, "image": load_picture(reader, os.path.join(folder, str(_source(part))), where)}
        if part.get("type") in _PARTS
        else part
        for part in prompt
    ]


def picture_paths(prompt: Sequence[Mapping[str, str]]) -> list[str]:
    """The files of the pictures in a message's content."""
    return [str(_source(part)) for part in prompt if part.get("type") in _PARTS]


def thumbnails(prompt: str | Sequence[Mapping[str, str]], folder: str, where: str) -> tuple[str, ...]:
    """The pictures of a message's content, small and as data URIs. Raises UserError as `load_picture`."""
    from meshtune.data.pictures.files import decode_picture, thumbnail

    paths = [] if isinstance(prompt, str) else picture_paths(prompt)
    files = (picture_file(os.path.join(folder, path), where) for path in paths)
    return tuple(thumbnail(decode_picture(file, where)) for file in files)


def prompt_words(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """A message's content as text, with a mark in the place of each picture."""
    return prompt if isinstance(prompt, str) else "".join(part.get("text", "<image>") for part in prompt)


def record_picture(reader: PictureReader, picture: Picture, where: str) -> LoadedPicture:
    """The picture of a record, whose file is read when its features are computed."""
    from meshtune.data.pictures.files import load_picture

    def read() -> PatchArrays:
        return PatchArrays(*reader.patches(load_picture(picture, where)))

    return LoadedPicture(picture.digest, picture.size, reader.layout(*picture.size), read)


def insert_pictures(reader: PictureReader, ids: Sequence[int], pictures: Sequence[LoadedPicture]) -> TokenPrompt:
    """A prompt with the tokens of each picture in the place of its placeholder. Raises UserError where there are other
    placeholders than those of the pictures."""
    from meshtune.data.pictures.expansion import expand

    expanded = expand(reader, np.asarray(ids), [picture.size for picture in pictures], "messages")
    tokens = expanded.ids.tolist()
    if not pictures:
        return TokenPrompt(tokens)
    placed = [PromptPicture(start, picture) for start, picture in zip(expanded.starts, pictures, strict=True)]
    return TokenPrompt(tokens, place_pictures(reader, len(tokens), placed))


def with_prefix(pictures: PromptPictures | None, length: int) -> PromptPictures:
    """The pictures, or none, of a text whose first `length` tokens, its prompt, see each other both ways."""
    from meshtune.data.pictures.positions import prefix_reach

    return dataclasses.replace(pictures or PromptPictures(()), reach=prefix_reach(length, length))


def place_pictures(reader: PictureReader, length: int, placed: Sequence[PromptPicture]) -> PromptPictures:
    """The pictures, at least one, of a prompt of `length` tokens in which theirs are already."""
    from meshtune.data.pictures.positions import mrope_positions, reach_positions

    pictures, rope, offset = PromptPictures(tuple(placed)), None, 0
    if reader.mrope:
        rope = mrope_positions(length, [(picture.start, picture.loaded.layout.grid) for picture in placed])
        offset = int(rope[-1].max()) + 1 - length
    reach = reach_positions(pictures.index(0, 0, length)) if reader.reach else None
    return PromptPictures(tuple(placed), rope, offset, reach)
