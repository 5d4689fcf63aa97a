"""Chats: encode messages and tools as a prompt; split an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import regex
from openai.types.chat.chat_completion_message_function_tool_call import Function
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from paradec.core.checks import short_repr
from paradec.core.prompts import tokenize
from paradec.integrations.server.limits import ApiError
from paradec.integrations.server.logprobs import TokenScore
from paradec.integrations.server.request_body import ChatBody


def _call_format(function: Any, **field: Any) -> dict[str, Any]:
    """Build transformers' `response_template` for a format of tool calls."""
    field |= {"repeats": True, "transform": {"type": "function", "function": function}}
    return {"start_anchor": "assistant", "fields": {"tool_calls": field}}


FUNCTION = {"name": "{name}", "arguments": "{content}"}
# <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3
HERMES = _call_format("{content}", open="<tool_call>", close="</tool_call>", content="json")
# <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder, Qwen 3.5
QWEN_XML = _call_format(
    FUNCTION,
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
)
# <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>}<tool_call|>: Gemma 4, whose markers are special tokens
GEMMA = _call_format(
    FUNCTION,
    open_pattern=r"<\|tool_call>\s*call:(?P<name>[^\s{]+)",
    close="<tool_call|>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
)
# names that `chat_template_kwargs` must not contain, because the server passes them to `apply_chat_template`
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}


class Piece(NamedTuple):
    """A part of an answer. role: only in the first; finish_reason: in the last. draft: JSON of text that may change."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Function, ...] = ()
    scores: Sequence[TokenScore] = ()
    finish_reason: Any = None
    draft: str = ""
    role: str = ""


class AnswerParser:
    """Incremental parser that splits the text of an answer.

    reasoning_end: the text that ends the reasoning; None if the answer does not begin with reasoning.
    template: the format of tool calls; None leaves calls in the content. tools: tools of the request body."""

    def __init__(self, reasoning_end: str | None, template: Any, tools: Any):
        self._reasoning = None if reasoning_end is None else StopCutter([reasoning_end])
        self._template, self._tools, self._held, self._follows_call = template, tools, "", False
        if template is not None:
            field = load_response_template(template).fields["tool_calls"]
            self._call = regex.compile(rf"\s*(?:{field.open_re.pattern}).*?(?:{field.close_re.pattern})", regex.DOTALL)

    def feed(self, text: str, is_last: bool = False) -> Piece:
        """Split the next piece of text. Text that may begin a tool call, and space before it, waits for more text."""
        reasoning, content, calls = "", "", list[Function]()
        if self._reasoning is not None:
            reasoning = self._reasoning.feed(text, is_last)
            if not self._reasoning.is_over:
                return Piece(reasoning=reasoning)
            text, self._reasoning = self._reasoning.rest, None
        text, self._held = self._held + text, ""
        while self._template is not None:
            text = text.lstrip() if self._follows_call else text
            self._follows_call = self._follows_call and not text
            match = self._call.search(text, partial=not is_last)
            if match is None or match.partial:
                end = len(text) if match is None else match.start()
                text, self._held = text[:end], text[end:]
                break
            try:
                (call,) = parse_response(match[0], self._template, prefix="", tools=self._tools)["tool_calls"]
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append(Function.model_validate({"name": name or None, "arguments": arguments}))
                content, self._follows_call = content + text[: match.start()], True
            except (ValueError, RuntimeError, KeyError, TypeError):  # malformed calls stay in the content
                content += text[: match.end()]
            text = text[match.end() :]
        return Piece(content + text, reasoning, tuple(calls))


class StopCutter:
    """Incremental cut of a text before the stop sequence that is completed first."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.is_over, self.rest = stops, False, ""

    def feed(self, text: str, is_last: bool = False) -> str:
        """Add text; return the part before any stop sequence. `rest`: held back, as it may begin one; if `is_over`, the
        text behind the stop sequence."""
        if self.is_over:
            return ""
        text = self.rest + text
        ends = [(begin + len(stop), begin) for stop in self.stops if (begin := text.find(stop)) >= 0]
        self.is_over = bool(ends)
        end, size = min(ends) if ends else (len(text), len(text))
        if not ends and not is_last:
            starts = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
            end = size = len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)
        self.rest = text[end:]
        return text[:size]


def response_template_of(tokenizer: Any) -> dict[str, Any] | None:
    """Return the format of tool calls: the tokenizer's, or a known one that the chat template contains, or None."""
    template, text = getattr(tokenizer, "response_template", None), getattr(tokenizer, "chat_template", None) or ""
    if template is not None:
        return template if "tool_calls" in template["fields"] else None
    markers = {"<|tool_call>": GEMMA, "<function=": QWEN_XML, "<tool_call>": HERMES}
    return next((known for marker, known in markers.items() if marker in text), None)


def encode_chat(model: Any, body: ChatBody) -> tuple[list[int], list[Any], list[Any], Any, str | None]:
    """Encode a chat. Returns the prompt's ids; the tools; the tools of which one must be called; the format of calls;
    the text that ends the reasoning if the prompt opens a reasoning block, else None. Raises ApiError."""
    param, variables, choice = "chat_template_kwargs", body.chat_template_kwargs, body.tool_choice
    if name := next((name for name in variables if name in RESERVED), None):
        raise ApiError(f"{param}: {name} is set by the server; give other variables of the template", 422, param)
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    tools = [] if choice == "none" else [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    template = response_template_of(model.tokenizer) if tools else None
    required = list[Any]()
    if choice not in (None, "auto", "none"):
        function = choice["function"]["name"] if isinstance(choice, dict) else None
        required = [tool for tool in tools if function in (None, tool["function"]["name"])]
        if not required:
            reason = f": {short_repr(function)} is not one of the tools" if tools else " needs tools"
            raise ApiError(f"tool_choice{reason}", 422, "tool_choice")
    if required and template is not HERMES:
        raise ApiError(f"tool_choice={short_repr(choice)} is not supported with this model", 422, "tool_choice")
    if tools and "tools" not in str(getattr(model.tokenizer, "chat_template", "")):
        raise ApiError("tools are not supported by this model's chat template; leave them out", 422, "tools")
    render = partial(model.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    try:
        text = render(messages, tools=tools or None, **variables)
        ids = tokenize(model.tokenizer, text)
    except Exception as error:  # any error of the template's code with the client's data
        reason = f"the chat template or the tokenizer does not support this chat: {error}"
        raise ApiError(reason, 400, "tools" if tools else "messages") from error
    fields = (getattr(model.tokenizer, "response_template", None) or {"fields": {}})["fields"]
    block = fields.get("reasoning_content") or fields.get("thinking") or {}
    begin, end = block.get("open", "<think>"), block.get("close", "</think>")
    is_open = isinstance(begin, str) and isinstance(end, str) and text.rstrip().endswith(begin.rstrip())
    return ids, tools, required, template, end if is_open else None
