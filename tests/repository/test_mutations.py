"""The planted bugs of `tests/mutations` still fit the code; `tests/mutations/run.py` says whether tests notice them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def harness() -> object:
    spec = importlib.util.spec_from_file_location("mutations_run", ROOT / "tests" / "mutations" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutation_fits_the_code(harness: object) -> None:
    mutations = harness.load()
    assert len(mutations) >= 200
    for mutation in mutations:
        path, planted = harness.mutated(mutation)  # raises unless its code is there once
        if path.suffix == ".py":
            compile(planted, path.name, "exec")
        assert mutation.why and mutation.tests, mutation.name
        for test in mutation.tests:
            if test.startswith("tests/"):
                assert (ROOT / test.split("::")[0]).exists(), f"{mutation.name}: {test}"


def test_a_mutation_survives_a_move_and_a_reformat(harness: object, tmp_path: Path) -> None:
    planted = {}
    for name, code in {
        "first.py": "class A:\n def f(self, x):\n  if x >  1 and \\\n   x < 9: return [x,\n   1]\n",
        "else/where.py": "class A:\n  # moved\n  def f(self, x):\n    if x > 1 and x < 9:\n      return [x, 1]",
    }.items():
        root = tmp_path / name.replace("/", "_")
        (root / "paradec" / name).parent.mkdir(parents=True)
        (root / "paradec" / name).write_text(code)
        for mutation in (
            harness.Mutation("expression", "A.f", "x < 9", "x <= 9", ["tests/x.py"], "9 is left out"),
            harness.Mutation("statement", "A.f", "return [x, 1]", "return [x]\nprint(x)", ["tests/x.py"], "no 1"),
            harness.Mutation("nothing", "A.f", "return [x, 1]", "", ["tests/x.py"], "nothing comes back"),
        ):
            path, text = harness.mutated(mutation, root)
            assert path == root / "paradec" / name
            planted.setdefault(mutation.name, []).append(ast.dump(ast.parse(text)))
    assert all(one == other for one, other in planted.values()) and len(set(map(tuple, planted.values()))) == 3


def test_a_mutation_that_does_not_fit_is_refused(harness: object, tmp_path: Path) -> None:
    (tmp_path / "paradec").mkdir()
    (tmp_path / "paradec" / "code.py").write_text("def f():\n    return 1 + 1\n")
    twice = harness.Mutation("twice", "f", "1", "2", ["tests/core/test_rng.py"], "f is wrong")
    with pytest.raises(ValueError, match="twice: its code is 2 times in f .*, not once"):
        harness.mutated(twice, tmp_path)
    with pytest.raises(ValueError, match="g: 0 definitions are called so"):
        harness.mutated(replace(twice, at="g"), tmp_path)
    (tmp_path / "a.toml").write_text('[[mutation]]\nname = "a"\nat = "f"\nbefore = "a"\nafter = "a"\n')
    with pytest.raises(ValueError, match="'a': .*tests"):
        harness.load(tmp_path)
