"""Decode recorded cases from a folder, compare the results with the recorded ones, and print a report.

    python tests/replays.py FAMILY FOLDER [options of pytest]

FOLDER has the files of a family of tests/golden, or is an unchanged folder of the published golden data (`text`,
`next-text`, `image-ar`, ...). It may be a ZIP file. All of its cases are replayed, and no packaged cases. Checkpoints
and weights that a case names are searched for in FOLDER, then next to it, then in tests/golden.

A case that does not replay as recorded has one of three outcomes, which the report lists with the reason:
- wrong: the results differ;
- near tie: they differ where two scores are less than 1e-7 apart;
- refused: paradec lacks the method, or the recording cannot be replayed; the reason says why.
The report also lists the fields that no replay reads, and why. Its last line is
`N replayed, M near ties, K refused, L wrong`. The exit status is 0 if N + M > 0 and L = 0.
"""

import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "support")]

import pytest  # noqa: E402
import recorded  # noqa: E402
from places import ROOT, TESTS, make_temporary_folder, unpack  # noqa: E402
from recorded import OUTCOMES, Selection, record_outcome, unread_fields  # noqa: E402

TEXT = {
    "samplers/masked/test_traces.py": "no_method_without_a_replay trace logits dinfer adablock",
    "samplers/masked/test_traces_pipelined.py": "d3llm d2f lopa",
    "samplers/masked/ahead/test_traces_freedave.py": "trace",
    "samplers/masked/rules/test_rules.py": "public_traces",
    "caches/test_cache_traces.py": "block_caches forced_first_token dkv dpad",
    "caches/test_d2.py": "public_traces density_as_a_prior",
}
VERIFICATIONS = {"samplers/causal/test_jacobi.py": "reference_verification reference_tree_verification"}
LLAMAGEN = {"models/images/test_llamagen.py": "logits_equal_the_public_code vq_decodes_like_the_public_code"}
RECAP = {
    "samplers/masked/rules/test_recap.py": "replays_the_reference schedules_are_the_reference_s",
    "models/images/test_mar.py": "decoding_equals_the_recorded_run",
}
FORECASTS = {
    "samplers/forecast/test_taylorseer.py": "schedules states_and_forecasts variants equals_cache_dit",
    "integrations/diffusers/test_accelerate.py": "latents_of_the_traces",
}
FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "traces": (("traces",), TEXT),
    "text": (("traces",), TEXT),
    "next-text": (("traces",), TEXT),
    "moe": (
        ("moe",),
        {
            "samplers/masked/test_traces_moe.py": "llada2 ends batches in_a_pipeline llada_moe sdar_moe",
            "models/text/test_moe.py": "facts_equal_the_recorded_ones logits_equal_the_recorded_ones "
            "padded_batches_give_the_recorded_logits logits_over_a_store_equal_the_recorded_ones "
            "hidden_states_and_routing_equal_the_recorded_ones",
        },
    ),
    "next-image": (
        ("next-image",),
        {
            "samplers/scales/test_scales.py": "var_replays code_sampler_replays pictures_become_codes "
            "all_scales_at_once",
            "samplers/test_distilled.py": "llamagen_replays_the_reference replays_the_reference",
            "samplers/continuous/test_cspd.py": "replays_the_reference replays_the_rule",
            "samplers/causal/test_jacobi_blocks.py": "blocks_are_those_of_the_public_code "
            "a_block_that_stays_in_the_store_has_another_fixed_point",
            "models/images/test_lpd.py": "decoding_equals_the_recorded_run one_forward_equals_the_recorded_one",
            "models/images/test_nar.py": "decoding_equals_the_recorded_run "
            "the_mask_and_one_forward_equal_the_reference",
            "core/test_orders.py": "lpd_orders_equal_the_recorded_ones",
        },
    ),
    "image-ar": (("sjd", "gsd", "scd", "lantern", "llamagen"), VERIFICATIONS | LLAMAGEN),
    **{family: ((family,), VERIFICATIONS) for family in ("sjd", "gsd", "scd", "lantern")},
    "llamagen": (("llamagen",), LLAMAGEN),
    "diffusion": (("diffusion", "recap"), FORECASTS | RECAP),
    "recap": (("recap",), RECAP),
    "gemma": (("gemma",), {"samplers/renoising/test_diffusion_gemma.py": "recorded_answers"}),
    "proteins": (
        ("proteins",),
        {
            "models/proteins/test_network.py": "residue_indices_equal_the_recorded_ones scores_equal_the_public_code "
            "single_residue_scores_equal_the_public_code designs_have_the_recorded_probabilities"
        },
    ),
    "ligands": (("ligands",), {"models/proteins/test_relatives.py": "probabilities_equal_the_public_code"}),
    "images-autumn": (
        ("images-autumn",),
        {
            "integrations/diffusers/test_skipping.py": "seacache_replays_diffusers",
            "models/images/test_glm_image.py": "positions_and_forwards_equal_the_recorded_ones "
            "greedy_tokens_equal_the_recorded_ones distributions_and_draws_equal_the_recorded_ones",
            "integrations/diffusers/test_prior.py": "prior_replays_the_pipeline",
        },
    ),
    "drafters": (
        ("drafters",),
        {
            "models/test_eagle3.py": "the_base_gives_the_recorded_logits_and_layers "
            "recorded_drafts_and_their_distributions",
            "models/test_walking_drafters.py": "recorded_drafts_and_their_distributions",
            "models/test_mtp.py": "calls_equal_the_recorded_ones",
            "samplers/causal/test_siblings.py": "the_plain_step_replays_a_recorded_verification "
            "replays_a_recorded_verification",
            "tools/training/test_replay.py": "replays_equal_the_recorded_cases",
        },
    ),
    "structured": (
        ("structured",),
        {
            "constraints/test_structured_cases.py": "",
            "samplers/masked/test_constrained.py": "recorded_runs "
            "recorded_runs_that_take_the_best_token_of_each_marginal one_token_a_step_has_the_recorded_distribution",
            "samplers/causal/test_causal_constraints.py": "recorded_greedy_runs the_recorded_constrained_distribution",
            "samplers/renoising/test_canvas_properties.py": "recorded_steps",
            "api/test_decide.py": "recorded_answers",
            "integrations/server/test_systemone.py": "recorded_answers",
        },
    ),
    "autumn": (
        ("autumn",),
        {
            "models/text/test_rotary.py": "angles_equal_the_recorded_tables",
            "models/text/test_nemotron_diffusion.py": "facts_equal_the_recorded_ones forwards_equal_the_recorded_ones "
            "causal_traces block_diffusion_traces",
            "samplers/masked/rules/test_s2d2.py": "recorded_steps",
            "samplers/masked/rules/test_levenshtein.py": "recorded_steps recorded_answers",
            "models/text/test_llada2_routing.py": "facts_equal_the_recorded_ones logits_equal_the_recorded_ones "
            "logits_over_a_store_equal_the_recorded_ones routing_equals_the_recorded_one",
            "samplers/causal/test_self_speculative.py": "recorded_rounds sdar_decodes_as_in_blocks_of_one",
        },
    ),
}
"""Family -> (the folders of tests/golden that FOLDER replaces, {test file: names of its tests without "test_"}).

An empty string of names means all tests of the file."""

