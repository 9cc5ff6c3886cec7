"""Prints the test files for what changed since a commit (make test-changed, BASE=main): a quick check, not a proof.

A changed test file is printed itself; for a changed module, the tests that import it and those of the same name.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def changed_files(base: str) -> set[str]:
    """Files that differ from the commit `base`, and those that git does not know yet."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in commands
    ]
    return {line for output in outputs for line in output.splitlines()}


def imported_modules(path: pathlib.Path) -> set[str]:
    """Modules that a file imports anywhere, as `meshtune.data.chat`; of `from a import b` both a and a.b."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def affected_tests(files: set[str]) -> list[str]:
    """The test files for changed files, as paths from the root."""
    tests = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    modules, names = set(), set()
    for file in files:
        path = pathlib.PurePosixPath(file)
        if path.suffix == ".py" and path.parts[:2] == ("src", "meshtune"):
            modules.add(".".join(path.parts[1:]).removesuffix(".py").removesuffix(".__init__"))
            names.add(f"tests/{'/'.join(path.parts[2:-1])}/test_{path.name}".replace("//", "/"))
        elif path.suffix == ".py" and path.parts[0] == "tests" and file not in tests:
            modules.add(path.stem)  # a module beside tests, which they import by its name
    return sorted(name for name, path in tests.items() if name in files | names or modules & imported_modules(path))


if __name__ == "__main__":
    print(*affected_tests(changed_files(sys.argv[1])))
