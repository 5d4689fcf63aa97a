"""Several answers to one request (`n`), and what is written beside each of them (`logprobs`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from paradec.core.checks import shown
from paradec.integrations.server.asked import Asked, Refused
from paradec.integrations.server.scores import Score

MOST = 128
"""Answers that a client may ask for at once, as OpenAI has it."""


def read_count(body: Mapping[str, Any]) -> int:
    """How many answers a body asks for."""
    count = body.get("n")
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise Refused(f"n={shown(count)} must be an integer from 1 to {MOST}", 422, "n")
    return count


def together(
    bodies: Sequence[Mapping[str, Any]], each: Sequence[Asked], form: Callable[[Sequence[Score]], Any], cached: int
) -> JSONResponse:
    """One answer of several that were written one by one.

    Args:
        form: `of_chat` or `of_text`. cached: tokens of the prompt that were not evaluated.
    """
    found = dict(bodies[0])
    found["choices"] = [
        body["choices"][0] | {"index": at} | ({} if asked.scores is None else {"logprobs": form(asked.scores)})
        for at, (body, asked) in enumerate(zip(bodies, each, strict=True))
    ]
    found["usage"] = added([body["usage"] for body in bodies]) | {"prompt_tokens_details": {"cached_tokens": cached}}
    return JSONResponse(found)


def added(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `usage` of several answers to one prompt, which counts once."""
    tokens = sum(usage["completion_tokens"] for usage in usages)
    prompt = usages[-1]["prompt_tokens"]
    return {**usages[-1], "completion_tokens": tokens, "total_tokens": prompt + tokens}


async def merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[str]:
    """Parts of several streams as they come, each with the number of its choice; the last one to end has the `usage` of
    all."""
    queue: asyncio.Queue[tuple[int, str | BaseException | None]] = asyncio.Queue()

    async def read(number: int, stream: AsyncIterator[Any]) -> None:
        ended: BaseException | None = None
        try:
            async for part in stream:
                queue.put_nowait((number, part))
        except Exception as error:
            ended = error
        queue.put_nowait((number, ended))

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    usages: list[dict[str, Any]] = []
    try:
        while len(usages) < len(tasks) or any(not task.done() for task in tasks) or not queue.empty():
            number, part = await queue.get()
            if isinstance(part, BaseException):
                raise part
            if part is not None:
                yield _numbered(part, number, usages, len(tasks))
    finally:
        for task in tasks:
            task.cancel()


def _numbered(part: str, number: int, usages: list[dict[str, Any]], count: int) -> str:
    """Events of a stream with the number of its choice; `usages` takes theirs out until all have ended."""
    events = []
    for event in part.split("\n\n"):
        if event.startswith("data: {"):
            data = json.loads(event.removeprefix("data: "))
            for choice in data.get("choices", ()):
                choice["index"] = number
            if usage := data.pop("usage", None):
                usages.append(usage)
                if len(usages) == count:
                    data["usage"] = added(usages)
            event = f"data: {json.dumps(data)}" if "choices" in data else event
        events.append(event)
    return "\n\n".join(events)


def with_scores(event: str, logprobs: Any) -> str:
    """A chunk of a stream with what is written beside its choice."""
    data = json.loads(event.removeprefix("data: "))
    data["choices"][0]["logprobs"] = logprobs
    return f"data: {json.dumps(data)}\n\n"
