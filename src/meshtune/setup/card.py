"""Checks a device for `meshtune doctor`: plugin, driver, memory, kernels, known faults."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import platform
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from meshtune.costs.hardware import Device
from meshtune.errors import pip_install
from meshtune.kernels.chips import chip_of, without_triton

FACTS = pathlib.Path(__file__).with_name("platforms.toml")
State = Literal["good", "bad", "note"]


@dataclasses.dataclass(frozen=True)
class Plugin:
    """How JAX gets to a platform; `name` is the extra that installs it. See platforms.toml."""

    name: str
    platform: str
    title: str
    plugins: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    python: str = "3.11"
    jax: str = ""
    driver: str = ""
    oldest: str = ""
    arches: tuple[str, ...] = ()
    needs: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def serves(self, device: Device) -> bool:
        """Whether it has kernels for the device's chip."""
        if device.platform != self.platform:
            return False
        if self.oldest:
            return chip_of(device.platform, device.arch).capability >= chip_of(device.platform, self.oldest).capability
        return not self.arches or device.arch.startswith(self.arches)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A known fault of a release (of ROCm) on some chips, with its remedy and where it is described."""

    platform: str
    says: str
    remedy: str
    source: str
    arch: str = ""
    release: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    about: str
    text: str
    state: State = "note"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings about a device, and the next command; `next` is empty where it is ready."""

    device: Device
    findings: list[Finding]
    next: str


@functools.cache
def _facts() -> dict[str, Any]:
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def known_plugins() -> list[Plugin]:
    """Every way to a platform, the preferred one of a platform first."""
    plugins = []
    for name, table in _facts().items():
        if isinstance(table, dict):
            fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
            plugins.append(Plugin(name, **fields))
    return plugins


def known_faults(device: Device, release: str) -> list[Fault]:
    """The faults of a chip with `release` of its driver's software; without a release, those of all releases."""
    faults = [Fault(**table) for table in _facts()["fault"] if table["platform"] == device.platform]
    return [
        fault
        for fault in faults
        if device.arch.startswith(fault.arch)
        and (not fault.release or not release or f"{release}.".startswith(f"{fault.release}."))
    ]


def diagnose(device: Device, *, attached: bool, version: Callable[[str], str | None] | None = None) -> Diagnosis:
    """Checks what the device needs against this Python and, where it is `attached`, against this machine.

    `version` gives the installed version of a package, by default this environment's.
    """
    version = version or _version
    if device.platform == "cpu":
        return Diagnosis(device, [*_abilities(device), _proof(device)], "")
    plugins = [plugin for plugin in known_plugins() if plugin.serves(device)]
    installed = [plugin for plugin in known_plugins() if any(version(name) for name in plugin.plugins)]
    driver = _nvidia("driver_version") if attached and any(plugin.driver for plugin in plugins) else None
    served = [plugin for plugin in plugins if driver is None or _numbers(driver) >= _numbers(plugin.driver)]
    chosen = next((plugin for plugin in served if plugin in installed), (served or plugins or [None])[0])
    findings, commands = [], []

    def add(about: str, problem: str | None, otherwise: str = "", command: str = "") -> None:
        if problem or otherwise:
            findings.append(Finding(about, problem or otherwise, "bad" if problem else "good"))
        if problem and command:
            commands.append(command)

    release = _rocm_release() if attached and device.platform == "rocm" else ""
    if chosen is None:
        add("plugin", f"no plugin of JAX serves {device.arch or device.name}", command="choose another device")
    else:
        here = platform.python_version()
        too_old = _numbers(here) < _numbers(chosen.python)
        add("Python", f"{here}, and {chosen.plugins[0]} needs {chosen.python}" if too_old else None, here,
            f"make an environment with Python {chosen.python}")  # fmt: skip
        add("plugin", *_plugin_state(chosen, installed, version))
        needs = [f"driver {chosen.driver} or newer"] if chosen.driver else []
        needs += [chosen.needs] if chosen.needs else []
        needs += [f"{name}={value} in the environment" for name, value in chosen.variables.items()]
        if attached and chosen.driver:
            old = driver is None or chosen not in served
            add("driver", f"{driver or 'none is found'}: {needs[0]} is needed" if old else None, driver or "",
                "update the driver of the card")  # fmt: skip
        elif needs:
            findings.append(Finding("needs", "; ".join(needs)))
    findings += [*_abilities(device), *_memory(device, attached)]
    findings += [
        Finding("known fault", f"{_with_release(fault)}{fault.says}: {fault.remedy} ({fault.source})")
        for fault in known_faults(device, release)
        if fault.arch or chosen is not None
    ]
    return Diagnosis(device, [*findings, _proof(device)], commands[0] if commands else "")


