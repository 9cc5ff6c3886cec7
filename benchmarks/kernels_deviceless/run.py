"""Attention compiled for chips that are not here: does it compile, and what does each kernel take?

Run from the repository's root:  python benchmarks/kernels_deviceless/run.py [TARGET ...]
(`meshtune doctor` says which compilers are there and installs the rest.)

For each target a process with its compiler makes the output and the gradients of q, k and v for each case below, with
the backend that `attention` chooses there, and says of each kernel the shared memory, registers and spilled registers:
of NVIDIA's from ptxas, of AMD's from the code object. Writes results.json and the tables of RESULTS.md beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import tempfile
import time
from typing import Any

import jax

from meshtune.costs.hardware import find_target, known_devices
from meshtune.errors import UserError
from meshtune.plan.compilers.find import require_compiler
from meshtune.plan.compilers.process import run

HERE = pathlib.Path(__file__).parent
TARGETS = [
    "A100-80", "RTX3090", "RTX4090", "H100", "B200", "RTX5090", "MI250X", "MI300X", "MI350X",
    "MI100", "RX7900XTX", "RX9070XT", "StrixHalo-128", "DGXSpark", "TPUv5e", "TPUv5p", "TPUv6e", "TPUv7x",
]  # fmt: skip
EIGHT_B = {"batch": 2, "length": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
CASES: dict[str, dict[str, Any]] = {
    "8B's layer: 2 x 4096, 32 heads of 128 on 8": EIGHT_B,
    "heads of 64": EIGHT_B | {"head_dim": 64},
    "heads of 80": EIGHT_B | {"head_dim": 80},
    "heads of 96": EIGHT_B | {"head_dim": 96},
    "heads of 256": EIGHT_B | {"head_dim": 256},
    "window 1024, soft cap, odd length 4000": EIGHT_B | {"length": 4000, "window": 1024, "softcap": 50.0},
    "one row of 131,072": EIGHT_B | {"batch": 1, "length": 131072},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS)
    results = HERE / "results.json"
    filed = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    for name in parser.parse_args().targets:
        target = find_target(f"{known_devices()[name].chip_devices}x{name}")  # one chip
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as dump:
            if target.device.platform != "tpu":
                os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump}"
            try:
                compiler = require_compiler(target.device.platform)
                arguments = {"cases": CASES, "dump": dump}
                answer = run(target, "compile_attention:compiled", arguments, paths=[HERE], compiler=compiler)
                filed[name] = {"arch": target.device.arch, "compiler": str(compiler), "cases": answer}
            except UserError as error:
                print(f"{name}: {error}")
            finally:
                os.environ.pop("XLA_FLAGS", None)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        lines = [f"{json.dumps(one)}: {json.dumps(facts)}" for one, facts in filed.items()]
        results.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(written(filed), encoding="utf-8")


def written(filed: dict[str, Any]) -> str:
    order = [name for name in TARGETS if name in filed] + [name for name in filed if name not in TARGETS]
    compilers = sorted({filed[name]["compiler"] for name in order})
    made = (
        f"{datetime.date.today()}, jax {jax.__version__}, Python {platform.python_version()}; {'; '.join(compilers)}."
    )
    lines = [
        "# Attention for chips that are not here",
        "",
        f"Made by `python benchmarks/kernels_deviceless/run.py` on {made}",
        "",
        "Each cell is one program: the output and the gradients of q, k and v in bfloat16, made by the chip's own",
        "compiler with no such chip present. It says the backend chosen, the seconds that took on two busy CPU",
        "cores, and the program's temporary memory in MiB. Nothing was run: for times see benchmarks/gpu_kernels.",
        "",
        f"| case | {' | '.join(name + ' (' + filed[name]['arch'].split(':')[0] + ')' for name in order)} |",
        f"| --- |{' --- |' * len(order)}",
    ]
    for case in CASES:
        cells = [_cell(filed[name]["cases"].get(case)) for name in order]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines += [
        "",
        "## What the kernels take",
        "",
        "Of the Triton kernels: tokens in a block of queries x of keys, warps and stages of the pipeline; shared",
        "memory; registers of a thread; bytes (NVIDIA) or registers (AMD) that did not fit and are kept in memory.",
        "",
        "| chip | head | kernel | block, warps, stages | shared KiB | registers | spilled |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in order:
        for case in ("heads of 64", next(iter(CASES)), "heads of 256"):
            found = filed[name]["cases"].get(case, {})
            for kernel in found.get("kernels", []):
                tile = kernel["tile"]
                lines.append(
                    f"| {name} | {CASES[case]['head_dim']} | {kernel['kernel']} | {tile[0]} x {tile[1]}, {tile[2]}, "
                    f"{tile[3]} | {kernel['shared'] / 1024:.0f} | {kernel['registers']} | {kernel['spilled']} |"
                )
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return found["error"]
    return f"{found['backend']}, {found['seconds']:.1f} s, {found['temp_bytes'] / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
