"""Threads for what the event loop must not do: cutting texts into tokens, rendering templates, compiling grammars."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from meshtune.errors import UserError
from meshtune.serve.errors import ApiError

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
            return await until_gone(
                request, asyncio.get_running_loop().run_in_executor(self._pool, _result, function, *args)
            )
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
