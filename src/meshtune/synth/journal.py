"""The journal of answers, on the disk before an answer is used: nothing is asked for twice."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import threading
from collections.abc import Mapping

from meshtune.errors import UserError
from meshtune.synth.teachers import Answer

DRAFT = ".partial"


def count_answers(folder: pathlib.Path) -> int:
    """The number of answers in the journals of a folder."""
    lines = (line for file in folder.glob("*.jsonl*") for line in file.read_bytes().splitlines(keepends=True))
    return sum(len(json.loads(line)) for line in lines if line.endswith(b"\n"))


class Journal:
    """The answers to the requests of some tasks, by the keys of the requests. Threads may use it.

    A line is a list of the answers that were computed together, which are there together or not. The file has another
    name until all of them are there. `requested` and `replayed` count the answers of the models and of the file.
    """

    def __init__(self, file: pathlib.Path):
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self.requested = self.replayed = 0
        self._path, draft = file, file.with_name(f"{file.name}{DRAFT}")
        self._open = file if file.exists() else draft
        complete = 0
        if self._open.exists():
            content = self._open.read_bytes()
            complete = content.rfind(b"\n") + 1  # a last line that was cut off is left out
            for number, line in enumerate(content[:complete].splitlines(), 1):
                self._read(line, number)
        self._file = self._open.open("ab")
        self._file.truncate(complete)

    def _read(self, line: bytes, number: int) -> None:
        try:
            for fields in json.loads(line):
                key = fields.pop("request")
                self._answers[key] = Answer(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            fix = "remove the line: its requests are asked again; or --overwrite"
            where = f"{self._open}, line {number}"
            raise UserError("a line of the journal is damaged", where=where, fix=fix) from problem

    def get(self, key: str) -> Answer | None:
        """The answer to a request that was asked before."""
        with self._lock:
            answer = self._answers.get(key)
            self.replayed += answer is not None
            return answer

    def append(self, answers: Mapping[str, Answer]) -> None:
        """Writes answers to the disk."""
        if not answers:
            return
        rows = [{"request": key, **dataclasses.asdict(answer)} for key, answer in answers.items()]
        line = json.dumps(rows, ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(line.encode("utf-8", "surrogatepass"))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._answers |= answers
            self.requested += len(answers)

    def close(self, *, complete: bool = False) -> None:
        """Closes the file, and names it as a complete one if it is."""
        self._file.close()
        if complete and self._open != self._path:
            os.replace(self._open, self._path)
