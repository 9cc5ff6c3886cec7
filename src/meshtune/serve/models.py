"""The models that a server offers: the thread that computes each one's batch, and the text of choices as it grows."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax

import meshtune
from meshtune.calls.grammar import Grammars
from meshtune.errors import UserError
from meshtune.generate.api import Model, load_variants
from meshtune.generate.request import Generation, GenerationRequest, Progress, Sampling, Token
from meshtune.generate.scheduler import Scheduler
from meshtune.generate.text import Alignment, Detokenizer, Place, StopStrings, TokenBytes, special_ids, turn_end
from meshtune.generate.weights import Weights
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.model_cache import describe_cache
from meshtune.runs.sources import find
from meshtune.serve.guard import ApiError
from meshtune.serve.schema import CompletionFields

LOG = logging.getLogger(__name__)
STEPS = 4  # tokens a row that readers get at once
FAILURES = 3  # steps in a row that raise an error before the model is said to have failed


class Worker:
    """A scheduler's thread. It sleeps while there is nothing to do."""

    def __init__(self, scheduler: Scheduler, name: str):
        self.scheduler = scheduler
        self.tokens: Counter[int | None] = Counter()  # generated, by the adapter that their requests select
        self.ended: Exception | None = None  # the thread, by this error
        self._failures = 0
        self._readers: dict[Generation, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Progress | Exception]]] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"generate {name}", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Progress]]:
        """Yields (number of the request, its progress), step by step, until all have ended or are cancelled. Those that
        are not read to their end are cancelled.

        Raises QueueFull, UserError where the model overflows, and the error that ended the thread.
        """
        if self.ended is not None:
            raise self.ended
        queue: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        numbers: dict[Generation, int] = {}
        try:
            with self._changed:  # so that the first tokens find their reader
                for number, request in enumerate(requests):
                    generation = self.scheduler.submit(request)
                    numbers[generation] = number
                    self._readers[generation] = (asyncio.get_running_loop(), queue)
                self._changed.notify()
            while numbers.keys() & self._readers.keys():
                new = await queue.get()
                if isinstance(new, Exception):
                    raise new
                if new.generation not in self._readers:  # it was cancelled meanwhile
                    continue
                if new.finish_reason == "error" and new.generation.error is not None:
                    raise new.generation.error
                yield numbers[new.generation], new
                if new.finish_reason is not None:
                    self.cancel(new.generation)
        finally:
            for generation in numbers:
                self.cancel(generation)

    def cancel(self, generation: Generation) -> None:
        """Ends a request that is not read any further, unless it has ended."""
        with self._changed:
            if self._readers.pop(generation, None) is not None and generation.finish_reason is None:
                self.scheduler.cancel(generation)
            self._changed.notify()

    @property
    def failed(self) -> bool:
        """Whether the latest steps have all raised errors, or the thread has ended by one."""
        return self.ended is not None or self._failures >= FAILURES

    @property
    def patches(self) -> int:
        """Patches of the pictures of all requests that run or wait."""
        with self._changed:
            pictures = {generation.request.pictures for generation in self._readers}
        return sum(entry.patches for entry in pictures if entry is not None)

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        with self._changed:
            return bool(self._readers)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and self.scheduler.idle:
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                new = self.scheduler.step(STEPS)
            except BaseException as problem:  # a panic in Rust is no Exception, a lost process no mistake of a client
                if isinstance(problem, UserError) or not isinstance(problem, Exception):
                    problem = RuntimeError(str(problem))
                self._recover(problem)
                if self.ended is not None:
                    return
                continue
            self._failures = 0
            with self._changed:
                for progress in new:
                    self.tokens[progress.generation.request.adapter] += len(progress.tokens)
                    self._deliver(progress.generation, progress)

    def _deliver(self, generation: Generation, new: Progress | Exception) -> None:
        if (reader := self._readers.get(generation)) is not None:
            loop, queue = reader
            loop.call_soon_threadsafe(queue.put_nowait, new)

    def _recover(self, problem: Exception) -> None:
        """Tells the requests of a step why it failed. Of several processes the others may still compute the step, so
        that nothing can be computed with them any more."""
        LOG.exception("a step of %s failed", self._thread.name)
        self._failures += 1
        failed = self.scheduler.recover()
        with self._changed:
            if jax.process_count() > 1:
                self.ended, failed = problem, list(self._readers)
            for generation in failed:
                self._deliver(generation, problem)