WHY_NOT_COMPARED: dict[str, str] = {
    field: reason
    for reason, fields in {
        "says where the recording comes from": (
            "schema reference restated patches source note id name system torch diffusers transformers seconds dtype "
            "setting settings.file float64_difference float32_difference replay_error "
            "largest_relative_difference_from_float64 generate_equals_loop dit.scheduler dit.stored transformer_seed "
            "flux.seed settings.seed cases.about extra.note"
        ),
        "selects the test that replays the case": (
            "method kind candidates settings.mode settings.method settings.note settings.cache settings.function "
            "explicit_given log.op log.fast log.kind log.n_cached feature_kind mode"
        ),
        "read only if a case differs": "margin router_margin fp64_same",
        "no random number depends on it": "cases.seed cases.task steps.step draws settings.eos seed",
        "unused by this rule": (
            "settings.steps settings.eps settings.top_k settings.top_p settings.alg_temp settings.alg "
            "settings.decoding_steps settings.use_cache settings.cache_steps settings.threshold settings.rule"
        ),
        "0, or unused by this rule": "settings.temperature settings.cfg_scale settings.remasking",
        "a value that only the reference needs; its model calls are compared": (
            "trajectory_step_map nfe_returned kept_suffix stats rounds reference_nfe tau discarded_u calls.cached base "
            "creation_conf extra_token steps.cached keys refresh_to store settings.rollout_p full_attention proj_out "
            "proj_mlp transformer_blocks.0 ff"
        ),
        "follows from fields that are compared": (
            "kept_by_top_p end_in_unrestricted p q ratio score span canvases.state masks draft steps.block steps.done "
            "steps.logits steps.original steps.post_steps steps.steps f_hat next_input teacher_end unknown_after "
            "result step.#.values log.context log.mask log.out log.tokens log.position_ids"
        ),
        "equals settings.temperature": "settings.T",
        "these runs ignore end tokens": "stop_ids eos_id settings.stop settings.eos_early_stop",
        "counts calls of diffusers' loop; its outputs are compared": "cases.steps cases.nfe",
        "paradec's loop evaluates windows of other lengths; the tokens that it commits are compared": (
            "steps.input_shape"
        ),
        "compared where the rule's score is this probability": "steps.conf",
        "read only from cases that are not refused": (
            "answer correct decoded prompt cases.final_ids cases.prompt_ids rope_parameters.factor long_factor "
            "short_factor original_max_position_embeddings max_position_embeddings attention_factor inv_freq cos sin "
            "positions head_dim cases.adapter cases.input_ids cases.before cases.causal cases.name"
        ),
        "read only with adaptive blocks": "block_history",
        "read only for rules that are compared position by position": "steps.fed",
        "belongs to calls that only store a block": "steps.ids steps.closed calls.stored steps.start",
        "belongs to a last call that paradec does not make": "drafts hidden input_ids logits",
        "the run was sampled: its steps are replayed one by one": "max_new_tokens settings.sampler block_length",
        "belongs to blocks after an end token, which paradec does not decode": (
            "blocks.calls committed blocks.first next_first trajectory cached_after converged iterations greedy "
            "max_new_seq_len"
        ),
        "belongs to calls whose guidance weight makes one half irrelevant": "averaged_logits input_tokens kv",
        "constant in this model": "attn_dropout proj_dropout use_checkpoint qkv_bias skip",
        "the shapes of the weights imply it": (
            "mlp_ratio patch_size decoder_embed_dim decoder_num_heads model.depth embed_dim num_classes img_size"
        ),
        "read only from rows that are not refused": "T nc pre seq_len",
        "ignored by the reference: its local steps used half of the head's steps": "diff_fast_ratio",
        "the folder's name": "model",
        "belongs to calls of diffusers, or to calls that only store a block": "steps.commit steps.edit",
        "this format has no blocks": "facts.block",
        "a name for the value of tree_choices": "tree",
        "only its length is read": (
            "c#i.sd.layers.#.attention.kv_cache.k_cache t#i.sd.layers.#.attention.kv_cache.k_cache"
        ),
        "empty": "c#i.sd.layers.#.attention.kv_cache.v_cache t#i.sd.layers.#.attention.kv_cache.v_cache",
        "1 for drafts that are the most likely tokens": "draft_cond_prob",
        "paradec words its errors differently": "expected.reason",
        "the text of the question": "expected.legend",
        "paradec returns the last layer's output after the norm": "layer_#",
        "paradec refuses such scaling, which makes a row depend on the other rows of its batch": "by_row_length",
        "the checkpoint's config.json states it": "vocab_size",
    }.items()
    for field in fields.split()
}
"""End of a field's name -> why no replay reads the field."""
UNREAD_FILES: dict[str, str] = {
    "prompts.json": "prompts and right answers, which the recorded cases repeat",
    "laws.json": "distances between distributions, computed by enumeration",
    "step_schedules.json": "schedules that were searched for another model",
    "modular_config.json": "configuration of a checkpoint",
    "modular_model_index.json": "configuration of a checkpoint",
    "model_index.json": "configuration of a checkpoint",
}
"""File name -> why no replay opens the file."""


