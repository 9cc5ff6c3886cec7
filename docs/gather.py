"""Gathers the pages for the site that mkdocs builds (make docs): build/pages mirrors the repository.

Copied are all tracked pages and whatever they link to. A link to a folder becomes one to its README, or to a list of
its files; a list that follows a line of text gets the empty line that Markdown for Python needs.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
LIST_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def main() -> None:
    """Writes build/pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in _tracked("*.md"):
        _copy_page(ROOT / name)


def _tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def _copy_page(page: pathlib.Path) -> None:
    lines, is_code, before = [], False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            line = LINK.sub(lambda match: match[1] + _target(page, match[2]) + match[3], line)
            is_item = LIST_ITEM.match(line) is not None
            if is_item and before.strip() and not LIST_ITEM.match(before) and not before.startswith((" ", "|")):
                lines.append("")
        lines.append(line)
        before = line
    _place(page).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _target(page: pathlib.Path, link: str) -> str:
    """The link as the site has it, after its target was copied. mkdocs reports what does not exist."""
    target = (page.parent / link).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return link
    if target.is_dir():
        if (target / "README.md").exists():
            return f"{link.rstrip('/')}/README.md"
        files = _tracked(target.relative_to(ROOT).as_posix())
        title = target.relative_to(ROOT).as_posix()
        lines = [f"# {title}", "", *(f"- `{name}`" for name in files)]
        _place(target / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"{link.rstrip('/')}/index.md"
    if target.suffix != ".md":
        shutil.copy(target, _place(target))
    return link


def _place(path: pathlib.Path) -> pathlib.Path:
    place = PAGES / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


if __name__ == "__main__":
    main()
