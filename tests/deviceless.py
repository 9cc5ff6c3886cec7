"""Compiling for accelerators that are not here, from a test.

    from deviceless import compiled_for
    facts = compiled_for("H100", "f = jax.jit(lambda x: x @ x)\nargs = (array((1024, 1024), 'bfloat16'),)")
    assert facts["temp_bytes"] < 2**20

The snippet runs in a separate process with the target's compiler (a test is skipped where that is missing), where
`jax`, `jnp`, `np`, `devices` (described ones, as many as the target has), `mesh(**axes)` over them, `target`, and
`array(shape, dtype, sharding=None)` (abstract, on the first device unless a sharding is given) are there. It leaves
`f`, a jitted function (one of its own making may be left out: then nothing is compiled), and `args`; `result`, if it
leaves that, is returned too, under that name. What fails to compile raises UserError with the compiler's last lines.
"""

from __future__ import annotations

import functools
import pathlib
import textwrap
import time
from typing import Any

import pytest

from meshtune.costs.hardware import Target, find_target
from meshtune.plan.compilers.find import Compiler, MissingCompiler, find_compiler
from meshtune.plan.compilers.process import run


@functools.cache
def compiler_for(platform: str) -> Compiler:
    """The compiler of a platform; the test that asks is skipped where there is none."""
    answer = find_compiler(platform)
    if isinstance(answer, MissingCompiler):
        pytest.skip(f"{answer.reason}; {answer.fix}")
    return answer


def compiled_for(target: str, snippet: str, *, limit: float = 600, text: bool = False, **values: Any) -> dict[str, Any]:
    """argument_bytes, output_bytes, alias_bytes, temp_bytes, host_temp_bytes, seconds (and text, the HLO, if asked)."""
    machine = find_target(target)
    compiler = compiler_for(machine.device.platform)
    arguments = {"snippet": textwrap.dedent(snippet), "text": text, "values": values}
    folder = pathlib.Path(__file__).parent
    return run(machine, "deviceless:executed", arguments, paths=[folder], compiler=compiler, limit=limit)


def executed(target: Target, devices: list[Any], snippet: str, text: bool, values: dict[str, Any]) -> dict[str, Any]:
    """Compiles the snippet, in the compiler's process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, SingleDeviceSharding

    def mesh(**axes: int) -> Mesh:
        return Mesh(np.array(devices[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values())), tuple(axes))

    def array(shape: tuple[int, ...], dtype: Any = "float32", sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding or SingleDeviceSharding(devices[0]))

    space: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "devices": devices, "mesh": mesh, "array": array}
    space |= {"target": target, **values}
    exec(compile(snippet, "<snippet>", "exec"), space)
    answer = {"result": space.get("result")}
    if "f" in space:
        began = time.perf_counter()
        program = space["f"].lower(*space["args"]).compile()
        facts = program.memory_analysis()
        names = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_temp")
        answer |= {f"{name}_bytes": getattr(facts, f"{name}_size_in_bytes") for name in names}
        answer["seconds"] = time.perf_counter() - began
        if text:
            answer["text"] = program.as_text()
    return answer
