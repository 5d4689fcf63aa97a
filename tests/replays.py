"""Decode recorded cases from a folder, compare the results with the recorded ones, and print a report.

    python tests/replays.py FAMILY FOLDER [options of pytest]

FOLDER has the files of a family of tests/golden, or is an unchanged folder of the published golden data (`text`,
`next-text`, `image-ar`, ...). It may be a ZIP file. All of its cases are replayed, and no packaged cases. Checkpoints
and weights that a case names are searched in FOLDER, then next to it, then in tests/golden.

A case that does not match the recording has one of three outcomes. The report lists each with its reason:
- wrong: the results differ;
- near tie: they differ where two scores are less than 1e-7 apart;
- refused: paradec lacks the method, or the recording states that the case is not reproducible.
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
LLAMAGEN = {"models/images/test_llamagen.py": "logits_of_the_public_code vq_decode_of_the_public_code"}
RECAP = {
    "samplers/masked/rules/test_recap.py": "replays_the_reference schedules_are_the_reference_s",
    "models/images/test_mar.py": "replays_the_reference",
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
            "models/text/test_moe.py": "facts logits logits_of_unequal_rows_in_one_batch logits_over_a_store "
            "hidden_states_and_routing",
        },
    ),
    "next-image": (
        ("next-image",),
        {
            "samplers/scales/test_scales.py": "var_replays code_replays pictures_become_codes all_scales_at_once",
            "samplers/test_distilled.py": "llamagen_replays_the_reference replays_the_reference",
            "samplers/continuous/test_cspd.py": "replays_the_reference replays_the_rule",
            "samplers/causal/test_jacobi_blocks.py": "blocks_are_those_of_the_public_code "
            "a_block_that_stays_in_the_store_has_another_fixed_point",
            "models/images/test_lpd.py": "a_recorded_run a_recorded_forward",
            "models/images/test_nar.py": "replays_the_reference the_mask_and_one_forward_equal_the_reference",
            "core/test_orders.py": "a_recorded_order",
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
            "models/proteins/test_network.py": "numbers_along_the_chain scores_equal_the_public_code "
            "single_residue_scores_equal_the_public_code designs_have_the_recorded_probabilities"
        },
    ),
    "ligands": (("ligands",), {"models/proteins/test_relatives.py": "probabilities_equal_the_public_code"}),
    "images-autumn": (
        ("images-autumn",),
        {
            "integrations/diffusers/test_skipping.py": "seacache_replays_diffusers",
            "models/images/test_glm_image.py": "glm_image_replays_positions_and_forwards glm_image_replays_greedy "
            "glm_image_replays_draws",
            "integrations/diffusers/test_prior.py": "prior_replays_the_pipeline",
        },
    ),
    "drafters": (
        ("drafters",),
        {
            "models/test_eagle3.py": "the_recorded_base recorded_drafts_and_their_distributions",
            "models/test_walking_drafters.py": "recorded_drafts_and_their_distributions",
            "models/test_mtp.py": "recorded_calls",
            "samplers/causal/test_siblings.py": "the_plain_step_replays_a_recorded_verification "
            "replays_a_recorded_verification",
            "tools/training/test_replay.py": "recorded_cases",
        },
    ),
    "structured": (
        ("structured",),
        {
            "constraints/test_structured_cases.py": "",
            "samplers/masked/test_constrained.py": "recorded_runs "
            "recorded_runs_that_take_the_best_token_of_each_marginal one_token_a_step_has_the_recorded_distribution",
            "samplers/causal/test_causal_constraints.py": "recorded_greedy_runs the_recorded_masked_distribution",
            "samplers/renoising/test_canvas_properties.py": "recorded_steps",
            "api/test_decide.py": "recorded_answers",
            "integrations/server/test_systemone.py": "recorded_answers",
        },
    ),
    "autumn": (
        ("autumn",),
        {
            "models/text/test_rotary.py": "angles_equal_the_recorded_tables",
            "models/text/test_nemotron_diffusion.py": "facts forwards the_causal_mode blocks",
            "samplers/masked/rules/test_s2d2.py": "recorded_steps",
            "samplers/masked/rules/test_levenshtein.py": "recorded_steps recorded_answers",
            "models/text/test_llada2_routing.py": "facts forwards over_a_store routers",
            "samplers/causal/test_self_speculative.py": "recorded_rounds sdar_decodes_as_in_blocks_of_one",
        },
    ),
}
"""Family -> (the folders of tests/golden that FOLDER replaces, {test file: names of its tests without "test_"}).

