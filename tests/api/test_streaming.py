"""Streamers get every final token once, in reading order; transformers' own work as they are."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest
import torch
from fitting import MASKED, fits
from rich.console import Console
from tiny_models import tiny
from torch import Tensor
from transformers import TextDiffusionStreamer, TextIteratorStreamer, TextStreamer

import paradec
from paradec.cli.watch import END, UNDECIDED, LiveView
from paradec.models.adapter import Model

PROMPT = "Reverse: pear fig apple kiwi"
STEPWISE = {"sampler": "low_confidence", "max_new_tokens": 8}


class Recorder:
    """A streamer of one's own, that takes batches."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class Drafts(Recorder):
    """The same, that shows what is not final yet."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[Tensor] = []

    def put_draft(self, value: Tensor) -> None:
        # final tokens and the draft together are the whole canvas
        self.drafts.append(torch.cat([*self.puts, value], dim=1))


@pytest.fixture(scope="module")
def packaged() -> Model:
    return paradec.load()


def test_a_row_that_ended_early_holds_nothing_back() -> None:
    model = tiny(1)
    rows, request = [[7], [0]], {"max_new_tokens": 16, "block_length": 4}
    ends = [paradec.generate(model, [row], sampler="editing", **request).tokens[0] for row in rows]
    assert ends[0] <= 4 and ends[1] == 16  # else the test shows nothing
    streamer, sent = Recorder(), []

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
def test_everything_comes_once_and_final(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(kind)
    if not fits(name, model):
        pytest.skip("refused by name")
    mask = model.facts.mask_token_id
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    arguments = {"sampler": name, "max_new_tokens": 12, "block_length": 4, "seed": 3}
    expected = paradec.generate(model, rows, **arguments)
    snapshots = []

    def look(state: Any, commit: Any) -> None:
        snapshots.append((state.canvas.clone(), state.length.copy(), bool(state.done)))

    streamer = Drafts()
    out = paradec.generate(model, rows, streamer=streamer, callback=look, **arguments)
    assert torch.equal(out.sequences, expected.sequences) and out.row_nfe == expected.row_nfe
    assert streamer.ends == 1
    got = torch.cat(streamer.puts, dim=1)
    assert streamer.puts[0].tolist() == out.sequences[:, :5].tolist()
    assert all(put.shape[0] == 3 and put.shape[1] > 0 for put in streamer.puts)
    assert (got != mask).all()
    assert torch.equal(got, out.sequences[:, : got.shape[1]])
    # what was not sent is padding of all rows
    assert (out.sequences[:, got.shape[1] :] == model.facts.fill_token_id).all()
    assert got.shape[1] == 5 + max(out.tokens)
    unfinished = [(canvas, length) for canvas, length, done in snapshots if not done]
    assert len(unfinished) > 0
    for draft, (canvas, length) in zip(streamer.drafts, unfinished, strict=True):
        for row, offset in enumerate(canvas.shape[1] - length):
            assert draft[row, offset:].tolist() == canvas[row, : draft.shape[1] - offset].tolist()


def test_tokens_are_sent_as_soon_as_they_are_final(llada: Model) -> None:
    sent = []
    streamer = Recorder()

    def look(state: Any, commit: Any) -> None:
        undecided = state.undecided[0].tolist()
        first = undecided.index(True) if True in undecided else int(state.end[0])
        sent.append((sum(put.shape[1] for put in streamer.puts), first))

    paradec.generate(llada, [1, 2, 3], sampler="random", max_new_tokens=12, seed=0, streamer=streamer, callback=look)
    assert all(count == first for count, first in sent)
    assert len({count for count, _ in sent}) > 3


def test_text_streamer(packaged: Model, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(packaged.tokenizer)
    out = paradec.generate(packaged, PROMPT, streamer=streamer, **STEPWISE)
    tokens = out.sequences[0, : out.sequences.shape[1] - 8 + out.tokens[0]]
    assert capsys.readouterr().out == packaged.tokenizer.decode(tokens) + "\n"
    paradec.generate(
        packaged,
        PROMPT,
        streamer=TextStreamer(packaged.tokenizer, skip_prompt=True, skip_special_tokens=True),
        **STEPWISE,
    )
    assert capsys.readouterr().out.strip() == out.text == "kiwi apple fig pear"


def test_text_iterator_streamer(packaged: Model) -> None:
    streamer = TextIteratorStreamer(packaged.tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    arguments = {"streamer": streamer, **STEPWISE}
    thread = threading.Thread(target=paradec.generate, args=(packaged, PROMPT), kwargs=arguments)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == "kiwi apple fig pear"
    assert len([piece for piece in pieces if piece]) > 1


def test_text_diffusion_streamer(packaged: Model, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextDiffusionStreamer(packaged.tokenizer, skip_prompt=True)
    out = paradec.generate(packaged, PROMPT, streamer=streamer, **STEPWISE)
    screen = capsys.readouterr().out
    drafts = re.findall("\0337\033\\[33m(.*?)\033\\[0m", screen)
    assert len(drafts) == out.nfe - 1
    assert packaged.tokenizer.mask_token in drafts[0]
    assert drafts[0].count(packaged.tokenizer.mask_token) > drafts[-1].count(packaged.tokenizer.mask_token)
    # a terminal shows what is left when every draft is wiped
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
def test_an_infill_streams_given_text_in_its_place(llada: Model, rows: list[list[int]]) -> None:
    rows = [[llada.facts.mask_token_id if token < 0 else token for token in row] for row in rows]
    streamer = Recorder()
    out = paradec.infill(llada, rows, sampler="low_confidence", streamer=streamer)
    assert torch.equal(streamer.puts[0], out.sequences[:, :2]) and streamer.puts[0][0].tolist() == [1, 2]
    assert torch.equal(torch.cat(streamer.puts, 1), out.sequences)


def raises(error: BaseException) -> Any:
    def callback(state: Any, commit: Any) -> None:
        if state.commits == 2:
            raise error

    return callback


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_the_streamer_is_ended_whatever_happens(llada: Model, error: BaseException) -> None:
    streamer = Recorder()
    with pytest.raises(type(error)):
        paradec.generate(llada, [1, 2], streamer=streamer, callback=raises(error), **STEPWISE)
    assert streamer.ends == 1

    class Full(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 2:
                raise BrokenPipeError

    streamer = Full()
    with pytest.raises(BrokenPipeError):
        paradec.generate(llada, [1, 2], streamer=streamer, **STEPWISE)
    assert streamer.ends == 1


def test_an_early_end_by_callback(llada: Model) -> None:
    streamer = Recorder()
    out = paradec.generate(llada, [1, 2], streamer=streamer, callback=lambda state, commit: True, **STEPWISE)
    assert out.row_nfe == [1] and streamer.ends == 1
    assert (torch.cat(streamer.puts, 1) != llada.facts.mask_token_id).all()


def test_what_is_sent_does_not_change_later(llada: Model) -> None:
    streamer = Drafts()
    kept = []
    streamer.put_draft = lambda value: kept.append((value, value.tolist()))
    paradec.generate(llada, [1, 2], streamer=streamer, **STEPWISE)
    assert all(value.tolist() == at_the_time for value, at_the_time in kept) and kept


def test_live_view_shows_tokens_being_filled_in(packaged: Model) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, color_system=None)
    with LiveView(packaged.tokenizer, console, interval=0) as view:
        out = paradec.generate(packaged, [PROMPT, "Sort: pear fig apple"], callback=view.update, **STEPWISE)
    frames = re.findall(r"\[1\] (.*)", screen.getvalue())
    counts = [frame.count(UNDECIDED) for frame in frames]
    assert counts[0] == 7 and counts == sorted(counts, reverse=True) and counts[-1] == 0
    assert frames[-1].strip() == f"{out.text[0]} {END}"
    assert re.findall(r"\[2\] (.*)", screen.getvalue())[-1].strip() == f"{out.text[1]} {END}"
    assert PROMPT.split()[1] not in frames[0].split()[0]
