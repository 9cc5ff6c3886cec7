"""The arrays of pictures in packed rows, decoded as rows are filled."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.arrays.batch import empty_arrays, row_patches
from meshtune.data.pictures.expansion import DocumentPicture, read_pictures
from meshtune.data.pictures.files import load_picture
from meshtune.data.pictures.positions import mrope_positions, prefix_reach, reach_positions
from meshtune.data.pictures.reader import PictureReader
from meshtune.data.store import Store
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.answered_prompts import AnsweredPrompts
    from meshtune.data.conversation import Origin
    from meshtune.data.packing import PackedRows
    from meshtune.data.tokens import Example

# Pictures that a process decodes at once, each in the memory of all its pixels. Pillow frees the interpreter meanwhile.
DECODERS = min(8, os.cpu_count() or 1)
SAVING = 0.1  # the share of an epoch's patches that one more compiled program must save


@functools.cache
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(DECODERS, "pictures")


def patch_counts(reader: PictureReader, store: Store | AnsweredPrompts) -> np.ndarray:
    """The patches of each document or prompt of a store, int64 [documents]."""
    counts, documents = np.zeros(len(store), np.int64), np.arange(len(store))
    if isinstance(store, Store):
        documents = np.flatnonzero(store.column("extra_lengths"))
    for document in documents.tolist():
        pictures = read_pictures(store[document].extra)
        counts[document] = sum(reader.layout(*item.picture.size).patches for item in pictures)
    return counts


class Segment(NamedTuple):
    """The tokens of a document with these pictures, from `start` up to, not including, `stop`, as a segment of a row.

    Pictures before `start` are in another segment, which this one continues."""

    pictures: Sequence[DocumentPicture]
    stop: int
    origin: Origin
    start: int = 0


@dataclasses.dataclass(frozen=True)
class RowPictures:
    """Makes the arrays of pictures. `sizes` are the numbers of patches that rows of a batch may have, the largest
    first: a program is compiled for each. 0: a batch without pictures has no arrays of them; else it has empty ones.
    `patches` int64 [units] are those of each unit.
    """

    reader: PictureReader
    sizes: tuple[int, ...]
    patches: np.ndarray

    def arrays(self, rows: Sequence[Sequence[Example]], length: int) -> dict[str, np.ndarray]:
        """The arrays of rows with these examples (see `segment_arrays`)."""
        return self.segment_arrays(
            [
                [Segment(read_pictures(example.extra), len(example.ids) - 1, example.origin) for example in examples]
                for examples in rows
            ],  # the last token is only a target
            length,
        )

    def with_sizes(self, rows: PackedRows, batch_size: int) -> RowPictures:
        """The same with the numbers of patches that suit the batches of `batch_size` of these rows."""
        per_row = np.add.reduceat(self.patches[rows.documents], rows.starts[:-1])
        padding = np.zeros(-len(per_row) % batch_size, np.int64)
        needed = np.concatenate([per_row, padding]).reshape(-1, batch_size).max(1)
        return dataclasses.replace(self, sizes=_batch_sizes(self.reader, self.sizes[0], needed))

    def empty_arrays(self, rows: int, length: int, patches: int) -> dict[str, np.ndarray]:
        """Zeros for the arrays of `rows` rows of `length` tokens with `patches` patches each; none for 0 patches."""
        if not patches:
            return {}
        reader = self.reader
        sizes = {"batch": rows, "length": length, "patches": patches, "pixels": reader.pixels, "grid": 4, "axes": 3}
        names = ["patches", "patch_segments", "patch_grid", "visual"]
        return empty_arrays([*names, *["mrope_positions"] * reader.mrope, *["reach"] * reader.reach], sizes)

    def batches(self, arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """A batch of every shape that batches may have, those with the most patches first: with empty arrays of
        pictures, and otherwise with `arrays`, each [A, B, ..]."""
        accumulation, rows, length = arrays["tokens"].shape
        names = self.empty_arrays(1, 1, 1).keys()
        others = {name: array for name, array in arrays.items() if name not in names}
        for size in self.sizes:
            empty = self.empty_arrays(accumulation * rows, length, size)
            yield others | {name: a.reshape(accumulation, rows, *a.shape[1:]) for name, a in empty.items()}

    def segment_arrays(self, rows: Sequence[Sequence[Segment]], length: int) -> dict[str, np.ndarray]:
        """patches, patch_segments, patch_grid and visual (see arrays.batch) of rows of `length` tokens with these
        segments, and what else the model reads; nothing for rows without pictures, if `sizes` say so.

        Raises UserError, naming the record, for a picture that is damaged, was changed or is gone.
        """
        placed = [list(_pictures_of(segments)) for segments in rows]
        needed = max((self.count([item for *_, item in row]) for row in placed), default=0)
        arrays = self.empty_arrays(len(rows), length, min(size for size in self.sizes if size >= needed))
        if not arrays:
            return {}
        reader, decoded = self.reader, self._decode(placed)
        for row, pictures in enumerate(placed):
            patch = tile = 0
            for document, begin, item in pictures:
                patches, segments, grid = decoded[item.picture.digest]
                layout = reader.layout(*item.picture.size)
                assert len(patches) == layout.patches, f"{item.picture}: {len(patches)} patches, not {layout.patches}"
                span = slice(patch, patch + len(patches))
                arrays["patches"][row, span] = patches
                arrays["patch_segments"][row, span] = segments + tile
                arrays["patch_grid"][row, span] = grid
                start = begin + item.start - document.start
                end = min(start + len(layout.ids), begin + document.stop - document.start)
                first = patch // reader.merge**2
                visual = layout.visual[: end - start]
                arrays["visual"][row, start:end] = np.where(visual > 0, visual + first, visual)
                patch, tile = patch + len(patches), tile + int(segments[-1])
        self._fill_positions(arrays, rows)
        return arrays

    def _decode(
        self, rows: Sequence[Sequence[tuple[Segment, int, DocumentPicture]]]
    ) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What the reader makes of every picture, by its digest: several at once, once each."""
        files = {item.picture.digest: (item.picture, str(doc.origin)) for row in rows for doc, _, item in row}
        patches = _decoders().map(lambda file: self.reader.patches(load_picture(*file)), files.values())
        return dict(zip(files, patches, strict=True))

    def count(self, pictures: Sequence[DocumentPicture]) -> int:
        """The number of patches of these pictures."""
        return sum(self.reader.layout(*item.picture.size).patches for item in pictures)

    def _fill_positions(self, arrays: dict[str, np.ndarray], rows: Sequence[Sequence[Segment]]) -> None:
        """Fills mrope_positions or reach, of models that read them."""
        reader = self.reader
        for row, segments in enumerate(rows if reader.mrope or reader.reach else ()):
            begin = 0
            for pictures, stop, _, start in segments:
                span = slice(begin, begin := begin + stop - start)
                if reader.mrope:
                    grids = [(item.start, reader.layout(*item.picture.size).grid) for item in pictures]
                    arrays["mrope_positions"][row, span] = mrope_positions(stop, grids)[start:]
                if reader.reach:
                    reach = reach_positions(arrays["visual"][row, span])
                    arrays["reach"][row, span] = np.where(reach, start + reach, 0)


