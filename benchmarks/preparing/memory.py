"""The memory of preparing copies of alpaca records: of the process and all that it starts, for each size and format.

    python benchmarks/preparing/memory.py MODEL ALPACA.json result.json jsonl,json,parquet 50000,200000,800000

Every 0.1 seconds, /proc tells the anonymous memory of all of these processes, which a machine must have, and their
proportional set size, in which pages of mapped files are counted once; the system takes those back when it needs them.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import psutil
from run import OURS, write_records

FIELDS = {"Anonymous": "anonymous", "Pss": "with_mapped_files"}


def write_as(form: str, lines: pathlib.Path) -> pathlib.Path:
    """The records of a .jsonl file as `form`; parquet with the row groups that pyarrow writes by itself."""
    file = lines.with_suffix(f".{form}")
    if form == "json":
        with lines.open() as source, file.open("w") as target:
            target.write("[\n")
            for index, line in enumerate(source):
                target.write(f"{',' if index else ''}{line}")
            target.write("]\n")
    elif form == "parquet":
        import pyarrow.json
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.json.read_json(lines), file)
    return file


def memory(process: psutil.Process) -> dict[str, int]:
    """Kilobytes of a process and all its descendants."""
    total = dict.fromkeys(FIELDS.values(), 0)
    for member in (process, *process.children(recursive=True)):
        try:
            lines = pathlib.Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            continue
        for line in lines:
            name, kilobytes, *_ = line.replace(":", "").split()
            if name in FIELDS:
                total[FIELDS[name]] += int(kilobytes)
    return total


def measure(model: str, data: pathlib.Path) -> dict[str, float]:
    """Peaks in MB, and seconds, of preparing `data` in a fresh process with empty caches."""
    peak, start = dict.fromkeys(FIELDS.values(), 0), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HOME": folder}
        command = [sys.executable, "-c", OURS, model, str(data), folder]
        process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                for name, kilobytes in memory(process).items():
                    peak[name] = max(peak[name], kilobytes)
            except psutil.Error:
                break
            time.sleep(0.1)
        assert process.wait() == 0
    return {**{name: round(kilobytes / 1000) for name, kilobytes in peak.items()}, "wall": time.monotonic() - start}


def main() -> None:
    model, source, result, forms, counts = sys.argv[1:]
    file = pathlib.Path(result)
    results = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, counts.split(",")):
            lines = pathlib.Path(folder) / f"{count}.jsonl"
            write_records(source, count, lines)
            for form in forms.split(","):
                data = write_as(form, lines)
                results.setdefault(form, {})[str(count)] = {**measure(model, data), "bytes": data.stat().st_size}
                print(form, count, results[form][str(count)], flush=True)
                file.write_text(json.dumps(results, indent=1))
                if data != lines:
                    data.unlink()
            lines.unlink()


if __name__ == "__main__":
    main()
