"""What a model says of itself in a line."""

from __future__ import annotations

from typing import Any

from paradec.core.facts import ModelFacts


def description(adapter: Any) -> str:
    """The `repr` of a model: what it makes, its tokens, size, dtype and device."""
    module = adapter.__dict__.get("module")
    if module is None:  # asked for in the middle of its making
        return object.__repr__(adapter)
    facts, kind = adapter.__dict__.get("facts"), str(adapter.dtype).removeprefix("torch.")
    said = [f"makes {getattr(adapter, 'makes', 'nothing')}"]
    if isinstance(facts, ModelFacts):
        blocks = f" in blocks of {facts.block_length}" if facts.block_length else ""
        said += [f"{facts.topology}{blocks}", f"{facts.vocab_size} tokens"]
        said += [] if facts.mask_token_id is None else [f"mask id {facts.mask_token_id}"]
    said += [f"{count_text(sum(p.numel() for p in module.parameters()))} parameters", f"{kind} on {adapter.device}"]
    return f"{type(adapter).__name__}({getattr(facts, 'name', type(module).__name__)!r}: {', '.join(said)})"


def count_text(number: int) -> str:
    """A count in three digits: 1.86M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
