"""`compile=True` on a CPU. Where nothing else is said functions are traced as always and not translated to C++, which
takes a compiler half a minute; what the translated code computes is tested once, and at length under `full`."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import paradec
from paradec import compiling, protocol
from paradec.generate import compiled_loop
from paradec.kernels.token_stats import compiled as sums_module
from paradec.kernels.token_stats import reference_stats, token_stats
from paradec.models import layout
from paradec.models.calls import take_columns
from paradec.models.compiled import compiled_calls
from paradec.protocol import decode
from paradec.samplers.masked.device_step import clear_graphs

ROWS = [[5, 6, 7], [8, 9, 10, 11, 12]]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4}


def make(kind: str = "llama", topology: str = "bidirectional", dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config, cls = KINDS[kind]
    module = cls(config(**SIZES | sizes)).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    said: dict[str, Any] = {"block_length": 4} if topology == "block_causal" else {}
    if topology != "causal":
        said["mask_token_id"] = 60
    return paradec.wrap(module, topology=topology, prediction="same" if said else None, eos_token_id=2, **said)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced functions run operation by operation."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where translated code goes."""
    path = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiling.FOLDER, str(path))
        yield path


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def both(model: Any, rows: Any = ROWS, **arguments: Any) -> tuple[Any, Any]:
    """A request uncompiled and compiled, which has to take the same steps without a warning."""
    plain = paradec.generate(model, input_ids=rows, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = paradec.generate(model, input_ids=rows, compile=True, **arguments)
    assert torch.equal(plain.sequences, found.sequences) and plain.row_nfe == found.row_nfe
    return plain, found


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "cache"), [("llama", "dual"), ("qwen2", "none"), ("qwen3", "prefix")])
def test_tokens_are_those_of_the_plain_loop(kind: str, cache: str) -> None:
    model = make(kind)
    _, found = both(model, cache=cache, **GREEDY)
    assert found.compile_seconds > 0 and model.compiled.layers is not None
    _, again = both(model, [[5, 6, 7, 8]], cache=cache, temperature=0.7, seed=3, **GREEDY)
    assert again.compile_seconds == 0  # one trace for every number of rows, every length, and every layer
    assert len(model.compiled.layers._halves) == 1


@pytest.mark.usefixtures("traced")
def test_logits_are_the_same_numbers() -> None:
    """The compiled layers run at all, and with the masks, the store and the wanted columns of the call."""
    model = make()
    seen: list[tuple[str, torch.Tensor]] = []

    def step(state: Any, commit: Any) -> None:
        seen.append((str(commit.kind), commit.scores))

    for on in (False, True):
        paradec.generate(
            model, input_ids=ROWS, cache="dual", callback=step, compile=on, steps=6, sampler="margin", **GREEDY
        )
    half = len(seen) // 2
    for (kind, plain), (same, found) in zip(seen[:half], seen[half:], strict=True):
        assert kind == same
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("traced")
def test_other_topologies_and_samplers() -> None:
    both(make("qwen2", "block_causal"), max_new_tokens=8)
    both(make("qwen3", "causal"), max_new_tokens=8, sampler="sjd", seed=1)
    both(make(), sampler="credit", guidance_scale=1.5, temperature=0.5, seed=1, **GREEDY)
    windowed = make("qwen2", "causal", use_sliding_window=True, sliding_window=40, max_window_layers=0)
    both(windowed, max_new_tokens=4, sampler="sjd", seed=1)


@pytest.mark.usefixtures("traced")
def test_one_position_and_one_row() -> None:
    model = make()
    both(model, [[5]], max_new_tokens=1)
    both(model, [[60]], max_new_tokens=0)
    both(model, [[5, 6]], max_new_tokens=1, cache="dual", block_length=1)


@pytest.mark.usefixtures("traced")
def test_changed_weights_count_at_once() -> None:
    model = make()
    both(model, **GREEDY)
    layers = model.compiled.layers
    before = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    with torch.no_grad():
        model.module.model.layers[0].mlp.up_proj.weight.mul_(-3)  # as merging an adapter does
        model.module.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.randn(32, 32).double())
    after, _ = both(model, **GREEDY)
    assert not torch.equal(before.sequences, after.sequences)
    assert model.compiled.layers is layers
    model.module.model.layers[2].mlp.down_proj = nn.Linear(48, 32, bias=False).double()
    last, _ = both(model, **GREEDY)
    assert not torch.equal(after.sequences, last.sequences)
    assert model.compiled.layers is not layers  # another part: another tree


