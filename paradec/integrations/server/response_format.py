"""Constraints of answers: `response_format` (OpenAI), `structured_outputs` and `guided_*` (vLLM), required calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.expressions import Node, either, sequence, text
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.json_schema import expression
from paradec.constraints.values import Choice, Constraint, Grammar, JsonSchema, Regex, constraint_of
from paradec.core.checks import shown
from paradec.integrations.server.errors import ApiError
from paradec.integrations.server.request_body import FORMATS, OWN, Body
from paradec.samplers.spans import automaton_of, reserved_tokens

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, by the keys of `structured_outputs`."""
KINDS = (*GUIDED.values(), "json_object")
"""Keys of `structured_outputs`."""
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolCalls(Constraint):
    """Answers that are a call of one of several tools, in Hermes' format."""

    tools: tuple[tuple[str, str], ...]
    """Names, and the schemas of arguments as JSON."""
    depth: int = 3

    def node(self) -> Node:
        calls = []
        for name, parameters in self.tools:
            begin = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            calls.append(sequence((text(begin), expression(parameters, self.depth), text("}\n</tool_call>"))))
        return either(calls)


def find_format(body: Body, calls: list[Any] | None) -> tuple[str, Any] | None:
    """Find the field of a body that says the form of its answers, and its value; None without one.

    Args:
        calls: tools of which one must be called.

    Raises:
        ApiError: several of these fields.
    """
    formats = {name: body.field(name) for name in FORMATS}
    formats |= {OWN: body.paradec.get("constraint"), "tool_choice": calls}
    formats = {name: value for name, value in formats.items() if value not in (None, {"type": "text"})}
    if len(formats) > 1:
        first, second, *_ = formats
        raise ApiError(f"{first} and {second} both say the form of an answer; give one", 400, second)
    return next(iter(formats.items()), None)


def read_constraint(name: str, value: Any, model: Any) -> Constraint:
    """Build the constraint of a field and its automaton, which the batch then finds.

    Raises:
        ApiError: a malformed value, one that is not supported, or one that needs too large an automaton.
    """
    try:
        constraint = _constraint(name, value)
        if isinstance(constraint, Grammar) and model.facts.topology == "causal":
            GrammarTexts(constraint.grammar, model.tokenizer, model.facts.vocab_size, model.facts.eos_token_ids)
        else:
            _automaton(constraint, model)
    except (ValueError, ModuleNotFoundError, RecursionError) as error:
        raise ApiError(f"{name}: {error}", 422, "tools" if name == "tool_choice" else name) from error
    except (TypeError, KeyError, AttributeError, IndexError) as error:  # of a schema whose parts have wrong types
        raise ApiError(f"{name}: malformed ({type(error).__name__}: {error})", 422, name) from error
    return constraint


def _constraint(name: str, value: Any) -> Constraint:
    if name == "tool_choice":
        return _tool_calls(value)
    if name == OWN:
        constraint = constraint_of("constraint", value)
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint={shown(value)} is for holes, and a prompt has none")
        return constraint
    if name == "response_format":
        return _response_format(value)
    parts = {GUIDED[name]: value} if name in GUIDED else value
    if not isinstance(parts, Mapping) or len(parts) != 1:
        raise ValueError(f"{shown(value)} must be an object with one of the keys {', '.join(KINDS)}")
    kind, argument = next(iter(parts.items()))
    if kind == "json_object" and argument is True:
        return JsonSchema(ANY_OBJECT)
    classes: dict[str, Any] = {"json": JsonSchema, "regex": Regex, "choice": Choice, "grammar": Grammar}
    if kind not in classes:
        allowed = f"give one of {', '.join(KINDS)}, json_object with true"
        raise ValueError(f"{kind}={shown(argument)} is not offered; {allowed}")
    return classes[kind](argument)


def _response_format(value: Any) -> Constraint:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        return JsonSchema(ANY_OBJECT)
    if kind != "json_schema":
        raise ValueError(f'{shown(value)} must have the type "text", "json_object" or "json_schema"')
    entry = value.get("json_schema")
    if not isinstance(entry, Mapping) or "schema" not in entry:
        raise ValueError(f'json_schema={shown(entry)} must be an object with a "schema"')
    return JsonSchema(entry["schema"])


def _tool_calls(tools: list[Any]) -> ToolCalls:
    calls = []
    for function in (tool["function"] for tool in tools):
        try:
            parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
            calls.append((function["name"], JsonSchema(parameters).schema))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"parameters of {shown(function['name'])}: {error}"
            raise ValueError(f"{reason}; tool_choice='auto' does not need them") from error
    return ToolCalls(tuple(calls))


def check_room(constraint: Constraint, model: Any, new: int) -> None:
    """Raise ApiError where no text of a constraint fits `new` tokens."""
    if isinstance(constraint, Grammar):  # its shortest text is not known
        return
    if not _automaton(constraint, model).reach(new)[0]:
        raise ApiError(f"max_tokens={new} is too few: no answer of this form is that short", 400, "max_tokens")


def is_complete(constraint: Constraint | None, model: Any, ids: list[int]) -> bool:
    """Whether an answer that `max_tokens` ended is a whole text of its constraint."""
    facts = model.facts
    if isinstance(constraint, Grammar):
        return GrammarTexts(constraint.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids).accepts(ids)
    return constraint is not None  # automata close every text in time


def _automaton(constraint: Constraint, model: Any) -> TokenAutomaton:
    """The automaton of a model's answers."""
    facts = model.facts
    return automaton_of(model, constraint, tuple(sorted(facts.eos_token_ids)), (), reserved_tokens(facts, True))
