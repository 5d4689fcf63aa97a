"""Pages, animations, plots and notebook views: escaped, bounded, and equal to the record."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import refuses
from images import tiny_masked_image
from PIL import Image
from small_models import tiny
from traces import HOSTILE, hostile_trace, scripts_trace

import paradec
from paradec.core.thumbnails import from_uri, trace_from_steps
from paradec.core.trace import Trace, merge_characters, record_token_texts, token_texts
from paradec.models.adapter import Model
from paradec.tools.traces.files import page

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12]]


class PageReader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = self.words = ""
        self.reading = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.reading = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self.reading = False

    def handle_data(self, data: str) -> None:
        self.data += data if self.reading else ""
        self.words += data

    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self.data)["runs"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2)


@pytest.fixture(scope="module")
def trace(model: Model) -> Trace:
    output = paradec.generate(model, ROWS, sampler="wino", max_new_tokens=8, block_length=4, trace=True).trace
    assert output is not None
    return output


def test_a_page_is_one_file_without_requests(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    text = trace.to_html(file)
    assert file.read_text(encoding="utf-8") == text
    actual = PageReader(text)
    assert not any({"src", "href", "srcset", "action"} & set(attributes) for _, attributes in actual.tags)
    assert not {"link", "base", "iframe", "object", "embed"} & {tag for tag, _ in actual.tags}
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", text.replace("// ", ""))
    policy = next(a["content"] for tag, a in actual.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")


def test_a_page_holds_every_step(trace: Trace) -> None:
    (run,) = PageReader(trace.to_html()).runs()
    assert run["mask"] == trace.mask_id and run["family"] == "masked" and run["left"] == []
    assert [row["start"] for row in run["rows"]] == trace.canvas and [row["end"] for row in run["rows"]] == trace.ends
    for step, data in zip(trace.steps, run["steps"], strict=True):
        assert [entry[:3] for entry in data["c"]] == [list(entry[:3]) for entry in step.commits]
        assert [entry[3] for entry in data["c"]] == [pytest.approx(entry[3], rel=1e-3) for entry in step.commits]
        assert data["f"] == step.forwarded and data["n"] == step.nfe and data["k"] == step.kind
        assert [[tuple(span) for span in row] for row in data["e"]] == step.evaluated


def test_token_texts_are_escaped(tmp_path: Path) -> None:
    name = "</title><script>window.hacked = 1</script>"
    text = page([hostile_trace(), hostile_trace()], [name, HOSTILE[1]], HOSTILE[0])
    text.encode("utf-8")  # works, because the lone surrogate was replaced
    page([scripts_trace()], ["\udce9"]).encode("utf-8")
    actual = PageReader(text)
    plain = PageReader(page([scripts_trace(), scripts_trace()]))
    assert "<" not in actual.data
    assert [tag for tag, _ in actual.tags] == [tag for tag, _ in plain.tags] and text.count("</script>") == 2
    run = actual.runs()[0]
    assert [run["texts"][str(i)] for i in range(7)] == list(HOSTILE[:7]) and run["texts"]["7"] == "?"
    assert run["settings"][HOSTILE[1]] == HOSTILE[2] and actual.runs()[0]["name"] == name
    hostile_trace().to_gif(tmp_path / "x.gif")
    framed = PageReader(hostile_trace()._repr_html_())
    assert [tag for tag, _ in framed.tags] == ["iframe"]
    assert framed.tags[0][1]["sandbox"] == "allow-scripts" and framed.tags[0][1]["srcdoc"] == hostile_trace().to_html()


def test_pages_and_animations_of_several_runs(model: Model, tmp_path: Path) -> None:
    request = {"max_new_tokens": 8, "trace": True, "eos_early_stop": False}
    names = ["low_confidence", "maskgit"]
    first_trace, second_trace = (paradec.generate(model, [1, 2], sampler=name, **request).trace for name in names)
    runs = PageReader(first_trace.to_html(beside=second_trace, names=["a", "b"])).runs()
    assert [run["name"] for run in runs] == ["a", "b"]
    assert [len(run["steps"]) for run in runs] == [8, len(second_trace.steps)]
    runs = PageReader(first_trace.to_html(beside=[second_trace, second_trace])).runs()
    assert [run["name"] for run in runs] == [*names, "maskgit"]
    short = paradec.generate(model, [1, 2], sampler="low_confidence", steps=4, **request).trace
    for first, second in ((first_trace, short), (short, first_trace)):
        first.to_gif(tmp_path / "both.gif", beside=second)
        assert Image.open(tmp_path / "both.gif").n_frames == 8 + 1
    refuses(lambda: first_trace.to_html(beside=second_trace, names=["a"]), "names has 1 entries for 2 traces")
    refuses(lambda: first_trace.to_html(beside=[second_trace] * 4), "5 traces: from 1 to 4")
    refuses(lambda: first_trace.to_html(beside=["run.json"]), "must be a paradec.core.trace.Trace", TypeError)


def test_an_animation_has_a_frame_for_every_step(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / "run.gif"
    trace.to_gif(file, row=1, seconds=0.2, width=400)
    with Image.open(file) as image:
        assert image.size[0] == 400 and image.info["loop"] == 0
        frames, times = [], []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")).copy())
            times.append(image.info["duration"])
    assert len(frames) == len(trace.steps) + 1 and set(times[:-1]) == {200} and times[-1] == 2500
    assert all((a != b).any() for a, b in zip(frames, frames[1:]))
    # undecided positions are grey, and the last frame has few or none
    grey = [int((np.abs(frame.astype(int) - (226, 226, 234)).max(-1) <= 4).sum()) for frame in frames]
    assert grey[0] > 2 * grey[-1]
    for wrong in ({"row": 3}, {"width": 5}, {"seconds": 0}, {"font": tmp_path / "no.ttf"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            trace.to_gif(tmp_path / "no.gif", **wrong)
    assert not (tmp_path / "no.gif").exists()


def test_pictures_are_drawn_with_their_tokens(tmp_path: Path) -> None:
    out = paradec.generate_images(tiny_masked_image(), class_labels=[0, 1], steps=3, seed=0, trace=True)
    trace = out.trace
    assert trace.grid == (out.grid.height, out.grid.width) and len(trace.images) == 2
    assert np.array_equal(np.asarray(from_uri(trace.images[1])), np.asarray(out.images[1].convert("RGB")))
    (run,) = PageReader(trace.to_html()).runs()
    steps = np.full((2, out.grid.height * out.grid.width), -1)
    for index, step in enumerate(run["steps"]):
        for row, position, *_ in step["c"]:
            if position in run["rows"][row]["cells"]:
                steps[row, run["rows"][row]["cells"].index(position)] = index
    assert (steps.reshape(out.steps.shape) == out.steps).all()
    trace.save(tmp_path / "run.gif")
    with Image.open(tmp_path / "run.gif") as image:
        assert image.n_frames == len(trace.steps) + 1
    decoded = trace_from_steps(out.steps, out.images, paradec.samplers.create("maskgit"))
    counts = [(out.steps == i).sum() for i in range(len(trace.steps))]
    assert decoded.grid == trace.grid and [sum(step.forwarded) for step in decoded.steps] == counts
    decoded.save(tmp_path / "back.html")


@pytest.mark.parametrize("family", ["text", "picture", "forecast"])
def test_plots_show_two_runs(family: str, trace: Trace) -> None:
    pytest.importorskip("matplotlib")
    if family == "picture":
        plot = paradec.generate_images(tiny_masked_image(), class_labels=1, steps=3, output_type="latent", trace=True)
        trace = plot.trace
    elif family == "forecast":
        trace = Trace([], {"sampler": "by hand"}, family="forecast")
        for kind in ("full", "forecast", "full"):
            trace.add([], [3 * (kind == "full")], kind)
    figure = trace.plot(beside=trace, names=["a", "b"])
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert [title[0] for title in titles] == ["a", "b"]
    bars = [axes for axes in figure.axes if len(axes.patches) == len(trace.steps)]
    assert [patch.get_height() for patch in bars[0].patches] == [sum(step.forwarded) for step in trace.steps]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({sign: i for i, sign in enumerate([*alphabet, "<end>"])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def test_characters_of_several_tokens(bytewise: Any) -> None:
    text = "a 🦊é!"
    ids = bytewise(text)["input_ids"]
    assert len(ids) == len(text.encode())
    texts = token_texts(bytewise, ids)
    assert [texts[i] for i in (ids[0], ids[1], ids[-1])] == ["a", " ", "!"] and texts[ids[2]] == "\ufffd"
    assert merge_characters(bytewise, ids, texts) == [(2, 6, "🦊"), (6, 8, "é")]
    assert merge_characters(bytewise, ids[3:], token_texts(bytewise, ids[3:])) == [(3, 5, "é")]  # no parts of 🦊
    trace = Trace([[0, 0]], family="masked", mask_id=0)
    trace.add([(0, 0, ids[6], 1.0), (0, 1, ids[7], 1.0)], [2], "full")
    record_token_texts(trace, bytewise)
    assert trace.joined == [[(0, 2, "é")]] and trace.texts.keys() == {0, ids[6], ids[7]}


def test_spaces_before_words_are_kept() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3}, [("\u2581", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=inner), [1, 3]) == {1: "a", 3: " a"}


def test_texts_of_a_model_with_a_tokenizer() -> None:
    out = paradec.generate(paradec.load(), "Sort: pear fig apple", max_new_tokens=8, trace=True)
    trace = out.trace
    ids = trace.replay()[0]
    words = [trace.texts[i] for i in ids[: trace.ends[0]] if i not in trace.special]
    assert " ".join(words) == f"sort : pear fig apple {out.text}"
    assert PageReader(trace.to_html()).runs()[0]["texts"][str(trace.mask_id)] == trace.texts[trace.mask_id]


def test_outputs_convert_to_json() -> None:
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
    actual = PageReader(out._repr_html_())
    assert "apple fig pear" in actual.words and f"{out.nfe} forwards, " in actual.words
    assert "<iframe" not in out._repr_html_()
    out.text = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>" * 1000]
    actual = PageReader(out._repr_html_())
    assert "<script>alert(1)</script>" in actual.words and not {"script", "img"} & {tag for tag, _ in actual.tags}
    assert len(actual.words) < 2500
    traced = PageReader(paradec.generate(model, "Sort: pear fig apple", max_new_tokens=8, trace=True)._repr_html_())
    assert [tag for tag, _ in traced.tags].count("iframe") == 1 and "4 tokens, 1 forward, " in traced.words
