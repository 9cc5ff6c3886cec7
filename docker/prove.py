"""Carries out the steps of a Dockerfile in a fresh Debian, where no Docker engine is, and runs what the image is for.

Debian's Python stands for that of the base image, which also has the packages that are named. As root, with mmdebstrap
(apt install mmdebstrap):

    python docker/prove.py cuda.Dockerfile DEVICE=cpu EXTRAS=serve,evaluate,synth
    python docker/prove.py rocm.Dockerfile jax==0.10.0 jaxlib==0.10.0

MESHTUNE_DEBIAN names apt's sources and options, where they are not those of Debian; MESHTUNE_CARRY names files that pip
needs, which are copied, and folders, which are mounted.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = "python3,python3-venv,ca-certificates"
# As python:3.11-slim-bookworm has them.
PYTHON_PACKAGES = ("pip==24.0", "setuptools==79.0.1", "wheel==0.45.1")
IMPORTS = (
    "import datasketch, langdetect, llguidance, lm_eval, markitdown, starlette"  # of the extras, with their libraries
)
OWN_FOLDERS = 'test "$(id -u)" = 1000 && touch "$HOME/x" /work/x && ! touch /usr/local/x 2> /dev/null'
HEALTHY_SECONDS = 300.0


def carried() -> list[str]:
    """Files and folders of this machine that the root has too."""
    return os.environ.get("MESHTUNE_CARRY", "").split()


class Image:
    """A root directory to run commands in, with the user, folder and variables that the Dockerfile has set so far."""

    def __init__(self, root: pathlib.Path):
        self.root, self.user, self.folder = root, "root", "/"
        self.variables = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
        self.variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def command(self, arguments: list[str]) -> list[str]:
        """The command that runs `arguments` in the root, in a name space of its own for mounts and processes."""
        mounts = 'mount --bind /dev "$0/dev" && mount -t proc proc "$0/proc" && mount -t sysfs -o ro sysfs "$0/sys"'
        for folder in filter(os.path.isdir, carried()):
            mounts += f' && mkdir -p "$0"{folder} && mount --bind {folder} "$0"{folder}'
        entry = f'{mounts} && exec chroot --userspec={self.user} "$0" "$@"'
        env = [
            "/usr/bin/env",
            "-i",
            f"--chdir={self.folder}",
            *(f"{name}={value}" for name, value in self.variables.items()),
        ]
        return [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child=TERM",
            "sh",
            "-c",
            entry,
            str(self.root),
            *env,
            *arguments,
        ]

    def run(self, *arguments: str) -> None:
        start = time.monotonic()
        subprocess.run(self.command(list(arguments)), check=True)
        print(f"  {time.monotonic() - start:.0f} s, as {self.user}: {shlex.join(arguments)[:100]}", flush=True)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, arguments.strip()) for name, arguments in pairs]


def make_debian(root: pathlib.Path, packages: list[str]) -> None:
    """Makes a minimal Debian with a Python at /usr/local, as Docker's images of Python have it, and packages."""
    extra = os.environ.get("MESHTUNE_DEBIAN", "").split()
    options = ["--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), *extra]
    subprocess.run(["mmdebstrap", *options], check=True)
    for name in filter(os.path.isfile, ("/etc/resolv.conf", "/etc/hosts", *carried())):
        place = root / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, place)
    Image(root).run("python3", "-m", "venv", "/usr/local")
    Image(root).run("pip", "install", "--quiet", *PYTHON_PACKAGES, *packages)


def copy_source(place: pathlib.Path) -> None:
    """Copies the tracked files that .dockerignore does not name."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and name.split("/")[0] not in ignored and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)


def home(root: pathlib.Path, user: str) -> str:
    """The home of a user, or of a user's number."""
    accounts = [line.split(":") for line in (root / "etc/passwd").read_text(encoding="utf-8").splitlines()]
    (place,) = (account[5] for account in accounts if user in (account[0], account[2]))
    return place


def build(image: Image, dockerfile: str, given: dict[str, str]) -> list[str]:
    """Carries out the steps of a Dockerfile, and returns its CMD."""
    values: dict[str, str] = {}
    started: list[str] = []
    for name, arguments in instructions((ROOT / "docker" / dockerfile).read_text(encoding="utf-8")):
        match name:
            case "FROM":
                values = {}
            case "ARG":
                key, _, default = arguments.partition("=")
                values[key] = given.get(key, default)
            case "COPY":
                assert arguments == ". /src", arguments
                copy_source(image.root / "src")
            case "RUN":
                image.run(
                    "/usr/bin/env", *(f"{key}={value}" for key, value in values.items()), "/bin/sh", "-c", arguments
                )
            case "USER":
                image.user = arguments
                image.variables["HOME"] = home(image.root, arguments)
            case "WORKDIR":
                image.folder = arguments
            case "ENV":
                image.variables |= dict(word.split("=", 1) for word in shlex.split(arguments))
            case "CMD":
                started = yaml.safe_load(arguments)
            case _:
                raise ValueError(f"{dockerfile}: {name} is not carried out")
    return started


def check_service(image: Image, service: dict, variables: dict[str, str]) -> None:
    """Starts a service of compose.yml, waits until its health check passes, and ends it with SIGTERM."""
    command = [re.sub(r"\$\{(\w+):-[^}]*\}", lambda match: variables[match[1]], word) for word in service["command"]]
    start = time.monotonic()
    server = subprocess.Popen(image.command(command))
    probe = image.command(service["healthcheck"]["test"][1:])
    while subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
        assert server.poll() is None, "the service ended"
        assert time.monotonic() - start < HEALTHY_SECONDS, "the service is not healthy"
        time.sleep(1)
    print(f"  healthy after {time.monotonic() - start:.0f} s: {shlex.join(command)}", flush=True)
    (child,) = pathlib.Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert pathlib.Path(f"/proc/{child}").stat().st_uid == 1000
    os.kill(int(child), signal.SIGTERM)  # unshare itself lets it pass
    server.wait(timeout=60)


def main(dockerfile: str, *arguments: str) -> None:
    """Builds the image, and runs its command, the quickstart, the board and a server in it, as its user."""
    packages = [argument for argument in arguments if "==" in argument]
    given = dict(argument.split("=", 1) for argument in arguments if argument not in packages)
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place) / "root"
        make_debian(root, packages)
        image = Image(root)
        image.run(*build(image, dockerfile, given))
        image.run("/bin/sh", "-c", OWN_FOLDERS)
        image.run("python3", "-c", IMPORTS)
        image.run("meshtune", "--version")
        image.run("meshtune", "env")
        image.run("meshtune", "quickstart", "train.steps=20")
        services = yaml.safe_load((ROOT / "docker/compose.yml").read_text(encoding="utf-8"))["services"]
        for service in services.values():
            check_service(image, service, {"MODEL": "runs/quickstart"})


if __name__ == "__main__":
    main(*sys.argv[1:])