@pytest.mark.usefixtures("traced")
def test_other_dtypes() -> None:
    model = make()
    both(model, **GREEDY)
    model.module.to(torch.bfloat16)
    both(model, **GREEDY)
    model.module.to(torch.float32)
    both(model, **GREEDY)
    assert len(model.compiled.layers._halves) == 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = paradec.generate(model, input_ids=ROWS, **GREEDY)
        with pytest.warns(UserWarning, match="has no effect: .* autocast is on"):
            found = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    assert torch.equal(plain.sequences, found.sequences)


@pytest.mark.usefixtures("traced")
def test_weights_that_lie_otherwise() -> None:
    """Code is compiled for the strides of its weights."""
    model = make()
    both(model, **GREEDY)
    weight = model.module.model.layers[1].mlp.up_proj.weight
    weight.data = layout.columns_first(weight.data)
    both(model, **GREEDY)
    assert len(model.compiled.layers._halves) == 2


@pytest.mark.usefixtures("traced")
def test_layers_that_differ_have_code_of_their_own() -> None:
    model = make()
    model.module.model.layers[1].input_layernorm.variance_epsilon = 10.0
    model.module.model.layers[2].mlp.act_fn = nn.GELU()
    both(model, **GREEDY)
    assert len(model.compiled.layers._halves) == 3


@pytest.mark.usefixtures("traced")
def test_the_last_layer_answers_for_wanted_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = make(), []
    call = compiling.Compiled.__call__

    def noted(compiled: Any, *inputs: torch.Tensor) -> Any:
        lengths.append(inputs[0].shape[1])
        return call(compiled, *inputs)

    monkeypatch.setattr(compiling.Compiled, "__call__", noted)
    tokens, positions = torch.arange(10).view(2, 5), torch.arange(5).expand(2, 5)
    query = protocol.Query(tokens=tokens, positions=positions, rows=torch.arange(2))
    wanted = torch.tensor([[4, 1], [0, 0]])
    expected = model(query)
    with compiled_calls(model, layers=True, statistics=False):
        found = model(dataclasses.replace(query, wanted=wanted))
        assert lengths == [10, 10, 10, 10, 10, 4]
        kept = dataclasses.replace(query, wanted=wanted, keep_hidden=True)
        again = model(kept)
    assert lengths[6:] == [10] * 6 and kept.hidden.shape[:2] == (2, 5)
    for logits in (found, again):
        torch.testing.assert_close(logits, take_columns(expected, wanted), rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("traced")
def test_the_module_is_left_alone() -> None:
    """Its parts, their modes, other wraps of it, and copies."""
    model = make()
    module = model.module.train()
    before = {name: dict(part.__dict__) for name, part in module.named_modules()}
    ids = torch.tensor([[5, 6, 7]])
    expected = module(input_ids=ids).logits
    both(model, **GREEDY)
    for name, part in module.named_modules():
        assert part.__dict__.keys() == before[name].keys()
        assert all(part.__dict__[key] is value for key, value in before[name].items())
    assert torch.equal(module(input_ids=ids).logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.compiled is None and model.compiled is not None
    both(other, **GREEDY)
    both(model, **GREEDY)
    assert clear_graphs(model) == 1 and model.compiled is None
    model.unwrap()


@pytest.mark.usefixtures("traced")
def test_threads_share_a_model() -> None:
    model, results = make(), {}
    expected = {n: paradec.generate(model, input_ids=[[5, 6, 7, n]], **GREEDY).sequences for n in range(4)}

    def work(n: int) -> None:
        results[n] = paradec.generate(model, input_ids=[[5, 6, 7, n]], compile=bool(n % 2), **GREEDY).sequences

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[n], expected[n]) for n in expected)


# ---- what cannot be compiled ----------------------------------------------------------------------------------------


def only_warning(caught: Any) -> str:
    assert len(caught) == 1
    return str(caught[0].message)


