"""Checkpoint families: tiny checkpoints in the published formats against plain modules of transformers."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import CONFIGS, FAMILY_BLOCK, FAMILY_SIZES, MASK_NAMES, SDAR, write_family, write_tokenizer
from decoding import fits, refuses, supported_fields, topology_of
from places import load_script
from safetensors.torch import load_file
from small_models import tiny
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.query import Query
from paradec.models.adapter import Model


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


antibody_model = load_script("benchmarks/antibody_model.py")
NEW = 11
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
EXACT = {"none", "prefix", "dual", "block"} & set(caches.names())
"""Caches that are exact for block-causal models decoded in blocks of the model's length."""
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20], [21]]
"""Prompts that end inside a block, at the end of a block, inside the first block, and at its first token."""
MODULES = {"sdar": ("Qwen3Config", "Qwen3ForCausalLM"), "fast_dllm_v2": ("Qwen2Config", "Qwen2ForCausalLM")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_family(tmp_path_factory.mktemp("checkpoints") / family, family) for family in CONFIGS}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Model]:
    return {family: paradec.load(folder, dtype="float64") for family, folder in folders.items()}


@pytest.fixture
def model(family: str, loaded: dict[str, Model]) -> Model:
    return loaded[family]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, Any]:
    """Return for each family transformers' module with the same weights."""
    modules = {}
    for family, folder in folders.items():
        config_class, module_class = (getattr(transformers, name) for name in MODULES[family])
        fields = {name: CONFIGS[family][name] for name in FAMILY_SIZES if name not in ("rope_theta", "rope_scaling")}
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": FAMILY_SIZES["rope_theta"]}
        extra = {"head_dim": SDAR["head_dim"]} if family == "sdar" else {}
        tied = CONFIGS[family]["tie_word_embeddings"]
        config = config_class(**fields, **extra, tie_word_embeddings=tied, attn_implementation="sdpa")
        module = module_class(config).double().eval()
        missing, unexpected = module.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if tied else [])
        modules[family] = module
    return modules


def one_shot_logits(module: Any, ids: list[int], block: int = FAMILY_BLOCK) -> Tensor:
    """Return the logits [L, V] of a row from one forward with an explicit mask: block b sees blocks 0 to b."""
    mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64)
    for query in range(len(ids)):
        end_of_block = (query // block + 1) * block
        mask[query, :end_of_block] = 0
    with torch.inference_mode():
        output = module(input_ids=torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False)
    return output.logits[0]


def align(family: str, logits: Tensor) -> Tensor:
    """Align logits so that row i predicts token i. Fast-dLLM v2's are shifted by one; their first row is repeated."""
    return torch.cat((logits[:1], logits[:-1])) if family == "fast_dllm_v2" else logits


CLOSE = {"rtol": 0, "atol": 1e-10}


def test_facts_come_from_config_and_tokenizer(family: str, model: Model) -> None:
    facts = model.facts
    assert facts.topology == "block_causal"
    assert facts.block_length == FAMILY_BLOCK
    assert facts.prediction == {"sdar": "same", "fast_dllm_v2": "shifted"}[family]
    assert type(model.module).__name__ == MODULES[family][1]
    assert facts.mask_token_id == 3  # from the tokenizer; config.json has none
    assert set(facts.eos_token_ids) == {"sdar": {0, 2}, "fast_dllm_v2": {2}}[family]  # 2 is the end of a turn
    # SDAR's padding id comes from the tokenizer; Fast-dLLM v2's config.json overrides its tokenizer
    assert facts.pad_token_id == {"sdar": 0, "fast_dllm_v2": 2}[family]
    assert facts.max_length == 64
    assert facts.vocab_size == 32
    assert facts.name == family
    assert model.supports_store
    assert model.pads


@pytest.mark.thinned
@pytest.mark.parametrize("states_mask", [True, False])
def test_sources_of_the_mask_id(tmp_path: Path, family: str, states_mask: bool) -> None:
    folder = write_family(tmp_path, family)
    write_tokenizer(folder, MASK_NAMES[family], states_mask)  # as mask_token, or only in the vocabulary
    assert paradec.load(folder).facts.mask_token_id == 3
    assert paradec.load(folder, mask_token_id=9).facts.mask_token_id == 9
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | {"mask_token_id": 8}))
    with pytest.warns(UserWarning, match="mask_token_id=8 is used, from its config.json; .*'tokenizer': 3") as caught:
        assert paradec.load(folder).facts.mask_token_id == 8
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paradec.load(folder, mask_token_id=8).facts.mask_token_id == 8
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert paradec.load(folder).tokenizer is None
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    refuses(lambda: paradec.load(folder), r"has no 'mask_token_id'; give load\(\.\.\.", paradec.CheckpointError)


