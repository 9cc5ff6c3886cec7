"""English text that the board can show in other languages: a template and the values in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self


class Translatable(str):
    """The English text of `template`, whose {names} are replaced by `values`.

    It is a string, so that a terminal, a file and a comparison see the English text. The board looks the template up
    in the page's language (board/page/text/help) and puts the values into its translation; a value may be Translatable
    itself. What an f-string makes of it is plain text. Templates are literals where they are used, by which
    tests/board/test_help.py finds all of them.
    """

    template: str
    values: Mapping[str, object]

    def __new__(cls, template: str, /, **values: object) -> Self:
        text = super().__new__(cls, template.format_map(values))
        text.template = template
        text.values = values
        return text

    def __getnewargs_ex__(self) -> tuple[tuple[str], Mapping[str, object]]:
        return (self.template,), self.values


def join_parts(parts: Iterable[str]) -> str:
    """Parts with a comma after each but the last; "" for none."""
    *earlier, text = list(parts) or [""]
    for part in reversed(earlier):
        text = Translatable("{first}, {rest}", first=part, rest=text)
    return text


def template_of(text: object) -> Any:
    """{"template", "values"} of a Translatable, its values likewise; the text of anything else."""
    if not isinstance(text, Translatable):
        return str(text)
    return {"template": text.template, "values": {name: template_of(value) for name, value in text.values.items()}}
