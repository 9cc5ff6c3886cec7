"""Reading a source whole, or the error that it gives."""

from __future__ import annotations

import pytest

from meshtune.data.readers.textfiles import Records
from meshtune.data.sources import DataSource, open_path, open_source
from meshtune.errors import UserError


def read(path) -> list:
    return list(open_path(path, path.name).sweep())


def fails(path, name: str | None = None, **source) -> UserError:
    """The error that opening or reading the source gives."""

    def read_all(records: Records) -> None:
        for index in range(len(records)):
            records[index]

    with pytest.raises(UserError) as caught:
        read_all(open_source(DataSource(name or str(path), **source)))
    return caught.value