def test_vocab_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "sdar", eos_token_id=8)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate("abcdefgh")}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"<|endoftext|>": 8, "<|im_start|>": 9, "<|im_end|>": 10, "<|MASK|>": 11}  # after the vocabulary
    (folder / "added_tokens.json").write_text(json.dumps(special))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(index): {"content": word, "special": True} for word, index in special.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = paradec.load(folder)
    assert (model.facts.mask_token_id, model.facts.pad_token_id, model.facts.eos_token_ids) == (11, 8, (8, 10))
    assert model.tokenizer("abc<|MASK|>")["input_ids"] == [0, 1, 2, 11]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SDAR-8B-Chat", 4), ("SDAR-1.7B-Chat-b16", 16), ("SDAR-30B-A3B-Chat", 4), ("TraDo-8B-Instruct", 4),
        ("SDAR-8B-Chat-mine", None), ("my-model", None),
    ],
)  # fmt: skip
def test_the_block_length_follows_a_published_name(tmp_path: Path, name: str, expected: int | None) -> None:
    folder = write_family(tmp_path / name, "sdar", block_size=...)
    if expected is None:
        with pytest.raises(
            paradec.CheckpointError, match=f"neither .* nor the name of .*{name}.* block_length="
        ) as error:
            paradec.load(folder)
        assert "\n" not in str(error.value)
    else:
        assert paradec.load(str(folder) + "/").facts.block_length == expected
    assert paradec.load(folder, block_length=8).facts.block_length == 8


def test_a_stated_block_wins_over_a_name(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "SDAR-8B-Chat", "sdar", block_size=8)
    assert paradec.load(folder).facts.block_length == 8
    assert paradec.load(folder, block_length=2).facts.block_length == 2


def test_a_fast_dllm_without_a_block_size_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "fast_dllm_v2", bd_size=...)
    refuses(lambda: paradec.load(folder), "states its block length; give .*load", paradec.CheckpointError)
    assert paradec.load(folder, block_length=FAMILY_BLOCK).facts.block_length == FAMILY_BLOCK


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("sdar", "block_size", 0), ("fast_dllm_v2", "bd_size", -1), ("sdar", "head_dim", ...), ("sdar", "head_dim", 5),
        ("sdar", "attention_bias", True), ("sdar", "rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("sdar", "use_sliding_window", True), ("sdar", "layer_types", ["full_attention", "sliding_attention"]),
        ("fast_dllm_v2", "layer_types", ["sliding_attention"]), ("fast_dllm_v2", "hidden_size", ...),
        ("fast_dllm_v2", "head_dim", 6), ("fast_dllm_v2", "hidden_act", "gelu"), ("fast_dllm_v2", "mask_token_id", 32),
        ("fast_dllm_v2", "mask_token_id", 2),
    ],
)  # fmt: skip
def test_fields_that_are_not_supported_are_refused_by_name(tmp_path: Path, family: str, field: str, value: Any) -> None:
    folder = write_family(tmp_path, family, **{field: value})
    assert "\n" not in refuses(lambda: paradec.load(folder), field, paradec.CheckpointError)


