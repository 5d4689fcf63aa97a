"""A pipeline class that attaches paradec when it is loaded.

```
pipe = DiffusionPipeline.from_pretrained(weights, custom_pipeline=folder, trust_remote_code=True)
```

`pipe.paradec` is the session: `pipe.paradec.report()`, `pipe.paradec.detach()`.
"""

import functools
from typing import Any

import diffusers

try:
    import paradec
except ImportError as error:
    raise ImportError(
        "this pipeline needs the package parallel-decoding (its module is called paradec); install it first. The "
        "package paradec on PyPI is another project"
    ) from error

# diffusers expects a single pipeline class in this file, so the base class must not be imported by name


class AcceleratedPipeline(diffusers.DiTPipeline):
    """The pipeline with a sampler of paradec on its transformer."""

    # diffusers reads from the signature which components to load
    @functools.wraps(diffusers.DiTPipeline.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.paradec = paradec.accelerate(self, "taylorseer")
