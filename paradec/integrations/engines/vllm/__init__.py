"""paradec's masked samplers inside vLLM, for checkpoints of block-causal masked diffusion models.

vLLM schedules requests, stores keys and values and runs the model, on its own model classes. A row of
`paradec.integrations.engines.hosted` decides which tokens of each open block become final. Usage: docs/engines.md.
Written for vLLM 0.32 and its second model runner, with its hooks for diffusion models:

- `registration.py`: registration of the checkpoints, and the configuration of an engine for them;
- `configs.py`: config.json of the checkpoints, for transformers and vLLM;
- `models.py`: vLLM's model classes under the checkpoints' names;
- `model_state.py`: inputs and attention of a forward;
- `sampler.py`: replacement of vLLM's sampler, and alignment of shifted logits;
- `slots.py`: a request's row and its current block, and queries cut at block ends;
- `scheduler.py`: prompts in chunks of whole blocks, and prompts that end within a block;
- `settings.py`, `admission.py`: settings of a request, and refusals before any work.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the checkpoints with vLLM, which calls this function in each of its processes (entry point
    "vllm.general_plugins"). Never raises: failures are logged, and vLLM continues without paradec."""
    try:
        from paradec.integrations.engines.vllm import registration

        registration.register()
    except Exception as error:  # any kind of error: other releases of vLLM must still start
        # a child of vLLM's logger, so that the message is shown
        logging.getLogger("vllm.plugins.paradec").warning(
            "paradec's models are not available in vLLM: %s: %s", type(error).__name__, error
        )
