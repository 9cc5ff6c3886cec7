"""Shapes that divide the dimensions of another shape into finer ones."""

from __future__ import annotations

from collections.abc import Iterator

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
