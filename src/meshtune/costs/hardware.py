"""Hardware descriptions: device types by name, and targets such as 8xMI300X or 2x8xA100-80."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from meshtune.errors import UserError, nearest

FACTS = pathlib.Path(__file__).with_name("hardware.toml")
HARDWARE_VARIABLE = "MESHTUNE_HARDWARE"  # environment variable: a TOML file of the user's own devices
PLATFORMS = ("cuda", "rocm", "oneapi", "metal", "tpu", "cpu")
REQUIRED = ("platform", "memory_gib", "sizes_gib")
TARGET = re.compile(r"^(?:(?P<hosts>\d+)x)?(?:(?P<per_host>\d+)x)?(?P<name>[A-Za-z][\w. -]*)$")


@dataclasses.dataclass(frozen=True)
class Device:
    """A device type, as described in hardware.toml. Fields that are None or empty there are unknown.

    Identity: `platform` is one of PLATFORMS, `kind` is JAX's `device_kind`, `memory` is in bytes. A `unified` device
    has no memory but the host's: what is offloaded takes the same bytes.
    `arch` is the platform's name of the chip (sm_90a, gfx942:sramecc+:xnack-, v5p); `compiled_as` is the arch of a
    close relative to compile for where XLA refuses the chip itself.

    For GPU compilers: `cores` (multiprocessors or compute units), `shared_memory` in bytes (per block by default, per
    block with opt-in, per core), `l2` in bytes, `clock_ghz`, and per core `threads_per_core`, `registers` and `fpus`.
    For TPUs: `host_chips`, the chips of a host along each dimension of the torus, and `chip_devices`, JAX devices per
    chip.

    Speeds, per device and in one direction: `bandwidth` of device memory in B/s; `flops_bf16` and `flops_f32` of dense
    matrix products in 1/s; `link` to devices of the same host, `network` to other hosts and `host_link` to host
    memory, in B/s. With `shared_network` all devices of a host share one network port. `pod` is the most devices whose
    hosts `network` joins; `dcn` is the speed between pods.
    """

    name: str
    platform: str
    memory: int
    kind: str = ""
    arch: str = ""
    compiled_as: str = ""
    cores: int | None = None
    shared_memory: tuple[int, ...] | None = None
    l2: int | None = None
    clock_ghz: float | None = None
    threads_per_core: int = 2048
    registers: int = 65536
    fpus: int = 128
    host_chips: tuple[int, ...] | None = None
    chip_devices: int = 1
    bandwidth: float | None = None
    flops_bf16: float | None = None
    flops_f32: float | None = None
    link: float | None = None
    network: float | None = None
    shared_network: bool = False
    pod: int | None = None
    dcn: float | None = None
    host_link: float | None = None
    unified: bool = False

    @property
    def backend(self) -> str:
        """The value of `jax.default_backend()` on this device; a platform's name where its plugins have several."""
        return "gpu" if self.platform in ("cuda", "rocm") else self.platform


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to plan for: `hosts` hosts with `per_host` devices of one type each, in equal `slices`."""

    hosts: int
    per_host: int
    device: Device
    slices: int = 1

    @property
    def devices(self) -> int:
        return self.hosts * self.per_host

    def __str__(self) -> str:
        one_host = f"{self.per_host}x{self.device.name}"
        return f"{self.hosts}x{one_host}" if self.hosts > 1 else one_host


def device_from_json(fields: Mapping[str, Any]) -> Device:
    """The inverse of `dataclasses.asdict(device)` after a round trip through JSON, where tuples become lists."""
    return Device(**_with_tuples(fields))


def known_devices(env: Mapping[str, str] = os.environ) -> dict[str, Device]:
    """All described device types by name: the built-in ones, then those of the file named by MESHTUNE_HARDWARE.

    Raises: UserError if the user's file is missing or is not a valid description of devices.
    """
    devices = _read(FACTS)
    if user_file := env.get(HARDWARE_VARIABLE):
        path = pathlib.Path(user_file).expanduser()
        if not path.is_file():
            raise UserError(f"there is no file {path}", where=HARDWARE_VARIABLE, fix="name a TOML file, or unset it")
        devices |= _read(path)
    return devices


def find_device(text: str, devices: Mapping[str, Device]) -> Device | None:
    """The device of this name or kind, or the only size of one: 'RX 9070 XT', 'rtx4090', 'NVIDIA GB10', 'Strix Halo'.

    None if there is none, or if there are several sizes of memory.
    """
    wanted = _spellings(text)
    named = [device for name, device in devices.items() if wanted & _spellings(name)]
    of_kind = [device for device in devices.values() if wanted & _spellings(device.kind)]
    sizes = [device for name, device in devices.items() if wanted & _spellings(re.sub(r"-\d+$", "", name))]
    for matches in (named, of_kind, sizes):
        if len(matches) == 1:
            return matches[0]
    return None


def _names_with_prefix(text: str, devices: Mapping[str, Device]) -> list[str]:
    shortest = min(_spellings(text), key=len)
    return [name for name in devices if min(_spellings(name), key=len).startswith(shortest)]


MAKERS = r"^(nvidia|geforce|tesla|quadro|amd|radeon|instinct|intel|apple)+(?=.)"


def _spellings(name: str) -> set[str]:
    """Lower-case letters and digits of a name, with and without its maker's names."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return {plain, re.sub(MAKERS, "", plain)}


