"""Plain text: every line that is not blank is a record {"text": line}, as `datasets` and LLaMA-Factory read .txt.

A document that has line breaks of its own belongs in a .jsonl file, as {"text": ...}.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from meshtune.data.conversation import Origin
from meshtune.data.readers.mapped import MappedFile, line_spans
from meshtune.data.readers.records import one_by_one
from meshtune.errors import UserError


class TextRecords:
    """The lines of a text file. Raises UserError for an empty file, and on reading a line that is not UTF-8."""

    def __init__(self, path: pathlib.Path, name: str):
        self.file = MappedFile(path, name)
        self.spans = line_spans(self.file)
        if not len(self.spans):
            raise UserError("the file holds only blank lines", where=name, fix="write text into it, or leave it out")

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, str]:
        begin, end = (int(at) for at in self.spans[index])
        return {"text": self.file.text(begin, end).rstrip("\r")}

    def origin(self, index: int) -> Origin:
        return Origin(self.file.name, index)

    def where(self, index: int) -> str:
        return f"{self.origin(index)} (line {self.file.line(int(self.spans[index, 0]))})"

    def sweep(self) -> Iterator[Any | UserError]:
        return one_by_one(self)
