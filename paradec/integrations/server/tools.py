"""Messages, and the tools that a model may call: what a body may hold of them, and how calls are read from answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paradec.constraints.values import Constraint
from paradec.core.checks import shown
from paradec.integrations.server.asked import Refused
from paradec.integrations.server.formats import calls_of

DEEPEST = 64
"""Levels of lists and objects of a tool or of a call's arguments."""
HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
"""How answers of models are read whose chat template writes calls as <tool_call> JSON </tool_call>."""


def template_of(tokenizer: Any) -> Mapping[str, Any] | None:
    """How the tokenizer's model writes calls: what it says itself, or `HERMES` where its chat template has that
    format, in turns of ChatML."""
    own = getattr(tokenizer, "response_template", None)
    text = getattr(tokenizer, "chat_template", None)
    is_hermes = isinstance(text, str) and "<|im_start|>" in text and "<tool_call>" in text and "<function=" not in text
    return own if own is not None or not is_hermes else HERMES


def check_messages(messages: Any) -> None:
    """Raise `Refused` where messages of a chat are none."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused(f"messages={shown(messages)} must be a list of messages", 422, "messages")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise Refused(f"message {shown(message)} must have a role", 422, "messages")
        if not isinstance(message.get("content") or "", (str, list)):
            raise Refused(f"message {shown(message)} must have a text as its content", 422, "messages")
        parts = message["content"] if isinstance(message.get("content"), list) else []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Refused(f"content part {shown(part)} must be of type text: texts are read alone", 422, "messages")
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id", ""), str):
            raise Refused(f"tool_call_id={shown(message['tool_call_id'])} must be a text", 422, "messages")
        if message.get("tool_calls") is None:
            message.pop("tool_calls", None)  # as OpenAI's client sends an answer back
        else:
            check_calls(message["tool_calls"])


def check_calls(calls: Any) -> None:
    """Raise `Refused` where `tool_calls` of a message are no calls."""
    if not isinstance(calls, list):
        raise Refused(f"tool_calls={shown(calls)} must be a list of calls", 422, "messages")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"tool_calls: {shown(call)} must have a function with a name", 422, "messages")
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise Refused(
                f"tool_calls: arguments={shown(arguments)} of {shown(function['name'])} cannot be read as JSON",
                422,
                "messages",
            ) from error
        if not isinstance(arguments, dict):
            raise Refused(
                f"tool_calls: arguments={shown(arguments)} of {shown(function['name'])} must be an object in JSON",
                422,
                "messages",
            )
        check_depth("tool_calls", arguments, "messages")


def offered(body: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the chat template is told of; None where there are none, or `tool_choice` is "none".

    Raises:
        Refused: tools that are none, or a choice that cannot be kept.
    """
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Refused(f"tools={shown(tools)} must be a list of tools", 422, "tools")
    for tool in tools or []:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(
                f"tools: {shown(tool)} must be of type function, with a function that has a name", 422, "tools"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise Refused(f"tools: parameters={shown(function['parameters'])} must be an object", 422, "tools")
        check_depth("tools", tool, "tools")
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return tools or None
    if choice == "none":
        return None
    chosen(choice, [tool["function"]["name"] for tool in tools or []])
    return tools


def chosen(choice: Any, names: list[str]) -> str | None:
    """The tool that a `tool_choice` names, which requires a call; None where it requires a call of any.

    Args:
        names: of the tools that were given.
    """
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise Refused(
            f'tool_choice={shown(choice)} must be "none", "auto", "required" or {{"type": "function", "function": '
            '{"name": ...}}',
            422,
            "tool_choice",
        )
    if name is not None and name not in names:
        raise Refused(f"tool_choice: {shown(name)} is none of the tools", 422, "tool_choice")
    if not names:
        raise Refused(f"tool_choice={shown(choice)} needs tools", 422, "tool_choice")
    return name


def required(body: Mapping[str, Any], template: Mapping[str, Any] | None) -> Constraint | None:
    """What the answer to a body must be whose `tool_choice` requires a call; None where it does not.

    Args:
        template: how the model's answers are read.
    """
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if choice in (None, "auto", "none"):
        return None
    if template is not HERMES:
        raise Refused(
            f"tool_choice={shown(choice)} is not offered for this model, whose chat template writes no <tool_call> "
            'with JSON; give "auto" or "none"',
            422,
            "tool_choice",
        )
    return calls_of(tools, chosen(choice, [tool["function"]["name"] for tool in tools]))


def check_depth(name: str, value: Any, param: str) -> None:
    """Raise `Refused` where lists and objects are in each other too deeply."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Refused(f"{name}: lists and objects may be in each other {DEEPEST} levels deep", 422, param)
