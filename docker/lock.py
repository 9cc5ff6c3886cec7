"""Writes docker/requirements-NAME.txt: every package of an image with the SHA-256 of its wheel, as the index has it.

Run by `make lock-images` with the Python of the images (3.11, x86-64), which decides the wheels: lock.py NAME EXTRAS
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def main(name: str, extras: str) -> None:
    # hatchling builds Meshtune itself; what it needs would otherwise be fetched without a hash.
    command = (
        f"{sys.executable} -m pip install --dry-run --ignore-installed --quiet --disable-pip-version-check --no-input"
    )
    options = ["-c", str(ROOT / "constraints.txt"), "--report", "-", f"{ROOT}[{extras}]", "hatchling"]
    report = subprocess.run([*command.split(), *options], check=True, capture_output=True, text=True).stdout
    lines = [f"# {extras}, for Python 3.11 on Linux x86-64. Written by docker/lock.py (make lock-images)."]
    for package in json.loads(report)["install"]:
        if "archive_info" in package["download_info"]:
            metadata, digest = package["metadata"], package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{metadata['name']}=={metadata['version']} --hash=sha256:{digest}")
    lines[1:] = sorted(lines[1:], key=str.lower)
    (ROOT / f"docker/requirements-{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
