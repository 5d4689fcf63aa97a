"""Kernels where torch and oneDNN may use fewer of the processor's instructions than it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATISTICS = "tests/kernels/test_token_stats.py"
FEW = tuple(
    f"{STATISTICS}::test_{name}"
    for name in (
        *("agreement_at_every_temperature", "odd_vocabularies", "sure_tokens_keep_their_order_and_doubt"),
        *("extreme_logits_are_no_infinities", "draws_beside_boundaries_are_those_of_float64"),
    )
)
ALL = (
    *(STATISTICS, "tests/kernels/test_block_sparse.py", "tests/samplers/test_statistics.py"),
    *("tests/samplers/masked/rules/test_history_samplers.py", "tests/samplers/masked/test_traces.py"),
    *("tests/caches/test_cache_traces.py", "tests/samplers/causal/test_sjd.py"),
)


@pytest.mark.parametrize(
    ("variable", "value", "tests"),
    [
        ("ATEN_CPU_CAPABILITY", "default", FEW),  # without fused products, too
        pytest.param("ATEN_CPU_CAPABILITY", "default", ALL, marks=pytest.mark.full),
        pytest.param("ATEN_CPU_CAPABILITY", "avx2", ALL, marks=pytest.mark.full),
        pytest.param("ONEDNN_MAX_CPU_ISA", "AVX2", ALL, marks=pytest.mark.full),
    ],
)
def test_fewer_instructions(variable: str, value: str, tests: tuple[str, ...]) -> None:
    """In processes of their own: both are read once, when torch is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: value}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
