"""A function called in a process that has one platform's compiler, with the described devices of a target."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshtune.errors import UserError
from meshtune.plan.compilers.find import Found, found_or_error
from meshtune.plan.compilers.stage import FILE, read
from meshtune.plan.hardware import Target

Progress = Callable[[str, float], None]  # what is being done, and for how many seconds the process has run

LIMIT = 900.0  # seconds; a 405B step takes half a minute on two cores


def run(
    target: Target,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    paths: Sequence[str | pathlib.Path] = (),
    compiler: Found | None = None,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Any:
    """What `function` ("module:name") answers to (target, devices, **arguments), called where the compiler is.

    Arguments and answer are what JSON can hold; `paths` are further folders to import from. No accelerator is used.
    Raises: UserError for a missing compiler, for one the function raises, and for a compiler that fails, with the last
    lines it wrote.
    """
    compiler = compiler or found_or_error(target.device.platform)
    with tempfile.TemporaryDirectory(prefix="meshtune-compile-") as scratch:
        folder = pathlib.Path(scratch)
        job = {
            "device": dataclasses.asdict(target.device),
            "hosts": target.hosts,
            "each": target.each,
            "function": function,
            "arguments": dict(arguments or {}),
            "answer": str(folder / "answer.json"),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "meshtune.plan.compilers.child", str(folder / "job.json")]
        env = child_env(compiler, target, paths) | {FILE: str(folder / "stage")}
        with (folder / "words").open("wb") as words:
            code = _wait(command, env, words, limit, _shown(folder / "stage", progress))
        answer = folder / "answer.json"
        if code != 0 or not answer.is_file():
            said = (folder / "words").read_text(encoding="utf-8", errors="replace")
            raise _failed(target, compiler, code, said, limit)
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise UserError(found["error"]["what"], where=found["error"]["where"], fix=found["error"]["fix"])
    return found["result"]


def child_env(
    compiler: Found, target: Target, paths: Sequence[str | pathlib.Path] = (), env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of the process that compiles."""
    unset = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NAMES_AND_LIBRARY_PATHS", "LD_PRELOAD")
    made = {name: value for name, value in env.items() if name not in unset}
    # What runs in that process runs on its CPU; the compilers are asked for by name. So no backend is started that
    # would look for devices.
    made["JAX_PLATFORMS"] = "cpu"
    made["TPU_SKIP_MDS_QUERY"] = "1"
    made["TF_CPP_MIN_LOG_LEVEL"] = env.get("TF_CPP_MIN_LOG_LEVEL", "2")
    # A cache of programs made for other devices is of no use here, and a described device has nothing to run them on.
    made["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    made |= compiler.env
    made = {name: value for name, value in made.items() if value}
    flags = [word for word in made.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in word]
    if compiler.platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={target.devices}")
    made["XLA_FLAGS"] = " ".join(flags)
    first = [] if compiler.folder is None else [str(compiler.folder)]
    here = str(pathlib.Path(__file__).parents[3])  # so that the same Meshtune is found, installed or not
    more = [word for word in env.get("PYTHONPATH", "").split(os.pathsep) if word]
    made["PYTHONPATH"] = os.pathsep.join([*first, *map(str, paths), here, *more])
    return made


def _shown(stage: pathlib.Path, progress: Progress | None) -> Callable[[float], None]:
    def show(seconds: float) -> None:
        if progress is not None:
            progress(read(stage), seconds)

    return show


def _wait(
    command: list[str], env: dict[str, str], words: Any, limit: float, show: Callable[[float], None]
) -> int | None:
    """The exit code, or None if the time was up. The process and whatever it started are gone afterwards."""
    process = subprocess.Popen(
        command, env=env, stdout=words, stderr=words, stdin=subprocess.DEVNULL, start_new_session=True
    )
    began = time.monotonic()
    try:
        while (seconds := time.monotonic() - began) < limit:
            show(seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(0.5, limit - seconds))
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failed(target: Target, compiler: Found, code: int | None, said: str, limit: float) -> UserError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = "\n".join(lines[-12:]) or "(it wrote nothing)"
    if code is None:
        what = f"the compiler for {target} was not done after {limit:.0f} s"
        fix = "give it a longer limit, or compute.scan_layers: true, with which time does not grow with depth"
    else:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        what = f"the compiler for {target} failed ({how}); its last lines:\n{last}"
        fix = "if it was killed, it needs more memory than there is; otherwise report it with these lines"
    return UserError(what, where=str(compiler), fix=fix)
