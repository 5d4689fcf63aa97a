"""The two endpoints: what a body asks for, checked and encoded."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi.responses import Response

from paradec.constraints.spelling import spelling_of
from paradec.constraints.values import Constraint
from paradec.core.checks import shown
from paradec.core.prompts import encode, is_rows_of_ids
from paradec.integrations.server.answers import Reply, Served
from paradec.integrations.server.chat import (
    HERMES,
    AnswerParser,
    Parts,
    choose_tools,
    encode_chat,
    reasoning_end,
    response_template_of,
)
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScores, score_prompt
from paradec.integrations.server.request_body import OWN, ChatBody, TextBody, find_format, read_changes, read_constraint


class Service(Served):
    """The two endpoints of a model."""

    async def chat(self, call: Call, body: ChatBody) -> Response:
        """Answer a body of /v1/chat/completions. Raises ApiError."""
        self.check_name(body.model)
        changes, tokenizer = read_changes(body, self.presets), self.model.tokenizer
        if "chat" in body.paradec:
            raise ApiError("chat is for /v1/completions; messages are a chat", 422, OWN)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", 422, "top_logprobs")
        tools, required = choose_tools(body)
        template = response_template_of(tokenizer)
        if required and template is not HERMES:
            reason = "is not offered for this model, whose chat template writes no <tool_call> with JSON"
            raise ApiError(f"tool_choice={shown(body.tool_choice)} {reason}", 422, "tool_choice")
        ids, text = await asyncio.to_thread(encode_chat, self.model, body, tools)
        await self._prepare(body, changes, [ids], required)
        end = None if changes["constraint"] else reasoning_end(tokenizer, text)
        make_parser = partial(AnswerParser, end, template if tools else None, tools)
        return await Reply(self, call, body, changes, [ids], make_parser, []).respond()

    async def complete(self, call: Call, body: TextBody) -> Response:
        """Answer a body of /v1/completions. Raises ApiError."""
        self.check_name(body.model)
        changes = read_changes(body, self.presets)
        rows = await asyncio.to_thread(self._encode_prompts, body)
        await self._prepare(body, changes, rows, None)
        echoes = await asyncio.to_thread(self._echo, body, rows) if body.echo else []
        make_parser = partial(AnswerParser, None, None, None)
        return await Reply(self, call, body, changes, rows, make_parser, echoes).respond()

    async def _prepare(
        self, body: ChatBody | TextBody, changes: dict[str, Any], rows: list[list[int]], required: Any
    ) -> None:
        """Set the constraint, whose automaton is made, and the number of log-probabilities. Raises ApiError."""
        constraint: Constraint | None = None
        if (form := find_format(body, required)) is not None:
            if changes.get("stop_strings"):
                raise ApiError("stop may end an answer before it has its form; leave it out", 400, "stop")
            constraint = await asyncio.to_thread(read_constraint, *form, self.model, self.compiler)
        changes["constraint"] = constraint
        if body.num_logprobs is not None:
            changes["logprobs"] = min(body.num_logprobs, self.model.facts.vocab_size)
            await asyncio.to_thread(spelling_of, self.model.tokenizer)  # it reads the whole vocabulary once
        if any(self.model.facts.hole_id in row for row in rows):
            raise ApiError("the prompt holds the mask token, and a server fills no masks")

    def _encode_prompts(self, body: TextBody) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError."""
        rows, is_chat = [], body.paradec.get("chat", False)
        for prompt in body.prompts:
            if not (prompt.strip() if isinstance(prompt, str) else is_rows_of_ids([prompt])):
                reason = "must be a text with a word in it, a list of ids, or a list of these"
                raise ApiError(f"prompt={shown(prompt)} {reason}", 422, "prompt")
            try:
                rows += encode(self.model, prompt, chat=is_chat if isinstance(prompt, str) else None).rows
            except (ValueError, TypeError) as error:
                raise to_api_error(error, "prompt") from error
        return rows

    def _echo(self, body: TextBody, rows: list[list[int]]) -> list[tuple[Parts, Any]]:
        """The texts of prompts, and the scores of their tokens. Raises ApiError."""
        model, count, echoes = self.model, body.num_logprobs, []
        if body.paradec.get("chat"):
            raise ApiError("echo is for prompts that are no chat", 400, "echo")
        if count is not None and model.facts.topology != "causal":
            reason = "needs a causal model: others give the tokens of a prompt no log-probabilities"
            raise ApiError(f"echo=true with logprobs {reason}", 400, "echo")
        for prompt, ids in zip(body.prompts, rows, strict=True):
            scores = TokenScores(model.tokenizer, keeps_special=True)
            if count is not None:
                scores.add(ids, score_prompt(model, ids, min(count, model.facts.vocab_size)))
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
            echoes.append((Parts(text), scores.take()))
        return echoes
