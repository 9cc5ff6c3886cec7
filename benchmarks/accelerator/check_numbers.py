"""Runs tests of tests/gpu and prints how many passed, as one JSON line: `check_numbers.py MARKS FILE [-k WORDS]`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

from models import print_result


def main(marks: str, selection: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, f"--junitxml={report}"]
        if (seconds := os.environ.get("BUDGET_SECONDS")) and importlib.util.find_spec("pytest_timeout"):
            command.append(f"--session-timeout={max(1, float(seconds) - 20):.0f}")  # what is done by then counts
        process = subprocess.run([*command, *selection], capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(process.stdout[-2000:] + process.stderr[-2000:])
        cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    print_result(
        {
            "passed": len(cases) - len(bad) - len(skipped),
            "failed_tests": len(bad),
            "skipped": len(skipped),
            "failures": [f"{case.get('name')}: {_message(case)}" for case in bad],
        }
    )


def _message(case: ElementTree.Element) -> str:
    node = case.find("failure")
    node = case.find("error") if node is None else node
    text = "" if node is None else node.get("message") or ""
    return text.splitlines()[0][:300] if text else ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
