"""A replayable record of a decoding: what each step evaluated and what it made final."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TraceStep:
    """One step. Rows count from 0; positions count from a row's first prompt token."""

    commits: list[tuple[int, int, int, float]]
    """(row, position, token, confidence) of everything that was written, sorted; the mask id where a sampler took a
    token back."""
    forwarded: list[int]
    """Positions evaluated for each row, in both branches of a guidance pair and in every draft, padding excluded; 0
    where the row took no part. Steps and rows together make `Output.forwarded_tokens`."""
    kind: str
    """"full" (whole sequences), "window" (a part, over a store), "forecast" (no evaluation), ..."""
    logprobs: list[list[Any]] | None = None
    """With `generate(logprobs=k)`, for every entry of `commits`: [its log-probability, [[token, log-probability], ...]]
    of the k likeliest, None for what is not finite."""


@dataclass
class Trace:
    """All steps of one request, and what is needed to replay them: the canvas before the first step."""

    canvas: list[list[int]]
    """The ids that decoding started from, one list per row, without padding."""
    settings: dict[str, Any] = field(default_factory=dict)
    steps: list[TraceStep] = field(default_factory=list)

    def replay(self, until: int | None = None) -> list[list[int]]:
        """The canvas after the first `until` steps (all by default). Later writes win: edits and remasks replay too."""
        canvas = [list(row) for row in self.canvas]
        for step in self.steps[:until]:
            for row, position, token, _ in step.commits:
                canvas[row][position] = token
        return canvas

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """JSON text; also written to `path` when one is given."""
        data = asdict(self)
        for step in data["steps"]:
            if step["logprobs"] is None:  # as it was written before there were any
                del step["logprobs"]
        text = json.dumps(data)
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Trace:
        """Read a file written by `to_json`, or its text."""
        text = str(source)
        data = json.loads(text if text.lstrip().startswith("{") else Path(source).read_text())
        steps = [
            TraceStep([tuple(c) for c in step["commits"]], step["forwarded"], step["kind"], step.get("logprobs"))
            for step in data["steps"]
        ]
        return cls(canvas=data["canvas"], settings=data["settings"], steps=steps)
