"""Generates completions with the weights that are trained, with the log-probabilities they were drawn with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshtune.arrays.tree import Tree
from meshtune.config.sections import RolloutSection
from meshtune.errors import UserError
from meshtune.generate.engine import Engine
from meshtune.generate.pictures import PromptPictures
from meshtune.generate.request import Generation, Sampling
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Episode:
    """A completion of several turns in an environment.

    `prompt` are the messages before it, with the text of the environment, and `prompt_ids` their ids with its tools.
    `messages` are the turns: of the assistant, and of tools between them. `calls` of tools were made, of which
    `failures` ended with an error that the model was told.
    """

    prompt: list[dict[str, Any]]
    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    calls: int = 0
    failures: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """The new tokens after a prompt, an end token included, and each one's log-probability in the distribution that it
    was drawn from. `reason` is why it ended: stop, or length.

    `drawn` says which tokens the model drew, by default all. Others are results of tools, which it reads between its
    turns in an `episode`; their log-probability is 0.
    """

    ids: list[int]
    log_probs: list[float]
    reason: str
    drawn: list[bool] = dataclasses.field(default_factory=list)
    episode: Episode | None = None

    def __post_init__(self):
        if not self.drawn:
            object.__setattr__(self, "drawn", [True] * len(self.ids))
        assert len(self.ids) == len(self.log_probs) == len(self.drawn), "every token has a log-probability"


class Turn(NamedTuple):
    """The last turn of completion `number`: its ids, why it ended, and how many tokens may follow it."""

    number: int
    ids: list[int]
    reason: str
    room: int


# The ids that follow each of some turns, fewer than its room, before the model continues; None where it does not.
FollowTurns = Callable[[Sequence[Turn]], Sequence[Sequence[int] | None]]


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
    follow_turns: FollowTurns | None = None,
    pictures: Sequence[PromptPictures | None] | None = None,
) -> list[list[Completion]]:
    """Returns `samples` completions of every prompt. The caches are gone when it returns.

    `params` is the whole tree, adapters in place, of which a CPU may have a copy meanwhile (generate.weights).
    `seed_of(prompt, sample)` seeds each completion; `where` names the prompts. `progress(done, all)` is called as
    completions end. `follow_turns` gets the turns that have ended, and may continue them. `pictures` are those of each
    prompt.

    Raises: UserError for a prompt that leaves no room in the context, and for logits that are not finite.
    """
    compute = dataclasses.replace(compute, remat="none", attention="auto")
    engine = Engine(params, spec, compute, stop_ids, resident=True)
    total = len(prompts) * samples
    scheduler = engine.scheduler(rows=min(options.rows or total, total))
    drafts = [_Draft(prompt) for prompt in prompts for _ in range(samples)]
    running: dict[Generation, int] = {}

    def submit(number: int) -> None:
        prompt, sample = divmod(number, samples)
        seed = seed_of(prompt, sample)  # draws depend on the token's position too, so a next turn has other ones
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, seed=seed)
        text = drafts[number].text
        request = engine.request(
            text,
            sampling,
            max_tokens=max(1, min(options.max_tokens - len(drafts[number].ids), engine.context - len(text))),
            alternatives=0,
            reports_drawn=True,
            where=where[prompt],
            pictures=None if pictures is None else pictures[prompt],
        )
        running[scheduler.submit(request)] = number

    for number in range(total):
        submit(number)
    done = 0
    while not scheduler.idle:
        turns = []
        for generation in [step.generation for step in scheduler.step() if step.finish_reason is not None]:
            number = running.pop(generation)
            if generation.error is not None:
                raise UserError(generation.error.what, where=where[number // samples], fix=generation.error.fix)
            draft = drafts[number]
            draft.extend(generation)
            room = min(options.max_tokens - len(draft.ids), engine.context - len(draft.text))
            turns.append(Turn(number, generation.ids, draft.reason, room))
        turns.sort()
        suffixes = follow_turns(turns) if turns and follow_turns is not None else [None] * len(turns)
        for turn, suffix in zip(turns, suffixes, strict=True):
            if suffix is not None:
                drafts[turn.number].append(suffix)
                submit(turn.number)
        done += suffixes.count(None)
        if progress is not None:
            progress(done, total)
    completions = [Completion(draft.ids, draft.log_probs, draft.reason, draft.drawn) for draft in drafts]
    return [completions[start : start + samples] for start in range(0, total, samples)]


@dataclasses.dataclass
class _Draft:
    """A completion under way."""

    prompt: Sequence[int]
    ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    drawn: list[bool] = dataclasses.field(default_factory=list)
    reason: str = ""

    @property
    def text(self) -> list[int]:
        """The prompt and the tokens so far."""
        return [*self.prompt, *self.ids]

    def extend(self, generation: Generation) -> None:
        """Appends a turn of the model."""
        self.ids += generation.ids
        self.log_probs += [token.log_probability or 0.0 for token in generation.tokens]
        self.drawn += [True] * len(generation.tokens)
        self.reason = str(generation.finish_reason)

    def append(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not draw."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.drawn += [False] * len(ids)
