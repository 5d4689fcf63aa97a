"""Unsupported requests raise an error of one line that names the argument and its value."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from drafters import GRID, TableModel
from images import random_mar, tiny_llamagen, tiny_lpd, tiny_student, tiny_uvit, tiny_var, tiny_var_student
from pipelines import tiny_dit
from places import GOLDEN
from small_models import CANVAS, MASK, piece, tiny, tiny_gemma, tiny_llama, wrap_kind
from small_models import wrap_causal as causal
from structured import VOCAB, tiny_with_texts

import paradec
from paradec import AdaptiveBlocks, PipelinedBlocks, Regex, samplers
from paradec.core import orders
from paradec.models.images.diffusion import DiffusionModel
from paradec.models.images.grid import Grid
from paradec.models.images.mar import MARModel
from paradec.models.images.uvit import UViT
from paradec.models.images.vq import KLDecoder, VQConfig
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.view import Needs

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8], [14]]
MODELS: dict[str, Callable[[], Any]] = {
    "masked": lambda: tiny(1),
    "shifted": lambda: tiny(1, prediction="shifted"),
    "blocks": lambda: tiny(1, "block_causal"),
    "opaque": lambda: wrap_kind("Opaque"),
    "encoder": lambda: wrap_kind("Bert"),
    "causal": causal,
    "without a store": lambda: causal(eager(tiny_llama())),
    "same causal": lambda: paradec.wrap(tiny_llama(), topology="causal", prediction="same"),
    "letters": tiny_with_texts,
    "causal letters": lambda: causal(tiny_llama(vocab=VOCAB), tokenizer=tiny_with_texts().tokenizer, eos_token_id=39),
    "canvases": lambda: paradec.wrap(tiny_gemma()),
    "canvases of letters": lambda: paradec.wrap(
        tiny_gemma(dtype=torch.float64, vocab=VOCAB, canvas=4), tokenizer=tiny_with_texts().tokenizer, eos_token_id=39
    ),
    "proteins": lambda: paradec.load_protein_mpnn(
        GOLDEN / "proteins" / "small.pt", [piece(0, 11, "plain")], dtype=torch.float64
    ),
    "picture": tiny_uvit,
    "dit": lambda: DiffusionModel(tiny_dit()),
    "llamagen": tiny_llamagen,
    "student": tiny_student,
    "var": tiny_var,
    "var student": tiny_var_student,
}


@cache
def model_of(name: str) -> Any:
    return MODELS[name]()


def eager(module: Any) -> Any:
    module.set_attn_implementation("eager")
    return module


# request, design, start, picture, picture_of_a_grid and create return a function that raises the expected error
def request(model: str, rows: Any = ((1, 2),), **fields: Any) -> Callable[[], Any]:
    return lambda: paradec.generate(model_of(model), [list(row) for row in rows], **{"max_new_tokens": 6, **fields})


def design(**fields: Any) -> Callable[[], Any]:
    def call() -> Any:
        model = model_of("proteins")
        return paradec.generate(model, model.prompt("plain", fixed=[0, 4]), **fields)

    return call


def start(model: str, sampler: Any, rows: Any = ((1, 2),), **fields: Any) -> Callable[[], Any]:
    def call() -> Any:
        method = sampler() if callable(sampler) else samplers.create(sampler)
        return method.start(model_of(model), [list(row) for row in rows], **{"max_new_tokens": 8, **fields})

    return call


def picture(model: str, sampler: Any, label: int = 1, **fields: Any) -> Callable[[], Any]:
    def call() -> Any:
        method = sampler() if callable(sampler) else samplers.create(sampler)
        return method.start(model_of(model), [label], **fields)

    return call


def picture_of_a_grid(height: int, width: int) -> Callable[[], Any]:
    def call() -> Any:
        model = model_of("picture")
        sampler = samplers.create("halton", height=height, width=width)
        return paradec.generate(model, [[model.class_token(1)]], sampler=sampler)

    return call


def create(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: samplers.create(name, **settings)


def with_decoder(seed: int) -> MARModel:
    module = random_mar().module
    torch.manual_seed(seed)
    sizes = {"channels": 32, "channel_mult": (1, 1), "res_blocks": 1, "attention": False, "z_channels": 4}
    return MARModel(module, KLDecoder(VQConfig(**sizes)))


@dataclasses.dataclass(frozen=True)
class Rewriter(MaskedSampler):
    name = "rewriter"
    needs = Needs(revises=True, decided_logits=True)


@dataclasses.dataclass(frozen=True)
class CommitOverride(samplers.get("threshold")):
    name = "commit_override"

    def commit(self, state: Any, proposal: Any) -> Any:
        return super().commit(state, proposal)


DIGITS = Regex("[0-9]+")
PIPELINED = PipelinedBlocks(4)
SPARSE = "attention='sparsed'"
UNCONDITIONAL = {"guidance_scale": 2.0, "negative_prompt": [[1], [2]]}
CASES: dict[str, list[tuple[Any, ...]]] = {
    "caches": [
        (request("opaque", cache="dual"), "Opaque", "cache"),
        (request("masked", sampler="random", cache="dkv_greedy", rng="reference", temperature=0.5), "rng='reference'"),
    ],
    "suffix": [
        (request("blocks", suffix=4), "suffix", "block-causal"),
        (request("masked", suffix=4), "suffix", "block_length"),
        *(
            (request("masked", suffix=4, block_length=4, cache=name), "suffix", f"cache='{name}'")
            for name in ("dkv_decode", "dkv_prefill", "dkv_pd")
        ),
        (request("masked", suffix=4, block_length=4, stop=paradec.Prophet()), "suffix", "stop="),
        (request("masked", suffix=4, block_length=4, sampler="wino"), "suffix", "'wino'"),
        (request("masked", suffix=4, block_length=4, attention="sparsed"), "suffix", SPARSE),
        (request("masked", ROWS, suffix="gaussian:4", block_length=4, rng="reference"), "rng='reference'"),
        (request("causal", sampler="sjd", suffix=4), "suffix=", "'sjd'"),
        (request("opaque", suffix="gaussian:4", block_length=4), "suffix", "position ids"),
        *(
            (lambda value=value: paradec.Request(suffix=value), "suffix")
            for value in ("", "gaussian", "gaussian:", 1.5, "gaussian:x", "cut:4:4", "1.5", "uniform:4", True, [4])
        ),
        (lambda: paradec.Request(suffix={"windows": 3}), "suffix"),
    ],
    "prefix": [
        (request("blocks", prefix="hello", cache="block"), "prefix='hello'"),
        (request("blocks", keep_prefix=1, cache="block"), "keep_prefix=1", "True or False"),
        (request("blocks", share_prefix="yes", cache="block"), "share_prefix='yes'", "True or False"),
        (request("blocks", keep_prefix=True), "keep_prefix=True", "cache='none'"),
        (request("blocks", share_prefix=True, cache="none"), "share_prefix=True", "cache"),
        (request("blocks", keep_prefix=True, cache="block", guidance_scale=2.0), "keep_prefix=True", "guidance_scale"),
    ],
    "attention": [
        *((request("masked", attention=value), "attention") for value in ("sparse", 3, paradec.SparseD)),
        (request("blocks", attention="sparsed", sampler="threshold"), SPARSE, "'threshold'", "block_causal"),
        (request("masked", attention="sparsed", sampler="freedave"), SPARSE, "'freedave'"),
        (request("masked", attention="sparsed", sampler="wino"), SPARSE, "'wino'"),
        (
            request("masked", [[1, 2], [1, 3]], attention="sparsed", share_prefix=True, cache="dual"),
            "attention",
            "prefix",
        ),
        (request("opaque", attention="sparsed"), SPARSE),
    ],
    "blocks": [
        *(
            (request("masked", sampler=name, blocks=PIPELINED), f"'{name}'", "blocks=PipelinedBlocks")
            for name in ("low_confidence", "freedave", "editing", "wino", "learn2pd")
        ),
        (request("masked", sampler="klass+ccd", blocks=PIPELINED), "'union'", "blocks=PipelinedBlocks"),
        (request("masked", sampler=samplers.FreeDave("threshold"), blocks=PIPELINED), "'freedave'", "'lopa'"),
        *(
            (request("masked", sampler=name, blocks=PIPELINED, steps=6), "steps=6", "blocks=PipelinedBlocks")
            for name in ("klass", "persistence", "klass+threshold")
        ),
        (request("masked", sampler="low_confidence", blocks=AdaptiveBlocks(delimiters=(5,)), steps=4), "steps=4"),
        (request("masked", blocks=AdaptiveBlocks(delimiters=(41,))), "delimiters=41", "from 0 to 40"),
        (request("masked", blocks="adaptiv"), "blocks: 'adaptiv'", "'adaptive'"),
        (request("masked", blocks="whole", block_length=4), "block_length=4", "blocks='whole'"),
    ],
    "masked": [
        (start("masked", "freedave", rng="reference"), "rng='reference'", "'freedave'"),
        (start("masked", "freedave", blocks=AdaptiveBlocks(delimiters=(3,))), "'freedave'", "AdaptiveBlocks"),
        (start("opaque", create("freedave", draft_mode="tree")), "draft_mode='tree'", "draft_mode='batch'"),
        (lambda: samplers.FreeDave(Rewriter()), "base='rewriter'"),
        (lambda: samplers.FreeDave(CommitOverride()), "base='commit_override'", "`commit`"),
        (request("masked", sampler="lopa", rng="reference"), "rng='reference'", "'lopa'"),
        (request("masked", sampler="lopa", logprobs=2), "logprobs=2", "'lopa'"),
        (request("masked", sampler="lopa", stop=paradec.Prophet()), "stop=Prophet", "'lopa'"),
        *((request(name, sampler="wino"), "'wino'") for name in ("encoder", "opaque", "shifted")),
        (request("masked", sampler="s2d2"), "s2d2", "block-causal"),
        (request("blocks", sampler="s2d2", rng="reference"), "rng='reference'"),
        (request("masked", sampler="levenshtein"), "levenshtein", "block-causal"),
        (request("blocks", sampler="levenshtein", blocks="pipelined"), "blocks"),
        (picture_of_a_grid(3, 5), "height=3", "width=5", "16"),
        (lambda: model_of("picture").class_token(99), "label=99"),
        (lambda: UViT(depth=3), "depth=3", "even"),
        *((request("masked", stop=value), "stop=", "stop_strings") for value in ("</s>", 3, paradec.Prophet, ["</s>"])),
    ],
    "forecasts": [
        (lambda: paradec.Forecast(when={"when": "verification", "base": 1}), "'base'", "base_threshold"),
        (lambda: paradec.Forecast(how="taylor(window=6)"), "'window'", "dtype, order"),
        (lambda: paradec.Forecast(how={"how": "foca", "last_warmup_step": 3}), "'last_warmup_step'", "dtype, order"),
    ],
    "device": [
        (request("masked", compile=1), "compile=1", "True or False"),
        (request("masked", compile=True), "compile=True", "cpu"),
    ],
    "rollouts": [
        (request("masked", sampler="freedave", rollout=True), "rollout=True", "'freedave'"),
        (request("masked", sampler="maskgit", rollout=True), "rollout=True", "'maskgit'"),
        (request("masked", rng="reference", seed=0, rollout=True), "rollout=True", "rng='reference'"),
        (request("masked", compile=True, rollout=True), "compile=True"),
        (request("masked", rollout="yes"), "rollout='yes'", "True or False"),
        (lambda: paradec.infill(tiny(1), [[3, MASK, 4]], rollout=True), "holes_eos_inf=False"),
        (request("causal", sampler="gsd", rollout=True, temperature=1.0), "rollout=True", "'gsd'"),
        (
            request("causal", sampler="jacobi(group=5, max_iterations=2, early_exit='published')", rollout=True),
            "rollout=True",
            "'jacobi'",
        ),
        (request("blocks", sampler="self_speculative", rollout=True), "rollout=True", "'self_speculative'"),
        (start("causal", "sjd", rollout=True, guidance_scale=2.0, negative_prompt=[[5, 6]]), "negative_prompt"),
    ],
    "constraints": [
        (request("letters", constraint=DIGITS, rng="reference", generator=torch.Generator()), "constraint"),
        (request("letters", constraint=DIGITS, stop_strings="1"), "stop_strings"),
        (request("letters", constraint=DIGITS, cache="dkv_greedy", sampler="random"), "cache"),
        (request("letters", constraint=[DIGITS, None]), "constraint", "2 entries"),
        (request("causal letters", constraint=[DIGITS], sampler="sjd"), "constraint"),
        *((request("causal letters", constraint=DIGITS, sampler=name), "constraint") for name in ("gsd", "lantern")),
        (request("causal letters", constraint=DIGITS, sampler="jacobi(group=4, early_exit='published')"), "constraint"),
        (request("canvases of letters", constraint=DIGITS, stop_strings="1"), "stop_strings"),
        (request("canvases of letters", constraint=DIGITS, rng="reference", generator=torch.Generator()), "constraint"),
        *(
            (request(name, sampler=sampler, constraint=value, **more), "constraint", *words)
            for name, sampler in (
                ("letters", "threshold"),
                ("causal letters", "sjd"),
                ("canvases of letters", "diffusion_gemma"),
            )
            for value, more, words in (
                (Regex("[0-9]{13}"), {}, ["max_new_tokens=6"]),
                (DIGITS, {"suppress_tokens": [*range(10), 27]}, []),
            )
        ),
    ],
    "drafts": [
        (start("causal", "sjd", seed=[1, 2]), "seed"),
        (start("causal", "sjd", suppress_tokens=[12]), "suppress_tokens"),
        (start("causal", "sjd", **UNCONDITIONAL), "negative_prompt"),
        (start("causal", "sjd", negative_prompt=[1]), "negative_prompt"),
        (start("causal", "sjd", rng="reference"), "rng"),
        (start("causal", "sjd", temprature=1), "temprature", "temperature"),
        (start("causal", "sjd", max_new_tokens=70), "max_new_tokens=70"),
        (start("causal", create("sjd", init="repeat_vertical")), "init='repeat_vertical'", "grid"),
        (start("causal", create("sjd", init="model")), "init='model'"),
        (start("causal", "zipar"), "zipar", "grid"),
        (start("same causal", "sjd"), "prediction='shifted'"),
        (start("causal", "lantern"), "lantern", "codebook"),
        (start("causal", "speculative"), "drafter"),
        (start("causal", create("speculative", drafter=TableModel.random(13, seed=0))), "13"),
        (start("causal", create("speculative", drafter=causal(max_length=6)), max_new_tokens=8), "6 positions"),
        (create("speculative", drafter=causal(), stop=Unsure(), tree=(2, 1)), "stop", "tree=(2, 1)"),
        (create("speculative", drafter="prompt_lookup", stop="unsure"), "stop", "drafter='prompt_lookup'"),
        (create("speculative", drafter=causal(), stop="unconfident"), "stop", "confidence"),
        (create("speculative", drafter=causal(), stop={"stop": "unsure", "size": 3}), "size"),
        *(
            (start("causal", create("speculative", drafter=causal(), stop=lambda q, drafts, a=answer: a)), "[R] bool")
            for answer in (True, torch.zeros(2), torch.zeros(1, 1, dtype=torch.bool))
        ),
        *(
            (start("without a store", make), "over a store", "LlamaForCausalLM")
            for make in (
                create("jacobi", window=6, pool=3),
                create("speculative", drafter="token_recycling", rule="naive"),
                create("scd", window=6, refresh="maximal", siblings=3, branching=2),
            )
        ),
        (start("masked", "self_speculative"), "self_speculative", "bidirectional"),
        (start("causal", "self_speculative"), "self_speculative", "mask"),
        (start("blocks", create("self_speculative", adapter=True)), "adapter"),
        (start("blocks", "self_speculative", [[1, MASK, 2]]), "mask id"),
        (request("causal", sampler="jacobi", order="chain"), "order='chain'"),
        (lambda: samplers.SJD().start(TableModel.random(9, seed=0), [1, 2], grid=GRID), "grid", "vocabulary"),
        (lambda: samplers.SJD().start(TableModel.random(10, seed=0), [1, 2], grid=GRID, max_new_tokens=7), "=7"),
        *(
            (lambda fields=fields: Grid(**dict(height=2, width=2, image_ids=range(4)) | fields), next(iter(fields)))
            for fields in ({"height": 0}, {"width": 1.5}, {"image_ids": ()}, {"image_ids": (1, 1)}, {"row_end": -1})
        ),
    ],
    "any order": [
        (design(sampler="jacobi", order="halton"), "order: 'halton'"),
        (design(sampler="jacobi", order=3), "order=3", "'random', 'chain'"),
        (design(sampler="jacobi", order=[0.5, 1]), "order=0.5"),
        (design(sampler="jacobi", order=[0, 1, 1]), "order=[0, 1, 1]", "11 positions", "9 undecided"),
        (design(sampler="jacobi", order=list(range(10))), "order", "11 positions"),
        (design(sampler="jacobi", order=[[0], [1]]), "order", "2 lists for 1 rows"),
        (design(sampler="jacobi", order=orders.create("given", cells=[1, 0])), "11 cells"),
        (design(sampler="margin", order="chain"), "order='chain'", "'margin'"),
        (design(sampler=create("speculative", drafter="prompt_lookup")()), "speculative"),
        (design(sampler="zipar"), "'zipar'"), (design(sampler=create("jacobi", group=4)()), "group=4"),
        (design(sampler=create("jacobi", pool=4)()), "pool=4", "store"),
        (design(sampler=create("sjd", init="repeat_horizontal")()), "init='repeat_horizontal'"),
        (design(sampler="sjd", guidance_scale=2.0), "guidance_scale=2.0"),
        (design(sampler="sjd", rollout=True), "rollout=True"),
    ],
    "canvases": [
        *(
            (request("canvases", **{name: value}), f"{name}=", "diffusion_gemma")
            for name, value in {
                **{"cache": "dual", "attention": "sparsed", "blocks": "fixed", "block_length": CANVAS},
                **{"temperature": 0.5, "guidance_scale": 2.0, "share_prefix": True, "confidence_eos_eot_inf": True},
            }.items()
        ),
        (start("canvases", "diffusion_gemma", compile=True), "compile=True"),
        (start("canvases", create("diffusion_gemma", t_min=0.9)), "t_min=0.9", "t_max=0.8"),
        (request("canvases", max_new_tokens=5000), "DiffusionGemmaForBlockDiffusion"),
        (request("canvases", steps=1, max_new_tokens=40), "steps", "multiple"),
        (request("canvases", suppress_tokens=range(64)), "suppress_tokens"),
        (request("canvases", stop=paradec.Prophet()), "stop="),
        (request("canvases", stop_strings="a"), "tokenizer"),
        (request("canvases", prefix=3), "prefix=3"),
        (request("canvases", rng="reference", seed=[1, 2]), "seed", "2 entries"),
        *((request("canvases", sampler=name), f"'{name}'") for name in ("sjd", "klass")),
        (request("masked", sampler="diffusion_gemma"), "'diffusion_gemma'"),
    ],
    "pictures": [
        (create("distilled", teacher=tiny_llamagen(), t_list=(0, 2, 3)), "t_list"),
        (create("distilled", teacher=tiny_llamagen(), t_list=(0, 2), teacher_start=2), "teacher_start=2"),
        (create("distilled", teacher=3), "teacher=3"),
        (picture("student", "distilled", guidance_scale=2.0), "guidance_scale=2.0", "teacher"),
        (picture("student", "distilled", temperature=0.0), "temperature=0.0", "teacher"),
        (picture("student", "distilled", steps=3), "steps=3"),
        (picture("student", create("distilled", t_list=(0, 4)), steps=1), "steps=1", "2"),
        (picture("student", create("distilled", t_list=(0, 17))), "t_list=17"),
        (picture("student", create("distilled", split=17)), "split=17"),
        (picture("student", "distilled", noise=torch.zeros(1, 16, 3)), "noise"),
        (picture("student", "distilled", seed=[1, 2]), "seed", "2 entries"),
        (picture("student", "distilled", 10), "label=10"),
        (picture("llamagen", "distilled"), "distilled student"),
        (picture("var student", "var"), "distilled student"),
        (lambda: tiny_var_student(split=9), "split=9"),
        *(
            (picture(student, create("distilled", teacher=teacher)), *words)
            for student, teacher, *words in (
                ("student", tiny_llamagen(grid=5), "grid=5", "4"), ("student", tiny_llamagen("t2i"), "condition='t2i'"),
                ("student", tiny_student(), "LlamaGen"), ("var student", tiny_llamagen(), "VAR"),
                ("var student", tiny_var(classes=7), "classes=7", "5"), ("var student", tiny_var(vq_seed=3), "codes"),
            )
        ),
        (picture("student", create("distilled", teacher=tiny_llamagen()), steps=1), "steps=1"),
        (picture("student", create("distilled", teacher=tiny_llamagen(), teacher_start=5)), "teacher_start=5"),
        (lambda: paradec.generate_images(model_of("student"), class_labels=1, sampler="sjd"), "'distilled'"),
        (picture("var", create("var", top_ks=(1, 2))), "top_ks", "4 scales"),
        (picture("var", "var", 9), "label=9", "from 0 to 5"),
        (picture("var", "code"), "drafter"),
        (lambda: paradec.generate_images(model_of("var"), class_labels=1, steps=3), "steps=3"),
        (picture("var", lambda: samplers.CoDe(drafter=model_of("var"), split=5)), "split=5", "from 0 to 4"),
        *(
            (picture("var", create("code", drafter=drafter, split=2)), word)
            for drafter, word in (
                (tiny_var(scales=(1, 2, 3)), "scales"),
                (tiny_var(classes=6), "classes"),
                (tiny_var(vq_seed=9), "codebook"),
            )
        ),
        *(
            (lambda sizes=sizes: samplers.CSpD(random_mar(**sizes)).start(random_mar(), [1]), "draft", *words)
            for sizes, *words in (({"side": 5}, "25", "16"), ({"channels": 3}, "3", "4"), ({"classes": 9}, "9", "10"))
        ),
        (lambda: samplers.CSpD(with_decoder(1)).start(with_decoder(0), [1], steps=4), "draft", "VAE"),
        (lambda: paradec.generate_images(random_mar(), class_labels=1, sampler="cspd", output_type="latent"), "draft"),
        (create("cspd", draft=paradec.load("digits-maskgit")), "draft", "MAR"),
        (create("cspd", draft="mar_base"), "draft='mar_base'"),
        (
            lambda: samplers.Groups(lossless=True).start(
                tiny_lpd(), tiny_lpd().request([1], tiny_lpd().grid()).prompts, guidance_scale=2.0
            ),
            "guidance_scale=2.0",
            "negative_prompt",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(call, words, id=f"{area} {number} {words[0]}")
        for area, cases in CASES.items()
        for number, (call, *words) in enumerate(cases)
    ],
)
def test_errors_name_the_argument_and_the_allowed_values(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text
