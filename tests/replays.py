"""Runs the tests that replay recorded cases, over another set of them.

    python tests/replays.py FAMILY FOLDER [options of pytest]

FOLDER holds what `tests/golden/FAMILY` does: other cases, in files of other names, of other checkpoints. The tests find
it in the family's variable (`places.golden`), so that each of them can be run over it alone, too. All cases are
replayed, those that are marked `full` as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from places import ROOT, variable  # noqa: E402

REPLAYS = {
    "traces": {
        **{f"samplers/masked/test_traces{part}.py": "" for part in ("", "_dinfer", "_pipelined")},
        "samplers/masked/rules/test_traces_adablock.py": "",
        **{f"samplers/masked/ahead/test_traces_{part}.py": "" for part in ("freedave", "lopa")},
        "samplers/masked/rules/test_factor_profile.py": "public_traces",
        "caches/test_traces_caches.py": "",
        "caches/test_traces_suffix.py": "",
        "caches/test_d2.py": "public_traces density_as_a_prior",
    },
    "moe": {
        "samplers/masked/test_traces_moe.py": "",
        "models/text/test_moe.py": "facts logits logits_of_unequal_rows_in_one_batch logits_over_a_store "
        "hidden_states_and_routing",
    },
    "next-image": {
        "samplers/scales/test_golden_scales.py": "",
        "samplers/test_distilled.py": "llamagen_replays_the_reference",
        "samplers/test_distilled_var.py": "replays_the_reference",
        "samplers/continuous/test_cspd.py": "replays_the_reference replays_the_rule",
        "samplers/causal/test_jacobi_blocks.py": "blocks_are_those_of_the_public_code "
        "a_block_that_stays_in_the_store_has_another_fixed_point "
        "the_published_early_exit_is_another_text_and_the_prefix_is_not",
        "models/images/test_lpd.py": "a_recorded_run a_recorded_forward",
        "models/images/test_nar.py": "replays_the_reference the_mask_and_one_forward_are_the_reference_s",
        "core/test_orders.py": "a_recorded_order",
    },
    "sjd": {"samplers/causal/test_jacobi.py": "reference_verification"},
    "gsd": {"samplers/causal/test_jacobi.py": "reference_verification"},
    "scd": {"samplers/causal/test_jacobi.py": "reference_verification"},
    "lantern": {"samplers/causal/test_jacobi.py": "reference_tree_verification"},
    "llamagen": {"models/images/test_llamagen.py": "logits_of_the_public_code vq_decode_of_the_public_code"},
    "diffusion": {
        "samplers/forecast/test_taylorseer.py": "schedules states_and_forecasts variants",
        "samplers/forecast/test_step_masks.py": "equals_cache_dit",
        "integrations/diffusers/test_accelerate.py": "latents_of_the_traces",
    },
    "recap": {
        "samplers/masked/rules/test_recap.py": "replays_the_reference schedules_are_the_reference_s",
        "models/images/test_mar.py": "replays_the_reference",
    },
    "proteins": {
        "models/proteins/test_network.py": "numbers_along_the_chain scores_are_those_of_the_public_code "
        "single_residues_are_those_of_the_public_code a_design_is_drawn_from_the_same_probabilities",
    },
    "ligands": {"models/proteins/test_relatives.py": "probabilities_are_those_of_the_public_code"},
    "images-autumn": {
        "integrations/diffusers/test_skipping.py": "seacache_replays_diffusers",
        "models/images/test_glm_image.py": "glm_image_replays_positions_and_forwards glm_image_replays_greedy "
        "glm_image_replays_draws",
        "integrations/diffusers/test_prior.py": "prior_replays_the_pipeline",
    },
    "drafters": {
        "models/test_eagle3.py": "recorded_drafts_and_what_they_were_drawn_from",
        "models/test_walking_drafters.py": "recorded_blocks_and_what_they_were_drawn_from",
        "models/test_mtp.py": "recorded_calls",
        "samplers/causal/test_siblings.py": "the_plain_step_replays_a_recorded_verification "
        "replays_a_recorded_verification",
        "tools/training/test_replay.py": "recorded_cases",
    },
    "structured": {
        "constraints/test_structured_cases.py": "",
        "samplers/masked/test_constrained.py": "recorded_runs "
        "recorded_runs_that_take_the_best_token_of_each_marginal one_token_a_step_has_the_recorded_distribution",
        "samplers/causal/test_causal_constraints.py": "recorded_greedy_runs the_recorded_masked_distribution",
        "samplers/renoising/test_canvas_constraints.py": "recorded_steps",
        "api/test_decide.py": "recorded_answers",
        "integrations/server/test_systemone.py": "recorded_answers",
    },
    "autumn": {
        "models/text/test_rotary.py": "the_tables",
        "models/text/test_nemotron_diffusion.py": "forwards the_causal_mode blocks",
        "samplers/masked/rules/test_s2d2.py": "recorded_steps",
        "samplers/masked/rules/test_levenshtein.py": "recorded_steps recorded_answers",
        "models/text/test_llada2_routing.py": "forwards over_a_store routers",
        "samplers/causal/test_self_speculative.py": "recorded_rounds sdar_decodes_as_in_blocks_of_one",
    },
}
"""The tests of each family, by the name of its folder in tests/golden: files, and which tests of them ("" is all)."""


def nodes(family: str) -> list[str]:
    """The tests of a family, as pytest takes them."""
    found = []
    for file, names in REPLAYS[family].items():
        found += [f"tests/{file}::test_{name}" for name in names.split()] or [f"tests/{file}"]
    return found


def replay(family: str, folder: Path, *options: str, **run: Any) -> subprocess.CompletedProcess[str]:
    """Run the tests of a family over the cases in a folder."""
    command = [sys.executable, "-m", "pytest", "-m", "full or not full", *nodes(family), *options]
    environment = os.environ | {variable(family): str(folder.absolute())}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **run)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in REPLAYS or not Path(arguments[1]).is_dir():
        print(f"usage: python tests/replays.py FAMILY FOLDER [options of pytest]; FAMILY: {', '.join(REPLAYS)}")
        return 2
    return replay(arguments[0], Path(arguments[1]), *arguments[2:]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
