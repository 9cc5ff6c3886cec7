"""Packages for a machine without a network: what it has, what it lacks, and how that gets there.

    python benchmarks/accelerator/wheels.py have > have.json                       on that machine
    python benchmarks/accelerator/wheels.py fetch --have have.json --to wheels     where there is a network
    python benchmarks/accelerator/wheels.py install --from wheels                  on that machine, into .packages

`fetch` begins with what Meshtune and run.py require, leaves out what the machine has in a fitting version, and goes on
with what the downloaded wheels require; Meshtune's own wheel is among them. `install` leaves the machine's environment
as it is: run.py looks into .packages itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".packages"
MORE = ("torch", "peft>=0.17", "pytest>=8", "pytest-timeout>=2.3")
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def have() -> dict[str, Any]:
    """Python, machine, and every installed distribution with its version."""
    packages = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    return {"python": platform.python_version(), "machine": platform.machine(), "packages": packages}


def fetch(have: dict[str, Any], to: pathlib.Path, extra: list[str]) -> list[str]:
    """Downloads wheels until nothing that is required is missing; their file names."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    installed = {canonicalize_name(name): version for name, version in have["packages"].items()}
    environment = environment_of(have)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    queue = [Requirement(text) for text in (*project["dependencies"], *MORE, *extra)]
    to.mkdir(parents=True, exist_ok=True)
    files = [_built(to)]
    while queue:
        requirement = queue.pop(0)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if name in installed and requirement.specifier.contains(installed[name], prereleases=True):
            continue
        wheel = _downloaded(requirement, have, to)
        metadata = _metadata(wheel)
        installed[name] = metadata["Version"]
        files.append(wheel.name)
        print(f"{requirement} -> {wheel.name}", file=sys.stderr)
        queue += [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    return files


def environment_of(have: dict[str, Any]) -> dict[str, str]:
    """The values of environment markers on the machine."""
    return {
        "python_version": ".".join(have["python"].split(".")[:2]),
        "python_full_version": have["python"],
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": have["machine"],
        "extra": "",
    }


def _downloaded(requirement: Any, have: dict[str, Any], to: pathlib.Path) -> pathlib.Path:
    before = set(to.glob("*.whl"))
    version = ".".join(have["python"].split(".")[:2])
    wanted = f"{requirement.name}{requirement.specifier}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(to),
    ]
    command += ["--python-version", version, *(f"--platform={name}_{have['machine']}" for name in PLATFORMS), wanted]
    subprocess.run(command, check=True)
    new = set(to.glob("*.whl")) - before
    if new:
        return new.pop()
    stem = requirement.name.lower().replace("-", "_").replace(".", "_")
    return next(path for path in before if path.name.lower().startswith(f"{stem}-"))


def _built(to: pathlib.Path) -> str:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(to), str(ROOT)]
    subprocess.run(command, check=True)
    return next(to.glob("meshtune-*.whl")).name


def _metadata(wheel: pathlib.Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def install(wheels: pathlib.Path) -> None:
    """Unpacks the wheels into .packages."""
    files = sorted(map(str, wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(PACKAGES), *files], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("have")
    options = verbs.add_parser("fetch")
    options.add_argument("--have", type=pathlib.Path, required=True)
    options.add_argument("--to", type=pathlib.Path, required=True)
    options.add_argument("--with", dest="extra", nargs="*", default=[], help="more packages, such as bitsandbytes")
    options = verbs.add_parser("install")
    options.add_argument("--from", dest="wheels", type=pathlib.Path, required=True)
    args = parser.parse_args()
    match args.verb:
        case "have":
            print(json.dumps(have(), indent=1))
        case "fetch":
            print("\n".join(fetch(json.loads(args.have.read_text()), args.to, args.extra)))
        case "install":
            install(args.wheels)


if __name__ == "__main__":
    main()
