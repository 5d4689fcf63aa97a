"""Modules that stand beside the package's: benchmarks/ and examples/ are scripts, and no packages."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from places import ROOT


def load_script(file: str) -> ModuleType:
    """The module of a file such as "benchmarks/antibody.py".

    Its folder comes last among the places that modules are imported from, for what stands beside it: some names there
    are those of installed packages, which come first.
    """
    path = ROOT / file
    name = f"{path.parent.name}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
