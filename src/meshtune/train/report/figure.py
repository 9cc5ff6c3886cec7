"""A figure of matplotlib that notebooks draw without pyplot. Importing this takes a second."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure with a picture of itself, which IPython asks for."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