def test_a_block_length_for_a_bidirectional_checkpoint() -> None:
    refuses(lambda: paradec.load(block_length=4), "block_length=4 is for block-causal", paradec.CheckpointError)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llada2_moe_veomni", "training form.*convert it"),
        ("llava_llada", "pictures as embeddings.*paradec.wrap"),
        ("wedlm", "moves decided tokens to the front.*paradec.wrap"),
        ("omnivoice", "several tokens.*its own code"),
        ("qwen3", "architectures=.'SDARForCausalLM'., which is not a class of transformers; .*paradec.wrap"),
    ],
)
def test_other_families_are_refused_with_the_reason(tmp_path: Path, model_type: str, message: str) -> None:
    folder = write_family(tmp_path, "sdar", model_type=model_type)
    assert "\n" not in refuses(lambda: paradec.load(folder), f"{model_type!r}.*{message}", paradec.CheckpointError)


def call(model: Model, rows: list[list[int]], **query: Any) -> Tensor:
    width = max(map(len, rows))
    ids, valid = torch.full((len(rows), width), 30), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)], valid[index, : len(row)] = torch.tensor(row), True
    fields = {"valid": None if valid.all() else valid, "positions": torch.arange(width).expand_as(ids), **query}
    with torch.inference_mode():
        return model(Query(rows=np.arange(len(rows)), tokens=ids, **fields))


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_logits_equal_an_explicit_mask(
    family: str, folders: dict[str, Path], plain: dict[str, Any], attn_implementation: str
) -> None:
    model = paradec.load(folders[family], dtype="float64", attn_implementation=attn_implementation)
    for rows in ([list(range(4, 18))], [[4, 5, 6], list(range(7, 18)), [9] * 8]):
        actual = call(model, rows)
        for index, row in enumerate(rows):
            expected = one_shot_logits(plain[family], row)
            torch.testing.assert_close(actual[index, : len(row)], expected, rtol=0, atol=1e-10)
    other = one_shot_logits(plain[family], list(range(4, 18)), block=3)
    assert (call(model, [list(range(4, 18))])[0] - other).abs().max() > 1e-3  # the test can fail


def step_with_outputs(model: Model, sampler: Any, state: Any) -> tuple[list[Query], list[Tensor], Any]:
    queries = sampler.query(state)
    extra = () if state.store is None else (state.store,)
    outputs = [model(query, *extra) for query in queries]
    return queries, [output.clone() for output in outputs], sampler.propose(state, outputs, queries)


@pytest.mark.thinned
@pytest.mark.parametrize("cache", sorted(EXACT))
@pytest.mark.parametrize("name", ["low_confidence", "threshold"])
def test_every_step_equals_a_one_shot_forward(
    family: str, model: Model, plain: dict[str, Any], name: str, cache: str
) -> None:
    sampler = samplers.create(name, **({"threshold": 0.3} if name == "threshold" else {}))
    state = sampler.start(model, PROMPTS, max_new_tokens=NEW, cache=cache, seed=1, eos_early_stop=False)
    steps, compared = 0, 0
    with torch.inference_mode():
        while not state.done:
            queries, outputs, proposal = step_with_outputs(model, sampler, state)
            window = state.window
            for query, output in zip(queries, outputs):
                for index, row in enumerate(query.rows):
                    row = int(row)
                    end = int(state.length[row])
                    expected = align(family, one_shot_logits(plain[family], state.canvas[row, :end].tolist()))
                    start, stop = int(state.block_start[row]), int(state.block_end[row])
                    assert stop == end or stop % FAMILY_BLOCK == 0
                    assert start % FAMILY_BLOCK == 0 or start == len(PROMPTS[row])
                    running = int(np.flatnonzero(window.rows == row)[0])
                    assert window.host_positions[running, : stop - start].tolist() == list(range(start, stop))
                    torch.testing.assert_close(output[index, : stop - start], expected[start:stop], **CLOSE)
                    compared += stop - start
            sampler.commit(state, proposal)
            steps += 1
    assert steps > 3 and compared > NEW * len(PROMPTS)
    assert all(length % FAMILY_BLOCK == 0 for length in state.length)
    for row, prompt in enumerate(PROMPTS):
        assert state.canvas[row, : len(prompt)].tolist() == prompt