class Plugin:
    """Plugin of pytest that runs only a family's tests. A test that fails outside a case counts as a wrong case."""

    def __init__(self, tests: dict[str, str]):
        self.tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        selected, names = [], set()
        for item in items:
            file, name = str(item.path.relative_to(TESTS)), getattr(item, "originalname", item.name)
            names.add((file, name))
            family_tests = self.tests[file].split()
            is_in_family = not family_tests or name.removeprefix("test_") in family_tests
            # float32 repeats the cases of float64, with more near ties
            if is_in_family and parameters_of(item).get("precision") != "float32":
                selected.append(item)
        items[:] = selected
        for file in {file for file, _ in names}:
            for name in self.tests[file].split():
                assert (file, f"test_{name}") in names, f"there is no test_{name} in {file}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        record_failure(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record_failure(report)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def record_failure(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.failed:
        record_outcome(report.nodeid.removeprefix("tests/"), "wrong", report.longreprtext.splitlines()[-1])


def why_not_compared(field: str) -> str:
    parts = field.split(".")
    names = [".".join(parts[start:]) for start in range(len(parts))]
    return next((WHY_NOT_COMPARED[name] for name in names if name in WHY_NOT_COMPARED), "not known to tests/replays.py")


def report(folder: Path) -> bool:
    """Print unread fields, unread files and cases that differ or are refused; return whether the replay succeeded."""
    counts_by_field: dict[str, list[tuple[int, str]]] = {}
    for (subfolder, field), count in unread_fields(folder).items():
        counts_by_field.setdefault(field, []).append((count, subfolder))
    for field, entries in sorted(counts_by_field.items()):
        shown = ", ".join(name for _, name in sorted(entries, reverse=True)[:3]) + ", ..." * (len(entries) > 3)
        print(f"not compared: {field} ({sum(count for count, _ in entries)} in {shown}): {why_not_compared(field)}")
    for path in unread_files(folder):
        name = str(path.relative_to(folder))
        if path.name in UNREAD_FILES:
            print(f"not compared: {name}: {UNREAD_FILES[path.name]}")
        else:
            record_outcome(name, "refused", "no replay reads this file")
    counts = dict.fromkeys(recorded.RANKS, 0)
    for name, outcome in sorted(OUTCOMES.items()):
        counts[outcome.rank] += 1
        if outcome.rank != "replayed":
            print(f"{outcome.rank}: {name}: {outcome.reason}")
    replayed, ties, wrong = counts["replayed"], counts["near tie"], counts["wrong"]
    print(f"{replayed} replayed, {ties} near ties, {counts['refused']} refused, {wrong} wrong")
    return replayed + ties > 0 and wrong == 0


