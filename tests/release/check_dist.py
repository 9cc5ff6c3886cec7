"""Checks the wheel and the source distribution of a folder, and runs the quickstart from the wheel only.

python tests/release/check_dist.py dist     the wheel is installed into a fresh environment (minutes; a package index)
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LARGEST = 5e6  # bytes
NEEDED = {"py.typed", "quickstart/model/model.safetensors", "quickstart/model/LICENSE", "quickstart/lesson.jsonl"}


def check_contents(wheel: pathlib.Path, source: pathlib.Path) -> None:
    """Asserts that both are small, and that the wheel has the package and the quickstart's model, and nothing else."""
    for file in (wheel, source):
        assert file.stat().st_size < LARGEST, f"{file} has {file.stat().st_size:,} bytes"
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"meshtune", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}, folders
    missing = {f"meshtune/{name}" for name in NEEDED} - set(names)
    assert not missing, missing
    with tarfile.open(source) as archive:
        parts = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert not parts & {"tests", "benchmarks", "docs"}, parts


def run_quickstart(wheel: pathlib.Path) -> None:
    """Installs the wheel, with pinned versions, into a fresh environment, and runs the quickstart in another folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        venv.create(folder / "env", with_pip=True)
        programs = folder / "env/bin"
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([programs / "python", "-m", "pip", "install", *options, wheel.absolute()], check=True)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in (["--version"], ["env"], ["quickstart", "train.steps=20"]):
            subprocess.run([programs / "meshtune", *command], check=True, cwd=folder, env=env)
        assert (folder / "runs/quickstart/adapter/adapter_model.safetensors").is_file()


if __name__ == "__main__":
    dist = pathlib.Path(sys.argv[1])
    [wheel_file], [source_file] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel_file, source_file)
    run_quickstart(wheel_file)
    sizes = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in (wheel_file, source_file))
    print(f"the quickstart ran from the wheel only: {sizes}")
