"""Cases that `test_meshes.py` runs on four simulated devices: python mesh_cases.py BASE ADAPTERS [all]."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtune.cli.main import main
from meshtune.generate.api import Model, load_variants
from meshtune.generate.target_log_probs import TargetText
from meshtune.quantize.config import QuantizeConfig
from meshtune.runs.sources import find

MESHES = ({"tp": 4}, {"fsdp": 4}, {"fsdp": 2, "tp": 2})
TOKENS = 10


def together(models: dict[str, Model], names: list[str]) -> dict[str, tuple[list[int], list[float | None]]]:
    """Greedy tokens and their log-probabilities of prompts of several lengths, one for each name, over two rows."""
    first = models[names[0]]
    scheduler, rng = first.engine.scheduler(rows=2), np.random.default_rng(0)
    generations = {}
    for number, name in enumerate(names):
        prompt = rng.integers(3, first.spec.vocab, 9 + 5 * number).tolist()
        request = models[name].engine.request(prompt, max_tokens=TOKENS, stop_ids=[], alternatives=0)
        generations[name] = scheduler.submit(request)
        scheduler.step(3)
    while not scheduler.idle:
        scheduler.step(3)
    return {name: (g.ids, [token.log_probability for token in g.tokens]) for name, g in generations.items()}


def check_answers(answers: Any, expected: Any, atol: float, label: object) -> None:
    for name, (ids, scores) in expected.items():
        assert answers[name][0] == ids, (label, name, answers[name][0], ids)
        np.testing.assert_allclose(np.asarray(answers[name][1], float), np.asarray(scores, float), atol=atol)


def load_models(base: str, adapters: dict[str, str], **options: Any) -> dict[str, Model]:
    sources = {"base": find(base)} | {name: find(base, path) for name, path in adapters.items()}
    return load_variants(sources, dtype="float32", share_batch=True, **options)


def alone(base: str, name: str, path: str | None, number: int, **options: Any) -> Any:
    """Computes what `together` gives for this name, on one device without the others."""
    model = load_variants({name: find(base, path)}, dtype="float32", **options)[name]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.spec.vocab, 9 + 5 * before).tolist() for before in range(number + 1)]
    request = model.engine.request(prompts[-1], max_tokens=TOKENS, stop_ids=[], alternatives=0)
    scheduler = model.engine.scheduler(rows=1)
    generation = scheduler.submit(request)
    while not scheduler.idle:
        scheduler.step()
    return generation.ids, [token.log_probability for token in generation.tokens]


def adapters_share_a_batch(base: str, adapters: dict[str, str], mesh: dict[str, int]) -> None:
    """Every adapter with the others on a mesh, and by itself on one device. Sums over devices round otherwise; over a
    cache of int8 that may move a code to its neighbour, a 127th of a head's largest number."""
    paths = {"base": None} | adapters
    for cache, atol in ((None, 1e-4), ("int8", 0.02)):
        models = load_models(base, adapters, mesh=mesh, cache=cache)
        assert models["base"].engine.weights.adapters == len(adapters)
        expected = {name: alone(base, name, path, n, cache=cache) for n, (name, path) in enumerate(paths.items())}
        check_answers(together(models, list(models)), expected, atol, (mesh, cache))


def one_adapter_over_a_quantised_base(base: str, adapters: dict[str, str], mesh: dict[str, int]) -> None:
    """An adapter in a separate batch over nf4 and int8, its logits, and the loss of texts."""
    name, path = next(iter(adapters.items()))
    texts = [TargetText(tuple(range(5, 30)), 1), TargetText((*range(5, 20), 40, 41, 42), 10)]
    for quantize in ("nf4", "int8"):
        config = QuantizeConfig(quantize, modules={"down_proj": "none"})  # whose rows no block divides
        expected = alone(base, name, path, 0, quantize=config)
        model = load_variants({name: find(base, path)}, dtype="float32", quantize=config, mesh=mesh)[name]
        check_answers(together({name: model}, [name]), {name: expected}, 1e-4, (mesh, quantize))
        single = load_variants({name: find(base, path)}, dtype="float32", quantize=config)[name]
        ids = list(range(5, 30))
        np.testing.assert_allclose(model.logits(ids), single.logits(ids), atol=1e-3)
        for ours, theirs in zip(model.target_log_probs(texts), single.target_log_probs(texts), strict=True):
            np.testing.assert_allclose(ours.log_probabilities, theirs.log_probabilities, atol=1e-4)


def the_command_line(base: str, mesh: dict[str, int]) -> None:
    """`meshtune generate`, whose text is that of one device."""
    texts = []
    for sizes in ([], [f"mesh.{axis}={size}" for axis, size in mesh.items()]):
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(["generate", base, *sizes, "--no-chat", "-p", "Once upon", "-n", "24"])
        texts.append(printed.getvalue())
    assert texts[0] == texts[1] != "\n", texts


if __name__ == "__main__":
    base, folder = sys.argv[1:3]
    adapters = {path.name: str(path) for path in sorted(Path(folder).iterdir())}
    assert jax.device_count() == 4
    for mesh in MESHES if "all" in sys.argv else MESHES[-1:]:
        adapters_share_a_batch(base, adapters, mesh)
        one_adapter_over_a_quantised_base(base, adapters, mesh)
    the_command_line(base, MESHES[-1])
