"""Which modules `import paradec` loads, and which packages of paradec import which."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

from places import ROOT


def run_python(code: str) -> str:
    """Run code in a new process at the root of the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_paradec_loads_no_heavy_package() -> None:
    # torch is imported first, because some builds of torch import triton.
    code = """
import sys, torch
before = set(sys.modules)
import paradec
print(*sorted(set(sys.modules) - before), sep="\\n")
"""
    added = run_python(code).splitlines()
    assert "paradec" in added
    heavy = {"triton", "diffusers", "transformers.modeling_utils", "accelerate", "scipy", "typer", "rich"}
    assert not heavy.intersection(added)


def test_kernels_work_without_triton() -> None:
    # Triton is imported on first use (see `paradec/kernels/__init__.py`); without it the references work.
    code = """
import sys, torch
loaded_by_torch = "triton" in sys.modules
import paradec.kernels.token_stats as token_stats
import paradec.kernels.block_sparse as block_sparse
print(loaded_by_torch or "triton" not in sys.modules)
sys.modules["triton"] = None
logits = torch.randn(1, 2, 9000)
print(torch.equal(token_stats.token_stats(logits).token, logits.argmax(-1)))
x = torch.randn(1, 1, 8, 4)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(torch.allclose(block_sparse.sparse_attention(x, x, x, None), expected, atol=1e-6))
try:
    block_sparse.sparse_attention(x, x, x, None, backend="triton")
except ValueError as error:
    print("triton is not installed" in str(error))
"""
    assert run_python(code).split() == ["True"] * 4


def imports_of(path: Path) -> set[str]:
    """Return all modules of paradec that a file imports anywhere, also by `import_module("...")`."""
    result = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            result |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= {name if module_path(name) else node.module for name in inner}
    return {name for name in result if name.split(".")[0] == "paradec"}


def module_path(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


LAYERS = (
    *("core", "kernels", "attention", "caches", "models", "constraints", "request", "samplers", "api"),
    *("batching", "tools", "integrations schedulers", "cli"),
)
"""Packages from the lowest layer to the highest. A package imports only from its own and lower layers."""
LAYER_INDEX = {package: index for index, packages in enumerate(LAYERS) for package in packages.split()}


def package_of(module: str) -> str:
    """Return the subpackage of paradec that contains a module; "" for paradec itself."""
    return (module.split(".") + [""])[1]


def test_no_package_imports_from_a_higher_layer() -> None:
    files = sorted((ROOT / "paradec").rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    imports = {name: (imports_of(file) & names.keys()) - {name} for name, file in names.items()}
    order = list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError for a circular import
    assert len(order) == len(names)
    for name, imported in imports.items():
        for other in imported if package_of(name) in LAYER_INDEX else ():
            assert LAYER_INDEX.get(package_of(other), 0) <= LAYER_INDEX[package_of(name)], f"{name} imports {other}"
