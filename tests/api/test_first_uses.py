"""First attempts of newcomers: names from papers and other tools give an error with the name to use."""

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from diffusers import FasterCacheConfig, PyramidAttentionBroadcastConfig

import paradec
from paradec import DBCache
from paradec.core.trace import Trace
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.samplers.masked import Needs, View
from paradec.tools.evaluation.likelihood import log_likelihoods

PROMPT = "Sort: pear fig apple"
CODES = "digits-ar"
ENTROPY = paradec.samplers.create("entropy")


class RuleWithoutBase:
    """A sampler's rule that does not inherit from MaskedSampler."""

    def select(self, view: Any) -> Any:
        return view.candidates


def _generate(**request: Any) -> Callable[[Any], Any]:
    return lambda model: paradec.generate(model, PROMPT, max_new_tokens=8, **request)


@pytest.fixture(scope="module")
def model() -> Any:
    return paradec.load()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        pytest.param(_generate(sampler="CreditDecoding"), "'credit'", id="CreditDecoding"),
        pytest.param(_generate(sampler="Fast-dLLM"), "'threshold'", id="Fast-dLLM"),
        pytest.param(_generate(sampler="maskgit plus"), "'maskgit_plus'", id="space"),
        pytest.param(_generate(sampler="TeaCache"), "accelerate(pipeline, 'teacache')", id="TeaCache"),
        pytest.param(_generate(sampler="fbcache"), "accelerate(pipeline, 'first_block')", id="fbcache"),
        pytest.param(_generate(cache="dkv"), "'dkv_decode'", id="dkv"),
        pytest.param(_generate(cache="TeaCache"), "accelerate(pipeline, 'teacache')", id="TeaCache as a cache"),
        pytest.param(_generate(block_size=4), "'block_length'", id="block_size"),
        pytest.param(_generate(sampler="confidence_threshold"), "did you mean 'threshold'", id="Dream's threshold"),
        pytest.param(_generate(sampler="entropy", alg_temp=1), "create('entropy', alg_temp=", id="alg_temp"),
        pytest.param(_generate(sampler="credit(decay=0.5)", threshold=1), "create('credit', thr", id="of a sampler"),
        pytest.param(_generate(sampler="entropy", threshold=1), "'entropy': alg_temp, eps; 'threshold' is a", id="no"),
        pytest.param(
            _generate(sampler=ENTROPY, threshold=1), "'entropy': alg_temp, eps; 'threshold' is a", id="object"
        ),
        pytest.param(_generate(use_cache=True), 'cache="prefix"', id="use_cache"),
        pytest.param(_generate(constraint=["yes", "no"]), "['yes', 'no'] must be paradec.Choice", id="texts"),
        pytest.param(
            lambda _: paradec.generate_images(paradec.load(CODES), class_labels=1, window=1),
            "create('sjd'",
            id="window",
        ),
        pytest.param(_generate(dual_cache=True), 'cache="dual"', id="dual_cache"),
        pytest.param(_generate(if_cache_position=True), 'cache="dual"', id="if_cache_position"),
        pytest.param(_generate(mask_id=3), "load(..., mask_token_id=", id="mask_id"),
        pytest.param(_generate(output_history=True), "trace=True", id="output_history"),
        pytest.param(_generate(generation_tokens_hook_func=print), "callback=", id="generation_tokens_hook_func"),
        pytest.param(_generate(return_dict_in_generate=True), "leave it out", id="return_dict_in_generate"),
        pytest.param(_generate(inputs=[3]), "input_ids=", id="inputs"),
        pytest.param(_generate(max_new_tokens_=4), "'max_new_tokens'", id="near field"),
        pytest.param(_generate(steps=0), "from 1", id="steps"),
        pytest.param(lambda _: paradec.TaylorSeer(cache_interval=3), "'interval'", id="cache_interval"),
        pytest.param(lambda _: paradec.TaylorSeer(max_order=2), "'order'", id="max_order"),
        pytest.param(lambda _: paradec.FirstBlock(residual_diff_threshold=0.1), "'threshold'", id="first block"),
        pytest.param(lambda _: paradec.load(torch_dtype="float32"), "dtype=", id="torch_dtype"),
        pytest.param(lambda _: paradec.load(trust_remote_code=True), "leave it out", id="trust_remote_code"),
        pytest.param(lambda _: paradec.load(load_in_8bit=True), 'quantization="int8"', id="load_in_8bit"),
        pytest.param(lambda _: paradec.load(load_in_4bit=True), "quantization_config=", id="load_in_4bit"),
        pytest.param(lambda _: paradec.load(CODES, torch_dtype="float32"), "dtype=", id="torch_dtype of codes"),
        pytest.param(lambda _: paradec.load(revison="main"), "'revision'", id="near option"),
        pytest.param(lambda _: paradec.load("digits_ar"), "'digits-ar'", id="digits_ar"),
        pytest.param(lambda _: paradec.load("digits-dit"), "PixelDiTPipeline.digits()", id="digits-dit"),
        pytest.param(_generate(cache=paradec.caches.get("dual")), "call it: Dual", id="class of a cache"),
        pytest.param(_generate(sampler=print), "docs/write_a_sampler.md", id="function"),
        pytest.param(_generate(sampler=RuleWithoutBase), "docs/write_a_sampler.md", id="class without a base"),
        pytest.param(_generate(sampler=RuleWithoutBase()), "docs/write_a_sampler.md", id="object without a base"),
        pytest.param(
            lambda _: paradec.generate_images(paradec.load(CODES), class_labels=1, sampler=paradec.samplers.get("sjd")),
            "call it: SJD()",
            id="class of a sampler of codes",
        ),
        pytest.param(lambda _: paradec.Choice("yes", "no"), "write Choice(['yes', 'no'])", id="texts of a Choice"),
        pytest.param(lambda _: paradec.Choice("yes"), 'write Choice(["yes", "no"])', id="text of a Choice"),
        pytest.param(lambda _: paradec.Span(["red", "blue"]), 'write texts=["', id="texts of a Span"),
        pytest.param(lambda _: paradec.Pick(["red", "blue"]), 'write options=["', id="options of a Pick"),
        pytest.param(
            _generate(sampler="freedave", repetition_penalty=1.2),
            "which drafts several steps",
            id="penalty of freedave",
        ),
        pytest.param(_generate(constraint=paradec.Regex("yes|no")), "words (ant, apple,", id="words of a pattern"),
        pytest.param(
            _generate(constraint=paradec.Choice(["appel"])), "'apple' for 'appel'", id="near word of a Choice"
        ),
        pytest.param(
            lambda model: next(log_likelihoods(model, [(PROMPT, "apple fig pear")])),
            "model.tokenizer(text, add_special_tokens=False)['input_ids']",
            id="likelihoods of texts",
        ),
        pytest.param(lambda _: paradec.samplers.FreeDave(sampler="credit"), "allowed: agreement, base", id="base"),
        pytest.param(lambda model: model(PROMPT), "paradec.generate(", id="call"),
        pytest.param(lambda model: model.generate(PROMPT), "paradec.generate(", id="generate"),
        pytest.param(lambda _: paradec.load(CODES).generate(3), "paradec.generate_images(", id="generate of codes"),
        pytest.param(lambda model: _generate()(model).trace, "trace=True", id="trace"),
        pytest.param(
            lambda _: paradec.generate_images(paradec.load(CODES), class_labels=1).trace,
            "trace=True",
            id="trace of codes",
        ),
    ],
)
def test_the_error_names_what_to_write(use: Callable[[Any], Any], name: str, model: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        use(model)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("use", "error", "name"),
    [
        (lambda _: paradec.TeaCache(rel_l1_thresh=0.2), TypeError, "TeaCache .* 'threshold' here"),
        (lambda _: paradec.SpeCa(threshold=0.2), TypeError, "SpeCa .* 'base_threshold' here"),
        (lambda _: paradec.FirstBlock(rel_l1_thresh=0.2), TypeError, "'threshold' here"),
        (lambda _: paradec.TaylorSeer(how="newton"), TypeError, r"write paradec.Forecast\(when=..., how=...\)"),
        (lambda _: paradec.TaylorSeer(treshold=2), TypeError, "unknown setting of TaylorSeer: 'treshold'.*interval"),
        (lambda _: DBCache(F8B0=True), TypeError, "write Fn_compute_blocks=8, Bn_compute_blocks=0"),
        (lambda pipe: paradec.accelerate(pipe, "DBCache_F8B0"), ValueError, r"'dbcache\(Fn_compute_blocks=8, Bn_c"),
        (lambda pipe: paradec.accelerate(pipe, residual_diff_threshold=0.1), ValueError, "accelerate.pipe, 'dbcache'"),
        (
            lambda pipe: paradec.accelerate(pipe, rel_l1_thresh=0.1),
            ValueError,
            "accelerate.pipe, 'teacache', threshold=",
        ),
        (lambda pipe: paradec.accelerate(pipe, FasterCacheConfig()), ValueError, "'FasterCacheConfig' .* 'taylorseer"),
        (
            lambda pipe: paradec.accelerate(pipe, PyramidAttentionBroadcastConfig()),
            ValueError,
            "nearest is 'taylorseer",
        ),
        (lambda pipe: paradec.accelerate(pipe, threshold=0.2), ValueError, "first_block.*teacache, easycache, dicache"),
        (
            lambda pipe: paradec.accelerate(pipe, "teacache", max_memory="1GB"),
            ValueError,
            r"paradec.Forecast\(when=paradec.TeaCache\(...\), max_memory=...\)",
        ),
        (
            lambda pipe: paradec.accelerate(pipe, "steps.json"),
            ValueError,
            r"'steps.json' is not found; write .*Forecast\(",
        ),
        (lambda pipe: paradec.generate_images(pipe, class_labels=3), TypeError, "PixelDiT.*call the pipeline itself"),
        (lambda pipe: [*paradec.generate_many(pipe, [3])], TypeError, "PixelDiT.*call the pipeline itself"),
        (lambda pipe: paradec.accelerate(pipe, "DeepCache"), ValueError, r"nearest is 'taylorseer\(order=0\)' here"),
        (lambda pipe: paradec.accelerate(pipe, "fora"), ValueError, r"'taylorseer\(order=0\)' here"),
        (
            lambda _: _generate(sampler="fora")(paradec.load()),
            ValueError,
            r"accelerate\(pipeline, 'taylorseer\(order=0",
        ),
        (lambda pipe: paradec.accelerate("teacache", pipe), TypeError, "^pipe='teacache' must be a diffusers pipeline"),
        (lambda pipe: paradec.accelerate(paradec.TeaCache(), pipe), TypeError, "^pipe=Forecast.* must be a diffusers"),
        (lambda pipe: paradec.accelerate(type(pipe), "teacache"), TypeError, "^pipe=<class .* must be a diffusers pip"),
        (lambda pipe: paradec.accelerate(pipe, paradec.FirstBlock), TypeError, r"must be called: FirstBlock\("),
        (lambda pipe: paradec.accelerate(pipe, paradec.TeaCache), TypeError, r"must be called: TeaCache\("),
    ],
)
def test_errors_of_accelerate_name_what_to_write(use: Callable[[Any], Any], error: type[Exception], name: str) -> None:
    pipe = PixelDiTPipeline.digits()
    with pytest.raises(error, match=name):
        use(pipe)
    with paradec.accelerate(pipe, paradec.TeaCache(0.1)):  # works, because the failed calls attached no hooks
        pass


