"""What a compiler says of a program, in a form that can be written down."""

from __future__ import annotations

import dataclasses
from typing import Any

# What a byte of an argument is for.
ROLES = ("frozen", "trained", "optimizer", "batch")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a target. All bytes are those of one device; host_* is memory of the host for it.

    `breakdown` splits argument_bytes + host_argument_bytes by ROLES: {"frozen": {"device": n, "host": n}, ...}, as the
    shapes say it (the compiler may pad). `out_of_memory` is None, or the compiler's own words where it refuses a
    program that does not fit; all bytes but the breakdown are then 0, except `needed_bytes` if the words name a figure.
    `collectives` are plan.collectives' records as dicts, None where the compiled program cannot be read. `flops`,
    `bytes_accessed` and `optimal_seconds` are of one device and None where the compiler does not say. `notes` say what
    was made up on the way; `cached`: these are the findings of an earlier call.
    """

    target: str
    compiler: str
    mesh: dict[str, int]
    rows: int
    length: int
    accumulation: int
    breakdown: dict[str, dict[str, int]]
    choices: list[dict[str, str]]
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    generated_code_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_alias_bytes: int = 0
    host_temp_bytes: int = 0
    out_of_memory: str | None = None
    needed_bytes: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    optimal_seconds: float | None = None
    collectives: list[dict[str, Any]] | None = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    cached: bool = False

    @property
    def device_bytes(self) -> int:
        """What the program holds on one device at most; where it was refused, what the compiler says it needs."""
        if self.out_of_memory is not None:
            return self.needed_bytes or 0
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """What it holds in the host's memory for one device."""
        return self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes + self.host_temp_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `Compiled(**values)` takes back."""
        return dataclasses.asdict(self)
