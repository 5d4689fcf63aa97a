"""What a body says that an answer must be: `response_format` as OpenAI has it, `structured_outputs` and `guided_*` as
vLLM has them, and calls of tools that `tool_choice` requires. All become a constraint (`paradec.constraints`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.expressions import Node, either, sequence, text
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.json_schema import expression
from paradec.constraints.values import (
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Regex,
    constraint_of,
)
from paradec.core.checks import shown
from paradec.integrations.server.asked import OWN, Refused
from paradec.samplers.spans import automaton_of, reserved_tokens

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's former fields, and the keys of `structured_outputs` that say the same."""
FIELDS = ("response_format", "structured_outputs", *GUIDED)
"""The body's fields; one of them at most."""
KINDS = (*GUIDED.values(), "json_object")
"""Keys of `structured_outputs`."""
OPEN = {"type": "object"}
"""Any object, three levels deep."""


def read(body: Mapping[str, Any]) -> tuple[str, Constraint] | None:
    """The field of a body that says what an answer must be, and the constraint; None where nothing does.

    Raises:
        Refused: several fields, or one that cannot be kept.
    """
    own = body.get(OWN)
    given = {name: body[name] for name in FIELDS if body.get(name) not in (None, {"type": "text"})}
    if isinstance(own, Mapping) and own.get("constraint") is not None:
        given[OWN] = own["constraint"]
    if len(given) > 1:
        first, second, *_ = given
        raise Refused(f"{first} and {second} both say what an answer must be; give one", 400, second)
    for name, value in given.items():
        try:
            return name, _read(name, value)
        except (ValueError, TypeError, ModuleNotFoundError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(f"{name}: {error}", 422, name) from error
    return None


def _read(name: str, value: Any) -> Constraint:
    if name == OWN:
        return _one(constraint_of("constraint", value))
    if name == "response_format":
        return _response_format(value)
    parts = {GUIDED[name]: value} if name in GUIDED else value
    if not isinstance(parts, Mapping) or len(parts) != 1:
        raise ValueError(f"{shown(value)} must be an object with one of the keys {', '.join(KINDS)}")
    kind, said = next(iter(parts.items()))
    if kind == "json":
        return JsonSchema(said)
    if kind == "regex":
        return Regex(said)
    if kind == "choice":
        return Choice(said)
    if kind == "grammar":
        return Grammar(said)
    if kind == "json_object" and said is True:
        return JsonSchema(OPEN)
    raise ValueError(f"{kind}={shown(said)} is not offered; give one of {', '.join(KINDS)}, json_object with true")


def _one(value: Any) -> Constraint:
    if not isinstance(value, Constraint):
        raise ValueError(f"constraint={shown(value)} is for holes, and a prompt has none")
    return value


def _response_format(value: Any) -> Constraint:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        return JsonSchema(OPEN)
    if kind != "json_schema":
        raise ValueError(f'{shown(value)} must have the type "text", "json_object" or "json_schema"')
    said = value.get("json_schema")
    if not isinstance(said, Mapping) or "schema" not in said:
        raise ValueError(f'json_schema={shown(said)} must be an object with a "schema"')
    return JsonSchema(said["schema"])


@dataclass(frozen=True)
class Calls(Constraint):
    """An answer that is a call of one of several tools, written as Hermes does."""

    tools: tuple[tuple[str, str], ...]
    """Names, and the schemas of arguments as JSON."""
    depth: int = 3

    def node(self) -> Node:
        calls = []
        for name, parameters in self.tools:
            begin = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            calls.append(sequence((text(begin), expression(parameters, self.depth), text("}\n</tool_call>"))))
        return either(calls)


def calls_of(tools: list[Any], name: str | None) -> Calls:
    """A call of one of the tools, or of the one with this name.

    Raises:
        Refused: parameters that cannot be kept.
    """
    chosen = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    found = []
    for function in chosen:
        parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
        try:
            schema = JsonSchema(parameters).schema
        except (ValueError, TypeError) as error:
            said = f"tools: parameters of {shown(function['name'])}: {error}; tool_choice='auto' does not need them"
            raise Refused(said, 422, "tools") from error
        found.append((function["name"], schema))
    return Calls(tuple(found))


def prepare(name: str, value: Constraint, model: Any) -> None:
    """Make the automaton of a constraint, which later requests find: so that no step waits for it.

    Raises:
        Refused: the model's tokenizer cannot write its texts, or they need too large an automaton.
    """
    facts = model.facts
    try:
        if isinstance(value, Grammar) and facts.topology == "causal":
            GrammarTexts(value.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids)
            return
        _answers(value, model)
    except ValueError as error:
        raise Refused(f"{name}: {error}", 422, name) from error


def check_room(value: Constraint, model: Any, new: int) -> None:
    """Raise ValueError where no text of a constraint fits so many new tokens."""
    if isinstance(value, Grammar):  # whose texts have no shortest one that is known
        return
    if not _answers(value, model).reach(new)[0]:
        raise ValueError(f"max_tokens={new} is too few: no answer of the asked form is that short")


def _answers(value: Constraint, model: Any) -> TokenAutomaton:
    """The automaton of a model's answers."""
    facts = model.facts
    return automaton_of(model, value, tuple(sorted(facts.eos_token_ids)), (), reserved_tokens(facts, True))
