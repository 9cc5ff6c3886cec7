"""Measures prepared data sets: what opening one reads, what preparing takes, and what it holds in memory; and streams.

    python benchmarks/data/run.py open FOLDER MODEL GIGABYTES TOKENS_A_RECORD result.json
    python benchmarks/data/run.py prepare FOLDER MODEL RECORDS result.json
    python benchmarks/data/run.py memory FOLDER MODEL RECORDS,RECORDS result.json
    python benchmarks/data/run.py stream FOLDER MODEL RECORDS UPDATES result.json
    python benchmarks/data/run.py parquet FOLDER MODEL RECORDS RECORDS_A_GROUP result.json

FOLDER must not exist, and is deleted. See README.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

OPEN = """
import hashlib, json, resource, sys, time
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.store import open_store
recipe = load_recipe(None, sys.argv[1:])
tokenizer = load_tokenizer(recipe.model.path)
def read_bytes():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, start, cpu, held = read_bytes(), time.monotonic(), time.process_time(), resident()
prepared = prepare_data(recipe, tokenizer)
opened = {
    "wall": time.monotonic() - start, "cpu": time.process_time() - cpu, "read": read_bytes() - before,
    "held": resident() - held, "documents": len(prepared.train.store),
}
before, start = read_bytes(), time.process_time()
open_store(prepared.train.store.path)
opened["store_cpu"] = time.process_time() - start
start, digest = time.process_time(), hashlib.sha256()
for step in range(3):
    batch = prepared.train.batch(step)
    for name in sorted(batch.arrays):
        digest.update(batch.arrays[name].tobytes())
opened |= {"batches_cpu": time.process_time() - start, "digest": digest.hexdigest()}
opened["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(opened))
"""
MEMORY = """
import sys, threading, time, json
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
def held(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, held("RssAnon"))
        time.sleep(0.1)
threading.Thread(target=watch, daemon=True).start()
recipe = load_recipe(None, sys.argv[1:])
prepare_data(recipe, load_tokenizer(recipe.model.path))
print(json.dumps({"anonymous": peak, "with mapped files": held("VmHWM")}))
"""
STREAM = """
import hashlib, json, os, resource, sys, time
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
share, of, workers, updates, *fields = sys.argv[1:]
recipe = load_recipe(None, fields)
stream = prepare_data(recipe, load_tokenizer(recipe.model.path)).train
size = stream.batch_size // int(of)
rows = range(int(share) * size, (int(share) + 1) * size)
stream.workers, stream.journal = int(workers), None
stream.share(rows, rows)
digests, tokens = [hashlib.sha256() for _ in range(stream.batch_size)], 0
before, start = time.process_time(), time.monotonic()
for batch in stream.iterate(0, int(updates)):
    arrays = [batch.arrays[name].reshape(stream.batch_size, -1) for name in sorted(batch.arrays)]
    for row in rows:
        tokens += int((arrays[1][row] > 0).sum())
        for array in arrays:
            digests[row].update(array[row].tobytes())
wall, own = time.monotonic() - start, time.process_time() - before
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "tokens": tokens, "wall": round(wall, 2), "cpu": round(own, 2),
    "workers_cpu": round(children.ru_utime + children.ru_stime, 2),
    "rows": {row: digests[row].hexdigest() for row in rows},
}))
"""
PARQUET = """
import hashlib, json, os, sys, time
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
import datasets, pyarrow.parquet
def status(name, file="status"):
    return int(open(f"/proc/self/{file}").read().split(name + ":")[1].split()[0])
recipe = load_recipe(None, sys.argv[2:])
tokenizer = load_tokenizer(recipe.model.path)
held, read, start = status("VmRSS"), status("rchar", "io"), time.monotonic()
stream = prepare_data(recipe, tokenizer).train
stream.journal = None
result = {"opened": round(time.monotonic() - start, 2)}
digest = hashlib.sha256()
for batch in stream.iterate(0, 20):
    for name in sorted(batch.arrays):
        digest.update(batch.arrays[name].tobytes())
result |= {"digest": digest.hexdigest(), "read": status("rchar", "io") - read}
documents, order, start = stream.documents, stream.rows.order(0), time.monotonic()
for first in range(0, int(sys.argv[1]), 64):
    documents.take(order[first : first + 64]).compact()
