"""Generates completions with the weights that are trained, with the log-probabilities they were drawn with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from meshtune.arrays.tree import Tree
from meshtune.config.sections import RolloutSection
from meshtune.errors import UserError
from meshtune.generate.config import Sampling
from meshtune.generate.engine import Engine
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Completion:
    """The new tokens after a prompt, an end token included, and each one's log-probability in the distribution that it
    was drawn from. `reason` is why it ended: stop, or length."""

    ids: list[int]
    log_probs: list[float]
    reason: str


def sample_seed(seed: int, rollout: int, prompt: int, sample: int) -> int:
    """A seed of 31 bits for one completion; neighbours share nothing."""
    digest = hashlib.blake2b(f"{seed} {rollout} {prompt} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def generate(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    prompts: Sequence[Sequence[int]],
    samples: int,
    options: RolloutSection,
    stop_ids: frozenset[int],
    seed_of: Callable[[int, int], int],
    where: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Returns `samples` completions of every prompt. The caches are gone when it returns.

    `params` is the whole tree, adapters in place; nothing of it is copied. `seed_of(prompt, sample)` seeds each
    completion; `where` names the prompts. `progress(done, all)` is called as completions end.

    Raises: UserError for a prompt that leaves no room in the context, and for logits that are not finite.
    """
    compute = dataclasses.replace(compute, remat="none", attention="auto")
    engine = Engine(params, spec, compute, stop_ids)
    total = len(prompts) * samples
    scheduler = engine.scheduler(rows=min(options.rows or total, total))
    generations = []
    for number, prompt in enumerate(prompts):
        room = engine.context - len(prompt)
        for sample in range(samples):
            sampling = Sampling(
                options.temperature, options.top_k, options.top_p, options.min_p, seed=seed_of(number, sample)
            )
            request = engine.request(
                prompt,
                sampling,
                max_tokens=max(1, min(options.max_tokens, room)),
                alternatives=0,
                reports_drawn=True,
                where=where[number],
            )
            generations.append(scheduler.submit(request))
    done = 0
    while not scheduler.idle:
        done += sum(step.finish_reason is not None for step in scheduler.step())
        if progress is not None:
            progress(done, total)
    completions = []
    for number, generation in enumerate(generations):
        if generation.error is not None:
            raise UserError(generation.error.what, where=where[number // samples], fix=generation.error.fix)
        log_probs = [token.log_probability or 0.0 for token in generation.tokens]
        completions.append(Completion(generation.ids, log_probs, str(generation.finish_reason)))
    return [completions[start : start + samples] for start in range(0, total, samples)]