def unread_files(folder: Path) -> list[Path]:
    """Return the JSON and JSON Lines files that no test opened, without configurations and refused cases."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".jsonl")]
    case_names = {name.partition(",")[0] for name in OUTCOMES}
    return [
        path
        for path in paths
        if path not in recorded.READ
        and not path.stem.endswith("config")
        and f"{path.parent.name}/{path.stem}" not in case_names
    ]


def main(arguments: list[str]) -> int:
    source = Path(*arguments[1:2]).resolve()
    if len(arguments) < 2 or arguments[0] not in FAMILIES or not (source.is_dir() or zipfile.is_zipfile(source)):
        print(f"usage: python tests/replays.py FAMILY FOLDER [options of pytest]; FAMILY: {', '.join(FAMILIES)}")
        return 2
    families, tests = FAMILIES[arguments[0]]
    folder = source if source.is_dir() else unpack(source, make_temporary_folder() / source.stem)
    recorded.SELECTION = Selection(folder, families)
    options = ["-q", "--no-header", "--no-summary", "--continue-on-collection-errors", f"--rootdir={ROOT}"]
    options += ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-m", "full or not full"]
    pytest.main([*options, *(str(TESTS / file) for file in tests), *arguments[2:]], [Plugin(tests)])
    return 0 if report(recorded.SELECTION.folder) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