def prompt_reach(rows: Sequence[Sequence[Example]], length: int) -> np.ndarray:
    """The array `reach`, int32 [rows, length], where tokens of a prompt, those before the first one with a weight, see
    each other."""
    reach = np.zeros((len(rows), length), np.int32)
    for row, examples in enumerate(rows):
        begin = 0
        for example in examples:
            count, weighted = len(example.ids) - 1, np.flatnonzero(example.weights)
            reach[row, begin : begin + count] = prefix_reach(count, int(weighted[0]) if len(weighted) else count)
            begin += count
    return reach


def _pictures_of(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int, DocumentPicture]]:
    """Each picture of a row with its segment, and the first position of that."""
    begin = 0
    for segment in segments:
        for item in segment.pictures:
            if item.start >= segment.start:
                yield segment, begin, item
        begin += segment.stop - segment.start


@dataclasses.dataclass(frozen=True)
class PictureCounts:
    """Counts of a split: its pictures with their patches and tokens, the `rows` of an epoch that have some, the numbers
    of patches that rows may have, and the share of patches that is used (of the smallest number that fits each row)."""

    pictures: int
    patches: int
    tokens: int
    rows: int
    sizes: tuple[int, ...]
    fill: float


def count_pictures(pictures: RowPictures, store: Store, rows: PackedRows) -> PictureCounts:
    """The counts of a store whose documents are packed in `rows`."""
    layouts = [
        pictures.reader.layout(*item.picture.size)
        for index in range(len(store))
        for item in read_pictures(store[index].extra)
    ]
    per_row = np.add.reduceat(pictures.patches[rows.documents], rows.starts[:-1])
    sizes = np.array(pictures.sizes)[::-1]
    chosen = sizes[np.searchsorted(sizes, per_row[per_row > 0])]
    return PictureCounts(
        len(layouts),
        sum(layout.patches for layout in layouts),
        sum(len(layout.ids) for layout in layouts),
        len(chosen),
        tuple(size for size in pictures.sizes if size),
        float(per_row.sum() / chosen.sum()),
    )


