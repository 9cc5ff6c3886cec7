"""Run the quickstart and keep what it shows: docs/images/quickstart.svg and quickstart-loss.png.

python docs/images/render.py
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import shutil
import tempfile

from rich.console import Console

from meshtune import quickstart
from meshtune.train.run import train

HERE = pathlib.Path(__file__).resolve().parent
COLUMNS = 80


def main() -> None:
    # Not a terminal, so that the progress is lines and not frames of an animation.
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
        # Paths as a reader has them, from the start: lines are folded by the length of what they show.
        pathlib.Path("meshtune").mkdir()
        pathlib.Path("meshtune/quickstart").symlink_to(quickstart.DIRECTORY)
        quickstart.MODEL = pathlib.Path("meshtune/quickstart/model")
        train(quickstart.recipe("runs/quickstart"), console=console)
        shutil.copy("runs/quickstart/loss.png", HERE / "quickstart-loss.png")
        svg = console.export_svg(title="meshtune quickstart")
    (HERE / "quickstart.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
