"""Converts a sentencepiece model file (tokenizer.model) to a fast tokenizer, without the sentencepiece package.

The file is one protocol buffer, sentencepiece_model.proto of https://github.com/google/sentencepiece (Apache 2.0); its
fields are read by their tags. Only byte pair encoding (BPE) is supported.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2
SPACE = "\u2581"  # the character that stands for a space in pieces


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The content of a model file: (piece, score, type) by id, and how text is normalised."""

    pieces: list[tuple[str, float, int]]
    algorithm: int
    byte_fallback: bool
    character_map: bytes
    dummy_prefix: bool
    single_spaces: bool
    escaped_spaces: bool

    def ids(self, *types: int) -> list[int]:
        """The ids of all pieces of these types."""
        return [id_ for id_, (_, _, piece_type) in enumerate(self.pieces) if piece_type in types]


def read_pieces(file: pathlib.Path) -> Pieces:
    """Reads the pieces of a file. Raises UserError where it is not a sentencepiece model, or is truncated."""
    try:
        fields = list(_fields(memoryview(file.read_bytes())))
        pieces = [_piece(value) for tag, value in fields if tag == 1]
        trainer = dict(_fields(next(value for tag, value in fields if tag == 2)))
        normalizer = dict(_fields(next(value for tag, value in fields if tag == 3)))
    except (ValueError, IndexError, struct.error, StopIteration, TypeError, OSError) as problem:
        raise UserError(
            f"this is not a complete sentencepiece model: {problem or type(problem).__name__}",
            where=str(file),
            fix="download tokenizer.model again (a small text file is a pointer of Git LFS)",
        ) from problem
    if not pieces:
        raise UserError("this sentencepiece model has no pieces", where=str(file), fix="download it again")
    return Pieces(
        pieces,
        algorithm=trainer.get(3, 1),
        byte_fallback=bool(trainer.get(35, 0)),
        character_map=bytes(normalizer.get(2, b"")),
        dummy_prefix=bool(normalizer.get(3, 1)),
        single_spaces=bool(normalizer.get(4, 1)),
        escaped_spaces=bool(normalizer.get(5, 1)),
    )


def fast_tokenizer(model: Pieces, where: str) -> Tokenizer:
    """A tokenizer that produces the same ids as sentencepiece. User-defined pieces are matched in the text first.

    Each stretch of text between such pieces is normalised as if it had been encoded alone. Raises UserError for models
    that are not byte pair encoding.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    if model.algorithm != BPE or model.ids(UNUSED):
        raise UserError(
            "only sentencepiece models of byte pair encoding, without unused pieces, have a fast version",
            where=where,
            fix="save the tokenizer once with transformers as a fast one, so that there is a tokenizer.json",
        )
    vocabulary = {piece: id_ for id_, (piece, _, _) in enumerate(model.pieces)}
    unknown = next(iter(model.ids(UNKNOWN)), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(model),
            unk_token=None if unknown is None else model.pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.character_map)] if model.character_map else []
    if model.single_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.escaped_spaces:
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    decoding: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)  # pyright: ignore[reportAttributeAccessIssue]
    controls = [AddedToken(model.pieces[id_][0], special=True, normalized=False) for id_ in model.ids(CONTROL, UNKNOWN)]
    defined = [model.pieces[id_][0] for id_ in model.ids(USER_DEFINED)]
    tokenizer.add_special_tokens(controls)
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=SPACE in piece) for piece in defined])
    return tokenizer


def _merges(model: Pieces) -> list[tuple[str, str]]:
    """Pairs of pieces that merge into a piece, in the order in which sentencepiece merges: the best score first."""
    scores = {
        piece: (score, id_) for id_, (piece, score, piece_type) in enumerate(model.pieces) if piece_type == NORMAL
    }
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, (score, id_) in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((-score, id_, cut, left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _piece(message: Any) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    if not math.isfinite(score):
        raise ValueError("a piece's score is not a number")
    return bytes(fields[1]).decode("utf-8"), score, fields.get(3, NORMAL)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """(tag, value) of each field of a protocol buffer: integers as such, everything else as bytes."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        tag, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, offset = _varint(message, offset)
            yield tag, value
            continue
        if wire_type == 2:
            size, offset = _varint(message, offset)
        else:
            size = {1: 8, 5: 4}.get(wire_type, -1)
        if size < 0 or offset + size > len(message):
            raise ValueError("a field extends beyond the end of the file")
        yield tag, message[offset : offset + size]
        offset += size


def _varint(message: memoryview, offset: int) -> tuple[int, int]:
    """The variable-length integer at `offset`, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
        if shift > 63:
            raise ValueError("an integer is too long")