VERSION = meshtune.__version__


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model under the id that clients name."""

    id: str
    model: Model
    worker: Worker
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return self.worker.scheduler.running_of(self.model.engine.adapter)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.worker.scheduler.waiting_of(self.model.engine.adapter)

    @property
    def generated(self) -> int:
        """Tokens generated since the start."""
        return self.worker.tokens[self.model.engine.adapter]

    def response_head(self, prefix: str, name: str) -> dict[str, Any]:
        """The fields of a response or a chunk of a stream, but its choices. The fingerprint is the version, dtype and
        cache, which the numbers of an answer depend on."""
        compute = self.model.engine.compute
        fingerprint = f"meshtune-{VERSION}-{compute.dtype}{f'-cache-{compute.cache}' if compute.cache else ''}"
        head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.id}
        return head | {"system_fingerprint": fingerprint, "object": name}

    @property
    def cache(self) -> str:
        """A description of the cache's format."""
        return describe_cache(self.model.spec, self.model.compute.cache, self.model.compute.dtype)

    @cached_property
    def chat_stops(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """(token ids, strings) that end an answer in a conversation. Raises UserError for a model that cannot chat."""
        ids, strings = turn_end(self.model.tokenizer)
        return self.model.engine.stop_ids | ids, strings

    @cached_property
    def chat_grammars(self) -> Grammars:
        """Compiles what answers in conversations must be like."""
        return Grammars(self.model.tokenizer, self.model.spec.vocab, self.chat_stops[0])

    @cached_property
    def longest_text(self) -> int:
        """Characters that the context can hold, at most: each token as long as the longest."""
        return self.model.engine.context * max(map(len, self.model.tokenizer.get_vocab()))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.model.tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out."""
        return special_ids(self.model.tokenizer)

    def token_text(self, id_: int, content: bytes | None, escaped: str = "") -> str:
        """A token as clients read it: its text, its name where texts leave it out (None), or `escaped` and the bytes
        of a part of a character."""
        if content is None:
            return str(self.model.tokenizer.convert_ids_to_tokens(id_))
        try:
            return content.decode()
        except UnicodeDecodeError:
            return escaped + "".join(f"\\x{byte:02x}" for byte in content)

    def alternative(self, id_: int, place: Place) -> bytes | None:
        """The bytes that another token would have at a place."""
        if id_ in self.special_ids:
            return None
        content = self.token_bytes[id_]
        if not (place.begins and content.startswith(b" ")):
            return content
        return str(self.model.tokenizer.decode([id_], clean_up_tokenization_spaces=False)).encode()

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError for a text that no tokens of the context can hold, before it is tokenised."""
        if len(text) > self.longest_text:
            raise self._length_error(text, param)

    def _length_error(self, text: str, param: str) -> ApiError:
        message = f"a text of {len(text)} characters is longer than the model's context of"
        limits = f"{self.model.engine.context} tokens can hold (at most {self.longest_text})"
        return ApiError(400, f"{message} {limits}; shorten it", param=param)

    def ids(self, text: str, special: bool) -> list[int]:
        """The ids of a text, with `special` tokens at its beginning. Raises ApiError for one that is too long."""
        self.check_text(text, "prompt")
        return list(self.model.tokenizer(text, add_special_tokens=special)["input_ids"])  # pyright: ignore

    def text(self, ids: list[int]) -> str:
        """The text of ids, special tokens included. Raises ApiError for too many and for unknown ones."""
        vocab = self.model.spec.vocab
        if len(ids) > self.longest_text:
            raise ApiError(
                400, f"there are {len(ids)} tokens, and {self.longest_text} are read at most", param="tokens"
            )
        if max(ids, default=0) >= vocab:
            raise ApiError(400, f"tokens must be a list of token ids below {vocab}", param="tokens")
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)  # pyright: ignore[reportReturnType]


