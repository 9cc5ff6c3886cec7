"""The HTTP application: an API that clients of OpenAI's speak, over the models of one server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from meshtune.errors import UserError
from meshtune.generate.request import check_prompt
from meshtune.generate.text import chat_template
from meshtune.serve.chat import prepare_chat
from meshtune.serve.completions import prepare_completion
from meshtune.serve.guard import ApiError, Guard, as_api_error, json_body
from meshtune.serve.models import ChoiceDelta, Completion, Models, Served, stream_choices
from meshtune.serve.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    parse_request,
)

T = TypeVar("T")


class Threads:
    """A few threads, with a queue of at most `waiting` pieces of work. Work of a client that has gone is not begun."""

    def __init__(self, threads: int, waiting: int, name: str):
        self._pool = ThreadPoolExecutor(threads, name)
        self._most, self._under_way = threads + waiting, 0

    async def run(self, request: Request, function: Callable[..., T], *args: object) -> T:
        """The function's result. Raises ApiError (429) where too much waits, and 499 once the client has gone."""
        if self._under_way >= self._most:
            raise ApiError(429, "too many requests wait to be read; try again in a while", code="queue_full")
        self._under_way += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, _result, function, *args)
            return await until_gone(request, work)
        finally:
            self._under_way -= 1

    def stop(self) -> None:
        """Begins nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _result(function: Callable[..., T], *args: Any) -> T:
    """The function's result. Raises UserError where the library tokenizers, which is in Rust, gives a text up."""
    try:
        return function(*args)
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot read this text: {problem}") from problem


async def until_gone(request: Request, work: asyncio.Future[T]) -> T:
    """The result of `work`, which is cancelled once the client has gone. Raises ApiError (499) then."""
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has gone")
        return work.result()
    finally:
        disconnect.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def metrics_text(models: Models) -> str:
    """Requests running and waiting, and tokens generated since the start, by model."""
    lines = []
    for name, kind, meaning, value in (
        ("requests_running", "gauge", "Requests that have a row of the batch.", lambda s: s.running),
        ("requests_waiting", "gauge", "Requests in the queue.", lambda s: s.waiting),
        ("generated_tokens_total", "counter", "Tokens generated since the start.", lambda s: s.generated),
    ):
        lines += [f"# HELP meshtune_{name} {meaning}", f"# TYPE meshtune_{name} {kind}"]
        lines += [f'meshtune_{name}{{model="{_escape_label(s.id)}"}} {value(s)}' for s in models]
    return "\n".join(lines) + "\n"


def _escape_label(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def tokenize_texts(request: ScoreRequest, served: Served) -> list[tuple[int, ...]]:
    """The ids of each text or conversation.

    Raises ApiError for a model that gives no scores, UserError for a text that is empty or longer than the context.
    """
    model = served.model
    if not model.spec.scored:
        raise ApiError(400, f"'{served.id}' is no reward model: it writes texts, and gives no scores", param="model")
    several = []
    for n, entry in enumerate(request.messages):
        where = f"messages[{n}]"
        ids = _ids(served, entry, where)
        several.append(check_prompt(ids, model.spec.vocab, model.engine.context + 1, where))
    return several


def score_rows(rows: list[tuple[int, ...]], served: Served) -> list[float]:
    """The score of each text: that of its last token."""
    return [float(served.model.logits(row)[0, -1, 0]) for row in rows]


def _ids(served: Served, entry: str | list[ChatMessage], where: str) -> list[int]:
    tokenizer = served.model.tokenizer
    if isinstance(entry, str):
        served.check_text(entry, where)
        return list(tokenizer(entry)["input_ids"])  # pyright: ignore[reportArgumentType]
    messages = [message.rendered(f"{where}[{n}]") for n, message in enumerate(entry)]
    chat = chat_template(tokenizer)
    try:
        text = chat.render(messages)
    except chat.failures as problem:
        raise ApiError(400, f"the chat template cannot render this: {problem}", param=where) from problem
    served.check_text(text, where)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]


MAX_BODY = 16 * 2**20  # bytes
WAITING = 128  # requests that wait to be read, at most
R = TypeVar("R", bound=BaseModel)


def create_app(models: Models, *, max_body: int = MAX_BODY, **checks: Any) -> Starlette:
    """The application. `max_body` (bytes) and the other `checks` of requests are those of `Guard`."""
    api = _Api(models, max_body)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for worker in models.workers:
            worker.start()
        yield
        for worker in models.workers if models.ended is None else ():  # else one may wait for other processes
            await run_in_threadpool(worker.stop)
        api.stop()

    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.show_model),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/score/evaluation", api.score, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, max_body=max_body, **checks)],
        lifespan=lifespan,
        exception_handlers={ApiError: _answer_refusal, UserError: _answer_refusal, HTTPException: _http_error},
    )


