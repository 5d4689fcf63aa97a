"""Export of folders for transformers and diffusers."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paradec.core.checks import check_choice, short_repr
from paradec.core.text_files import read_json, write_bytes, write_json
from paradec.core.version import __version__
from paradec.models.images.loading import PACKAGED_PIPELINES as PACKAGED_FOLDERS
from paradec.models.images.loading import packaged_path

KINDS = ("generate", "pipeline")
HERE = Path(__file__).parent
REQUIREMENT = f"parallel-decoding>={__version__}"
PACKAGED_CLASSES = ("PixelDiTPipeline",)

README = {
    "generate": """---
library_name: transformers
tags:
- custom_generate
---

# Decoding with paradec

```python
model.generate(ids, custom_generate="{folder}", trust_remote_code=True, max_new_tokens=64, sampler="sjd")
```

`sampler`, `seed`, `kv_cache` and the other arguments of `paradec.hf_generate` can be used next to transformers' own.
Without `sampler`, a model without masks is decoded by "sjd", which is lossless. A masked model needs
`prediction="same"` or `"shifted"`, and `mask_token_id` if its config has none. Do not pass `revision` or `token`:
transformers uses them to read the folder. In a model's repository, `custom_generate/` replaces its `generate`.
""",
    "pipeline": """---
library_name: diffusers
---

# {base} with paradec attached

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("path/to/weights", custom_pipeline="{folder}", trust_remote_code=True)
print(pipe.paradec.report())  # after a run; pipe.paradec.detach() leaves the plain pipeline
```

The sampler is `{sampler}`. With the folders of the weights copied next to `model_index.json`,
`DiffusionPipeline.from_pretrained("{folder}", trust_remote_code=True)` loads the class and the weights.
""",
}
README_END = """
Written with {versions}. Install `{requirement}` first; PyPI's `paradec` is another project.
"""


def export_folder(
    kind: str, folder: str | os.PathLike[str], *, model: str | None = None, sampler: str | None = None
) -> list[Path]:
    """Write a folder with code that transformers or diffusers loads, and that calls paradec.

    kind: "generate" (transformers' `custom_generate`) or "pipeline" (a diffusers pipeline class).
    folder: an empty folder, or the name of a new one.
    model: for "pipeline", a pipeline's folder, or a packaged pipeline's name. Its model_index.json has the class.
    sampler: for "pipeline", a sampler's name for `paradec.accelerate`; by default "taylorseer".
    Returns the files. Raises ValueError for an argument out of its range, a folder that is not empty, or a class that
    diffusers does not have; OSError if a file cannot be written."""
    check_choice("kind", kind, KINDS)
    for name, value in (("model", model), ("sampler", sampler)):
        if kind != "pipeline" and value is not None:
            raise ValueError(f"{name}={short_repr(value)} is for the kind 'pipeline'; leave it out")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"folder={os.fspath(folder)!r} is not empty; give an empty folder, or a new name")
    files = {"generate": _generate_files, "pipeline": _pipeline_files}[kind](model, sampler)
    libraries = ("torch", "transformers" if kind == "generate" else "diffusers")
    versions = ", ".join([f"paradec {__version__}", *(f"{name} {version(name)}" for name in libraries)])
    values = {"folder": target.name or os.fspath(folder), "versions": versions, "requirement": REQUIREMENT}
    values |= {"base": files.pop("base", ""), "sampler": sampler or "taylorseer"}
    files["README.md"] = (README[kind] + README_END).format(**values)
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            write_bytes(path, content.encode())
        else:
            write_json(path, content)
    return [target / name for name in sorted(files)]


def _generate_files(model: str | None, sampler: str | None) -> dict[str, Any]:
    requirements = REQUIREMENT + "\n"
    return {"custom_generate/generate.py": _read_source("generate"), "custom_generate/requirements.txt": requirements}


def _pipeline_files(model: str | None, sampler: str | None) -> dict[str, Any]:
    if model is None:
        raise ValueError("model=None: kind 'pipeline' needs a pipeline's folder, whose class it exports")
    is_packaged = model in PACKAGED_FOLDERS and not Path(model).exists()
    try:
        index = read_json(Path(packaged_path(model) if is_packaged else model) / "model_index.json")
    except OSError:
        raise ValueError(f"model={model!r} has no model_index.json: it is not a pipeline's folder") from None
    base = index.get("_class_name")
    import diffusers

    if not isinstance(base, str) or not (base in PACKAGED_CLASSES or hasattr(diffusers, base)):
        raise ValueError(
            f"model={model!r}: model_index.json names {short_repr(base)}, which is not a diffusers pipeline"
        )
    from paradec.samplers.forecast.methods import sampler_from

    sampler_from(sampler)  # raises for a wrong name
    owner = "paradec" if base in PACKAGED_CLASSES else "diffusers"
    text = _read_source("pipeline").replace("diffusers.DiTPipeline", f"{owner}.{base}")
    text = text.replace('"taylorseer"', json.dumps(sampler or "taylorseer"))
    if owner == "paradec":
        text = text.replace("import diffusers\n\n", "")
    index["_class_name"] = ["pipeline", "AcceleratedPipeline"]
    return {"pipeline.py": text, "model_index.json": index, "base": base}


def _read_source(name: str) -> str:
    """Read a source file of this package."""
    return (HERE / f"{name}.py").read_text(encoding="utf-8")
