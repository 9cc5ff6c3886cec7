"""Run the quickstart and keep what it shows: docs/images/quickstart.svg and quickstart-loss.png.

python docs/images/render.py
"""

from __future__ import annotations

import io
import pathlib
import shutil
import tempfile

from rich.console import Console

from meshtune import quickstart
from meshtune.train.run import train

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    # Not a terminal, so that the progress is lines and not frames of an animation.
    console = Console(record=True, width=110, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as root:
        output = pathlib.Path(root) / "quickstart"
        train(quickstart.recipe(str(output)), console=console)
        shutil.copy(output / "loss.png", HERE / "quickstart-loss.png")
        svg = console.export_svg(title="meshtune quickstart")
        svg = svg.replace(str(output), "runs/quickstart").replace(str(quickstart.__path__[0]), "meshtune/quickstart")
    (HERE / "quickstart.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
