"""Print the lowest transformers and diffusers that pyproject.toml allows, as requirements for pip."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for name in ("transformers", "diffusers"):
    (requirement,) = (entry for entry in project["dependencies"] if re.match(rf"{name}\b", entry))
    lowest = re.search(r">=([\d.]+)", requirement)
    print(f"{name}=={lowest[1]}{'.0' if lowest[1].count('.') < 2 else ''}", end=" ")
