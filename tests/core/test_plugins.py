"""Samplers and caches of other packages, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from dataclasses import dataclass
from paradec.caches.dual import DualCache
from paradec.samplers.masked import MaskedSampler

@dataclass(frozen=True)
class Everything(MaskedSampler):
    name = "everything"
    summary = "all at once"
    def select(self, view):
        return view.candidates

@dataclass(frozen=True)
class Mine(DualCache):
    name = "mine"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder as pip would leave it: a module, and the metadata that names what is in it."""
    (tmp_path / "others.py").write_text(MODULE)
    metadata = tmp_path / "others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[paradec.samplers]\neverything = others:Everything\nbroken = nowhere:Thing\nthreshold = others:Everything\n"
        "[paradec.caches]\nmine = others:Mine\n"
    )
    return tmp_path


def run(package: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(Path.cwd())])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_what_other_packages_name_is_there(package: Path) -> None:
    done = run(
        package,
        """
import sys, warnings
import paradec
assert "others" not in sys.modules  # found when asked for, imported when used
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert {"everything", "broken"} <= {*paradec.samplers.names()} and "mine" in paradec.caches.names()
print(*{str(warning.message) for warning in caught})
assert "others" not in sys.modules
model = paradec.load()
out = paradec.generate(model, "Sort: pear fig apple", sampler="everything+threshold", cache="mine", max_new_tokens=8)
print(type(paradec.samplers.create("threshold")).__module__, out.nfe > 0)
same = paradec.samplers.registry.from_dict(paradec.samplers.create("everything").to_dict())
print(same == paradec.samplers.create("everything"))
try:
    paradec.samplers.create("broken")
except ImportError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert first == (
        "sampler 'threshold' of others (others:Everything) is left out: the name is taken by "
        "'paradec.samplers.masked.rules.threshold:Threshold'"
    )
    assert second == "paradec.samplers.masked.rules.threshold True"
    assert third == "True"
    assert fourth == "sampler 'broken' of another package cannot be imported: No module named 'nowhere'"