def test_without_a_compiler() -> None:
    from torch._inductor import config, cpp_builder

    model = make()
    plain = paradec.generate(model, input_ids=ROWS, **GREEDY)
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with config.patch({"cpp.cxx": ("no-such-compiler",)}):
            with pytest.warns(
                UserWarning, match=r"no effect: no C\+\+ compiler was found; install g\+\+, or"
            ) as caught:
                found = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
    assert only_warning(caught) and found.compile_seconds is None
    assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("what", ["hook", "forward", "compiled", "weight", "kind"])
def test_layers_that_are_left_as_they_are(what: str) -> None:
    model = make()
    part = model.module.model.layers[1].mlp
    if what == "hook":
        part.register_forward_hook(lambda module, args, output: 2 * output)
        reason = "a hook is on a LlamaMLP"
    elif what == "forward":
        part.forward = part.forward
        reason = "a LlamaMLP has a forward of its owner's"
    elif what == "compiled":
        part.compile(backend="eager")
        reason = "a LlamaMLP has a forward of its owner's"
    elif what == "weight":

        class Packed(nn.Parameter):
            pass

        part.up_proj.weight = Packed(part.up_proj.weight.data)
        reason = "a weight of a Linear is a Packed"
    else:

        class Mine(type(model.module.model.layers[1])):  # type: ignore[misc]
            pass

        model.module.model.layers[1].__class__ = Mine
        reason = "Mine is none of LlamaDecoderLayer, MistralDecoderLayer, "
    with pytest.warns(
        UserWarning, match=f"has no effect: the layers of LlamaForCausalLM cannot .+: {reason}"
    ) as caught:
        found = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    assert only_warning(caught)
    assert torch.equal(found.sequences, paradec.generate(model, input_ids=ROWS, **GREEDY).sequences)


@pytest.mark.usefixtures("traced")
def test_a_hook_that_comes_later_is_seen() -> None:
    model = make()
    plain, _ = both(model, **GREEDY)
    model.module.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)
    with pytest.warns(UserWarning, match="has no effect: .* a hook is on a LlamaMLP"):
        found = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    expected = paradec.generate(model, input_ids=ROWS, **GREEDY)
    assert torch.equal(found.sequences, expected.sequences) and not torch.equal(found.sequences, plain.sequences)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_what_turns_out_not_to_compile_runs_as_before(cache: str) -> None:
    """A graph break inside a layer, which tracing finds in the middle of a forward."""
    model = make()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) if float(x.sum()) < 1e9 else x

    for layer in model.module.model.layers:
        layer.mlp.act_fn = Waits()
    expected = paradec.generate(model, input_ids=ROWS, cache=cache, **GREEDY)
    with pytest.warns(
        UserWarning, match="leaves the layers of LlamaForCausalLM uncompiled: .*[Dd]ata.dependent"
    ) as caught:
        found = paradec.generate(model, input_ids=ROWS, cache=cache, compile=True, **GREEDY)
    assert only_warning(caught)
    assert torch.equal(found.sequences, expected.sequences) and found.row_nfe == expected.row_nfe
    with pytest.warns(UserWarning, match="has no effect: the layers of .* .*[Dd]ata.dependent"):  # not tried again
        assert compiled_loop(paradec.samplers.create("threshold"), model) is decode


def test_other_devices_are_refused() -> None:
    model = make()
    model.module.to("meta")
    with pytest.raises(ValueError, match="compile=True is for models on CUDA devices and CPUs, not on meta"):
        paradec.generate(model, input_ids=ROWS, compile=True)


def test_modules_without_layers() -> None:
    class Ids(nn.Module):
        config = type("Config", (), {"vocab_size": 8})

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.table(input_ids)

    model = paradec.wrap(Ids(), mask_token_id=7, prediction="same", topology="bidirectional")
    with pytest.warns(UserWarning, match="has no effect: the layers of Ids .* Opaque runs no decoder layers"):
        paradec.generate(model, input_ids=[[1, 2]], max_new_tokens=2, compile=True)