@pytest.mark.thinned
@pytest.mark.parametrize("cache", sorted(EXACT))
def test_a_longer_answer_begins_as_a_shorter_one(model: Model, cache: str) -> None:
    request = {"sampler": "threshold", "cache": cache, "eos_early_stop": False}
    for prompt in PROMPTS[:2]:
        whole_blocks = -len(prompt) % FAMILY_BLOCK + FAMILY_BLOCK
        long = paradec.generate(model, prompt, max_new_tokens=whole_blocks + 9, **request)
        # the last block is decoded completely and then cut
        for new in (whole_blocks, whole_blocks - 1, whole_blocks + 2):
            short = paradec.generate(model, prompt, max_new_tokens=new, trace=True, **request)
            assert long.new_tokens[0, :new].tolist() == short.new_tokens[0].tolist()
            assert short.sequences.shape == (1, len(prompt) + new) and short.tokens == [new]
            assert (len(prompt) + new + -(len(prompt) + new) % FAMILY_BLOCK) == len(short.trace.canvas[0])


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_every_sampler_decodes_block_by_block(loaded: dict[str, Model], name: str) -> None:
    families = [actual for actual in loaded.values() if fits(name, actual)] or [tiny(2, topology_of(name))]
    model = families[MASKED.index(name) % len(families)]  # the families take turns
    request = {"sampler": name, "max_new_tokens": 7, "seed": 2, "temperature": 0.7, "eos_early_stop": False}
    request = supported_fields(name, request)
    width = max(map(len, PROMPTS))
    ids, mask = torch.full((len(PROMPTS), width), 30), torch.zeros(len(PROMPTS), width, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    batch = {"input_ids": ids, "attention_mask": mask, "trace": True}
    out = paradec.generate(model, **batch, **request)
    assert model.facts.mask_token_id not in out.new_tokens
    for row, prompt in enumerate(PROMPTS):
        assert out.sequences[row, width - len(prompt) : width].tolist() == prompt
        blocks = [entry[1] // FAMILY_BLOCK for step in out.trace.steps for entry in step.commits if entry[0] == row]
        assert blocks == sorted(blocks)
        final = {entry[1] for step in out.trace.steps for entry in step.commits if entry[0] == row}
        assert len(final) == 7 + -(len(prompt) + 7) % FAMILY_BLOCK  # the last block is decoded completely
        assert len(blocks) == len(final) or samplers.get(name).needs.revises
    for row in (0, 2):
        alone = paradec.generate(model, [PROMPTS[row]], **request)
        assert out.new_tokens[row].tolist() == alone.new_tokens[0].tolist()
    verdicts = {cache: verdict(samplers.get(name), caches.create(cache), model.facts) for cache in EXACT - {"none"}}
    exact = [cache for cache in sorted(verdicts) if verdicts[cache].status != REFUSED]
    for offset in (0, 1):  # two of the caches, in turn
        other = paradec.generate(model, cache=exact[(2 * MASKED.index(name) + offset) % len(exact)], **batch, **request)
        assert other.new_tokens.tolist() == out.new_tokens.tolist()
        assert other.forwarded_tokens <= out.forwarded_tokens


@pytest.mark.thinned
@pytest.mark.parametrize("cache", sorted(EXACT))
def test_guided_logits_equal_one_shot_forwards(model: Model, plain: dict[str, Any], family: str, cache: str) -> None:
    sampler = samplers.create("low_confidence")
    state = sampler.start(model, PROMPTS[:2], max_new_tokens=NEW, cache=cache, guidance_scale=2.0)
    with torch.inference_mode():
        while not state.done:
            queries, outputs, proposal = step_with_outputs(model, sampler, state)
            for query, output in zip(queries, outputs):
                for index, row in enumerate(map(int, query.rows)):
                    ids = state.canvas[row, : int(state.length[row])].tolist()
                    unconditional = [3] * len(PROMPTS[row]) + ids[len(PROMPTS[row]) :]
                    start, stop = int(state.block_start[row]), int(state.block_end[row])
                    for branch, tokens in enumerate((ids, unconditional)):
                        expected = align(family, one_shot_logits(plain[family], tokens))[start:stop]
                        logits = output[index + branch * len(query.rows), : stop - start]
                        torch.testing.assert_close(logits, expected, **CLOSE)
            sampler.commit(state, proposal)


def test_text_and_chat_prompts(model: Model) -> None:
    out = paradec.generate(model, ["w1 w2", "w3"], max_new_tokens=6, cache="prefix")
    assert all(isinstance(text, str) for text in out.text)
    chat = paradec.generate(model, [{"role": "user", "content": "w1 w2"}], max_new_tokens=6)
    assert chat.sequences[0, :5].tolist() == [1, 5, 6, 2, 1]


def test_smaller_blocks_are_aligned_with_the_model_blocks(model: Model) -> None:
    state = samplers.create("threshold").start(model, [PROMPTS[0]], max_new_tokens=NEW, block_length=2)
    assert (state.block_start[0], state.block_end[0]) == (5, 6)
    for length in (1, 2, 4, 8):
        out = paradec.generate(model, PROMPTS, max_new_tokens=NEW, block_length=length, eos_early_stop=False)
        assert out.new_tokens.shape == (len(PROMPTS), NEW)


@pytest.mark.parametrize("length", [3, 6, 5])
def test_block_lengths_that_do_not_divide_are_refused(model: Model, length: int) -> None:
    message = f"block_length={length} does not fit {model.facts.name}, which was trained with blocks of 4"
    refuses(lambda: paradec.generate(model, [5], max_new_tokens=8, block_length=length), message)


def test_steps_are_counted_over_whole_and_partial_blocks(model: Model) -> None:
    # the 11 tokens after a prompt of 5 lie in blocks 1, 2 and 3, of length 4
    out = paradec.generate(
        model, PROMPTS[0], max_new_tokens=11, sampler="low_confidence", steps=3, eos_early_stop=False
    )
    assert out.nfe == 3
    with pytest.raises(ValueError, match=r"steps=4 must be a multiple of the number of blocks \(3\)"):
        paradec.generate(model, PROMPTS[0], max_new_tokens=11, sampler="low_confidence", steps=4)


def test_rows_with_fewer_blocks_take_all_planned_steps(model: Model) -> None:
    rows, steps = [PROMPTS[0], [*PROMPTS[0], 7]], 5
    assert [len(row) for row in rows] == [5, 6]  # the answers take 3 and 4 blocks
    request: dict[str, Any] = {"max_new_tokens": 11, "sampler": "low_confidence", "eos_early_stop": False}
    out = paradec.generate(model, rows, steps=steps, **request)
    expected = []
    for row, blocks in zip(rows, (3, 4), strict=True):
        first = 8 - len(row)  # masks in the block in which the prompt ends; all others have 4
        steps_per_block = -(-steps // blocks)
        expected.append(min(steps_per_block, first) + (blocks - 1) * steps_per_block)
    assert out.row_nfe == expected and min(expected) >= steps
    for index, (row, blocks) in enumerate(zip(rows, (3, 4), strict=True)):
        alone = paradec.generate(model, row, steps=2 * blocks, **request)
        assert torch.equal(alone.new_tokens[0], out.new_tokens[index])


# heavy chain variable domain of trastuzumab (PDB 1N8Z, chain B)
TRASTUZUMAB = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSK"
    "NTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)


def test_antiberty_knows_antibodies() -> None:
    import importlib.metadata

    try:
        importlib.metadata.distribution("antiberty")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("antiberty is not installed")
    model = antibody_model.load_antiberty()
    assert "antiberty" not in sys.modules  # its code is not imported
    ids = torch.tensor(model.tokenizer(" ".join(TRASTUZUMAB))["input_ids"])
    assert len(ids) == len(TRASTUZUMAB) + 2
    # each residue is masked in one of 8 rows, which mask every eighth residue
    position = torch.arange(len(ids))
    masked = (position % 8 == torch.arange(8).unsqueeze(1)) & (position > 0) & (position < len(ids) - 1)
    rows = ids.repeat(8, 1).masked_fill(masked, model.facts.mask_token_id)
    actual = model(Query(rows=np.arange(8), tokens=rows, positions=position.expand_as(rows))).argmax(-1)
    assert masked.sum() == len(TRASTUZUMAB)
    assert (actual == ids)[masked].double().mean() > 0.7
