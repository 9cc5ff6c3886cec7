"""Runs a function in a process of its own, in which a compiler's libraries are loaded."""

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
from typing import Any, BinaryIO

from meshtune.costs.hardware import Target
from meshtune.errors import UserError
from meshtune.plan.compilers.find import Compiler, require_compiler

STAGE_VARIABLE = "MESHTUNE_STAGE"  # environment variable of the compiler process: the path of the file


def report_stage(stage: str) -> None:
    """Reports the current stage (such as "tracing"); does nothing outside of a process that `process.run` started."""
    if path := os.environ.get(STAGE_VARIABLE):
        scratch = pathlib.Path(path + ".new")
        scratch.write_text(stage, encoding="utf-8")
        scratch.replace(path)


def read_stage(path: pathlib.Path) -> str:
    """The stage last reported."""
    return path.read_text(encoding="utf-8") if path.is_file() else "starting"


Progress = Callable[[str, float], None]  # (current stage, seconds since the process started)

LIMIT = 900.0  # seconds; a 405B step takes half a minute on two cores


def run(
    target: Target,
    function: str,
    arguments: Mapping[str, object] | None = None,
    *,
    paths: Sequence[str | pathlib.Path] = (),
    compiler: Compiler | None = None,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Any:
    """Calls `function` ("module:name") with (target, devices, **arguments) in a compiler process; returns its result.

    Arguments and result must be JSON values; `paths` are additional folders to import from, `limit` is in seconds. No
    accelerator is used. Raises: UserError for a missing compiler, any UserError of the function, and for a compiler
    that fails, with the last lines of its output.
    """
    compiler = compiler or require_compiler(target.device.platform)
    with tempfile.TemporaryDirectory(prefix="meshtune-compile-") as scratch:
        folder = pathlib.Path(scratch)
        job = {
            "device": dataclasses.asdict(target.device),
            "hosts": target.hosts,
            "per_host": target.per_host,
            "function": function,
            "arguments": dict(arguments or {}),
            "answer": str(folder / "answer.json"),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "meshtune.plan.compilers.child", str(folder / "job.json")]
        env = child_env(compiler, target, paths) | {STAGE_VARIABLE: str(folder / "stage")}
        with (folder / "output").open("wb") as output:
            code = _wait(command, env, output, limit, _stage_reporter(folder / "stage", progress))
        answer = folder / "answer.json"
        if code != 0 or not answer.is_file():
            text = (folder / "output").read_text(encoding="utf-8", errors="replace")
            raise _failure(target, compiler, code, text, limit)
        result = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"]["what"], where=result["error"]["where"], fix=result["error"]["fix"])
    return result["result"]


def child_env(
    compiler: Compiler, target: Target, paths: Sequence[str | pathlib.Path] = (), env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of a compiler process."""
    unset = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NAMES_AND_LIBRARY_PATHS", "LD_PRELOAD")
    variables = {name: value for name, value in env.items() if name not in unset}
    # Compilers are requested by name, and everything that executes does so on the CPU, so that JAX starts no backend
    # that would look for devices.
    variables["JAX_PLATFORMS"] = "cpu"
    variables["TPU_SKIP_MDS_QUERY"] = "1"
    variables["TF_CPP_MIN_LOG_LEVEL"] = env.get("TF_CPP_MIN_LOG_LEVEL", "2")
    # Programs compiled for described devices cannot be executed, so caching them is of no use.
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    variables |= compiler.env
    variables = {name: value for name, value in variables.items() if value}
    flags = [
        flag for flag in variables.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in flag
    ]
    if compiler.platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={target.devices}")
    variables["XLA_FLAGS"] = " ".join(flags)
    compiler_path = [] if compiler.folder is None else [str(compiler.folder)]
    meshtune_path = str(pathlib.Path(__file__).parents[3])  # the same Meshtune is imported, installed or not
    inherited = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join([*compiler_path, *map(str, paths), meshtune_path, *inherited])
    return variables


def _stage_reporter(stage: pathlib.Path, progress: Progress | None) -> Callable[[float], None]:
    def report(seconds: float) -> None:
        if progress is not None:
            progress(read_stage(stage), seconds)

    return report


def _wait(
    command: list[str], env: dict[str, str], output: BinaryIO, limit: float, report: Callable[[float], None]
) -> int | None:
    """Runs a command; returns its exit code, or None after `limit` seconds. Its process group is killed at the end."""
    process = subprocess.Popen(
        command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
    )
    start = time.monotonic()
    try:
        while (seconds := time.monotonic() - start) < limit:
            report(seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(0.5, limit - seconds))
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(target: Target, compiler: Compiler, code: int | None, output: str, limit: float) -> UserError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last_lines = "\n".join(lines[-12:]) or "(no output)"
    if code is None:
        message = f"the compiler for {target} was not done after {limit:.0f} s"
        fix = "give it a longer limit, or compute.scan_layers: true, with which compile time is independent of depth"
    else:
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        message = f"the compiler for {target} failed ({cause}); its last lines:\n{last_lines}"
        fix = "if it was killed, it needs more memory than there is; otherwise report it with these lines"
    return UserError(message, where=str(compiler), fix=fix)