def _plugin_state(
    chosen: Plugin, installed: list[Plugin], version: Callable[[str], str | None]
) -> tuple[str | None, str, str]:
    """(the problem or None, what there is, the command that mends it)."""
    name = chosen.plugins[0]
    found, jaxlib = version(name), version("jaxlib") or ""
    rivals = [rival for plugin in installed if plugin != chosen and plugin.platform == chosen.platform
              for rival in plugin.plugins] + [rival for rival in chosen.rivals if version(rival)]  # fmt: skip
    install = pip_install(chosen.name)
    if found is None:
        needs_jax = f", with JAX {chosen.jax}" if chosen.jax and not jaxlib.startswith(f"{chosen.jax}.") else ""
        return f"{name} is not installed{needs_jax}", "", install
    if rivals:
        return f"{name} and {' and '.join(rivals)} at once: JAX loads both", "", f"pip uninstall {' '.join(rivals)}"
    if name != "libtpu" and found.split(".")[:2] != jaxlib.split(".")[:2]:
        return f"{name} {found} cannot work with jaxlib {jaxlib}", "", f"pip install '{name}=={jaxlib}'"
    return None, f"{name} {found} with jaxlib {jaxlib}", ""


def _abilities(device: Device) -> list[Finding]:
    chip = chip_of(device.backend, device.arch)
    types = "float32, float16, bfloat16" if chip.has_bfloat16 else "float32, float16; no bfloat16: precision is float16"
    plain = None if device.platform == "tpu" else without_triton(chip)
    if device.platform == "tpu":
        kernels = "splash attention"
    elif plain is None:
        kernels = "Triton: attention, decoding, products of experts"
    else:
        kernels = f"XLA's own operations; not Triton's: {plain}"
    return [
        Finding("types", types),
        Finding("kernels", kernels),
        Finding("formats", "16-bit, nf4, int8, fp8 and mxfp4 weights; codes are decoded before each product"),
    ]


def _memory(device: Device, attached: bool) -> list[Finding]:
    total = device.memory / 2**30
    text = f"{total:.1f} GiB for programs" + (", the host's own" if device.unified else "")
    used = _nvidia("memory.used") if attached and device.platform == "cuda" else None
    if used is not None and (taken := _numbers(used)[0] / 1024) > 0.1 * total:
        return [Finding("memory", f"{text}, of which {taken:.1f} are taken: a desktop or another run?", "bad")]
    return [Finding("memory", text)]


def _proof(device: Device) -> Finding:
    if device.platform == "cpu":
        text = "all tests run here"
    elif device.platform == "metal":
        text = "its plugins' operations are checked (tests/plan/test_plugin_operations.py); not yet run"
    elif device.name == "H200":
        text = "trained and timed on one (benchmarks/accelerator/RESULTS.md)"
    elif device.compiled_as:
        text = f"compiled as {device.compiled_as}, since XLA refuses it"
    else:
        compilers = [table["compiler"] for table in _facts()["compiled"] if _is_one_of(device.arch, table["arches"])]
        text = (
            f"compiled by {compilers[0]} compiler without the device; not yet run on it" if compilers else "nothing yet"
        )
    return Finding("proved", text)


def _is_one_of(arch: str, arches: Iterable[str]) -> bool:
    """Whether a chip is in the list, by its name without features: sm_90a is sm_90, gfx942:sramecc+ is gfx942."""
    name = arch.partition(":")[0]
    return (name.rstrip("af") if name.startswith("sm_") else name) in arches


def _with_release(fault: Fault) -> str:
    return f"ROCm {fault.release}: " if fault.release else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) or (0,)


def _nvidia(field: str) -> str | None:
    """A field of the first NVIDIA card as its driver tells it, None if there is none."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.splitlines()[0].strip() if ran.returncode == 0 and ran.stdout.strip() else None


def _rocm_release() -> str:
    """The release of the installed ROCm, empty if there is none."""
    file = pathlib.Path("/opt/rocm/.info/version")
    return file.read_text(encoding="utf-8").split("-")[0].strip() if file.is_file() else ""