def find_target(text: str, env: Mapping[str, str] = os.environ, slices: int | None = None) -> Target:
    """Parses 'MI300X', '8xMI300X' or '2x8xA100-80' (hosts x devices per host x device type).

    `slices` are by default as few as the device's pods allow. Raises: UserError for another form, for hosts that do not
    divide into the slices, and for an unknown device type, with the nearest known names.
    """
    match = TARGET.match(text.strip())
    if match is None:
        raise UserError(
            f"'{text}' is not a target", where="--target", fix="write it as 8xMI300X, or 2x8xA100-80 for two hosts"
        )
    devices = known_devices(env)
    device = require_device(match["name"], devices)
    hosts, per_host = (match["hosts"], match["per_host"]) if match["per_host"] else (None, match["hosts"])
    target = Target(int(hosts or 1), int(per_host or 1), device)
    if not target.devices:
        raise UserError(f"'{text}' has no devices", where="--target", fix="give at least one host and one device")
    fewest = -(-target.devices // device.pod) if device.pod else 1
    slices = fewest if slices is None else slices
    if slices < fewest or target.hosts % slices:
        pods = f"; a pod of {device.name} has {device.pod}" if device.pod else ""
        raise UserError(
            f"{target.hosts} hosts with {target.devices} devices do not make {slices} equal slices{pods}",
            where="--target" if slices == fewest else "--slices",
            fix=f"give a number of hosts that divides by the slices, of which there are {fewest} at least",
        )
    return dataclasses.replace(target, slices=slices)


def require_device(name: str, devices: Mapping[str, Device]) -> Device:
    """The device of this name. Raises: UserError with the nearest known names."""
    device = find_device(name, devices)
    if device is not None:
        return device
    if min(_spellings(name), key=len).startswith("ascend"):
        raise UserError(
            "Ascend has no plugin for JAX that is kept",
            where="--target",
            fix="tune with LLaMA-Factory or MindSpeed, which run on torch_npu; what they write opens here",
        )
    longer = _names_with_prefix(name, devices)
    nearby = f"did you mean {' or '.join(map(repr, longer))}? " if longer else nearest(name, devices)
    known = nearby or f"known devices are {', '.join(devices)}; "
    raise UserError(
        f"no device is called '{name}'",
        where="--target",
        fix=f"{known}{HARDWARE_VARIABLE} may name a TOML file with others",
    )


def _read(path: pathlib.Path) -> dict[str, Device]:
    try:
        tables: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"not valid TOML: {error}", where=str(path), fix="see costs/hardware.toml for the format"
        ) from error
    devices = {}
    for name, facts in tables.items():
        for device in _devices(name, facts, path):
            devices[device.name] = device
    return devices


def _devices(name: str, facts: object, path: pathlib.Path) -> list[Device]:
    """The device of one table, or one for each size of `sizes_gib`."""
    if not isinstance(facts, dict) or "sizes_gib" not in facts:
        return [_device(name, facts, path)]
    sizes = facts["sizes_gib"]
    is_list = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if "memory_gib" in facts or not is_list:
        raise UserError(
            "sizes_gib is a list of positive integers, in place of memory_gib",
            where=f"{path}, [{name}]",
            fix="sizes_gib = [16, 32]",
        )
    shared = {key: value for key, value in facts.items() if key != "sizes_gib"}
    return [_device(f"{name}-{size}", shared | {"memory_gib": usable_gib(size)}, path) for size in sizes]


def usable_gib(size: int) -> float:
    """The part of a Mac's memory that Metal gives to programs: two thirds up to 36 GB, three quarters above
    (MTLDevice.recommendedMaxWorkingSetSize; `sysctl iogpu.wired_limit_mb` raises it)."""
    return size * (2 / 3 if size <= 36 else 3 / 4)


def _device(name: str, facts: object, path: pathlib.Path) -> Device:
    where = f"{path}, [{name}]"
    if not isinstance(facts, dict) or facts.get("platform") not in PLATFORMS:
        raise UserError("a device needs a platform", where=where, fix=f"platform is one of {', '.join(PLATFORMS)}")
    gib = facts.get("memory_gib")
    if not _is_positive(gib):
        raise UserError("a device needs memory_gib, a positive number", where=where, fix="memory_gib = 80.0")
    optional: dict[str, object] = {key: value for key, value in facts.items() if key not in REQUIRED}
    for key, value in optional.items():
        if key not in _OPTIONAL:
            raise UserError(
                f"'{key}' is not a property of a device",
                where=where,
                fix=f"{nearest(key, _OPTIONAL)}known are platform, memory_gib, {', '.join(_OPTIONAL)}",
            )
        expected, is_valid = _OPTIONAL[key]
        if not is_valid(value):
            raise UserError(
                f"{key} = {value!r} is not {expected}", where=where, fix="see costs/hardware.toml for the format"
            )
    return Device(name, facts["platform"], int(gib * 2**30), **_with_tuples(optional))


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with lists, which TOML and JSON give, as the tuples that a Device holds."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


# The validation of each field type: (how an error message describes it, predicate).
_VALIDATORS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a positive integer", lambda value: type(value) is int and _is_positive(value)),
    "float": ("a positive number", _is_positive),
    "tuple[int, ...]": (
        "a list of positive integers",
        lambda value: isinstance(value, list) and all(type(item) is int and item > 0 for item in value),
    ),
}
_OPTIONAL = {
    field.name: _VALIDATORS[str(field.type).removesuffix(" | None")]
    for field in dataclasses.fields(Device)
    if field.name not in ("name", "platform", "memory")
}
