"""Options that `predict` and `eval` share: which data, and where results are written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from meshtune.errors import UserError
from meshtune.options import option, required

if TYPE_CHECKING:
    from meshtune.config.data import SourceSection


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which data are answered."""

    data: str = required("A file, a folder of files or a hub data set, in any format that training reads.")
    format: str = option("auto", "Format of the records, as in a recipe; auto: detected.")
    split: str = option("train", "Split of a hub data set.")
    columns: str | None = option(None, "Names of the record's fields, such as prompt=question,completion=answer.")
    system: str | None = option(None, "System prompt for conversations that have none.")
    limit: int | None = option(None, "Only the first records, at most this many.", ge=1)


@dataclasses.dataclass(frozen=True)
class Writing:
    """Where results are written."""

    output: str | None = option(None, "Folder of the results; default: named after model and data.")
    resume: bool = option(False, "Go on with results that are in the folder.", flags=("--resume",))
    overwrite: bool = option(False, "Move results that are in the folder aside.", flags=("--overwrite",))


def check_data(path: str) -> None:
    """Raises UserError for data that are neither here nor perhaps on a hub: before JAX is imported."""
    from meshtune.data.sources import check_source_path

    check_source_path(path)


def source_section(path: str, **fields: str | None) -> SourceSection:
    """A source of records from the command line's words. Raises UserError for those that make none."""
    from pydantic import ValidationError

    from meshtune.config.data import SourceSection

    columns = fields.pop("columns", None)
    try:
        return SourceSection.model_validate({"path": path, "columns": _pairs(columns), **fields})
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(str(first["msg"]), where=f"--{name}", fix="see `meshtune predict --help`") from problem


def _pairs(text: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in (text or "").split(","):
        name, equals, column = (word.strip() for word in part.partition("="))
        if part and not (equals and name and column):
            raise UserError(f"'{part}' is not FIELD=COLUMN", where="--columns", fix="write prompt=question")
        if part:
            pairs[name] = column
    return pairs