class _Api:
    def __init__(self, models: Models, max_body: int):
        self._models, self._max_body = models, max_body
        self._reading = Threads(2, WAITING, "read")
        self._scoring = Threads(1, models.capacity, "score")

    def stop(self) -> None:
        """Begins nothing more."""
        self._reading.stop()
        self._scoring.stop()

    async def health(self, _: Request) -> Response:
        failed = [served.id for served in self._models if served.worker.failed]
        return JSONResponse({"status": "failed" if failed else "ok", "failed": failed}, 503 if failed else 200)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(metrics_text(self._models), media_type="text/plain; version=0.0.4")

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_describe_model(served) for served in self._models]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(_describe_model(self._models[request.path_params["name"]]))

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, ChatRequest, prepare_chat)

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, CompletionRequest, prepare_completion)

    async def _complete(self, request: Request, kind: type[BaseModel], prepare: Callable[..., Completion]) -> Response:
        """Answers a request of this kind."""
        body = await json_body(request, self._max_body)
        completion = await self._reading.run(request, self._prepare, kind, prepare, body, _client(request))
        return await (_stream if completion.request.stream else self._answer)(request, completion)

    async def _answer(self, request: Request, completion: Completion) -> Response:
        """All choices in one response, once they have ended."""
        deltas = await until_gone(request, asyncio.ensure_future(_all_deltas(completion)))
        threads = self._scoring if completion.scores_prompt else self._reading
        choices = [
            await threads.run(request, completion.choice, choice, of_choice)
            for choice, of_choice in zip(completion.choices, deltas, strict=True)
        ]
        generated = sum(delta.generated for of_choice in deltas for delta in of_choice)
        return JSONResponse(completion.head | {"choices": choices, "usage": _usage(completion, generated)})

    def _prepare(
        self, kind: type[BaseModel], prepare: Callable[..., Completion], body: dict[str, Any], client: str
    ) -> Completion:
        query = parse_request(kind, body)
        served = self._models[query.model]
        if served.model.engine.spec.scored:
            raise _reward_model_error(served)
        query.check(served.worker.scheduler.capacity)
        if served.worker.scheduler.room == 0:
            served.worker.scheduler.refuse()
        return prepare(query, served, client, secrets.randbelow(2**31))

    async def score(self, request: Request) -> Response:
        query = await self._query(ScoreRequest, request)
        served = self._models[query.model]
        rows = await self._reading.run(request, tokenize_texts, query, served)
        values = await self._scoring.run(request, score_rows, rows, served)
        return JSONResponse(served.response_head("scoreval", "score.evaluation") | {"scores": values})

    async def tokenize(self, request: Request) -> Response:
        query = await self._query(TokenizeRequest, request)
        served = self._served_model(query.model)
        ids = await self._reading.run(request, served.ids, query.prompt, query.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.model.engine.context})

    async def detokenize(self, request: Request) -> Response:
        query = await self._query(DetokenizeRequest, request)
        served = self._served_model(query.model)
        return JSONResponse({"prompt": await self._reading.run(request, served.text, query.tokens)})

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self._models.first.model.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return JSONResponse({name: getattr(tokenizer, name, None) for name in names})

    def _served_model(self, name: str | None) -> Served:
        return self._models.first if name is None else self._models[name]

    async def _query(self, kind: type[R], request: Request) -> R:
        body = await json_body(request, self._max_body)
        return await self._reading.run(request, parse_request, kind, body)


def _reward_model_error(served: Served) -> ApiError:
    return ApiError(400, f"'{served.id}' is a reward model: it scores texts (/v1/score/evaluation)", param="model")


async def _all_deltas(completion: Completion) -> list[list[ChoiceDelta]]:
    """The deltas of every choice, once all have ended."""
    if not completion.choices[0].request.max_tokens:  # an echo
        return [[ChoiceDelta(choice.index, "", 0, [], "length")] for choice in completion.choices]
    deltas: dict[int, list[ChoiceDelta]] = {choice.index: [] for choice in completion.choices}
    async with contextlib.aclosing(stream_choices(completion.served, completion.choices)) as stream:
        async for delta in stream:
            deltas[delta.index].append(delta)
    return list(deltas.values())


async def _stream(request: Request, completion: Completion) -> Response:
    """The choices as server-sent events. Errors before the first token are errors of the request itself."""
    deltas, head = stream_choices(completion.served, completion.choices), completion.head
    usage = completion.request.stream_options.include_usage
    first = await until_gone(request, asyncio.ensure_future(anext(deltas, None)))

    def event(choices: list[dict[str, Any]], **fields: Any) -> str:
        return f"data: {json.dumps(head | {'choices': choices} | fields)}\n\n"

    async def events() -> AsyncIterator[str]:
        no_usage, generated = {"usage": None} if usage else {}, 0
        try:
            for chunk in completion.first_chunks():
                yield event([chunk], **no_usage)
            delta = first
            while delta is not None:
                generated += delta.generated
                for chunk in completion.chunks(delta):
                    yield event([chunk], **no_usage)
                delta = await anext(deltas, None)
            if usage:
                yield event([], usage=_usage(completion, generated))
        except Exception as problem:  # the status is sent: the error goes where the next event would
            yield f"data: {json.dumps(as_api_error(problem).body)}\n\n"
        finally:
            await deltas.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _usage(completion: Completion, generated: int) -> dict[str, int]:
    """Tokens of the prompts, each counted once however many choices it has, and of the choices."""
    prompts = {id(choice.request.prompt): choice.request.prompt for choice in completion.choices}
    read = sum(map(len, prompts.values()))
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _describe_model(served: Served) -> dict[str, Any]:
    context = served.model.engine.context
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "meshtune",
        "max_model_len": context,
    }


def _client(request: Request) -> str:
    return request.headers.get("authorization", "") or (request.client.host if request.client else "")


async def _answer_refusal(_: Request, problem: Exception) -> Response:
    error = as_api_error(problem)
    return JSONResponse(error.body, error.status)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.scope['path'][:200]} is not part of this API"
    return JSONResponse(ApiError(problem.status_code, message).body, problem.status_code)