class Models:
    """All models of a server. Those that share their weights share a batch. `rows` requests of each batch are computed
    at once, and `queue` may wait."""

    def __init__(self, models: dict[str, Model], *, rows: int, queue: int):
        self.workers: list[Worker] = []
        self._served: dict[str, Served] = {}
        worker_of: dict[Weights, Worker] = {}
        for name, model in models.items():
            weights = model.engine.weights
            if weights not in worker_of:
                worker_of[weights] = Worker(model.engine.scheduler(rows=rows, queue=queue, interactive=True), name)
                self.workers.append(worker_of[weights])
            self._served[name] = Served(name, model, worker_of[weights])

    def __iter__(self):
        return iter(self._served.values())

    def warm_up(self) -> None:
        """Compiles what a first request needs, before the workers start. Raises what keeps a model from answering."""
        for worker in self.workers:
            served = next(served for served in self if served.worker is worker)
            if served.model.engine.spec.scored:
                continue
            scheduler, engine = served.worker.scheduler, served.model.engine
            scheduler.submit(engine.request([0], Sampling(temperature=1.0), max_tokens=2))
            while not scheduler.idle:
                scheduler.step()

    def __getitem__(self, name: str) -> Served:
        """The model of this id. Raises ApiError (404)."""
        if name not in self._served:
            raise self._unknown_error(name)
        return self._served[name]

    def _unknown_error(self, name: str) -> ApiError:
        message = f"the model '{name[:200]}' does not exist; there are: {', '.join(self._served)}"
        return ApiError(404, message, param="model", code="model_not_found")

    @property
    def ended(self) -> Exception | None:
        """The error of a step after which the processes of this server compute nothing together any more."""
        return next((worker.ended for worker in self.workers if worker.ended is not None), None)

    @property
    def capacity(self) -> int:
        """Requests that are taken at once, at most."""
        return sum(worker.scheduler.capacity or 0 for worker in self.workers)

    @property
    def batches(self) -> list[str]:
        """Which models share a batch, and why others do not, where there are several."""
        lines = []
        for worker in self.workers:
            sharing = [served for served in self if served.worker is worker]
            reason = sharing[0].model.own_batch
            lines.append(", ".join(served.id for served in sharing) + ("" if reason is None else f" ({reason})"))
        return lines if len(self._served) > 1 else []

    def banner(self) -> list[str]:
        """The lines that a server prints about its models when it starts."""
        model = self.first.model
        lines = [f"models   {', '.join(self._served)}"]
        lines += [f"{'' if number else 'batches':9}{batch}" for number, batch in enumerate(self.batches)]
        choices = dict.fromkeys(str(served.model.merging) for served in self if served.model.merging is not None)
        lines += [f"adapter  {choice}" for choice in choices]
        if (layout := model.compute.layout) is not None:
            processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
            lines.append(f"mesh     {MeshConfig(**layout.mesh.shape)}{processes}")
        return lines if model.compute.cache is None else [*lines, f"cache    {self.first.cache}"]

    @property
    def first(self) -> Served:
        """The model that is meant where none is named."""
        return next(iter(self))


def load_served(
    path: str,
    name: str | None,
    adapters: Mapping[str, str],
    *,
    dtype: str | None,
    quantize: str,
    cache: str | None = None,
    mesh: MeshConfig | None = None,
    merge: bool | None = False,
    job: Job = SINGLE_PROCESS,
    **options: str | None,
) -> dict[str, Model]:
    """The model at `path` under its name, its base under its own where `path` is an adapter or a run, and `adapters`
    (paths by name) over the same base, which is in memory once. Adapters that can share a batch, and a single one
    is merged by `merge` (None: where there is memory).

    `options` are those of `find`. Raises UserError as `meshtune.load` does, and for two models of one name.
    """
    source = find(path, **options)
    sources = {name or str(path).rstrip("/"): source}
    if source.adapter is not None:
        plain = dataclasses.replace(source, adapter=None)
        sources[source.base.name] = plain
    for adapter_name, adapter in adapters.items():
        if adapter_name in sources:
            raise UserError(f"two models have the name '{adapter_name}'", where="--adapter", fix="give another name")
        tokenizer_options = {name: options.get(name) for name in ("chat_template", "tokenizer")}
        sources[adapter_name] = find(source.base, adapter, **tokenizer_options)
    loading: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "cache": cache, "mesh": mesh, "job": job}
    return load_variants(sources, rewards=True, share_batch=True, merge=merge, **loading)


class PlacedToken(NamedTuple):
    """A token with its log-probabilities and its place in the text."""

    token: Token
    place: Place


