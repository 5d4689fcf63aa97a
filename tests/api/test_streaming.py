"""Streamers and stop strings."""

import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from decoding import MASKED, TensorRecorder, fits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import tiny
from structured import tiny_with_texts
from tokenized_models import TEXT, TOKENIZER, VOCAB, RecitingModule, byte_level_tokenizer, encode, reciting_model
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    StopStringCriteria,
    TextDiffusionStreamer,
    TextIteratorStreamer,
    TextStreamer,
)

import paradec
from paradec.models.adapter import Model
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.masked.blocks import NEVER

PROMPT = "Reverse: pear fig apple kiwi"
STEPWISE = {"sampler": "low_confidence", "max_new_tokens": 8}


class DraftRecorder(TensorRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[Tensor] = []

    def put_draft(self, value: Tensor) -> None:
        # final tokens and the draft together make up the canvas
        self.drafts.append(torch.cat([*self.puts, value], dim=1))


def test_an_ended_row_does_not_delay_the_others() -> None:
    model = tiny(1)
    rows, request = [[7], [0]], {"max_new_tokens": 16, "block_length": 4}
    ends = [paradec.generate(model, [row], sampler="editing", **request).tokens[0] for row in rows]
    assert ends[0] <= 4 and ends[1] == 16  # one row ends early, the other one does not
    streamer, sent = TensorRecorder(), []

    def callback(state: Any, commit: Any) -> None:
        count = sum(piece.shape[1] for piece in streamer.puts[1:])
        running = [int(start) - 1 for start, runs in zip(state.block_start, state.running) if runs]
        assert count == min(running, default=16)
        sent.append(count)

    out = paradec.generate(model, rows, sampler="editing", streamer=streamer, callback=callback, **request)
    assert torch.cat(streamer.puts, 1).tolist() == out.sequences.tolist() and {4, 8, 12, 16} <= set(sent)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_every_token_is_streamed_once_and_final(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(kind)
    if not fits(name, model):
        pytest.skip("refused by name")
    mask = model.facts.mask_token_id
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    arguments = {"sampler": name, "max_new_tokens": 12, "block_length": 4, "seed": 3}
    expected = paradec.generate(model, rows, **arguments)
    snapshots = []

    def callback(state: Any, commit: Any) -> None:
        snapshots.append((state.canvas.clone(), state.length.copy(), bool(state.done)))

    streamer = DraftRecorder()
    out = paradec.generate(model, rows, streamer=streamer, callback=callback, **arguments)
    assert torch.equal(out.sequences, expected.sequences) and out.row_nfe == expected.row_nfe
    assert streamer.ends == 1
    actual = torch.cat(streamer.puts, dim=1)
    assert streamer.puts[0].tolist() == out.sequences[:, :5].tolist()
    assert all(put.shape[0] == 3 and put.shape[1] > 0 for put in streamer.puts)
    assert (actual != mask).all()
    assert torch.equal(actual, out.sequences[:, : actual.shape[1]])
    # tokens that were not sent are padding in all rows
    assert (out.sequences[:, actual.shape[1] :] == model.facts.fill_token_id).all()
    assert actual.shape[1] == 5 + max(out.tokens)
    unfinished = [(canvas, length) for canvas, length, done in snapshots if not done]
    assert len(unfinished) > 0
    for draft, (canvas, length) in zip(streamer.drafts, unfinished, strict=True):
        for row, offset in enumerate(canvas.shape[1] - length):
            assert draft[row, offset:].tolist() == canvas[row, : draft.shape[1] - offset].tolist()


def test_tokens_are_sent_as_soon_as_they_are_final(llada: Model) -> None:
    sent = []
    streamer = TensorRecorder()

    def callback(state: Any, commit: Any) -> None:
        undecided = state.undecided[0].tolist()
        first = undecided.index(True) if True in undecided else int(state.end[0])
        sent.append((sum(put.shape[1] for put in streamer.puts), first))

    request = {"sampler": "random", "max_new_tokens": 12, "seed": 0}
    paradec.generate(llada, [1, 2, 3], streamer=streamer, callback=callback, **request)
    assert all(count == first for count, first in sent)
    assert len({count for count, _ in sent}) > 3


def test_text_streamers_print_the_answer(packaged: Model, capsys: pytest.CaptureFixture[str]) -> None:
    out = paradec.generate(packaged, PROMPT, streamer=TextStreamer(packaged.tokenizer), **STEPWISE)
    tokens = out.sequences[0, : out.sequences.shape[1] - 8 + out.tokens[0]]
    assert capsys.readouterr().out == packaged.tokenizer.decode(tokens) + "\n"
    streamer = TextStreamer(packaged.tokenizer, skip_prompt=True, skip_special_tokens=True)
    paradec.generate(packaged, PROMPT, streamer=streamer, **STEPWISE)
    assert capsys.readouterr().out.strip() == out.text == "kiwi apple fig pear"


def test_text_iterator_streamers_yield_the_answer(packaged: Model) -> None:
    streamer = TextIteratorStreamer(packaged.tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    arguments = {"streamer": streamer, **STEPWISE}
    thread = threading.Thread(target=paradec.generate, args=(packaged, PROMPT), kwargs=arguments)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == "kiwi apple fig pear"
    assert len([piece for piece in pieces if piece]) > 1


def test_text_diffusion_streamers_show_drafts(packaged: Model, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextDiffusionStreamer(packaged.tokenizer, skip_prompt=True)
    out = paradec.generate(packaged, PROMPT, streamer=streamer, **STEPWISE)
    screen = capsys.readouterr().out
    drafts = re.findall("\0337\033\\[33m(.*?)\033\\[0m", screen)
    assert len(drafts) == out.nfe - 1
    assert packaged.tokenizer.mask_token in drafts[0]
    assert drafts[0].count(packaged.tokenizer.mask_token) > drafts[-1].count(packaged.tokenizer.mask_token)
    # drafts, which the terminal erases, are removed from the output
    shown = re.sub("\0337.*?\0338\033\\[J", "", screen, flags=re.DOTALL)
    assert shown == packaged.tokenizer.decode(out.new_tokens[0, : out.tokens[0]]) + "\n"


def test_one_row_streamers_refuse_a_batch(packaged: Model) -> None:
    calls = []
    handle = packaged.module.register_forward_pre_hook(lambda *_: calls.append(1))
    for streamer in (TextStreamer(packaged.tokenizer), TextDiffusionStreamer(packaged.tokenizer)):
        name = type(streamer).__name__
        with pytest.raises(ValueError, match=f"streamer of type {name} takes one row; this request has 2"):
            paradec.generate(packaged, [PROMPT, PROMPT], streamer=streamer)
        with pytest.raises(ValueError, match="this request has 3"):
            paradec.generate(packaged, PROMPT, streamer=streamer, num_return_sequences=3)
        paradec.generate(packaged, [PROMPT], streamer=streamer, max_new_tokens=1)  # a batch of one is fine
    handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("rows", [[[1, 2, -1, 3, 4, -1, -1, 5]], [[1, 2, -1, 3, 4, -1, -1, 5], [6, 7, 8, 9, -1, 1]]])
def test_infill_streams_the_prompt_too(llada: Model, rows: list[list[int]]) -> None:
    rows = [[llada.facts.mask_token_id if token < 0 else token for token in row] for row in rows]
    streamer = TensorRecorder()
    out = paradec.infill(llada, rows, sampler="low_confidence", streamer=streamer)
    assert torch.equal(streamer.puts[0], out.sequences[:, :2]) and streamer.puts[0][0].tolist() == [1, 2]
    assert torch.equal(torch.cat(streamer.puts, 1), out.sequences)


def raise_in_callback(error: BaseException) -> Any:
    def callback(state: Any, commit: Any) -> None:
        if state.commits == 2:
            raise error

    return callback


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_errors_end_the_streamer(llada: Model, error: BaseException) -> None:
    streamer = TensorRecorder()
    with pytest.raises(type(error)):
        paradec.generate(llada, [1, 2], streamer=streamer, callback=raise_in_callback(error), **STEPWISE)
    assert streamer.ends == 1

    class BrokenPipe(TensorRecorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 2:
                raise BrokenPipeError

    streamer = BrokenPipe()
    with pytest.raises(BrokenPipeError):
        paradec.generate(llada, [1, 2], streamer=streamer, **STEPWISE)
    assert streamer.ends == 1


def test_a_callback_can_end_a_streamed_request(llada: Model) -> None:
    streamer = TensorRecorder()
    out = paradec.generate(llada, [1, 2], streamer=streamer, callback=lambda state, commit: True, **STEPWISE)
    assert out.row_nfe == [1] and streamer.ends == 1
    assert (torch.cat(streamer.puts, 1) != llada.facts.mask_token_id).all()


def test_streamed_tensors_do_not_change_later(llada: Model) -> None:
    streamer = DraftRecorder()
    drafts = []
    streamer.put_draft = lambda value: drafts.append((value, value.tolist()))
    paradec.generate(llada, [1, 2], streamer=streamer, **STEPWISE)
    assert all(value.tolist() == snapshot for value, snapshot in drafts) and drafts


def length_by_transformers(ids: list[int], stops: list[str]) -> int:
    """Return the number of tokens after which transformers' generate would stop."""
    criterion = StopStringCriteria(TOKENIZER, stops)
    for count in range(1, len(ids) + 1):
        if criterion(torch.tensor([ids[:count]]), None)[0]:
            return count
    return len(ids)


def tokenizer_of(model: Any, decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def numbered(*words: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(words)}


BYTES = [f"<0x{i:02X}>" for i in range(256)]
LLAMA = models.BPE(numbered("<unk>", "▁", "▁a", "▁the", "a", "é", "▁é", ".", *BYTES), [], byte_fallback=True)
LLAMA_PARTS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WORDPIECE = models.WordPiece(numbered("[UNK]", "a", "##a", "##b", "do", "not", ".", "'", "s", "é"), unk_token="[UNK]")
METASPACE = models.Unigram([(word, -1.0) for word in ("<unk>", "▁", "▁▁", "▁a", "a", "▁b", ".", "é")], 0)
TOKENIZERS = {
    "bytes": byte_level_tokenizer(text=f"{TEXT} né 🎉 thé 🎉🎉"),
    "llama": tokenizer_of(LLAMA, decoders.Sequence(LLAMA_PARTS), unk_token="<unk>"),
    "wordpiece": tokenizer_of(WORDPIECE, decoders.WordPiece(), unk_token="[UNK]", clean_up_tokenization_spaces=True),
    "metaspace": tokenizer_of(METASPACE, decoders.Metaspace(), unk_token="<unk>"),
    "letters": tiny_with_texts().tokenizer,
    "packaged": paradec.load().tokenizer,
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_end_growing_answers_like_whole_ones(name: str, data: st.DataObject) -> None:
    tokenizer, first = TOKENIZERS[name], 3
    emoji = tokenizer("né 🎉 a the 🎉", add_special_tokens=False)["input_ids"]
    pieces = [emoji, emoji[1:4], emoji[-4:] * 3, [len(tokenizer)] * 9]
    piece = st.one_of(st.integers(0, len(tokenizer) - 1).map(lambda token: [token]), st.sampled_from(pieces))
    news = st.lists(piece, max_size=7).map(lambda parts: sum(parts, []))
    answer, answers = list[int](), list[list[int]]()
    edit = st.tuples(st.sampled_from([0, 0, 0, 1, 3, 9]), news)
    for num_removed, new in data.draw(st.lists(edit, min_size=1, max_size=12)):
        answer = answer[: max(0, len(answer) - num_removed)] + new
        answers.append(answer)

    def read(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    text = read(max(answers, key=len))
    cut = st.integers(0, max(len(text) - 1, 0)).flatmap(lambda a: st.integers(a + 1, a + 4).map(lambda b: text[a:b]))
    stops = [stop for stop in data.draw(st.lists(cut, min_size=1, max_size=2)) if stop] or ["no such text"]
    rule, row, before = StopStrings(stops, tokenizer, np.array([first])), np.array([0]), list[int]()
    for answer in answers:
        num_equal = next((i for i, (a, b) in enumerate(zip(before, answer)) if a != b), min(len(before), len(answer)))
        begin = data.draw(st.integers(0, num_equal))
        tokens = np.array([answer[begin:]], np.int64)
        (end,) = rule.find_ends(row, np.array([first + begin]), tokens, np.array([first + len(answer)]))
        counts = range(num_equal + 1, len(answer) + 1)
        holds = [count for count in counts if any(stop in read(answer[:count]) for stop in stops)]
        assert end == (first + holds[0] if holds and holds[-1] == len(answer) else NEVER)
        if end < NEVER:
            break
        before = answer


TOKENS = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20)


@settings(max_examples=35, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ids=st.one_of(st.sampled_from([encode(TEXT), encode(TEXT[30:])]), TOKENS), data=st.data())
def test_ends_where_transformers_ends(ids: list[int], data: st.DataObject) -> None:
    text = TOKENIZER.decode(ids)
    cuts = st.integers(0, len(text) - 1).flatmap(
        lambda a: st.integers(a + 1, min(len(text), a + 6)).map(lambda b: (a, b))
    )
    stops = [text[a:b] for a, b in data.draw(st.lists(cuts, min_size=1, max_size=3))]
    stops = [stop for stop in stops if "\N{REPLACEMENT CHARACTER}" not in stop] or ["no such text"]
    expected = length_by_transformers(ids, stops)
    block = data.draw(st.sampled_from([None, 4]))
    request = {"sampler": "low_confidence", "block_length": block, "stop_strings": stops}
    out = paradec.generate(reciting_model(ids), [10, 10], max_new_tokens=len(ids), **request)
    assert out.tokens == [expected]
    assert out.new_tokens[0, :expected].tolist() == ids[:expected]
    assert (out.new_tokens[0, expected:] == TOKENIZER.eos_token_id).all()
    assert out.text == TOKENIZER.decode(ids[:expected], skip_special_tokens=True)
    assert out.finished == [any(stop in TOKENIZER.decode(ids[:expected]) for stop in stops)]


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_every_sampler_ends_at_stop_strings(name: str) -> None:
    first, second = encode(TEXT), encode(TEXT[3:])
    model, stop = reciting_model(first, second), ". th"
    if not fits(name, model):
        pytest.skip("refused by name")
    arguments = {"sampler": name, "max_new_tokens": 20, "stop_strings": stop, "seed": 1}
    out = paradec.generate(model, [[10, 10], [11, 11]], **arguments)
    assert TOKENIZER.mask_token_id not in out.sequences
    for row, ids in enumerate([first[:20], second[:20]]):
        count = length_by_transformers(ids, [stop])
        assert out.new_tokens[row, :count].tolist() == ids[:count]
        assert out.tokens[row] == count
        assert out.finished[row] == (count < 20)
        alone = paradec.generate(model, [[10 + row] * 2], **arguments)
        assert alone.new_tokens[0].tolist() == out.new_tokens[row].tolist()
        assert (alone.tokens[0], alone.nfe) == (out.tokens[row], out.row_nfe[row])
    # stop strings never need more steps
    full = paradec.generate(model, [[10, 10], [11, 11]], **arguments | {"stop_strings": None})
    assert out.row_nfe[0] <= full.row_nfe[0]


def test_the_earliest_of_all_rules_ends_a_row() -> None:
    ids = encode("one two") + [TOKENIZER.eos_token_id] + encode(". three")
    model = reciting_model(ids)
    arguments = {"max_new_tokens": len(ids), "sampler": "threshold"}
    count = len(encode("one two"))
    assert paradec.generate(model, [10, 10], stop_strings="three", **arguments).tokens == [count + 1]
    assert paradec.generate(model, [10, 10], stop_strings=["three", "ne"], **arguments).text == "one"
    assert paradec.generate(model, [10, 10], stop_strings=["ne", "three"], **arguments).text == "one"


def test_a_special_token_is_a_stop_string() -> None:
    ids = encode("one two") + [TOKENIZER.convert_tokens_to_ids("<|turn|>")] + encode(" three")
    out = paradec.generate(reciting_model(ids), [10, 10], max_new_tokens=len(ids), stop_strings="<|turn|>")
    assert out.tokens == [len(encode("one two")) + 1]
    assert out.text == "one two" and out.finished == [True]


def test_the_prompt_is_no_part_of_a_match() -> None:
    class IgnoringIds(RecitingModule):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(torch.full_like(ids, 10))

    ids = encode("\n one two")
    model = reciting_model(ids)
    model.module.__class__ = IgnoringIds
    newline = encode("\n")[0]
    out = paradec.generate(model, [newline, newline], max_new_tokens=len(ids), stop_strings="\n\n")
    assert out.text == "\n one two"
