"""The planted bugs of `tests/mutations` still fit the code; `tests/mutations/run.py` says whether tests notice them."""

from __future__ import annotations

import importlib.util
import sys
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
    assert len(mutations) >= 150
    for mutation in mutations:
        planted = harness.mutated(mutation)  # raises unless its text stands there once
        if mutation.file.endswith(".py"):
            compile(planted, mutation.file, "exec")
        assert mutation.why and mutation.tests, mutation.name
        for test in mutation.tests:
            if test.startswith("tests/"):
                assert (ROOT / test.split("::")[0]).is_file(), f"{mutation.name}: {test}"


def test_a_mutation_that_does_not_fit_is_refused(harness: object, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    twice = harness.Mutation("twice", "code.py", "= 1", "= 2", ["tests/test_rng.py"], "b is wrong")
    with pytest.raises(ValueError, match="twice: its text stands 2 times in code.py, not once"):
        harness.mutated(twice, tmp_path)
    (tmp_path / "a.toml").write_text('[[mutation]]\nname = "a"\nfile = "code.py"\nbefore = "a"\nafter = "a"\n')
    with pytest.raises(ValueError, match="'a': .*tests"):
        harness.load(tmp_path)
