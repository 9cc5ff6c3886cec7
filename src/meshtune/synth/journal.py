"""The journal of answers: a line for each, on the disk before the answer is used; nothing is asked for twice."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import threading

from meshtune.errors import UserError
from meshtune.synth.teachers import Answer


class Journal:
    """Answers by the key of their request. `append` may be called from several threads."""

    def __init__(self, file: pathlib.Path):
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        complete = 0
        if file.exists():
            content = file.read_bytes()
            complete = content.rfind(b"\n") + 1  # a last line that was cut off is left out
            for number, line in enumerate(content[:complete].splitlines(), 1):
                try:
                    fields = json.loads(line)
                    key = fields.pop("request")
                    self._answers[key] = Answer(**fields)
                except (ValueError, KeyError, TypeError, AttributeError) as problem:
                    fix = "remove the line: its request is asked again; or --overwrite"
                    raise UserError(
                        "a line of the journal is damaged", where=f"{file}, line {number}", fix=fix
                    ) from problem
        self._file = file.open("ab")
        self._file.truncate(complete)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """The answer to a request of an earlier run."""
        return self._answers.get(key)

    def append(self, key: str, answer: Answer) -> None:
        """Writes an answer to the disk."""
        line = json.dumps({"request": key, **dataclasses.asdict(answer)}, ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(line.encode("utf-8", "surrogatepass"))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._answers[key] = answer

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
