"""Old names of modules: what was imported, pickled or saved under them is found for one version."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings

import pytest

import paradec
from paradec.moved import MOVED

PROMISED = (
    "engine samplers.reference samplers.low_confidence samplers.random samplers.draft_verify samplers.lantern "
    "samplers.multi_draft samplers.bases samplers.mar samplers.maskgit samplers.recap samplers.taylorseer "
    "samplers.stopping samplers.statistics models.mar models.uvit models.pixel_dit kernels.token_stats kernels.sparsed "
    "samplers.masked samplers.masked_state samplers.jacobi samplers.forecast samplers.request"
).split()


@pytest.mark.parametrize("old", sorted({*MOVED} | {f"paradec.{name}" for name in PROMISED}))
def test_old_names_give_the_modules_that_they_became(old: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    if old not in MOVED:
        return
    assert module is importlib.import_module(MOVED[old])
    assert module.__name__ == MOVED[old] and module.__spec__.name == MOVED[old]
    assert len([w for w in caught if f"{old} is now {MOVED[old]}" in str(w.message)]) <= 1


def test_a_warning_says_the_new_name_once_and_new_names_say_nothing() -> None:
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "import paradec; paradec.samplers.create('lantern'); paradec.caches.create('dual')\n"
        "import paradec.samplers.lantern\nfrom paradec.samplers import lantern\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "is now" in line]
    assert len(told) == 1 and "paradec.samplers.lantern is now paradec.samplers.causal.lantern" in told[0]


def test_names_that_left_a_module_for_another_are_found() -> None:
    """Classes that packages export under the name of a module that they were in before."""
    from paradec.samplers.forecast import ForecastState
    from paradec.samplers.masked import MaskedSampler, View

    for cls in (MaskedSampler, View, ForecastState):
        assert cls.__module__.startswith("paradec.samplers.")
    with pytest.raises(ImportError):
        from paradec.samplers.masked import Nothing  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("paradec.samplers.threshold", "Threshold"),
        ("paradec.samplers.credit", "Credit"),
        ("paradec.samplers.sjd", "SJD"),
    ],
)
def test_pickles_of_the_version_before_load(old: str, name: str) -> None:
    value = getattr(importlib.import_module(MOVED[old]), name)()
    text = pickle.dumps(value, protocol=0).replace(MOVED[old].encode(), old.encode())
    assert old.encode() in text and MOVED[old].encode() not in text
    assert pickle.loads(text) == value


def test_what_is_exported_later_is_there() -> None:
    for name in paradec.__all__:
        assert getattr(paradec, name) is not None
    assert {*paradec.LATER} <= {*paradec.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        paradec.nothing  # noqa: B018
