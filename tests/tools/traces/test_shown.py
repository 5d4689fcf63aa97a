"""What a prompt or a notebook shows of outputs, models, sessions and reports."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from causal_models import close_model, wrapped
from image_models import FAMILIES, tiny_masked_image
from tiny_models import tiny
from tiny_pipelines import dit_pipeline, run_dit

import paradec
from paradec import samplers


class Tags(HTMLParser):
    """The tags of a text, and its words outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("rows", [1, 2, 60])
def test_the_repr_of_an_output_is_short(rows: int) -> None:
    model = paradec.load()
    out = paradec.generate(model, ["Sort: pear fig apple"] * rows if rows > 1 else "Sort: pear fig apple", trace=True)
    said = repr(out)
    assert said.startswith("Output('apple fig pear'") and len(said) < 200
    unit = "forward" if rows == 1 else "row call"
    assert f"{4 * rows} tokens, 1 forward, {out.tokens_per_forward:.1f} tokens per {unit}, finished" in said
    assert (f"{rows} rows" in said) == (rows > 1) and "trace" in said and ("more" in said) == (rows > 2)
    # whatever the texts are
    for text in ("\x00🦊\n'" * 5000, "\U000e0001" * 5000):
        out.text = text if rows == 1 else [text] * rows
        assert len(repr(out)) <= 600 and len(str(out)) <= 600


def test_the_repr_without_a_tokenizer_and_of_what_is_not_done() -> None:
    stop = {"callback": lambda state, commit: True, "max_new_tokens": 8, "sampler": "low_confidence"}
    out = paradec.generate(tiny(1), [[1, 2], [3]], **stop)
    assert repr(out).startswith("Output(no text: 2 rows, 2 tokens, 1 forward, 1.0 tokens per row call, not finished, ")


def test_an_output_as_data() -> None:
    model = paradec.load()
    request = {"max_new_tokens": 16, "block_length": 8, "cache": "dual", "trace": True, "keep_prefix": False}
    out = paradec.generate(model, ["Sort: pear fig apple", "Reverse: fig"], **request)
    data = json.loads(json.dumps(out.to_dict()))
    assert data["text"] == out.text and data["sequences"] == out.sequences.tolist() and data["nfe"] == out.nfe
    assert data["tokens_per_forward"] == out.tokens_per_forward and data["row_nfe"] == out.row_nfe
    assert data["filled"] == out.filled.tolist() and data["cost"]["forwarded_tokens"] == out.cost.forwarded_tokens
    assert paradec.core.trace.Trace.from_dict(data["trace"]).steps == out.trace.steps
    assert "attention" not in data and "prefix" not in data
    out = paradec.generate(tiny(1, "block_causal"), [1, 2, 3], max_new_tokens=8, cache="block", keep_prefix=True)
    assert out.prefix is not None and "prefix" not in out.to_dict() and "trace" not in out.to_dict()


def test_notebooks_see_answers_as_text() -> None:
    model = paradec.load()
    out = paradec.generate(model, ["Sort: pear fig apple", "Reverse: fig"], max_new_tokens=8)
    found = Tags(out._repr_html_())
    assert "apple fig pear" in found.words and f"{out.nfe} forwards, " in found.words and "iframe" not in found.tags
    out.text = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>" * 1000]
    found = Tags(out._repr_html_())
    assert "<script>alert(1)</script>" in found.words and not {"script", "img"} & set(found.tags)
    assert len(found.words) < 2500
    traced = Tags(paradec.generate(model, "Sort: pear fig apple", max_new_tokens=8, trace=True)._repr_html_())
    assert traced.tags.count("iframe") == 1 and "4 tokens, 1 forward, " in traced.words


def test_models_say_what_they_are() -> None:
    said = repr(tiny(2))
    assert said.startswith("Decoder('LlamaForCausalLM': makes text, bidirectional, 41 tokens, mask id 40, ")
    assert said.endswith(" parameters, float64 on cpu)")
    assert "block_causal in blocks of 4" in repr(tiny(1, "block_causal"))
    assert "mask id" not in repr(wrapped()) and "causal" in repr(wrapped())
    for make in FAMILIES.values():
        model: Any = make()
        assert repr(model).startswith(type(model).__name__ + "(") and model.makes in repr(model)
        assert len(repr(model)) < 200
    model = tiny(1)
    assert f"{sum(p.numel() for p in model.module.parameters()) / 1000:.3g}k parameters" in repr(model)
    assert repr(object.__new__(type(model))).startswith("<")  # half made: still no error


def test_pictures_sessions_and_reports_say_what_they_are() -> None:
    out = paradec.generate_images(tiny_masked_image(), class_labels=[0, 1], steps=2, output_type="pt")
    assert repr(out).startswith("ImageOutput(2 pictures of 4 x 4 tokens: 2 forwards, 8.00 tokens per row call, ")
    pipe = dit_pipeline()
    with paradec.accelerate(pipe, paradec.TaylorSeer(interval=3)) as session:
        assert repr(session) == (
            "Session(transformer by taylorseer (target module, 4 modules hooked); 0 runs, the latest of 0 calls)"
        )
        run_dit(pipe)
        report = session.report()
        assert repr(session).endswith(f"1 runs, the latest of {len(report.calls)} calls)")
    full = len(report.full_steps)
    assert f"{len(report.calls)} calls, {full} full, {len(report.calls) - full} forecast)" in repr(report)
    found = Tags(report._repr_html_())
    assert report.summary in found.words and found.tags.count("tr") == len(report.calls) + 1
    trace = report.trace(torch.zeros(2, 3, 8, 8))
    assert [i for i, step in enumerate(trace.steps) if step.kind == "full"] == report.full_steps
    assert sum(step.forwarded[0] for step in trace.steps) == sum(call.evaluated for call in report.calls)
    assert trace.row_nfe[0] == full and len(trace.images) == 2 and trace.batch == 2
    drafter = samplers.create("speculative", drafter=close_model())
    assert len(repr(drafter)) < 400
