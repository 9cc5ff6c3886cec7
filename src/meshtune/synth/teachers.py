"""Models that answer requests: behind the address of a server, or loaded here."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email.utils
import functools
import hashlib
import http.client
import json
import mimetypes
import os
import pathlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Protocol

from meshtune.config.data_recipe import TeacherModel
from meshtune.errors import UserError
from meshtune.json_text import parse_json
from meshtune.rollout.servers import read_answer
from meshtune.runs.sources import split_state
from meshtune.weights.hub import check_path

if TYPE_CHECKING:
    from meshtune.evaluate.predict import Prompt

PAUSE = 1.0  # seconds before the second try; then twice that
LONGEST_PAUSE = 120.0
CHARACTERS_PER_TOKEN = 2  # at least, of a prompt whose tokens only the server can count
MESSAGE_TOKENS = 16  # of a message's role and marks
PICTURE_TOKENS = 2048  # of a picture, where only the server can count them


class RequestFailed(Exception):
    """A request that got no answer, for reasons that may pass: it is tried again when the run is resumed."""


class RequestRefused(Exception):
    """A request that the model cannot answer: it would be refused again."""


class Stopped(Exception):
    """The run ends, so that nothing more is asked."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A conversation to answer. `pictures` come before the last message's text; `schema` is that of the answer."""

    messages: tuple[tuple[str, str], ...]
    seed: int
    schema: Mapping[str, Any] | None = None
    temperature: float | None = None
    pictures: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the prompt: its messages, pictures and schema."""
        pictures = [hashlib.sha256(pathlib.Path(picture).read_bytes()).hexdigest() for picture in self.pictures]
        content = json.dumps([self.messages, pictures, self.schema], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def characters(self) -> int:
        """Characters of the prompt, its schema included, which servers may write into it."""
        return sum(len(text) for _, text in self.messages) + (len(json.dumps(self.schema)) if self.schema else 0)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, with the tokens of prompt and answer. `complete`: it was not cut off at max_tokens."""

    text: str
    complete: bool
    prompt_tokens: int
    answer_tokens: int


class Teacher(Protocol):
    """A model that answers requests."""

    @property
    def name(self) -> str:
        """The model's name for people."""
        ...

    @property
    def identity(self) -> str:
        """A text that differs where answers may."""
        ...

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer | RequestFailed | RequestRefused]]:
        """(number of the request, its answer or why there is none) in the order in which they end. Raises UserError
        where nothing more can be asked."""
        ...

    def prompt_tokens(self, request: Request) -> int:
        """Tokens of the prompt, at least as many as there are. Raises UserError for one that is too long."""
        ...

    def close(self) -> None:
        """Ends the requests under way."""
        ...


def check_teacher(section: TeacherModel, role: str = "teacher") -> None:
    """Raises UserError for a key that is not set and a model folder that is missing: before documents are read."""
    if section.is_server:
        api_key(section, role)
    else:
        check_path(split_state(section.path)[0].as_posix())


def api_key(section: TeacherModel, role: str) -> str:
    """The key of a server, of the environment; "" where it needs none. Raises UserError where it is not set."""
    if section.key is None:
        return ""
    key = os.environ.get(section.key, "").strip()
    if not key:
        problem = f"the environment variable {section.key}, which is to hold the server's key, is not set"
        raise UserError(problem, where=f"{role}.key", fix=f"export {section.key}=...")
    return key


def open_teacher(section: TeacherModel, role: str = "teacher") -> Teacher:
    """The model of a section called `role`. Raises UserError where it cannot be used."""
    return ServerTeacher(section, role) if section.is_server else LocalTeacher(section)