@dataclasses.dataclass(frozen=True)
class ChoiceDelta:
    """New text of choice number `index`, the number of tokens generated for it, why the choice ended (None: it has
    not), and the tokens of the text where log-probabilities are requested."""

    index: int
    text: str
    generated: int
    tokens: list[PlacedToken]
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class ChoiceRequest:
    """A request to the engine for choice number `index`, with the strings that end its text.

    `continued` writes the text as the prompt's continuation, else as a text that begins. Special tokens that are
    `visible` are part of it.
    """

    index: int
    request: GenerationRequest
    stop: tuple[str, ...]
    continued: bool
    visible: frozenset[int] = frozenset()


class Completion(Protocol):
    """One request of a client and its choices, as OpenAI's API writes them."""

    @property
    def request(self) -> CompletionFields: ...

    @property
    def served(self) -> Served: ...

    @property
    def choices(self) -> Sequence[ChoiceRequest]: ...

    @property
    def head(self) -> dict[str, Any]:
        """The fields of a response, or of a chunk of a stream, but its choices."""
        ...

    @property
    def scores_prompt(self) -> bool:
        """Whether `choice` computes log-probabilities of the prompt."""
        ...

    def choice(self, request: ChoiceRequest, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """A choice of a whole response."""
        ...

    def first_chunks(self) -> list[dict[str, Any]]:
        """The choices that a stream begins with, before any text."""
        ...

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choices of a stream's chunks for new text."""
        ...


async def stream_choices(served: Served, choices: Sequence[ChoiceRequest]) -> AsyncGenerator[ChoiceDelta]:
    """The texts of choices as they grow; those that are not read to their end are cancelled."""
    requests, texts = [choice.request for choice in choices], [_open_text(served, choice) for choice in choices]
    async with aclosing(served.worker.stream(requests)) as steps:
        async for n, step in steps:
            new = [token for token in step.tokens if token.id not in requests[n].stop_ids]
            shown, tokens = texts[n].push(new, ended=step.finish_reason is not None)
            reason = "stop" if texts[n].stops.found else step.finish_reason
            if shown or new or reason is not None:
                yield ChoiceDelta(choices[n].index, shown, len(new), tokens, reason)
            if reason is not None:
                served.worker.cancel(step.generation)


def _open_text(served: Served, choice: ChoiceRequest) -> _ChoiceText | _PlacedText:
    prompt = choice.request.prompt if choice.continued else ()
    decoder, stops = Detokenizer(served.model.tokenizer, prompt, choice.visible), StopStrings(choice.stop)
    if choice.request.alternatives is None:
        return _ChoiceText(decoder, stops)
    hidden = served.special_ids - choice.visible
    return _PlacedText(Alignment(decoder, served.token_bytes, hidden, choice.continued), stops)


class _ChoiceText:
    """The text of a choice up to a stop string."""

    def __init__(self, decoder: Detokenizer, stops: StopStrings):
        self._decoder, self.stops = decoder, stops

    def push(self, tokens: list[Token], ended: bool) -> tuple[str, list[PlacedToken]]:
        """The text that these tokens complete, and that is no beginning of a stop string; all of it where it has
        `ended`."""
        text = self.stops.push(self._decoder.push([token.id for token in tokens]))
        if ended and not self.stops.found:
            text += self.stops.push(self._decoder.finish()) + self.stops.finish()
        return text, []


class _PlacedText:
    """The text of a choice up to a stop string, with its tokens, whose log-probabilities are requested."""

    def __init__(self, alignment: Alignment, stops: StopStrings):
        self._alignment, self.stops, self._shown = alignment, stops, 0
        self._new: deque[Token] = deque()
        self._placed: deque[PlacedToken] = deque()

    def push(self, tokens: list[Token], ended: bool) -> tuple[str, list[PlacedToken]]:
        """The text, and the tokens that begin in the text so far, each once; all of them where the text has ended."""
        self._new += tokens
        text = self.stops.push("".join([self._place(*self._alignment.push(token.id)) for token in tokens]))
        if ended and not self.stops.found:
            text += self.stops.push(self._place(*self._alignment.finish())) + self.stops.finish()
        self._shown += len(text)
        shown, is_whole = [], ended and not self.stops.found
        while self._placed and (is_whole or self._placed[0].place.offset < self._shown):
            shown.append(self._placed.popleft())
        return text, shown

    def _place(self, text: str, places: list[Place]) -> str:
        self._placed += [PlacedToken(self._new.popleft(), place) for place in places]
        return text
