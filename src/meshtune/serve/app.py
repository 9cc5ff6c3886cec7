"""The HTTP application: an API that clients of OpenAI's speak, over the models of one server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from meshtune.errors import UserError
from meshtune.serve import chat, completions, scores
from meshtune.serve.answer import Piece, Question, answer
from meshtune.serve.body import json_body
from meshtune.serve.errors import ApiError, as_api_error
from meshtune.serve.gate import Gate
from meshtune.serve.guard import Guard
from meshtune.serve.metrics import metrics_text
from meshtune.serve.models import Models, Served
from meshtune.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ScoreRequest,
    TokenizeRequest,
    parsed,
)
from meshtune.serve.threads import Threads, until_gone

MAX_BODY = 16 * 2**20  # bytes
WAITING = 128  # requests that wait to be read, at most
R = TypeVar("R", bound=BaseModel)


def create_app(
    models: Models,
    *,
    token: str | None = None,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
    max_body: int = MAX_BODY,
    gate: Gate | None = None,
) -> Starlette:
    """The application. `token`, `hosts`, `origins`, `max_body` (bytes) and `gate` are those of `Guard`."""
    api = _Api(models, max_body)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for worker in models.workers:
            worker.start()
        yield
        for worker in models.workers:
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
    guard = Middleware(Guard, token=token, hosts=hosts, origins=origins, max_body=max_body, gate=gate)
    return Starlette(
        routes=routes,
        middleware=[guard],
        lifespan=lifespan,
        exception_handlers={ApiError: _refused, UserError: _refused, HTTPException: _http_error},
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
        return JSONResponse({"object": "list", "data": [_described(served) for served in self._models]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(_described(self._models[request.path_params["name"]]))

    async def chat(self, request: Request) -> Response:
        query = await self._query(ChatRequest, request)
        served = self._models.writer(query.model)
        query.check(served.worker.scheduler.capacity)
        head = _head(chat.PREFIX, served) | {"object": chat.CHUNK_NAME if query.stream else chat.NAME}
        answers = await self._reading.run(request, chat.ChatAnswers, query, served)
        return await self._answered(request, query, served, answers, head)

    async def completions(self, request: Request) -> Response:
        query = await self._query(CompletionRequest, request)
        served = self._models.writer(query.model)
        query.check(served.worker.scheduler.capacity)
        head = _head(completions.PREFIX, served) | {"object": completions.NAME}
        return await self._answered(request, query, served, completions.CompletionAnswers(query, served), head)

    async def score(self, request: Request) -> Response:
        query = await self._query(ScoreRequest, request)
        served = self._models[query.model]
        rows = await self._reading.run(request, scores.rows, query, served)
        values = await self._scoring.run(request, scores.evaluated, rows, served)
        return JSONResponse(_head(scores.PREFIX, served) | {"object": scores.NAME, "scores": values})

    async def tokenize(self, request: Request) -> Response:
        query = await self._query(TokenizeRequest, request)
        served = self._named(query.model)
        ids = await self._reading.run(request, served.ids, query.prompt, query.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.model.engine.context})

    async def detokenize(self, request: Request) -> Response:
        query = await self._query(DetokenizeRequest, request)
        served = self._named(query.model)
        return JSONResponse({"prompt": await self._reading.run(request, served.text, query.tokens)})

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self._models.first.model.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return JSONResponse({name: getattr(tokenizer, name, None) for name in names})

    def _named(self, name: str | None) -> Served:
        return self._models.first if name is None else self._models[name]

    async def _query(self, kind: type[R], request: Request) -> R:
        body = await json_body(request, self._max_body)
        return await self._reading.run(request, parsed, kind, body)

    async def _answered(
        self, request: Request, query: GenerationRequest, served: Served, answers: Answers, head: dict[str, Any]
    ) -> Response:
        if served.worker.scheduler.room == 0:
            served.worker.scheduler.refuse()
        questions = await self._reading.run(request, answers.questions, _client(request), _seed())
        if query.stream:
            return await _streamed(request, query, served, questions, head, answers)
        several = await until_gone(request, asyncio.ensure_future(_whole(served, questions)))
        threads = self._scoring if answers.scores else self._reading
        choices = [
            await threads.run(request, answers.choice, question, pieces)
            for question, pieces in zip(questions, several, strict=True)
        ]
        return JSONResponse(head | {"choices": choices, "usage": _usage(questions, several)})


class Answers(Protocol):
    """What a kind of request is asked, and how its answers are written."""

    @property
    def scores(self) -> bool:
        """Whether a whole answer has scores that are still to be computed."""
        ...

    def questions(self, client: str, seed: int) -> list[Question]:
        """What the engine is asked."""
        ...

    def choice(self, question: Question, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer."""
        ...

    def openings(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a streamed answer."""
        ...


async def _whole(served: Served, questions: list[Question]) -> list[list[Piece]]:
    """All answers."""

    async def read(question: Question) -> list[Piece]:
        return [piece async for piece in answer(served, question)]

    tasks = [asyncio.create_task(read(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _streamed(
    request: Request,
    query: GenerationRequest,
    served: Served,
    questions: list[Question],
    head: dict[str, Any],
    answers: Answers,
) -> Response:
    """The answers as server-sent events. What is wrong before the first token is an error of the request itself."""
    pieces = _merged(served, questions)
    first = await until_gone(request, asyncio.ensure_future(anext(pieces, None)))
    no_usage = {"usage": None} if query.includes_usage else {}

    def event(**fields: Any) -> str:
        return f"data: {json.dumps(head | fields)}\n\n"

    async def events() -> AsyncIterator[str]:
        generated = 0
        try:
            for opening in answers.openings():
                yield event(choices=[opening], **no_usage)
            piece = first
            while piece is not None:
                generated += piece.generated
                for chunk in answers.chunks(piece):
                    yield event(choices=[chunk], **no_usage)
                piece = await anext(pieces, None)
            if query.includes_usage:
                yield event(choices=[], usage=_usage_of(questions, generated))
        except Exception as problem:  # the status is sent: the error goes where the next event would
            yield f"data: {json.dumps(as_api_error(problem).body)}\n\n"
        finally:
            await pieces.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _merged(served: Served, questions: list[Question]) -> AsyncGenerator[Piece]:
    """The pieces of several answers as they come."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def read(question: Question) -> None:
        try:
            async for piece in answer(served, question):
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as problem:  # raised where the pieces are read, as one answer would raise it
            queue.put_nowait(problem)

    tasks = [asyncio.create_task(read(question)) for question in questions]
    try:
        ended = 0
        while ended < len(tasks):
            new = await queue.get()
            if isinstance(new, BaseException):
                raise new
            if new is None:
                ended += 1
            else:
                yield new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _head(prefix: str, served: Served) -> dict[str, Any]:
    head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.id}
    return head | {"system_fingerprint": served.fingerprint}


def _usage(questions: list[Question], answers: list[list[Piece]]) -> dict[str, int]:
    return _usage_of(questions, sum(piece.generated for pieces in answers for piece in pieces))


def _usage_of(questions: list[Question], generated: int) -> dict[str, int]:
    """Tokens of the prompts, each counted once however many choices it has, and of the answers."""
    prompts = {id(question.request.prompt): question.request.prompt for question in questions}
    read = sum(map(len, prompts.values()))
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _described(served: Served) -> dict[str, Any]:
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


def _seed() -> int:
    return secrets.randbelow(2**31)


async def _refused(_: Request, problem: Exception) -> Response:
    error = as_api_error(problem)
    return JSONResponse(error.body, error.status)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.scope['path'][:200]} is not part of this API"
    return JSONResponse(ApiError(problem.status_code, message).body, problem.status_code)
