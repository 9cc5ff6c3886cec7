"""The published examples of LLaMA-Factory, axolotl and TRL through the importer.

published_examples.py TOOL CHECKOUT, where TOOL is llama_factory, axolotl or trl.

Prints a line for each file: its name, `train` or `refused`, and the keys that were refused (`-`: the
file as a whole). published_examples.txt holds these lines for the checkouts named in it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

from meshtune.config.foreign.importer import translate
from meshtune.config.foreign.trl import commands
from meshtune.errors import UserError

YAML = ("examples/**/*.yaml", "examples/**/*.yml")
FILES = {
    "llama_factory": YAML,
    "axolotl": YAML,
    "trl": (*YAML, "examples/scripts/*.py", "trl/scripts/*.py"),  # scripts whose docstring holds a command
}
EXPECTED = pathlib.Path(__file__).with_suffix(".txt")


def verdicts(tool: str, checkout: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(file, verdict) of every example, read from within `checkout`, as its paths are meant."""
    with contextlib.chdir(checkout):
        for path in sorted({path for pattern in FILES[tool] for path in pathlib.Path().glob(pattern)}, key=str):
            if path.suffix != ".py" or commands(path.read_text(encoding="utf-8")):
                yield str(path), verdict(str(path))


def verdict(file: str) -> str:
    try:
        translation = translate(file)
    except UserError:
        return "refused -"
    if translation.refused:
        return "refused " + " ".join(sorted(finding.key or "recipe" for finding in translation.refused))
    translation.written_files(pathlib.Path("recipe.yaml"))
    return "train"


def expected_lines(tool: str) -> dict[str, str]:
    """The lines of the file of expectations that are of `tool`."""
    lines = [line.split("\t") for line in EXPECTED.read_text(encoding="utf-8").splitlines() if "\t" in line]
    return {file: entry for name, file, entry in lines if name == tool}


if __name__ == "__main__":
    tool, checkout = sys.argv[1:]
    for file, entry in verdicts(tool, pathlib.Path(os.path.expanduser(checkout))):
        print(tool, file, entry, sep="\t")
