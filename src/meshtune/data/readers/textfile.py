"""Plain text: every line that is not blank is a record {"text": line}, as `datasets` and LLaMA-Factory read .txt.

Documents that contain line breaks belong in a .jsonl file, as {"text": ...}.
"""

from __future__ import annotations

import pathlib

from meshtune.data.readers.mapped import MappedFile, line_spans
from meshtune.data.readers.records import FileRecords
from meshtune.errors import UserError


def open_text(path: pathlib.Path, name: str) -> FileRecords:
    """The lines of a text file. Raises UserError for an empty file, and on reading a line that is not UTF-8."""
    file = MappedFile(path, name)
    spans = line_spans(file)
    if not len(spans):
        raise UserError("the file contains only blank lines", where=name, fix="write text into it, or leave it out")
    return FileRecords(file, spans, _decode_line)


def _decode_line(file: MappedFile, index: int, begin: int, end: int) -> dict[str, str]:
    return {"text": file.text(begin, end).rstrip("\r")}
