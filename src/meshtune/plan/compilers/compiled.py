"""The result of compiling a step: memory, cost and collectives, in a form that can be stored as JSON."""

from __future__ import annotations

import dataclasses

# The roles of a step's arguments.
ROLES = ("frozen", "trained", "optimizer", "batch")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for a target. All bytes are per device; host_* are bytes of host memory for that device.

    `breakdown` splits argument_bytes + host_argument_bytes by ROLES: {"frozen": {"device": n, "host": n}, ...}; it is
    computed from shapes (the compiler may add padding). `out_of_memory` is the compiler's message if it refuses the
    program because it does not fit, else None; if it is set, all byte counts but the breakdown are 0, and
    `needed_bytes` is the size in that message, if it states one. `collectives` are costs.collectives.Collective as
    dicts, None if the compiled program cannot be read. `flops`, `bytes_accessed` and `optimal_seconds` are per device,
    None if the compiler does not report them. `notes` list the approximations made for the target. `cached` is true
    for the result of an earlier call.
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
    collectives: list[dict[str, object]] | None = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    cached: bool = False

    @property
    def device_bytes(self) -> int:
        """Peak bytes on one device; if the program was refused, the bytes that the compiler says it needs."""
        if self.out_of_memory is not None:
            return self.needed_bytes or 0
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """Peak bytes in host memory for one device."""
        return self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes + self.host_temp_bytes

    def to_json(self) -> dict[str, object]:
        """Plain values; `Compiled(**values)` is the inverse."""
        return dataclasses.asdict(self)
