"""A block for diffusers' modular pipelines that attaches paradec before the transformer is called.

```
block = ModularPipelineBlocks.from_pretrained(folder, trust_remote_code=True)
blocks.sub_blocks.insert("paradec", block, 0)
```
"""

from __future__ import annotations

from typing import Any

from diffusers import ModularPipelineBlocks
from diffusers.modular_pipelines import ComponentSpec, InputParam, OutputParam

try:
    import paradec
except ImportError as error:
    raise ImportError(
        "this block needs the package parallel-decoding (its module is called paradec); install it first. The package "
        "paradec on PyPI is another project"
    ) from error


class ParadecBlock(ModularPipelineBlocks):
    """Place it before the denoising block. It stays attached until the next call, or `state.session.detach()`."""

    model_name = None

    @property
    def description(self) -> str:
        return "Attaches a sampler of paradec to the pipeline's transformer."

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("transformer"), ComponentSpec("scheduler")]

    @property
    def inputs(self) -> list[InputParam]:
        what = "a sampler or rule of paradec.accelerate, by itself or by name; 'none' leaves it plain"
        return [InputParam("paradec", default="taylorseer", description=what)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("session", description="paradec's session, with report() and detach(); None where plain")]

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        block = self.get_block_state(state)
        before = getattr(components, "_paradec_session", None)
        if before is not None:
            before.detach()
        plain = isinstance(block.paradec, str) and block.paradec == "none"  # None would be the default
        block.session = None if plain else paradec.accelerate(components, block.paradec)
        components._paradec_session = block.session
        self.set_block_state(state, block)
        return components, state
