"""paradec's masked samplers inside vLLM, for checkpoints of block-causal masked diffusion models.

vLLM schedules requests, stores keys and values, and runs the model with its own model classes. The sampler decides
which tokens of each open block become final (`paradec.integrations.engines.hosted`). Usage: docs/engines.md.
The files use vLLM 0.32, its second model runner, and the runner's hooks for diffusion models:

- `registration.py`: registration of the checkpoints, and the configuration of an engine for them;
- `configs.py`: config.json of the checkpoints, for transformers and vLLM;
- `models.py`: vLLM's model classes under the checkpoints' names;
- `model_state.py`: inputs and attention of a forward;
- `sampler.py`: replacement of vLLM's sampler, and alignment of shifted logits;
- `slots.py`: a request's hosted row and its current block; splitting of a query into blocks;
- `scheduler.py`: scheduling of prompts in chunks of whole blocks, and of prompts that end within a block;
- `settings.py`, `admission.py`: settings of a request, and their check before the request is admitted.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the checkpoints with vLLM, which calls this function in each of its processes (entry point
    "vllm.general_plugins"). Never raises: an error is logged, and vLLM continues without paradec's models."""
    try:
        from paradec.integrations.engines.vllm import registration

        registration.register()
    except Exception as error:  # any kind of error: other releases of vLLM must still start
        # child of vLLM's logger: vLLM shows no messages of other loggers
        logging.getLogger("vllm.plugins.paradec").warning(
            "paradec's models are not available in vLLM: %s: %s", type(error).__name__, error
        )
