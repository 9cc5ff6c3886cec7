"""Machines that are only described: kinds of devices by name, and targets such as 8xMI300X or 2x8xA100-80."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError, nearest

FACTS = pathlib.Path(__file__).with_name("hardware.toml")
OWN = "MESHTUNE_HARDWARE"  # environment variable: a TOML file of the user's own devices
TARGET = re.compile(r"^(?:(?P<hosts>\d+)x)?(?:(?P<each>\d+)x)?(?P<kind>[A-Za-z][\w.-]*)$")


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device, as hardware.toml describes it; what is None or empty there is not known.

    `platform` is JAX's: cuda, rocm, tpu or cpu; `memory` is in bytes. `arch` is what the platform calls the chip
    (sm_90a, gfx942:sramecc+:xnack-, v5p), `compiled_as` that of a near relative where XLA refuses the chip itself;
    `kind` is what JAX calls the device. For the compilers of GPUs: `cores`
    (multiprocessors or compute units), `shared_memory` in bytes (of a block by default, of a block that asks for more,
    of a core), `l2` in bytes, `clock_ghz`, `threads_per_core` and `registers` of a core, `fpus` of a core. For TPUs:
    `host_chips` of a host along each dimension of the torus, and `chip_devices`. `bandwidth` is of memory, in B/s;
    `flops_*` are of dense products, in 1/s; `link`, `network` and `host_link` are what one device sends to those of its
    host, to other hosts and to its host's memory, in B/s. `shared_network`: all devices of a host have one such port.
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
    host_link: float | None = None

    @property
    def backend(self) -> str:
        """What jax.default_backend() says there."""
        return "gpu" if self.platform in ("cuda", "rocm") else self.platform


@dataclasses.dataclass(frozen=True)
class Target:
    """`hosts` machines of `each` devices."""

    hosts: int
    each: int
    device: Device

    @property
    def devices(self) -> int:
        return self.hosts * self.each

    def __str__(self) -> str:
        return f"{self.hosts}x{self.each}x{self.device.name}" if self.hosts > 1 else f"{self.each}x{self.device.name}"


def device_of(facts: Mapping[str, Any]) -> Device:
    """The device that `dataclasses.asdict` made `facts` of, after a way through JSON."""
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return Device(**made)


def known_devices(env: Mapping[str, str] = os.environ) -> dict[str, Device]:
    """Every kind of device by name: Meshtune's own, then those of the file that MESHTUNE_HARDWARE names.

    Raises UserError for a file of the user's that is not there or says something else than devices.
    """
    found = _read(FACTS)
    if own := env.get(OWN):
        path = pathlib.Path(own).expanduser()
        if not path.is_file():
            raise UserError(f"there is no file {path}", where=OWN, fix="name a TOML file, or unset it")
        found |= _read(path)
    return found


def find_target(words: str, env: Mapping[str, str] = os.environ) -> Target:
    """'MI300X', '8xMI300X' or '2x8xA100-80' (hosts x devices of each x kind) as a Target.

    Raises UserError for another form, and for a kind that nothing describes, naming those that are near.
    """
    match = TARGET.match(words.strip())
    if match is None:
        raise UserError(
            f"'{words}' is not a target", where="--target", fix="write it as 8xMI300X, or 2x8xA100-80 for two hosts"
        )
    devices = known_devices(env)
    by_name = {name.lower(): device for name, device in devices.items()}
    kind = match["kind"]
    if kind.lower() not in by_name:
        raise UserError(
            f"no device is called '{kind}'",
            where="--target",
            fix=f"{nearest(kind, devices)}known are {', '.join(devices)}; {OWN} may name a TOML file with others",
        )
    hosts, each = (match["hosts"], match["each"]) if match["each"] else (None, match["hosts"])
    target = Target(int(hosts or 1), int(each or 1), by_name[kind.lower()])
    if not target.devices:
        raise UserError(f"'{words}' has no devices", where="--target", fix="give 1 or more of them")
    return target


def _read(path: pathlib.Path) -> dict[str, Device]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not TOML: {error}", where=str(path), fix="see plan/hardware.toml for the form") from error
    return {name: _device(name, facts, path) for name, facts in tables.items()}


def _device(name: str, facts: Any, path: pathlib.Path) -> Device:
    where = f"{path}, [{name}]"
    if not isinstance(facts, dict) or facts.get("platform") not in ("cuda", "rocm", "tpu", "cpu"):
        raise UserError("a device needs a platform", where=where, fix='platform = "cuda", "rocm", "tpu" or "cpu"')
    gib: Any = facts.get("memory_gib")
    if not _is_number(gib) or gib <= 0:
        raise UserError("a device needs memory_gib, a number above 0", where=where, fix="memory_gib = 80.0")
    more: dict[str, Any] = {key: value for key, value in facts.items() if key not in ("platform", "memory_gib")}
    for key, value in more.items():
        if key not in _FACTS:
            raise UserError(
                f"'{key}' is no fact about a device",
                where=where,
                fix=f"{nearest(key, _FACTS)}known are platform, memory_gib, {', '.join(_FACTS)}",
            )
        form, fits = _FACTS[key]
        if not fits(value):
            raise UserError(f"{key} = {value!r} is not {form}", where=where, fix="see plan/hardware.toml for the form")
    more = {key: tuple(value) if isinstance(value, list) else value for key, value in more.items()}
    return Device(name, facts["platform"], int(gib * 2**30), **more)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# A form in words and a test of it, for each type of a field.
_FORMS = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number from 1", lambda value: type(value) is int and value > 0),
    "float": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(type(one) is int and one > 0 for one in value),
    ),
}
_FACTS = {
    field.name: _FORMS[str(field.type).removesuffix(" | None")]
    for field in dataclasses.fields(Device)
    if field.name not in ("name", "platform", "memory")
}
