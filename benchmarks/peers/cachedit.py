"""cache-dit's DBCache with its Taylor calibrator, evaluating at the same steps; one block of each list always runs.

    python benchmarks/peers/cachedit.py [--sizes tiny wide] [--models DiT FLUX]

Needs `pip install -e ".[bench]"`. Prints what `pictures.py` measures of it alone; nothing is written.
"""

from __future__ import annotations

import contextlib
from typing import Any

from forecasting import FULL_STEPS, SCHEDULE, STEPS, Attach, arguments, race
from torch import nn


@contextlib.contextmanager
def attach(module: nn.Module, model: str) -> Any:
    """Its static mask of steps, so that nothing is measured and no step is its own choice."""
    import cache_dit

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=1,
        residual_diff_threshold=1e9,
        num_inference_steps=STEPS,
        steps_computation_mask=[int(step in FULL_STEPS) for step in range(STEPS)],
        steps_computation_policy="static",
        enable_separate_cfg=False,
    )
    calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=SCHEDULE["order"])
    cache_dit.enable_cache(module, cache_config=config, calibrator_config=calibrator)
    yield lambda: cache_dit.refresh_context(module, num_inference_steps=STEPS)
    cache_dit.disable_cache(module)


def peers() -> dict[str, tuple[Attach, str]]:
    """For `forecasting.race`.

    Raises:
        ImportError: it is not installed.
    """
    import cache_dit

    return {"cache-dit": (attach, cache_dit.__version__)}


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    race(peers(), args.models, args.sizes, args.turns)
