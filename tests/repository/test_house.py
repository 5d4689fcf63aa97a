"""The repository itself: packaging, documented commands, and what importing paradec brings in."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

import paradec

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(code: str) -> str:
    """Run code with the working directory at the root of the checkout, where its folders can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def readme_commands() -> list[str]:
    """The README's commands that set everything up from a bare Python; lines that a backslash continues are one."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r" \\\n +", " ", block).splitlines()]
    return [line for line in lines if "-m venv" in line]


def test_importing_paradec_is_light() -> None:
    # Only what paradec adds to torch counts: some builds of torch import triton by themselves.
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


def test_kernels_need_no_triton() -> None:
    # What `paradec/kernels/__init__.py` says of when it is imported, and what is left where it is not installed.
    code = """
import sys, torch
before = "triton" in sys.modules  # some builds of torch import it
import paradec.kernels.token_stats as token_stats
import paradec.kernels.block_sparse as sparsed
print(before or "triton" not in sys.modules)
sys.modules["triton"] = None
logits = torch.randn(1, 2, 9000)
print(torch.equal(token_stats.token_stats(logits).token, logits.argmax(-1)))
x = torch.randn(1, 1, 8, 4)
plain = torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(torch.allclose(sparsed.sparse_attention(x, x, x, None), plain, atol=1e-6))
try:
    sparsed.sparse_attention(x, x, x, None, backend="triton")
except ValueError as error:
    print("triton is not installed" in str(error))
"""
    assert run_python(code).split() == ["True"] * 4


def test_no_kernels_beside_the_package() -> None:
    # With Hugging Face's `kernels` installed, a second one on the path stops transformers' models from importing.
    assert [path.name for path in ROOT.iterdir() if path.stem == "kernels"] == []
    assert (ROOT / "paradec" / "__init__.py").is_file()


def test_transformers_models_import_from_the_checkout() -> None:
    code = """
import importlib.util, os
from transformers import LlamaForCausalLM, Qwen2ForCausalLM
spec = importlib.util.find_spec("kernels")
places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
print(any(place.startswith(os.getcwd() + os.sep) for place in places))
"""
    assert run_python(code) == "False"


def test_wheel_has_one_top_level() -> None:
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["paradec"]}
    assert (ROOT / "paradec" / "py.typed").is_file()


def test_package_data_is_not_ignored() -> None:
    # The build leaves out what git ignores.
    tracked_files()
    data = [str(path) for path in (ROOT / "paradec").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    command = ["git", "check-ignore", "--stdin"]
    ignored = subprocess.run(command, cwd=ROOT, input="\n".join(data), capture_output=True, text=True)
    assert ignored.stdout == ""


def test_installed_version_agrees() -> None:
    try:
        installed = importlib.metadata.version(PYPROJECT["project"]["name"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("paradec is not installed")
    assert installed == paradec.__version__


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page: its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert {"docs/samplers.md", "docs/assets/threshold.gif", "CITATION.cff"} <= set(links)
    for link in links:
        file, _, anchor = link.partition("#")
        assert "://" not in link and (ROOT / file).exists(), link
        assert not anchor or anchor in anchors(ROOT / file), link


def test_the_readme_leads_to_every_page_of_the_documentation() -> None:
    """By itself, or by the home page of the documentation, which leads to all that are in the navigation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"](docs/{name}" not in text and f"]({name}" not in home] == []


def test_ci_runs_the_commands_of_the_readme() -> None:
    commands = readme_commands()
    assert len(commands) == 2
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "-m venv .venv" in line] == commands


def test_tables_are_those_of_the_results() -> None:
    """`benchmarks/tables.py` would change nothing: no figure of a table was typed by hand or left from an older run."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for file, text in tables.rendered().items():
        assert text == (ROOT / file).read_text(encoding="utf-8"), file


def imports_of(path: Path) -> set[str]:
    """The modules of paradec that a file imports, wherever in it: for types alone, inside functions and by
    `import_module("...")` too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if module_path(name) else node.module for name in inner}
    return {name for name in found if name.split(".")[0] == "paradec"}


def module_path(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


LAYERS = (
    *(
        "core",
        "kernels",
        "attention",
        "caches",
        "models",
        "constraints",
        "request",
        "samplers",
        "api",
    ),
    *("batching", "tools", "integrations schedulers", "cli"),
)
"""Packages from below to above: each imports those before it. Diffusers' hooks and schedulers share a layer."""
FLOORS = {package: floor for floor, packages in enumerate(LAYERS) for package in packages.split()}


def package_of(module: str) -> str:
    """The package of paradec that a module is in; "" for paradec itself, which names what users type."""
    return (module.split(".") + [""])[1]


def test_imports_point_one_way() -> None:
    """Nothing is imported in a circle, and what stands below knows nothing of what stands above."""
    files = sorted((ROOT / "paradec").rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    imports = {name: (imports_of(file) & names.keys()) - {name} for name, file in names.items()}
    order = list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle
    assert len(order) == len(names)
    for name, used in imports.items():
        for other in used if package_of(name) in FLOORS else ():
            assert FLOORS.get(package_of(other), 0) <= FLOORS[package_of(name)], f"{name} imports {other}"


def test_tracked_files_name_no_machine() -> None:
    folders = "|".join(["work", "root", "home", "Users", "opt", "mnt"])
    absolute = re.compile(rf"(?<![\w.~)}}-])/(?:{folders})/\w")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in absolute.finditer(text)]
    assert found == []