class _SameAddress(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the key would be sent to another address."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        """None: the answer is an error."""


class ServerTeacher:
    """A model behind OpenAI's API."""

    def __init__(self, section: TeacherModel, role: str = "teacher"):
        self._section, self._role, self._address = section, role, section.path.rstrip("/")
        self._stop = threading.Event()
        self._key = api_key(section, role)
        self._answered = False
        self._open = urllib.request.build_opener(_SameAddress()).open
        self._model = section.model or self._only_model()

    @property
    def name(self) -> str:
        """The model's name at the server."""
        return self._model

    @property
    def identity(self) -> str:
        """Address, model and sampling."""
        options = self._section.model_dump(
            include={"path", "temperature", "top_p", "max_tokens", "structured", "extra"}
        )
        return json.dumps(options | {"model": self._model}, sort_keys=True)

    def close(self) -> None:
        """Lets waiting requests end."""
        self._stop.set()

    def prompt_tokens(self, request: Request) -> int:
        """An estimate that is rarely too low."""
        return (
            request.characters // CHARACTERS_PER_TOKEN
            + MESSAGE_TOKENS * len(request.messages)
            + PICTURE_TOKENS * len(request.pictures)
        )

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer | RequestFailed | RequestRefused]]:
        """Asks `at_once` requests at a time."""
        with ThreadPoolExecutor(self._section.at_once) as pool:
            numbers = {pool.submit(self.ask, request): number for number, request in enumerate(requests)}
            for future in as_completed(numbers):
                try:
                    yield numbers[future], future.result()
                except (RequestFailed, RequestRefused) as problem:
                    yield numbers[future], problem
                except BaseException:
                    self.close()
                    raise

    def ask(self, request: Request) -> Answer:
        """The server's answer, after tries with waiting, for several threads at once. Raises UserError where nothing
        more can be asked, RequestFailed, RequestRefused, Stopped."""
        section = self._section
        body: dict[str, Any] = {
            "model": self._model,
            "messages": _openai_messages(request),
            "max_tokens": section.max_tokens,
            "temperature": section.temperature if request.temperature is None else request.temperature,
            "top_p": section.top_p,
            "seed": request.seed,
        }
        if request.schema is not None and section.structured == "schema":
            form = {"name": "answer", "schema": request.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif request.schema is not None and section.structured == "object":
            body["response_format"] = {"type": "json_object"}
        return self._post("/chat/completions", body | section.extra, lambda answer: self._answer_of(answer, request))

    def _only_model(self) -> str:
        names = self._post("/models", None, _model_names)
        if len(names) != 1:
            listed = ", ".join(names[:20]) or "no model"
            fix = f"name it: {self._role}: {{path: ADDRESS, model: NAME}}"
            raise UserError(f"the server has {listed}, and one is needed", where=self._address, fix=fix)
        return names[0]

    def _answer_of(self, answer: Any, request: Request) -> Answer:
        """Reads a response. Raises ValueError for one that has not the form of the API."""
        try:
            (choice,) = answer["choices"]
            message, reason = choice["message"], choice.get("finish_reason")
            text = message.get("content") or message.get("refusal") or ""
            usage = answer.get("usage") or {}
            prompt = int(usage.get("prompt_tokens") or self.prompt_tokens(request))
            count = int(usage.get("completion_tokens") or len(text) // CHARACTERS_PER_TOKEN + 1)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"its answer has not the form of a chat completion: {str(answer)[:200]}") from problem
        if not isinstance(text, str):
            raise ValueError("its answer's content is no text")
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be written
        return Answer(text, reason != "length", prompt, count)

    def _post(self, path: str, body: object, read: Any) -> Any:
        """`read` of the JSON that the server answers to a POST, or a GET where `body` is None. It raises ValueError
        for JSON of another form."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        content = None if body is None else json.dumps(body).encode()
        problem = ""
        for number in range(self._section.tries):
            if self._stop.is_set():
                raise Stopped
            pause = min(LONGEST_PAUSE, PAUSE * 2**number)
            try:
                query = urllib.request.Request(self._address + path, content, headers)
                answer = read_answer(query, time.monotonic() + self._section.timeout, self._open)
                self._answered = True
                return read(parse_json(answer, self._address))
            except urllib.error.HTTPError as error:
                text = self._without_key(_body(error))
                problem = f"it answered {error.code}: {text}"
                self._check(error.code, problem)
                pause = _retry_after(error) or pause
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME and not self._answered:
                    fix = f"correct {self._role}.path"
                    raise UserError("there is no host of this name", where=self._address, fix=fix) from error
                problem = self._without_key(str(reason) or type(error).__name__)
            except ValueError as error:  # UserError of JSON included
                problem = self._without_key(getattr(error, "what", str(error)))
            if number + 1 < self._section.tries and self._stop.wait(pause):
                raise Stopped
        problem = f"the server gave no answer: {problem} (tried {self._section.tries} times)"
        if body is None:
            fix = f"start it ({self._address} is its address with /v1), or name {self._role}.model"
            raise UserError(problem, where=self._address, fix=fix)
        raise RequestFailed(problem)

    def _check(self, code: int, problem: str) -> None:
        """Raises UserError where no request can succeed, and RequestRefused where this one cannot."""
        if code in (401, 403):
            key = self._section.key
            fix = f"set {self._role}.key to the name of the environment variable that holds the server's key"
            fix = f"the key in {key} is wrong, or may not use this model" if key else fix
            raise UserError(f"the server refuses access: {problem}", where=self._address, fix=fix)
        if code in (301, 302, 303, 307, 308, 404, 405):
            fix = f"correct {self._role}.path, which ends with /v1, or {self._role}.model ({self._section.model})"
            raise UserError(f"nothing is at this address: {problem}", where=self._address, fix=fix)
        if 400 <= code < 500 and code not in (408, 409, 425, 429):
            raise RequestRefused(problem)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(500).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return error.reason


def _model_names(answer: Any) -> list[str]:
    try:
        return [str(model["id"]) for model in answer["data"]]
    except (KeyError, TypeError) as problem:
        raise ValueError(f"its answer has not the form of a list of models: {str(answer)[:200]}") from problem


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Seconds that a server asks to wait: a number, or a date."""
    value = error.headers.get("Retry-After") if error.headers else None
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        date = email.utils.parsedate_to_datetime(value) if value.strip() else None
        seconds = date.timestamp() - time.time() if date is not None else PAUSE
    return min(LONGEST_PAUSE, max(0.0, seconds))


def _openai_messages(request: Request) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in request.messages]
    if request.pictures:
        parts = [{"type": "image_url", "image_url": {"url": _data_uri(picture)}} for picture in request.pictures]
        messages[-1]["content"] = [*parts, {"type": "text", "text": messages[-1]["content"]}]
    return messages


def _data_uri(picture: str) -> str:
    kind = mimetypes.guess_type(picture)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(pathlib.Path(picture).read_bytes()).decode()}"


