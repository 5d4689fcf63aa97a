"""paradec's masked samplers inside vLLM, for checkpoints of block-causal masked diffusion models.

vLLM schedules requests, keeps the pages of keys and values and runs the model, on its own model classes; a row of
`paradec.integrations.engines.hosted` decides what of each open block becomes final. How to use it: docs/engines.md.
Written for vLLM 0.32 and its second model runner, whose hooks for diffusion models are:

- `registration.py`: what `register` tells vLLM, and how an engine for such a checkpoint is configured;
- `configs.py`: config.json of the checkpoints, as transformers and vLLM read it;
- `models.py`: vLLM's model classes under the checkpoints' names;
- `model_state.py`: inputs and attention of a forward; `sampler.py`: what becomes of the logits, and where
  models that predict shifted have them;
- `slots.py`: a request's row, which block of it the engine is at, and prompts cut at their blocks;
- `scheduler.py`: chunks of whole blocks, and prompts that end within one;
- `settings.py`, `admission.py`: what a request may say, and its refusal before any work is done.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Make the checkpoints known to vLLM, which calls this in each of its processes (entry point
    "vllm.general_plugins"). Never raises: what fails is logged, and vLLM goes on without paradec."""
    try:
        from paradec.integrations.engines.vllm import registration

        registration.register()
    except Exception as error:  # of any kind: another release of vLLM must still start
        # a child of vLLM's logger, so that it is seen
        logging.getLogger("vllm.plugins.paradec").warning(
            "paradec's models are not available in vLLM: %s: %s", type(error).__name__, error
        )