An empty string of names means all tests of the file."""

PROVENANCE = "says where the recording comes from"
CHOICE = "selects the test that replays the case"
ONLY_IF_REPLAYED = "read only from cases that are not refused"
AFTER_END = "belongs to blocks after an end token, which paradec does not decode"
DERIVED = "follows from fields that are compared"
BOOKKEEPING = "a value that only the reference needs; its model calls are compared"
STORE_CALL = "belongs to calls that only store a block"
WEIGHT_SHAPE = "the shapes of the weights imply it"
WHY_NOT_COMPARED: dict[str, str] = {
    **dict.fromkeys(
        ("schema", "reference", "restated", "patches", "source", "note", "id", "name", "system"), PROVENANCE
    ),
    **dict.fromkeys(("torch", "diffusers", "transformers", "seconds", "dtype", "setting", "settings.file"), PROVENANCE),
    **dict.fromkeys(("float64_difference", "float32_difference", "replay_error"), PROVENANCE),
    **dict.fromkeys(("largest_relative_difference_from_float64", "generate_equals_loop"), PROVENANCE),
    **dict.fromkeys(("method", "kind", "candidates", "settings.mode", "settings.method", "settings.note"), CHOICE),
    **dict.fromkeys(("margin", "router_margin", "fp64_same"), "read only if a case differs"),
    **dict.fromkeys(("cases.seed", "cases.task", "steps.step"), "no random number depends on it"),
    **dict.fromkeys(("settings.steps", "settings.eps", "settings.top_k", "settings.top_p"), "unused by this rule"),
    **dict.fromkeys(("settings.alg_temp", "settings.alg", "settings.decoding_steps"), "unused by this rule"),
    **dict.fromkeys(("settings.temperature", "settings.cfg_scale", "settings.remasking"), "0, or unused by this rule"),
    **dict.fromkeys(("settings.use_cache", "settings.cache_steps", "settings.threshold"), "unused by this rule"),
    **dict.fromkeys(("trajectory_step_map", "nfe_returned", "kept_suffix", "stats", "rounds"), BOOKKEEPING),
    **dict.fromkeys(("reference_nfe", "tau", "discarded_u", "calls.cached"), BOOKKEEPING),
    **dict.fromkeys(("kept_by_top_p", "end_in_unrestricted", "p", "q", "ratio", "score", "span"), DERIVED),
    **dict.fromkeys(("canvases.state", "masks", "draft", "steps.block"), DERIVED),
    "settings.T": "equals settings.temperature",
    "settings.rule": "unused by this rule",
    **dict.fromkeys(("stop_ids", "eos_id", "settings.stop", "settings.eos_early_stop"), "these runs ignore end tokens"),
    **dict.fromkeys(("cases.steps", "cases.nfe"), "counts calls of diffusers' loop; its outputs are compared"),
    "steps.input_shape": "paradec's loop evaluates windows of other lengths; the tokens that it commits are compared",
    "steps.conf": "compared where the rule's score is this probability",
    **dict.fromkeys(
        ("base", "creation_conf", "extra_token", "steps.cached", "keys", "refresh_to", "store"), BOOKKEEPING
    ),
    **dict.fromkeys(("steps.cached", "settings.rollout_p", "full_attention"), BOOKKEEPING),
    **dict.fromkeys(("settings.cache", "settings.function"), CHOICE),
    **dict.fromkeys(("answer", "correct", "decoded", "prompt"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("cases.final_ids", "cases.prompt_ids"), ONLY_IF_REPLAYED),
    "block_history": "read only with adaptive blocks",
    "steps.fed": "read only for rules that are compared position by position",
    **dict.fromkeys(("rope_parameters.factor", "long_factor", "short_factor"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("original_max_position_embeddings", "max_position_embeddings"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("attention_factor", "inv_freq", "cos", "sin", "positions"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("head_dim", "cases.adapter", "cases.input_ids"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("cases.before", "cases.causal", "cases.name"), ONLY_IF_REPLAYED),
    **dict.fromkeys(("steps.ids", "steps.closed", "calls.stored"), STORE_CALL),
    **dict.fromkeys(("steps.done", "steps.logits", "steps.original", "steps.post_steps", "steps.steps"), DERIVED),
    "explicit_given": CHOICE,
    **dict.fromkeys(("drafts", "hidden", "input_ids", "logits"), "belongs to a last call that paradec does not make"),
    **dict.fromkeys(
        ("max_new_tokens", "settings.sampler", "block_length"), "the run was sampled: its steps are replayed one by one"
    ),
    **dict.fromkeys(("blocks.calls", "committed", "blocks.first", "next_first", "trajectory"), AFTER_END),
    **dict.fromkeys(("cached_after", "converged", "iterations", "greedy", "max_new_seq_len"), AFTER_END),
    **dict.fromkeys(
        ("averaged_logits", "input_tokens", "kv"), "belongs to calls whose guidance weight makes one half irrelevant"
    ),
    **dict.fromkeys(("f_hat", "next_input", "teacher_end", "unknown_after", "result"), DERIVED),
    **dict.fromkeys(("draws", "settings.eos", "seed"), "no random number depends on it"),
    "step.#.values": DERIVED,
    **dict.fromkeys(("log.context", "log.mask", "log.out", "log.tokens", "log.position_ids"), DERIVED),
    **dict.fromkeys(("log.op", "log.fast", "log.kind", "log.n_cached", "feature_kind"), CHOICE),
    **dict.fromkeys(("dit.scheduler", "dit.stored", "transformer_seed", "flux.seed", "settings.seed"), PROVENANCE),
    **dict.fromkeys(("proj_out", "proj_mlp", "transformer_blocks.0", "ff"), BOOKKEEPING),
    **dict.fromkeys(("attn_dropout", "proj_dropout", "use_checkpoint", "qkv_bias", "skip"), "constant in this model"),
    **dict.fromkeys(("mlp_ratio", "patch_size", "decoder_embed_dim", "decoder_num_heads"), WEIGHT_SHAPE),
    **dict.fromkeys(("model.depth", "embed_dim", "num_classes", "img_size"), WEIGHT_SHAPE),
    **dict.fromkeys(("T", "nc", "pre", "seq_len"), "read only from rows that are not refused"),
    "diff_fast_ratio": "ignored by the reference: its local steps used half of the head's steps",
    "model": "the folder's name",
    **dict.fromkeys(
        ("steps.commit", "steps.edit"), "belongs to calls of diffusers, or to calls that only store a block"
    ),
    "steps.start": STORE_CALL,
    "cases.about": PROVENANCE,
    "facts.block": "this format has no blocks",
    "mode": CHOICE,
    "extra.note": PROVENANCE,
    "tree": "a name for the value of tree_choices",
    "c#i.sd.layers.#.attention.kv_cache.k_cache": "only its length is read",
    "c#i.sd.layers.#.attention.kv_cache.v_cache": "empty",
    "t#i.sd.layers.#.attention.kv_cache.k_cache": "only its length is read",
    "t#i.sd.layers.#.attention.kv_cache.v_cache": "empty",
    "draft_cond_prob": "1 for drafts that are the most likely tokens",
    "expected.reason": "paradec words its errors differently",
    "expected.legend": "the text of the question",
    "layer_#": "paradec returns the last layer's output after the norm",
    "by_row_length": "paradec refuses such scaling, which makes a row depend on the other rows of its batch",
    "vocab_size": "the checkpoint's config.json states it",
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
    """Runs only the tests of a family. Tests that fail outside a case, as with unreadable files, count as wrong."""

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
    """Print the unread fields and files, and the outcome of each case. Return whether no case is wrong."""
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
