"""Pictures in tokenised texts: placeholders become their tokens, and documents are cut between pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from meshtune.data.conversation import Conversation, Document, Picture
from meshtune.data.pictures.reader import PictureReader
from meshtune.errors import UserError, amount


@dataclasses.dataclass(frozen=True)
class DocumentPicture:
    """A picture of a tokenised document, whose tokens begin at position `start`."""

    picture: Picture
    start: int


def picture_rows(pictures: Sequence[DocumentPicture]) -> list[list[str | int]]:
    """The pictures of a document as JSON can hold them."""
    return [[p.picture.path, p.picture.digest, p.picture.width, p.picture.height, p.start] for p in pictures]


def write_pictures(pictures: Sequence[DocumentPicture]) -> bytes:
    """The pictures of a document as JSON, for its store."""
    return json.dumps(picture_rows(pictures), ensure_ascii=False).encode() if pictures else b""


def read_pictures(extra: bytes) -> list[DocumentPicture]:
    """The pictures of a document, as `write_pictures` wrote them, or of a prompt (see tokens.Tokenize.prompts)."""
    rows = json.loads(extra) if extra else []
    rows = rows.get("pictures", []) if isinstance(rows, dict) else rows
    return [DocumentPicture(Picture(*row[:4]), row[4]) for row in rows]


@dataclasses.dataclass(frozen=True)
class Expanded:
    """Ids int32 [n] with the tokens of pictures in place of their placeholders, and the `starts` of pictures in them.

    `visual` int32 [n] is 0 for text, k + 1 for feature k of all pictures together, or NEWLINE. `sources` int64 [n] are
    the positions before of the tokens, `places` int64 [tokens + 1] the new position of each token before, and of the
    end. `unweighted` bool [n] are the tokens of pictures, and each that follows a feature.
    """

    ids: np.ndarray
    visual: np.ndarray
    starts: list[int]
    sources: np.ndarray
    places: np.ndarray
    unweighted: np.ndarray


def expand(reader: PictureReader, ids: np.ndarray, sizes: Sequence[tuple[int, int]], where: str) -> Expanded:
    """Puts the tokens of pictures of these `sizes` (width and height) in place of the placeholders among `ids`.

    Raises UserError, naming `where`, if there are more or fewer placeholders than pictures.
    """
    placeholders = np.flatnonzero(ids == reader.placeholder_id)
    if len(placeholders) != len(sizes):
        places = amount(len(placeholders), "place")
        problem = f"the tokens have {places} for {amount(len(sizes), 'picture')}"
        fix = f"remove {reader.placeholder} from the text, or use the chat template of the model"
        raise UserError(problem, where=where, fix=fix)
    layouts = [reader.layout(*size) for size in sizes]
    lengths = np.ones(len(ids), np.int64)
    lengths[placeholders] = [len(layout.ids) for layout in layouts]
    places = np.concatenate([[0], np.cumsum(lengths)])
    sources = np.repeat(np.arange(len(ids)), lengths)
    expanded, visual = ids[sources].astype(np.int32), np.zeros(len(sources), np.int32)
    starts, features = places[placeholders].tolist(), 0
    for start, layout in zip(starts, layouts, strict=True):
        end = start + len(layout.ids)
        expanded[start:end] = layout.ids
        visual[start:end] = np.where(layout.visual > 0, layout.visual + features, layout.visual)
        features += layout.features
    is_picture = lengths[sources] > 1
    is_picture[starts] = True
    unweighted = is_picture | np.concatenate([[False], visual[:-1] != 0])
    return Expanded(expanded, visual, starts, sources, places, unweighted)


def expand_document(
    reader: PictureReader, document: Conversation, ids: np.ndarray, weights: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[DocumentPicture]]:
    """A tokenised conversation (see tokens.Tokenised) with the tokens of its pictures, of which neither these nor what
    follows a feature have a weight. Raises UserError as `expand`."""
    pictures = document.pictures
    expanded = expand(reader, ids, [picture.size for picture in pictures], str(document.origin))
    weights = weights[expanded.sources]
    weights[expanded.unweighted] = 0
    placed = [DocumentPicture(picture, start) for picture, start in zip(pictures, expanded.starts, strict=True)]
    return expanded.ids, weights, expanded.places[answers], placed


def expand_prompt(
    reader: PictureReader, document: Conversation, ids: np.ndarray
) -> tuple[np.ndarray, list[DocumentPicture]]:
    """The ids of a prompt with the tokens of its pictures, and these. Raises UserError as `expand`, and for a prompt
    that ends with a picture: an answer is drawn after a token of text."""
    where, pictures = str(document.origin), document.pictures
    expanded = expand(reader, ids, [picture.size for picture in pictures], where)
    if ids[-1] == reader.placeholder_id:
        fix = "write a word after it, or use a chat template that begins the answer"
        raise UserError("the prompt ends with a picture", where=where, fix=fix)
    return expanded.ids, [DocumentPicture(*placed) for placed in zip(pictures, expanded.starts, strict=True)]


def check_placeholders(reader: PictureReader, document: Document) -> None:
    """Raises UserError for words of a document that stand for pictures, and for a picture the model cannot take."""
    is_chat = isinstance(document, Conversation)
    texts = [message.content for message in document.messages] if is_chat else [document.prompt, document.text]
    for index, text in enumerate(texts):
        token = next((token for token in reader.reserved if token in text), None)
        if token is not None:
            raise UserError(
                f"the text of turn {index} has {token}, which stands for a picture",
                where=str(document.origin),
                fix="remove it: give the picture under images or as a part; or write the word in another way",
            )
    if reader.prefix and is_chat and any(m.role != "assistant" and m.weight for m in document.messages):
        raise UserError(
            "a turn of the prompt has a weight, and this model reads its prompt both ways: there is nothing to predict",
            where=str(document.origin),
            fix="leave the weight out",
        )
    for picture in document.pictures if isinstance(document, Conversation) else ():
        try:
            reader.layout(*picture.size)
        except UserError as problem:
            raise UserError(problem.what, where=str(document.origin), fix=problem.fix) from problem


def keep_complete(
    reader: PictureReader, ids: np.ndarray, positions: np.ndarray, pictures: Sequence[DocumentPicture]
) -> tuple[np.ndarray, list[DocumentPicture]]:
    """The selected `positions` of a document without pictures that lost a token, and the other pictures with their new
    places. The tokens that the template frames a picture with go with it."""
    selected = np.zeros(len(ids), bool)
    selected[positions] = True
    left = []
    for item in pictures:
        end = item.start + len(reader.layout(*item.picture.size).ids)
        before, after = reader.frame
        first = item.start - (item.start > 0 and before is not None and ids[item.start - 1] == before)
        last = end + (end < len(ids) and after is not None and ids[end] == after)
        if selected[item.start : end].all():
            left.append(item)
        else:
            selected[first:last] = False
    new_places = np.cumsum(selected) - 1
    return np.flatnonzero(selected), [DocumentPicture(item.picture, int(new_places[item.start])) for item in left]
