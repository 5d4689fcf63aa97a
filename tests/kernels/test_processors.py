"""Kernels on other processors: with fewer instruction sets, and compiled for an H100."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paradec.kernels import has_triton

ROOT = Path(__file__).parents[2]
TESTS = (
    *("tests/kernels/test_token_stats.py", "tests/kernels/test_block_sparse.py", "tests/kernels/test_int8.py"),
    *("tests/samplers/masked/rules/test_history_samplers.py", "tests/samplers/masked/test_traces.py"),
    *("tests/caches/test_cache_traces.py", "tests/samplers/causal/test_sjd.py", "tests/samplers/test_filters.py"),
)

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATEN_CPU_CAPABILITY", "default"),  # also without fused multiply-add
        ("ATEN_CPU_CAPABILITY", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
    ],
)
def test_kernels_with_fewer_instruction_sets(variable: str, value: str) -> None:
    """Run tests in a new process, because PyTorch reads both variables only when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: value}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


BLOCK_SPARSE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paradec.kernels.block_sparse import triton as module

POINTERS = dict.fromkeys(("query", "key", "value", "out"), "*bf16") | dict.fromkeys(("sums", "means"), "*fp32")
POINTERS |= dict.fromkeys(("counts", "host", "tile_block", "tile_first", "tile_count", "bounds"), "*i32")
query = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="meta")
for kernel, more in (
    (module._attention_kernel, {"SPLITS": 1, "DENSE": False}),
    (module._logsumexp_kernel, {"AFTER": 1}),
    (module._means_kernel, {"QUERIES": 128}),
):
    shapes = module._tile_shapes(query, 128)
    constants = {name: value for name, value in ({"SIZE": 128} | shapes | more).items() if name in kernel.arg_names}
    kinds = POINTERS | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    if kernel is module._attention_kernel:
        kinds["blocks"] = "*i16"
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=module._launch(query, shapes))
    print(len(binary.asm["cubin"]) > 0 and binary.metadata.shared < 227 * 1024)
"""
TOKEN_STATS = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paradec.kernels.token_stats import triton as module

triton = module.triton
WORDS = {"width", "row_stride", "column_stride", "vocab", "span", "count", "splits", "num_segments", "num_ids"}
FLOATS = {"scale", "temperature"}
CONSTANTS = {"SAMPLE": True, "BLOCK": module.BLOCK, "IDS": 4, "SEGMENT": module.SEGMENT, "PADDED_SEGMENTS": 512}
POINTERS = {"logits": "*bf16", "sums": "*fp32", "tops": "*fp32", "tokens": "*i64", "ids": "*i64"}
for kernel, warps in ((module._partial_kernel, 8), (module._finish_kernel, 1)):
    signature, constants = {}, {}
    for name in kernel.arg_names:
        kind = "i32" if name in WORDS else "fp32" if name in FLOATS else POINTERS.get(name, "*fp64")
        signature[name] = "*i1" if name == "nonfinite" else kind
        if name in CONSTANTS:
            signature[name], constants[name] = "constexpr", CONSTANTS[name]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(len(binary.asm["cubin"]) > 0)
"""


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize(
    ("code", "num_kernels"), [(BLOCK_SPARSE, 3), (TOKEN_STATS, 2)], ids=["block_sparse", "token_stats"]
)
def test_kernels_compile_for_an_h100(code: str, num_kernels: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * num_kernels