def row_pictures(
    reader: PictureReader, store: Store, unit_size: int, rows: PackedRows, max_patches: int | None
) -> RowPictures | None:
    """The maker of arrays of a store's pictures; None where it has none.

    Rows have `max_patches` at most (vision.max_patches), or enough for 95% of `rows`, which are packed by their
    tokens, and for the largest unit of `unit_size` documents. Raises UserError, naming the record, for a unit that no
    row has room for.
    """
    patches = patch_counts(reader, store).reshape(-1, unit_size).sum(1)
    largest = int(patches.max())
    if not largest:
        return None
    per_row = np.add.reduceat(patches[rows.documents], rows.starts[:-1])
    limit = max_patches or max(largest, int(np.quantile(per_row, 0.95)))
    size = row_patches(limit, reader.tile_patches, reader.merge)
    if largest > size:
        raise _no_room(largest, size, store.origin(int(np.argmax(patches)) * unit_size))
    return RowPictures(reader, (size,), patches)


def prompt_pictures(
    reader: PictureReader, store: Store | AnsweredPrompts, copies: int, prompts: int, max_patches: int | None
) -> RowPictures | None:
    """The maker of arrays of prompts with pictures, for updates of `prompts` prompts; None where none has one.

    Rows have `max_patches`, or enough for `copies` of the largest prompt. Raises UserError, naming the record, for a
    prompt that no row has room for.
    """
    patches = patch_counts(reader, store)
    largest = int(patches.max())
    if not largest:
        return None
    size = row_patches(max_patches or copies * largest, reader.tile_patches, reader.merge)
    if largest > size:
        raise _no_room(largest, size, store[int(np.argmax(patches))].origin)
    none_has_one = float(np.mean(patches == 0)) ** prompts
    return RowPictures(reader, (size, 0) if none_has_one >= SAVING else (size,), patches)


def _batch_sizes(reader: PictureReader, largest: int, needed: np.ndarray) -> tuple[int, ...]:
    """The numbers of patches that rows of a batch may have: the largest, half of it, and none, the latter two if they
    save enough in an epoch whose batches need `needed` int64 [batches]."""
    half = row_patches(-(-largest // 2), reader.tile_patches, reader.merge)
    has_plain = bool(np.mean(needed == 0) >= SAVING)
    halved = np.mean((needed <= half) & ((needed > 0) | (not has_plain)))
    return (largest, *[half] * bool(halved * (1 - half / largest) >= SAVING), *[0] * has_plain)


def _no_room(patches: int, room: int, origin: Origin) -> UserError:
    return UserError(
        f"the pictures of the record have {patches:,} patches, and a row has room for {room:,}",
        where=str(origin),
        fix=f"set vision.max_patches to {patches} or more, or vision.max_pixels to scale pictures down",
    )


def best_fit_of_two(
    sizes: np.ndarray, capacity: int, patches: np.ndarray, max_patches: int
) -> tuple[np.ndarray, list[int]]:
    """As `loader._best_fit_decreasing`, for documents that also take `patches`, of which a row has `max_patches`."""
    row_of = np.empty(len(sizes), np.int64)
    rooms, patch_rooms = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    openers: list[int] = []
    share = np.maximum(sizes / capacity, patches / max(max_patches, 1))  # of the scarcer room
    for document in np.argsort(-share, kind="stable").tolist():
        size, count, rows = int(sizes[document]), int(patches[document]), len(openers)
        fits = (rooms[:rows] >= size) & (patch_rooms[:rows] >= count)
        if fits.any():
            row = int(np.argmin(np.where(fits, rooms[:rows], capacity + 1)))
        else:
            row = rows
            openers.append(document)
            rooms[row], patch_rooms[row] = capacity, max_patches
        row_of[document] = row
        rooms[row] -= size
        patch_rooms[row] -= count
    return row_of, openers
