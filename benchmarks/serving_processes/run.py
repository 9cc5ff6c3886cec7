"""Tokens of `meshtune serve` in one process of two devices, and in two processes of one device each.

cd benchmarks/serving_processes
python run.py ../../../shared/assets/models/stories260K tp > stories260K.json
python run.py 135M=../../../shared/assets/tokenizers/smollm2 tp dp > 135M.json

135M=TOKENIZER is a model of random weights in SmolLM2-135M's shape, with 8 heads in place of 9, so that two devices can
split them. Both servers of an axis run all the time and are measured in turn; the processor seconds are those of the
server's processes. The clients are tasks of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import httpx
import jax
import numpy as np
import psutil

CLIENTS, TOKENS, ROUNDS, SECONDS = 8, 32, 3, 10.0
DEVICES = {"one process": "--xla_force_host_platform_device_count=2", "two processes": ""}
SUMS = ((8, 64), (8, 576))  # of decode steps: rows and hidden size of stories260K and of 135M
REPEATS = 200


class Server:
    """A server of a model on a mesh of two devices."""

    def __init__(self, model: str, axis: str, how: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve = ["serve", model, f"mesh.{axis}=2", "--name", "model", "--port", str(port)]
        launch = [] if how == "one process" else ["launch", "local", "-n", "2", "-d", "1", "--"]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES[how]}
        command = [sys.executable, "-m", "meshtune", *launch, *serve]
        self.process = subprocess.Popen(command, env=env, stdout=sys.stderr, stderr=sys.stderr)
        self.url = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        """Waits until it answers."""
        deadline = time.monotonic() + 600
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5)
                return
            except httpx.TransportError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.5)

    def processor_seconds(self) -> float:
        """Of all its processes until now."""
        parent = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
        return sum(entry.user + entry.system for entry in times)


async def complete(client: httpx.AsyncClient, number: int, deadline: float) -> int:
    """Tokens of completions of one client, which begins no further one after the deadline."""
    tokens = 0
    body = {"model": "model", "prompt": f"Once upon a time number {number}", "max_tokens": TOKENS, "temperature": 0}
    while not tokens or time.perf_counter() < deadline:
        answer = await client.post("/v1/completions", json=body)
        tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]
    return tokens


async def measure(server: Server, seconds: float) -> dict[str, float]:
    """Tokens a second, and processor milliseconds a token, of a round."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        started, before = time.perf_counter(), server.processor_seconds()
        tokens = sum(await asyncio.gather(*(complete(client, n, started + seconds) for n in range(CLIENTS))))
        used, wall = server.processor_seconds() - before, time.perf_counter() - started
    return {"tokens_a_second": round(tokens / wall, 2), "processor_ms_a_token": round(1e3 * used / tokens, 3)}


def compare(model: str, axis: str) -> dict[str, object]:
    """The rounds of both servers in turn, their medians, and the ratios of those: above 1 two processes are better."""
    servers: dict[str, Server] = {}
    try:
        for how in DEVICES:
            servers[how] = server = Server(model, axis, how)
            server.wait()
            asyncio.run(measure(server, 0))  # compiles
        rounds = []
        for _ in range(ROUNDS):
            rounds.append({how: asyncio.run(measure(server, SECONDS)) for how, server in servers.items()})
            print(axis, rounds[-1], file=sys.stderr)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(60)
    one, two = (
        {unit: statistics.median(entry[how][unit] for entry in rounds) for unit in rounds[0][how]} for how in DEVICES
    )
    ratios = {
        "tokens_a_second": round(two["tokens_a_second"] / one["tokens_a_second"], 3),
        "processor": round(one["processor_ms_a_token"] / two["processor_ms_a_token"], 3),
    }
    return {"rounds": rounds, "medians": dict(zip(DEVICES, (one, two), strict=True)), "ratios": ratios}


def sum_times() -> None:
    """Prints the microseconds of the clock and of this process that a sum over two devices takes, by its shape, and in
    two processes the message before a call of the decode program."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshtune.generate.driver import Channel, encode
    from meshtune.generate.programs import Feed, compiled_form
    from meshtune.generate.request import Sampling
    from meshtune.mesh.processes import start

    with start() as job:
        mesh, over = Mesh(np.array(jax.devices()), ("tp",)), PartitionSpec("tp")
        sums = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "tp") / 2, None), x, None, length=REPEATS)[0],
                mesh=mesh, in_specs=over, out_specs=over, check_vma=False,
            )
        )  # fmt: skip
        times = {}
        for rows, width in SUMS:
            numbers = np.ones((2 * rows, width), np.float32)
            x = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, over), lambda i, all_=numbers: all_[i])
            times[f"{rows}x{width}"] = median_times(lambda x=x: jax.block_until_ready(sums(x)))
        if job.process_count > 1:
            channel, zeros = Channel(), np.zeros(CLIENTS, np.int32)
            feed: Any = Feed(zeros, zeros, zeros, np.zeros((CLIENTS, 8), np.int32))  # pyright: ignore[reportArgumentType]
            switches, knobs = compiled_form([Sampling()] * CLIENTS)
            arguments = {"feed": feed, "knobs": knobs, "steps": 4, "leave": False, "switches": switches}

            def exchange() -> None:
                for _ in range(REPEATS):
                    if job.is_main_process:
                        channel.send({"batch": 0, "call": "decode", "arguments": encode(arguments), "ended": []})
                    else:
                        channel.receive()

            times["message"] = median_times(exchange)
        if job.is_main_process:
            print(json.dumps(times))


def median_times(repeat: Callable[[], object]) -> dict[str, int]:
    """Medians of seven calls that each do something REPEATS times, after one that compiles."""
    repeat()
    entries = []
    for _ in range(7):
        wall, used = time.perf_counter(), time.process_time()
        repeat()
        entries.append((time.perf_counter() - wall, time.process_time() - used))
    wall, used = (1e6 * statistics.median(column) / REPEATS for column in zip(*entries, strict=True))
    return {"wall_us": round(wall), "processor_us": round(used)}


def measure_sums(how: str) -> dict[str, object]:
    """`sum_times` in one process or in two, each of which uses as many processor seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    count = 1 if how == "one process" else 2
    processes = []
    for index in range(count):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES[how], "MESHTUNE_COORDINATOR": address}
        env |= {"MESHTUNE_PROCESSES": str(count), "MESHTUNE_PROCESS": str(index), "MESHTUNE_SECRET": "a benchmark"}
        processes.append(
            subprocess.Popen([sys.executable, __file__, "sums"], env=env, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def save_model(path: str, tokenizer: str) -> str:
    """Writes the model of random weights to `path`, with the tokenizer of a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{tokenizer}/{name}", path)
    return path


def main() -> None:
    if sys.argv[1:] == ["sums"]:
        sum_times()
        return
    name, *axes = sys.argv[1:]
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder, name.removeprefix("135M=")) if name.startswith("135M=") else name
        result = {axis: compare(model, axis) for axis in axes}
    sums = {how: measure_sums(how) for how in DEVICES}
    print(
        json.dumps(
            {
                "machine": machine,
                "jax": jax.__version__,
                "model": "135M" if model != name else os.path.basename(name),
                "sums": sums,
            }
            | result,
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
