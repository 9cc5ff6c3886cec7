"""Meshtune's side of decoding on one device: greedy tokens of a model with random weights made there.

Prints one JSON line: seconds to the first token, tokens a second after it, the peak of device memory.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from models import MODELS, config_of, print_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, required=True, help="new tokens")
    parser.add_argument("--stacked", action="store_true", help="as where no memory is free for layers by themselves")
    print_result(measure(parser.parse_args()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times the first token and all that follow, after a round that compiles."""
    import jax
    import numpy as np
    from random_weights import random_like

    from meshtune.arrays.tree import flatten, unflatten
    from meshtune.families import model_spec
    from meshtune.families.quantised import quantised_leaves
    from meshtune.generate.engine import Engine
    from meshtune.model.compute import Compute
    from meshtune.model.spec import abstract_params
    from meshtune.quantize.config import QuantizeConfig

    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    spec = model_spec(config_of(args.model, dtype), dtype)
    leaves = flatten(abstract_params(spec))
    if args.quantize != "none":
        leaves |= quantised_leaves(leaves, QuantizeConfig(args.quantize), spec)
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), unflatten(leaves))
    engine = Engine(random_like(described), spec, Compute(dtype=dtype), resident=not args.stacked)
    prompts = np.random.default_rng(0).integers(3, spec.vocab, (args.rows, args.length)).tolist()

    def timed() -> tuple[float, float]:
        """Seconds to the first tokens, and tokens a second after them."""
        start, counts, times = time.perf_counter(), list[int](), list[float]()
        for piece in engine.run(prompts, max_tokens=args.decode):
            counts.append(sum(map(len, piece)))
            times.append(time.perf_counter() - start)
        assert sum(counts) == args.rows * args.decode
        return times[0], sum(counts[1:]) / (times[-1] - times[0])

    start = time.perf_counter()
    timed()
    compile_seconds = time.perf_counter() - start
    first, tokens_per_second = timed()
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "first_token_seconds": first,
        "tokens_per_second": tokens_per_second,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "compile_seconds": compile_seconds,
        "versions": {"jax": jax.__version__},
    }


if __name__ == "__main__":
    main()
