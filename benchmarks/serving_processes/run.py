"""Tokens a second of `meshtune serve` with one process of two devices, and with two processes of one device each.

python benchmarks/serving_processes/run.py MODEL > benchmarks/serving_processes/result.json
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import jax

CLIENTS, TOKENS, ROUNDS = 8, 64, 3
DEVICES = {"one process": "--xla_force_host_platform_device_count=2", "two processes": ""}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def complete(url: str, model: str, number: int) -> int:
    """The number of tokens of one completion."""
    prompt = f"Once upon a time number {number}"
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def measure(model: str, how: str) -> list[float]:
    """Tokens a second of each round, after one that compiles."""
    port = free_port()
    serve = ["serve", model, "mesh.tp=2", "--port", str(port)]
    launch = [] if how == "one process" else ["launch", "local", "-n", "2", "-d", "1", "--"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES[how]}
    command = [sys.executable, "-m", "meshtune", *launch, *serve]
    server = subprocess.Popen(command, env=env, stdout=sys.stderr, stderr=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            try:
                name = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=5))["data"][0]["id"]
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.5)
        rates = []
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            for _ in range(ROUNDS + 1):
                started = time.perf_counter()
                tokens = sum(pool.map(lambda number: complete(url, name, number), range(CLIENTS)))
                rates.append(tokens / (time.perf_counter() - started))
        time.sleep(5)  # idle: the other process leaves its device, and comes back
        assert complete(url, name, 0) > 0
        return rates[1:]
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    model = sys.argv[1]
    rates = {how: measure(model, how) for how in DEVICES}
    medians = {how: round(statistics.median(values), 1) for how, values in rates.items()}
    result = {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "jax": jax.__version__,
        "model": os.path.basename(model),
        "tokens_a_second": {how: [round(value, 1) for value in values] for how, values in rates.items()},
        "medians": medians,
        "ratio": round(medians["two processes"] / medians["one process"], 3),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