result |= {"epoch": round(time.monotonic() - start, 2), "records": len(documents)}
result["growth"] = (status("VmHWM") - held) * 1024
print(json.dumps(result))
"""
PREPARE = [sys.executable, "-m", "meshtune", "data", "prepare"]


def sentences(count: int, tokens: int) -> Iterator[str]:
    """Records of about `tokens` tokens of words."""
    rng = random.Random(0)
    words = [
        f"{first}{last}" for first in ("re", "un", "pre", "in", "out") for last in ("turn", "form", "port", "side")
    ]
    for number in range(count):
        yield json.dumps(
            {"text": f"{number} " + " ".join(rng.choices(words, k=rng.randint(tokens // 4, 3 * tokens // 4)))}
        )


def overrides(folder: pathlib.Path, model: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train={folder / 'data.jsonl'}",
        "output=x",
        "stage=pt",
        "data.max_length=4096",
    ]


def write(folder: pathlib.Path, count: int, tokens: int) -> None:
    folder.mkdir()
    with (folder / "data.jsonl").open("w") as file:
        file.writelines(line + "\n" for line in sentences(count, tokens))
    os.utime(folder / "data.jsonl", (time.time() - 60,) * 2)


def measure_open(folder: pathlib.Path, model: str, gigabytes: float, tokens: int) -> dict[str, object]:
    """Links a prepared shard until the set has so many bytes, and opens it in 1, 2, 4 and 8 processes at once."""
    from meshtune.data.store import SHARD, SHARD_NAME, open_store, publish_store

    write(folder, SHARD, tokens)
    environment = os.environ | {"MESHTUNE_CACHE": str(folder)}
    arguments = overrides(folder, model)
    subprocess.run([*PREPARE, *arguments], env=environment, check=True, capture_output=True)
    (path,) = (manifest.parent for manifest in folder.glob("tokens/*/manifest.json"))
    first = path / SHARD_NAME.format(0)
    count = round(gigabytes * 1e9 / first.stat().st_size)
    for number in range(1, count):
        os.link(first, path / SHARD_NAME.format(number))  # opening reads no more of a file than its size
    store, _ = open_store(path)
    assert store is not None
    store = publish_store(path, [path / SHARD_NAME.format(number) for number in range(count)], store.meta)
    size = sum(file.stat().st_size for file in path.iterdir())
    result: dict[str, object] = {"bytes": size, "bytes_a_token": size / int(store.lengths.sum()), "shards": count}
    digests = set()
    for processes in (1, 2, 4, 8):
        running = [
            subprocess.Popen([sys.executable, "-c", OPEN, *arguments], env=environment, stdout=subprocess.PIPE)
            for _ in range(processes)
        ]
        opened = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
        digests |= {item.pop("digest") for item in opened}
        result[f"{processes} processes"] = opened[0]
    assert len(digests) == 1, "the processes have different batches"
    return result


def measure_prepare(folder: pathlib.Path, model: str, count: int) -> dict[str, object]:
    """Processor seconds of each of 1, 2 commands that prepare the same data, imports included."""
    write(folder, count, 300)
    result: dict[str, object] = {"records": count}
    contents = set()
    for shards in (1, 2):
        cache = folder / f"cache-{shards}"
        environment = os.environ | {"MESHTUNE_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "false"}
        start = time.monotonic()
        running = [
            subprocess.Popen(
                [*PREPARE, *overrides(folder, model), "--shard", f"{shard}/{shards}", "--workers", "1"],
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for shard in range(1, shards + 1)
        ]
        used = []
        for process in running:
            _, status, usage = os.wait4(process.pid, 0)
            assert status == 0
            used.append(round(usage.ru_utime + usage.ru_stime, 2))
        result[f"{shards} workers"] = {"cpu": used, "wall": round(time.monotonic() - start, 2)}
        digest = hashlib.sha256()
        for file in sorted(cache.glob("tokens/*/[lms]*")):
            digest.update(file.name.encode() + file.read_bytes())
        contents.add(digest.hexdigest())
    assert len(contents) == 1, "the stores differ"
    return result


def measure_memory(folder: pathlib.Path, model: str, counts: str) -> dict[str, object]:
    """The most memory that the preparing process held for each number of short records: anonymous, which a machine must
    have, and with the pages of mapped files, which the system takes back."""
    result: dict[str, object] = {}
    for count in map(int, counts.split(",")):
        write(folder, count, 8)
        environment = os.environ | {"MESHTUNE_CACHE": str(folder), "MESHTUNE_DATA_PROCESSES": "1"}
        command = [sys.executable, "-c", MEMORY, *overrides(folder, model)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        result[str(count)] = json.loads(done.stdout)
        print(count, result[str(count)], flush=True)
        shutil.rmtree(folder)
    return result


def measure_stream(folder: pathlib.Path, model: str, count: int, updates: int) -> dict[str, object]:
    """The first `updates` of a stream: in one process with 1 and 2 workers, and in 1, 2, 4 processes by shares of rows,
    one after another. Processor seconds of a process are its own, those of workers are apart and have their imports."""
    write(folder, count, 600)
    arguments = [*overrides(folder, model), "data.streaming=true", "train.batch_size=16", f"train.steps={updates}"]
    arguments[3:4] = ["stage=sft"]
    arguments += ["data.max_length=2048"]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    result, rows = dict[str, object](), dict[str, set[str]]()

    def run(share: int, of: int, workers: int) -> dict[str, object]:
        command = [sys.executable, "-c", STREAM, str(share), str(of), str(workers), str(updates), *arguments]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        measured = json.loads(done.stdout.splitlines()[-1])
        for row, digest in measured.pop("rows").items():
            rows.setdefault(row, set()).add(digest)
        return measured

    for workers in (1, 2, 1, 2):
        result.setdefault(f"{workers} workers", []).append(run(0, 1, workers))  # pyright: ignore[reportAttributeAccessIssue]
    for processes in (2, 4):
        result[f"{processes} processes"] = [run(share, processes, 1) for share in range(processes)]
    assert all(len(digests) == 1 for digests in rows.values()), "rows differ"
    return result


def write_parquet(file: pathlib.Path, count: int, group: int) -> None:
    """Writes records of about 1,000 bytes, in row groups of `group`."""
    import pyarrow
    import pyarrow.parquet

    texts = (json.loads(line)["text"] for line in sentences(count, 125))
    schema = pyarrow.schema({"text": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(file, schema, compression="none") as writer:
        for first in range(0, count, group):
            column = list(itertools.islice(texts, min(group, count - first)))
            writer.write_table(pyarrow.table({"text": column}, schema), row_group_size=group)


def measure_parquet(folder: pathlib.Path, model: str, count: int, group: int) -> dict[str, object]:
    """A stream of a parquet file: what opening it and 20 updates read, here and over HTTP of a hub, and how long all
    records of an epoch take here, in the order of the stream and without tokenising, and what they hold in memory."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests"))
    from hub.fake_hub import TOKEN, Repository, running_hub

    folder.mkdir()
    file = folder / "train.parquet"
    write_parquet(file, count, group)
    result: dict[str, object] = {"records": count, "records a group": group, "bytes": file.stat().st_size}
    arguments = [*overrides(folder, model)[:1], *overrides(folder, model)[2:], "data.streaming=true"]
    arguments += ["train.steps=20", "train.batch_size=8", "data.max_length=2048"]
    environment = os.environ | {"MESHTUNE_DATA_PROCESSES": "1", "HF_HOME": str(folder), "HF_TOKEN": TOKEN}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "MESHTUNE_CACHE": str(folder)}
    with running_hub() as hub:
        hub.repositories["ann/chats"] = Repository(files={"train.parquet": file.read_bytes()})
        for source, read in (("ann/chats", 0), (str(file), count)):
            command = [sys.executable, "-c", PARQUET, str(read), *arguments, f"data.train={source}"]
            done = subprocess.run(
                command, env=environment | {"HF_ENDPOINT": hub.url}, check=True, stdout=subprocess.PIPE
            )
            measured = json.loads(done.stdout.splitlines()[-1]) | {"bytes sent": hub.bytes_sent.pop(file.name, 0)}
            result["local" if read else "hub"] = measured
            print(measured, flush=True)
    return result


def main() -> None:
    kind, name, model, *arguments, output = sys.argv[1:]
    folder = pathlib.Path(name)
    assert not folder.exists(), f"{folder} exists"
    try:
        match kind:
            case "open":
                result = measure_open(folder, model, float(arguments[0]), int(arguments[1]))
            case "prepare":
                result = measure_prepare(folder, model, int(arguments[0]))
            case "parquet":
                result = measure_parquet(folder, model, *map(int, arguments))
            case "stream":
                result = measure_stream(folder, model, *map(int, arguments))
            case _:
                result = measure_memory(folder, model, arguments[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["machine"] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    result["peak_children"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    pathlib.Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
