"""Tensors of files as views of arrays: slices, transposes, and shapes that refine other shapes.

Checking, loading, exporting and verifying read the same table, so that a family states its layout of files once. A
`View` covers fused projections, interleaved and transposed experts and rows in another order; a leaf may be made of
many tensors (layers, experts), and a tensor may hold parts of several leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, stack_path
from meshtune.families.expert_layout import STRAIGHT, ExpertLayout
from meshtune.model.spec import PROJECTOR, VISION, ModelSpec, abstract_params

Shape = tuple[int, ...]


def split_dimensions(fine: Shape, coarse: Shape) -> tuple[tuple[int, ...], ...]:
    """For each dimension of a shape, the positions in the finer shape that it is divided into."""
    groups = groups_of(fine, coarse)
    assert groups is not None, f"{fine} does not refine {coarse}"
    return groups


def groups_of(fine: Shape, coarse: Shape) -> tuple[tuple[int, ...], ...] | None:
    """The positions in `fine` whose product is each dimension of `coarse`; None where they do not fit."""

    def of_each() -> Iterator[tuple[int, ...]]:
        at = 0
        for n, size in enumerate(coarse):
            first, product = at, 1
            while at < len(fine) and product * fine[at] <= size and (product < size or n == len(coarse) - 1):
                product *= fine[at]
                at += 1
            if product != size:
                return
            yield tuple(range(first, at))
        if all(n == 1 for n in fine[at:]):
            yield ()

    groups = tuple(of_each())
    return groups[:-1] if len(groups) == len(coarse) + 1 else None


Range = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class View:
    """Part of a tensor, rearranged: `tensor.reshape(split_shape)[take][rows].transpose(order).reshape(shape)`.

    `split_shape` refines the tensor's own shape, `take` is (start, stop, step) for each of its dimensions, `rows` puts
    the elements of the first dimension in another order (None: unchanged), `order` permutes dimensions, and `shape`
    merges neighbouring ones. Built from `View.identity(shape)` by its methods, in this order:

        View.identity((3 * H * h, D)).split(3, H, h, D).transpose(1, 0, 2, 3).merge(3 * H * h, D)   rows head by head
        View.identity((2 * F, D)).split(2, F, D).slice(0, 1, 2).merge(F, D)                         the second half
        View.identity((6 * h, D)).split(6, h, D).permute(0, 1, 4, 2, 3, 5).merge(6 * h, D)                q q k | q q k
        View.identity((E, D, 2 * F)).split(E, D, F, 2).slice(3, 0, 1).transpose(0, 2, 3, 1).merge(E, F, D)
    """

    tensor: Shape
    split_shape: Shape
    take: tuple[Range, ...]
    order: tuple[int, ...]
    shape: Shape
    rows: tuple[int, ...] | None = None

    def __post_init__(self):
        assert math.prod(self.tensor) == math.prod(self.split_shape), (self.tensor, self.split_shape)
        assert groups_of(self.split_shape, self.tensor) is not None, f"{self.split_shape} does not refine {self.tensor}"
        for n, (start, stop, step) in zip(self.split_shape, self.take, strict=True):
            assert step > 0
            assert 0 <= start < stop <= n, (self.split_shape, self.take)
        assert self.rows is None or sorted(self.rows) == list(range(self.split_shape[0])), self.rows
        assert self.rows is None or self.take[0] == (0, self.split_shape[0], 1), "rows are taken in part"
        assert sorted(self.order) == list(range(len(self.split_shape))), self.order
        assert groups_of(self.permuted, self.shape) is not None, f"{self.permuted} does not merge into {self.shape}"

    @classmethod
    def identity(cls, shape: Shape) -> View:
        """A view of the unchanged tensor."""
        return cls(shape, shape, tuple((0, n, 1) for n in shape), tuple(range(len(shape))), shape)

    def split(self, *shape: int) -> View:
        """With dimensions divided into finer ones."""
        assert self == View.identity(self.tensor), "split comes first"
        return dataclasses.replace(View.identity(shape), tensor=self.tensor)

    def slice(self, dimension: int, start: int, stop: int, step: int = 1) -> View:
        """Only start..stop, every `step`, of one dimension."""
        take = tuple((start, stop, step) if n == dimension else entry for n, entry in enumerate(self.take))
        return dataclasses.replace(self, take=take, shape=tuple(_count(entry) for entry in take))

    def permute(self, *rows: int) -> View:
        """With the elements of the first dimension in another order: element i of the part is rows[i] of the tensor."""
        return dataclasses.replace(self, rows=rows)

    def transpose(self, *order: int) -> View:
        """With dimensions in another order."""
        return dataclasses.replace(self, order=order, shape=tuple(self.counts[n] for n in order))

    def merge(self, *shape: int) -> View:
        """With neighbouring dimensions as one: the shape of the parameter's part."""
        return dataclasses.replace(self, shape=shape)

    @property
    def counts(self) -> Shape:
        """Elements taken of each dimension of `split_shape`."""
        return tuple(_count(entry) for entry in self.take)

    @property
    def permuted(self) -> Shape:
        """`counts`, in the order of the parameter's dimensions."""
        return tuple(self.counts[n] for n in self.order)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension of `shape`, the positions in `permuted` that make it up."""
        groups = groups_of(self.permuted, self.shape)
        assert groups is not None
        return groups

    @functools.cached_property
    def is_identity(self) -> bool:
        """Tells whether the part is the whole tensor, unchanged."""
        return self == View.identity(self.tensor)

    @property
    def slices(self) -> tuple[slice, ...]:
        """`take`, as numpy writes it."""
        return tuple(slice(*entry) for entry in self.take)

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """The part [*shape] of a whole tensor."""
        part = tensor.reshape(self.split_shape)[self.slices]
        part = part if self.rows is None else part[list(self.rows)]
        return part.transpose(self.order).reshape(self.shape)

    def write(self, part: np.ndarray, tensor: np.ndarray) -> None:
        """The inverse of `read`: puts a part where it belongs in a whole, contiguous tensor."""
        assert tensor.flags.c_contiguous
        assert tensor.shape == self.tensor
        inverse = tuple(int(n) for n in np.argsort(self.order))
        where = self.slices if self.rows is None else (list(self.rows), *self.slices[1:])
        tensor.reshape(self.split_shape)[where] = part.reshape(self.permuted).transpose(inverse)

    @property
    def rows_dimension(self) -> int:
        """The dimension of the tensor that holds the part's rows: 1 of a transposed matrix, else 0."""
        if self.is_identity:
            return 0
        return next(n for n, finer in enumerate(self._split_dimensions) if self.order[self.groups[0][0]] in finer)

    @property
    def _split_dimensions(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension of the tensor, the positions in `split_shape` that it is divided into."""
        return split_dimensions(self.split_shape, self.tensor)

    @property
    def columns(self) -> int | None:
        """The position in `split_shape` that is the last dimension of the part, where that is one whole dimension of
        the tensor; else None."""
        positions = [self.order[n] for n in self.groups[-1]]
        wide = [n for n in positions if self.counts[n] > 1] or positions[-1:]
        if len(wide) != 1 or (wide[0],) not in self._split_dimensions or (self.rows is not None and wide[0] == 0):
            return None
        return wide[0] if self.take[wide[0]] == (0, self.split_shape[wide[0]], 1) else None

    def with_columns(self, count: int) -> View:
        """The same arrangement of a tensor with another size of the dimension that is the part's last one."""
        place = self.columns
        assert place is not None, "the last dimension is not one whole dimension of the tensor"
        dimension = self._split_dimensions.index((place,))
        return View(
            (*self.tensor[:dimension], count, *self.tensor[dimension + 1 :]),
            (*self.split_shape[:place], count, *self.split_shape[place + 1 :]),
            (*self.take[:place], (0, count, 1), *self.take[place + 1 :]),
            self.order,
            (*self.shape[:-1], count),
            self.rows,
        )

    @property
    def only_rows(self) -> bool:
        """Whether rows alone are rearranged, so that the part of another array of such rows is `of_rows`."""
        dimension = self.rows_dimension
        finer = self._split_dimensions[dimension]
        unchanged = [n for n in range(len(self.split_shape)) if n not in finer]
        return (
            all(self.take[n] == (0, self.split_shape[n], 1) for n in unchanged)
            and sorted(self.order[n] for n in self.groups[0]) == list(finer)
            and [n for n in self.order if n in unchanged] == unchanged
            and (self.rows is None or dimension == 0)
        )

    def of_rows(self, *columns: int) -> View:
        """The same arrangement of rows for an array [rows, *columns], where only rows are rearranged."""
        dimension = self.rows_dimension
        finer = self._split_dimensions[dimension]
        assert self.only_rows, "columns are rearranged, or taken in part"
        order = [self.order[n] for n in self.groups[0]]
        extra = View.identity(columns)
        return View(
            (self.tensor[dimension], *columns),
            (*(self.split_shape[n] for n in finer), *columns),
            (*(self.take[n] for n in finer), *extra.take),
            (*(n - finer[0] for n in order), *(len(finer) + n for n in range(len(columns)))),
            (self.shape[0], *columns),
            self.rows,
        )


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """`params[path][index]` is `view` of the tensor `name`; `array` describes `params[path]`.

    `owner` is the module that users name, where that is not the one that holds the tensor: of experts, the layer's
    matrices of one kind. `parameter` is what holds it in transformers' memory, where a model of transformers has no
    parameter of the tensor's name, and `layout` how.
    """

    name: str
    path: str
    index: tuple[int, ...]
    array: ArraySpec
    view: View
    owner: str = ""
    parameter: str = ""
    layout: ExpertLayout = STRAIGHT

    @property
    def shape(self) -> Shape:
        """Shape of the parameter's part."""
        return self.view.shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical name of each dimension of the parameter's part."""
        return self.array.axes[len(self.index) :]

    @property
    def module(self) -> str:
        """The Hugging Face module that holds the tensor."""
        return self.owner or self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a leaf of a layer is stored where its tensor is not `<module>.<leaf>`.

    `name` is the tensor's name in the layer, and `view(shape)` the part of the tensor that the leaf of this shape is.
    Without a view, `name` is that of a module for each expert or head, with "{}" for its number. `module` is what users
    call it, `parameter` what holds it in transformers' memory, where that is not called `name`, and `layout` how.
    """

    name: str
    module: str
    view: Callable[[Shape], View] | None = None
    parameter: str = ""
    layout: ExpertLayout = STRAIGHT

    def entries(self, layer: str, path: str, row: int, array: ArraySpec) -> list[TensorMap]:
        """Those of row `row` of a leaf, in the layer of this name."""
        owner, parameter = f"{layer}.{self.module}", f"{layer}.{self.parameter or self.name}"
        if self.view is not None:
            view = self.view(array.shape[1:])
            return [TensorMap(f"{layer}.{self.name}", path, (row,), array, view, owner, parameter, self.layout)]
        view, leaf = View.identity(array.shape[2:]), path.rpartition("/")[2]
        names = (f"{layer}.{self.name.format(expert)}.{leaf}" for expert in range(array.shape[1]))
        return [
            TensorMap(name, path, (row, expert), array, view, owner, parameter, self.layout)
            for expert, name in enumerate(names)
        ]


def one_to_one(
    spec: ModelSpec,
    modules: Mapping[str, str | Stored],
    outside: Mapping[str, str | Stored],
    layers: str = "model.layers",
    root: str = "",
) -> list[TensorMap]:
    """A table in which every tensor is one leaf, or one layer of a stacked leaf, unchanged, except for `Stored` ones.

    `modules` names the Hugging Face module of each node of a layer ("attn/q": "self_attn.q_proj"), or how a leaf of it
    is stored ("mlp/router/correction"), `outside` the module of each other node, or how a leaf of it is stored,
    `layers` the list of layers. In the order embedding, layer by layer, norm, head: the order in which models are
    written. With another `root` the table is that of the tower and its projector.
    """
    numbers, tower = spec.layer_numbers(), (f"{VISION}/", f"{PROJECTOR}/")
    ordered: list[tuple[float, TensorMap]] = []
    place = -1.0  # of leaves outside the layers: before all layers, or after
    for path, array in flatten(abstract_params(spec)).items():
        if path.startswith(tower) != (root == VISION):
            continue
        node, _, leaf = path.rpartition("/")
        stacked = stack_path(node)
        if stacked is None:
            stored = outside.get(path) or outside[node]
            if isinstance(stored, Stored):
                assert stored.view is not None
                entry = TensorMap(stored.name, path, (), array, stored.view(array.shape), stored.module)
            else:
                entry = TensorMap(f"{stored}.{leaf}", path, (), array, View.identity(array.shape))
            ordered.append((place, entry))
            continue
        place = math.inf
        view = View.identity(array.shape[1:])
        for row, number in enumerate(numbers[root, stacked.key]):
            stored = modules.get(f"{stacked.site}/{leaf}") or modules[stacked.site]
            layer = f"{layers}.{number}"
            if isinstance(stored, Stored):
                ordered += [(float(number), entry) for entry in stored.entries(layer, path, row, array)]
                continue
            ordered.append((float(number), TensorMap(f"{layer}.{stored}.{leaf}", path, (row,), array, view)))
    return [entry for _, entry in sorted(ordered, key=lambda entry: entry[0])]


def with_view(table: Sequence[TensorMap], ending: str, view: Callable[[ArraySpec], View]) -> list[TensorMap]:
    """The table with another view for the leaves whose path has this ending."""
    return [
        dataclasses.replace(entry, view=view(entry.array)) if entry.path.endswith(ending) else entry for entry in table
    ]


def by_name(table: Iterable[TensorMap]) -> dict[str, list[TensorMap]]:
    """The entries of each tensor of the files, in the order of the table."""
    names: dict[str, list[TensorMap]] = {}
    for entry in table:
        names.setdefault(entry.name, []).append(entry)
    return names


def validate(table: Sequence[TensorMap], arrays: Mapping[str, ArraySpec]) -> None:
    """Raises AssertionError where a table leaves part of a tensor or of a leaf out, or has it twice, and says which."""
    tensors: dict[str, list[TensorMap]] = {}
    leaves: dict[str, set[tuple[int, ...]]] = {path: set() for path in arrays}
    for entry in table:
        where = f"{entry.path}{list(entry.index)}"
        _require(entry.path in arrays, f"{where} of tensor '{entry.name}' is no part of the model")
        lead = len(entry.index)
        expected = arrays[entry.path].shape[lead:]
        _require(bool(entry.view.split_shape), f"the view of '{entry.name}', a scalar, must begin with split(1)")
        _require(entry.shape == expected, f"{where} is {expected}, its view of '{entry.name}' is {entry.shape}")
        inside = all(0 <= i < n for i, n in zip(entry.index, arrays[entry.path].shape, strict=False))
        _require(inside, f"{where} of tensor '{entry.name}' does not exist: {entry.path} is {arrays[entry.path].shape}")
        _require(entry.index not in leaves[entry.path], f"{where} is written twice, by '{entry.name}' as well")
        leaves[entry.path].add(entry.index)
        tensors.setdefault(entry.name, []).append(entry)
    for path, indices in leaves.items():
        lengths = {len(index) for index in indices}
        _require(bool(indices), f"{path} is read from no tensor")
        _require(len(lengths) == 1, f"{path} is indexed to different depths: {sorted(lengths)}")
        parts = math.prod(arrays[path].shape[: lengths.pop()])
        _require(len(indices) == parts, f"{path} is read from {len(indices)} tensors, and has {parts} parts")
    for name, entries in tensors.items():
        _validate_tensor(name, [entry.view for entry in entries])


def _validate_tensor(name: str, views: list[View]) -> None:
    shapes = {(view.tensor, view.split_shape) for view in views}
    _require(len(shapes) == 1, f"the views of tensor '{name}' disagree about its shape or split: {sorted(shapes)}")
    for n, view in enumerate(views):
        for second in views[:n]:
            _require(not _overlap(view, second), f"tensor '{name}' has a part that two leaves are written from")
    total = sum(math.prod(view.counts) for view in views)
    size = math.prod(views[0].tensor)
    _require(total == size, f"tensor '{name}' is left unread in part: {total:,} of {size:,} numbers are used")


def _overlap(view: View, second: View) -> bool:
    ranges = zip(view.take, second.take, strict=True)
    return all(not set(range(*a)).isdisjoint(range(*b)) for a, b in ranges)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(f"the family's table of tensors is wrong: {message}")


def _count(entry: Range) -> int:
    return len(range(*entry))