# ---- where results are kept -----------------------------------------------------------------------------------------


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for name in (compiling.TORCHS_FOLDER, compiling.FOLDER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.folder() == tmp_path / "paradec" / "compiled"
    monkeypatch.setenv(compiling.TORCHS_FOLDER, default_cache_dir())  # torch itself writes it there
    assert compiling.folder() == tmp_path / "paradec" / "compiled"
    monkeypatch.setenv(compiling.FOLDER, str(tmp_path / "own"))
    assert compiling.folder() == tmp_path / "own"
    with compiling.kept():
        with compiling.kept():
            assert os.environ[compiling.TORCHS_FOLDER] == str(tmp_path / "own")
        assert os.environ[compiling.TORCHS_FOLDER] == str(tmp_path / "own")
    assert os.environ[compiling.TORCHS_FOLDER] == default_cache_dir()
    monkeypatch.setenv(compiling.TORCHS_FOLDER, str(tmp_path / "theirs"))
    assert compiling.folder() == tmp_path / "theirs"


def test_code_is_named_after_all_that_it_is_made_for() -> None:
    def name(factor: float, weight: torch.Tensor) -> str:
        inputs = [torch.empty(1, 4, 8, dtype=weight.dtype), weight]
        return compiling._digest(compiling._traced(lambda x, w: factor * (x @ w), inputs, [1, None]))

    weight = torch.ones(8, 8)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        more = name(2.0, weight)
    finally:
        torch.set_num_threads(threads)
    own = name(2.0, weight)
    assert own == name(2.0, 3 * weight)
    others = [more, name(3.0, weight), name(2.0, weight.T), name(2.0, weight.double()), name(2.0, weight[:, :4])]
    assert len({own, *others}) == 6


# ---- statistics -----------------------------------------------------------------------------------------------------


def hard_logits(words: int) -> torch.Tensor:
    """Rows of every kind: spread, sure, tied, with excluded words, NaN, and none left."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(11, words)
    logits[1, 17] = 60
    logits[2, [3, words - 1]] = 30
    logits[3, 5:] = -torch.inf
    logits[4] = 1e4 * logits[4]
    logits[5, 9] = torch.nan
    logits[6, 9] = torch.inf
    logits[7] = -torch.inf
    logits[8] = 2.5
    logits[9] = -torch.inf
    logits[9, [4, 7]] = torch.tensor([70.0, 0.0])
    logits[10, 3] = 80
    return logits


def check_sums(sums: sums_module.CompiledSums, logits: torch.Tensor) -> None:
    ids = torch.tensor([[0, 17]]).expand(len(logits), 2)
    expected = reference_stats(logits, ids=ids)
    with sums_module.serving(sums):
        found = token_stats(logits, fields=tuple(sums_module.SERVED), ids=ids)
        one = token_stats(logits[:1], fields=("entropy",))
    assert sums.failed is None and len(sums._functions) >= 1
    good = ~expected.nonfinite
    assert torch.equal(found.nonfinite, expected.nonfinite)
    assert torch.equal(found.token[good], expected.token[good])
    for name in ("prob", "second_prob", "margin", "entropy", "logsumexp", "gap", "ids_prob"):
        torch.testing.assert_close(getattr(found, name)[good], getattr(expected, name)[good], rtol=3e-6, atol=1e-12)
    sure = [1, 9, 10]  # what is left of 1 has its digits
    torch.testing.assert_close(found.entropy[sure], expected.entropy[sure], rtol=1e-5, atol=0)
    assert float(found.prob[5:8].nan_to_num(2).min()) == 2
    torch.testing.assert_close(one.entropy, expected.entropy[:1], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("words", [9000, 8192 + 512])
def test_sums(words: int) -> None:
    sums = sums_module.CompiledSums()
    check_sums(sums, hard_logits(words))
    count = len(sums._functions)
    cooler = token_stats(hard_logits(words), fields=("entropy",), temperature=0.5)
    with sums_module.serving(sums):
        token_stats(hard_logits(words).double())  # exact as it is
        token_stats(hard_logits(words)[:, :512])
        found = token_stats(hard_logits(words), fields=("entropy",), temperature=0.5)
        token_stats(hard_logits(words), path="chunked")
    torch.testing.assert_close(found.entropy, cooler.entropy, rtol=0, atol=0, equal_nan=True)  # by the same code
    token_stats(hard_logits(words))
    assert len(sums._functions) == count == 1


@pytest.mark.usefixtures("traced")
def test_statistics_of_a_large_vocabulary() -> None:
    model = make(dtype=torch.float32, vocab_size=9000)
    for sampler in ("threshold", "margin", "entropy"):
        both(model, sampler=sampler, steps=6, **GREEDY) if sampler != "threshold" else both(model, **GREEDY)
    assert model.compiled.sums.seconds > 0 and model.compiled.sums.failed is None


# ---- translated code ------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.full
def test_translated_code(folder: Path) -> None:
    """The layers and the store through the C++ compiler, in float64, and what is kept of it."""
    model = make()
    _, first = both(model, cache="dual", **GREEDY)
    _, second = both(model, [[5, 6, 7, 8]], **GREEDY)
    assert first.compile_seconds > 0 == second.compile_seconds
    for rows in ([[5]], [[60]], [[5, 6]]):  # one position at a time, by the same code
        _, one = both(model, rows, max_new_tokens=2, cache="dual", block_length=1)
        assert one.compile_seconds == 0
    assert any(folder.glob("*.pt2"))


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("kind", list(KINDS))
def test_translated_layers(folder: Path, kind: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = make(kind, dtype=dtype)
        for cache in ("none", "prefix", "dual"):
            plain = paradec.generate(model, input_ids=ROWS, cache=cache, **GREEDY)
            found = paradec.generate(model, input_ids=ROWS, cache=cache, compile=True, **GREEDY)
            if dtype == torch.float64:
                assert torch.equal(plain.sequences, found.sequences)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_translated_sums(folder: Path, dtype: torch.dtype) -> None:
    with compiling.kept():
        check_sums(sums_module.CompiledSums(), hard_logits(9000).to(dtype))


SCRIPT = """
import sys, paradec
model = paradec.load(dtype="float64")
out = paradec.generate(model, "Sort: pear fig apple", max_new_tokens=8, compile=True)
print(out.text)
"""


@needs_compiler
@pytest.mark.full
def test_another_process_finds_the_code(tmp_path: Path) -> None:
    said, kept = [], []
    for _ in range(2):
        environment = os.environ | {compiling.FOLDER: str(tmp_path)}
        environment.pop(compiling.TORCHS_FOLDER, None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout)
        kept.append({path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt2")})
    assert said[0] == said[1] == "apple fig pear\n"
    assert len(kept[0]) == 2 and kept[0] == kept[1]


INTERRUPTED = """
import os, pathlib, signal, threading, torch, paradec
signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a job in the background ignore it
model = paradec.load(dtype="float64")
call = dict(max_new_tokens=8, compile=True)
import time
folder = pathlib.Path(os.environ["PARADEC_COMPILE_CACHE"])
def strike():
    while not list(folder.glob("tmp*")):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=strike, daemon=True).start()
try:
    paradec.generate(model, "Sort: pear fig apple", **call)
except paradec.Interrupted as interrupt:
    print("interrupted", interrupt.output.nfe)
out = paradec.generate(model, "Sort: pear fig apple", **call)
print(out.text, out.compile_seconds > 0)
print(out.text == paradec.generate(model, "Sort: pear fig apple", max_new_tokens=8).text)
"""


@needs_compiler
@pytest.mark.full
def test_an_interrupt_while_compiling(tmp_path: Path) -> None:
    environment = os.environ | {compiling.FOLDER: str(tmp_path)}
    environment.pop(compiling.TORCHS_FOLDER, None)
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["interrupted 0", "apple fig pear True", "True"], done.stdout + done.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiling.FOLDER, str(tmp_path / "file"))
    monkeypatch.delenv(compiling.TORCHS_FOLDER, raising=False)
    model = make()
    with pytest.warns(
        UserWarning, match="has no effect: nothing can be kept in '.*file' .*; name another folder"
    ) as caught:
        found = paradec.generate(model, input_ids=ROWS, compile=True, **GREEDY)
    assert only_warning(caught)
    assert torch.equal(found.sequences, paradec.generate(model, input_ids=ROWS, **GREEDY).sequences)
