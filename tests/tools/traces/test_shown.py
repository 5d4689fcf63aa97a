"""What a prompt or a notebook shows of outputs, models, sessions and reports."""

import json
from html.parser import HTMLParser

from small_models import tiny

import paradec


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


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
