"""The arrays of pictures in packed rows, decoded as rows are filled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.arrays.batch import empty_arrays
from meshtune.data.pictures.expansion import DocumentPicture, read_pictures
from meshtune.data.pictures.files import load_picture
from meshtune.data.pictures.positions import mrope_positions, reach_positions
from meshtune.data.pictures.reader import PictureReader
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.loader import PackedRows
    from meshtune.data.store import Store
    from meshtune.data.tokens import Example

_LANES = 128  # a row's patches are a multiple of this where pictures have no tiles, for the attention's blocks


def patch_counts(reader: PictureReader, store: Store) -> np.ndarray:
    """The patches of each document of a store, int64 [documents]."""
    counts = np.zeros(len(store), np.int64)
    for document in np.flatnonzero(store.column("extra_lengths")).tolist():
        pictures = read_pictures(store[document].extra)
        counts[document] = sum(reader.layout(*item.picture.size).patches for item in pictures)
    return counts


@dataclasses.dataclass(frozen=True)
class RowPictures:
    """Makes the arrays of pictures. `sizes` are the numbers of patches that rows of a run may have, the largest first:
    a program is compiled for each, and one for rows without pictures. `patches` int64 [units] are those of each unit.
    """

    reader: PictureReader
    sizes: tuple[int, ...]
    patches: np.ndarray

    def arrays(self, rows: Sequence[Sequence[Example]], length: int) -> dict[str, np.ndarray]:
        """patches, patch_segments, patch_grid and visual (see arrays.batch) of rows of `length` tokens with these
        examples, and what else the model reads; nothing where no row has a picture.

        Raises UserError, naming the record, for a picture that is damaged, was changed or is gone.
        """
        placed = [list(_pictures_of(examples)) for examples in rows]
        needed = max((sum(self._patches(item) for *_, item in row) for row in placed), default=0)
        if needed == 0:
            return {}
        size = min(size for size in self.sizes if size >= needed)
        reader, decoded = self.reader, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]()
        axes = {"batch": len(rows), "length": length, "patches": size, "pixels": reader.pixels, "grid": 4}
        arrays = empty_arrays(["patches", "patch_segments", "patch_grid", "visual"], axes)
        for row, pictures in enumerate(placed):
            patch = segment = 0
            for example, begin, item in pictures:
                digest = item.picture.digest
                if digest not in decoded:
                    decoded[digest] = reader.patches(load_picture(item.picture, str(example.origin)))
                patches, segments, grid = decoded[digest]
                layout = reader.layout(*item.picture.size)
                assert len(patches) == layout.patches, f"{item.picture}: {len(patches)} patches, not {layout.patches}"
                span = slice(patch, patch + len(patches))
                arrays["patches"][row, span] = patches
                arrays["patch_segments"][row, span] = segments + segment
                arrays["patch_grid"][row, span] = grid
                start = begin + item.start
                end = min(start + len(layout.ids), begin + len(example.ids) - 1)  # the last token is only a target
                first = patch // reader.merge**2
                visual = layout.visual[: end - start]
                arrays["visual"][row, start:end] = np.where(visual > 0, visual + first, visual)
                patch, segment = patch + len(patches), segment + int(segments[-1])
        return arrays | self._positions(rows, arrays["visual"])

    def _patches(self, item: DocumentPicture) -> int:
        return self.reader.layout(*item.picture.size).patches

    def _positions(self, rows: Sequence[Sequence[Example]], visual: np.ndarray) -> dict[str, np.ndarray]:
        """mrope_positions or reach, of models that read them."""
        axes, reader = {"batch": len(rows), "length": visual.shape[1], "axes": 3}, self.reader
        arrays = empty_arrays(["mrope_positions"] * reader.mrope + ["reach"] * reader.reach, axes)
        for row, examples in enumerate(rows):
            begin = 0
            for example in examples:
                span = slice(begin, begin := begin + len(example.ids) - 1)
                if reader.mrope:
                    pictures = [
                        (item.start, reader.layout(*item.picture.size).grid) for item in read_pictures(example.extra)
                    ]
                    arrays["mrope_positions"][row, span] = mrope_positions(len(example.ids) - 1, pictures)
                if reader.reach:
                    arrays["reach"][row, span] = reach_positions(visual[row, span])
        return arrays


def _pictures_of(examples: Sequence[Example]) -> Iterator[tuple[Example, int, DocumentPicture]]:
    """Each picture of a row with its example, and the first position of that."""
    begin = 0
    for example in examples:
        for item in read_pictures(example.extra):
            yield example, begin, item
        begin += len(example.ids) - 1


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
        pictures.sizes,
        float(per_row.sum() / chosen.sum()),
    )


def row_pictures(
    reader: PictureReader, store: Store, unit_size: int, rows: PackedRows, max_patches: int | None
) -> RowPictures | None:
    """The maker of arrays of a store's pictures; None where it has none.

    Rows have `max_patches` at most (vision.max_patches), or enough for 95% of `rows`, which are packed by their
    tokens, and for the largest unit of `unit_size` documents; or half of that. Raises UserError, naming the record, for
    a unit that no row has room for.
    """
    patches = patch_counts(reader, store).reshape(-1, unit_size).sum(1)
    largest = int(patches.max())
    if not largest:
        return None
    per_row = np.add.reduceat(patches[rows.documents], rows.starts[:-1])
    row_limit = max_patches or max(largest, int(np.quantile(per_row, 0.95)))
    multiple = reader.tile_patches or (math.lcm(reader.merge**2, _LANES) if row_limit > _LANES else reader.merge**2)
    sizes = {-(-size // multiple) * multiple for size in (row_limit, -(-row_limit // 2))}
    if largest > max(sizes):
        index = int(np.argmax(patches))
        raise UserError(
            f"the pictures of the record have {largest:,} patches, and a row has room for {max(sizes):,}",
            where=str(store.origin(index * unit_size)),
            fix=f"set vision.max_patches to {largest} or more, or vision.max_pixels to scale pictures down",
        )
    return RowPictures(reader, tuple(sorted(sizes, reverse=True)), patches)


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