def test_outputs_without_a_trace_can_be_inspected_and_copied(model: Any) -> None:
    for output in (_generate()(model), paradec.generate_images(paradec.load(CODES), class_labels=1)):
        assert not hasattr(output, "trace")
        for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output)), dataclasses.replace(output)):
            assert repr(copied) == repr(output) and not hasattr(copied, "trace")
        assert "tokens" in dict(inspect.getmembers(output))


@pytest.mark.parametrize("number", [-1, 0, False])
def test_a_prompt_without_masks_needs_new_tokens(number: Any, model: Any) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens={number} .*integer from"):
        paradec.generate(model, PROMPT, max_new_tokens=number)


def test_equal_answers_of_one_prompt_are_a_warning(model: Any) -> None:
    with pytest.warns(UserWarning, match="temperature=0 .* num_return_sequences=2"):
        _generate(num_return_sequences=2)(model)


def test_a_redefined_class_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = paradec.samplers.registry
    monkeypatch.setattr(registry, "_targets", dict(registry._targets))

    def run_cell(share: float) -> type:
        """Define the class, like a notebook cell that is run again."""

        @dataclasses.dataclass(frozen=True)
        class Again(paradec.samplers.get("threshold")):  # type: ignore[misc]
            name = "again"
            share_of_cell = share

        return Again

    for share in (0.5, 0.7):
        cls = run_cell(share)
        for _ in range(2):
            registry.register("again", cls)
        assert paradec.samplers.create("again").share_of_cell == share
    for name in ("again", "threshold"):
        with pytest.raises(ValueError, match="is taken by"):
            registry.register(name, type("Other", (cls,), {"name": name}))


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (paradec.Output, "filled row_nfe row_forwards"),
        (Trace, "settings filled score"),
        (View, " ".join(field.name for field in dataclasses.fields(View))),
        (Needs, "reads may_wait revises draws_tokens"),
    ],
)
def test_docstrings_describe_unclear_fields(cls: type, names: str) -> None:
    described = re.findall(r"\w+", cls.__doc__ or "")
    assert {*names.split()} <= {*described}