class LocalTeacher:
    """A model that is loaded here, whose requests share a batch: prompts that begin alike are read once."""

    def __init__(self, section: TeacherModel):
        from meshtune.calls.grammar import Grammars
        from meshtune.evaluate.run import identity
        from meshtune.generate.api import load
        from meshtune.generate.text import chat_template, turn_end
        from meshtune.setup.program_cache import keep_programs

        keep_programs()
        self._section = section
        self._identity = identity(section.path)
        self.model = load(section.path, dtype=section.dtype)  # pyright: ignore[reportArgumentType]
        chat_template(self.model.tokenizer)  # raises UserError for a model that cannot chat
        ids, self._stop_strings = turn_end(self.model.tokenizer)
        self._stop_ids = self.model.stop_ids | ids
        self._grammars = Grammars(self.model.tokenizer, self.model.spec.vocab, self._stop_ids)
        self._compiled: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The name of its folder."""
        return pathlib.Path(self._section.path).name or self._section.path

    @property
    def identity(self) -> str:
        """Its weights and sampling."""
        options = self._section.model_dump(include={"temperature", "top_p", "max_tokens"})
        return json.dumps(options | {"weights": self._identity, "dtype": self.model.compute.dtype}, sort_keys=True)

    def close(self) -> None:
        """Does nothing."""

    def prompt_tokens(self, request: Request) -> int:
        """The prompt's tokens. Its schema is compiled, which raises UserError for one that cannot be."""
        if request.schema is not None:
            self._grammar(request.schema)
        ids, room = self._prompt(request).ids, self._context - self._section.max_tokens
        if len(ids) > room:
            raise UserError(
                f"a prompt of {len(ids)} tokens and an answer of {self._section.max_tokens} are more than the "
                f"context of {self.name}, {self._context} tokens",
                fix="lower passage_words or teacher.max_tokens",
            )
        return len(ids)

    @property
    def _context(self) -> int:
        return min(self.model.engine.context, self._section.context or self.model.engine.context)

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer | RequestRefused]]:
        """Computes the answers from an empty batch of `at_once` rows."""
        from meshtune.evaluate.predict import answers_or_errors

        prompts: dict[int, Prompt] = {}
        for number, request in enumerate(requests):
            try:
                prompts[number] = self._engine_prompt(request)
            except UserError as problem:
                yield number, RequestRefused(problem.what)
        numbers, submitted = list(prompts), list(prompts.values())
        engine, tokenizer, rows = self.model.engine, self.model.tokenizer, self._section.at_once
        for place, outcome in answers_or_errors(engine, tokenizer, submitted, rows=rows):
            if isinstance(outcome, UserError):
                yield numbers[place], RequestRefused(outcome.what)
            else:
                length = len(submitted[place].request.prompt)
                yield (
                    numbers[place],
                    Answer(outcome.text, outcome.finish_reason == "stop", length, outcome.tokens),
                )

    def _engine_prompt(self, request: Request) -> Prompt:
        """The request to the engine. Raises UserError for one that it cannot answer."""
        from meshtune.evaluate.predict import Prompt
        from meshtune.generate.request import Sampling

        prompt, section = self._prompt(request), self._section
        temperature = section.temperature if request.temperature is None else request.temperature
        room = self._context - len(prompt.ids)
        if room < 1:
            raise UserError(f"the prompt has {len(prompt.ids)} tokens, and the context {self._context}")
        generation = self.model.engine.request(
            prompt.ids,
            Sampling(temperature=temperature, top_p=section.top_p, seed=request.seed),
            max_tokens=min(section.max_tokens, room),
            stop_ids=self._stop_ids,
            grammar=None if request.schema is None else self._grammar(request.schema),
            pictures=prompt.pictures,
        )
        return Prompt(generation, self._stop_strings)

    def _prompt(self, request: Request) -> Any:
        from meshtune.generate.text import chat_prompt

        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in request.messages]
        if request.pictures:
            parts = [{"type": "image", "image": picture} for picture in request.pictures]
            messages[-1]["content"] = [*parts, {"type": "text", "text": messages[-1]["content"]}]
        return chat_prompt(self.model.tokenizer, messages, self.model.picture_reader)

    def _grammar(self, schema: Mapping[str, Any]) -> Any:
        name = json.dumps(schema, sort_keys=True)
        if name not in self._compiled:
            self._compiled[name] = self._grammars.json(schema, "answer_schema")
        return self._compiled[name]


@contextlib.contextmanager
def closing(*teachers: Teacher | None):
    """Closes teachers at the end."""
    try:
        yield
    finally:
        for teacher in teachers:
            if teacher is not None:
                teacher.close()