def test_names_ignore_case(model: Any) -> None:
    for upper, lower in ({"sampler": "THRESHOLD"}, {"sampler": "threshold"}), ({"cache": "Dual"}, {"cache": "dual"}):
        assert _generate(**upper)(model).new_tokens.equal(_generate(**lower)(model).new_tokens)
    codes = paradec.load("digits-maskgit")
    runs = [
        paradec.generate_images(codes, class_labels=3, sampler=name, seed=0) for name in ("recap", "ReCAP", "RECAP")
    ]
    assert all(run.codes.equal(runs[0].codes) and run.nfe == runs[0].nfe for run in runs)
    assert paradec.samplers.create("Credit(threshold=0.9)+LocalLeap") == paradec.samplers.create(
        "credit(threshold=0.9)+localleap"
    )
    with pytest.raises(ValueError, match="'sjd' is of family"):
        paradec.generate_images(codes, class_labels=3, sampler="SJD")
    with pytest.raises(ValueError) as error:
        paradec.samplers.get("CreditDecoding")
    assert "did you mean 'credit'" in str(error.value) and "nearest" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("FBCache", "paradec.FirstBlock"),
        ("TaylorSeerCalibrator", "paradec.TaylorSeer"),
        ("TeaCacheConfig", "paradec.TeaCache"),
        ("FirstBlockCacheConfig", "paradec.FirstBlock"),
        ("MagCacheConfig", "paradec.MagCache"),
        ("enable_cache", "paradec.accelerate"),
        ("apply_cache_on_pipe", "paradec.accelerate"),
        ("teacache", "paradec.TeaCache"),
    ],
)
def test_attributes_of_other_packages_give_a_hint(name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; write {here}"):
        getattr(paradec, name)
    assert getattr(paradec, here.partition(".")[2])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        paradec.nonsense  # noqa: B018
