"""vLLM in this process on a CPU: its second model runner with Triton's interpreter, and small random checkpoints.

PyPI's Triton has no CPU backend, but vLLM's CPU builds check for it. A stub backend suffices, because kernels are
interpreted. Import this module before vllm.
"""

import gc
import json
import os
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which .ci/engines installs")
os.environ |= dict.fromkeys(("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE"), "1")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": "paradec"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
import triton.backends  # noqa: E402


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends.setdefault("cpu", types.SimpleNamespace(driver=_Driver, compiler=None))

import torch  # noqa: E402
from checkpoints import CONFIGS, family_weights, small_config, small_weights  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

import paradec  # noqa: E402
from paradec.models.adapter import Model  # noqa: E402

__all__ = ["BLOCK", "END", "KINDS", "MASK", "VOCAB", "Engine", "VLLMValidationError", "checkpoint", "paradec"]

BLOCK = 4
VOCAB, MASK, END = 48, 47, 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "max_position_embeddings": 128, "mask_token_id": MASK, "eos_token_id": END,
    "pad_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
"""vLLM's attention on a CPU needs a head size of at least 32."""
MOE_CHECKPOINTS = {"llada2": "llada2-tiny", "sdar_moe": "sdar-moe-tiny"}
KINDS = ("sdar", "fast_dllm_v2", "llada2", "sdar_moe")


def checkpoint(kind: str, folder: Path) -> Path:
    """Write a small random checkpoint of a kind to a new folder and return the folder."""
    if kind in MOE_CHECKPOINTS:
        name = MOE_CHECKPOINTS[kind]
        block = {"block_length" if kind == "llada2" else "block_size": BLOCK}
        config = small_config(name, **SIZES, **block, moe_intermediate_size=32)
        if kind == "llada2":
            config |= {"rotary_dim": 16}
        weights = small_weights(name, config)
    else:
        config = CONFIGS[kind] | SIZES
        weights = family_weights(kind, config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    scaled = {name: 0.6 * tensor if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file({name: tensor.float().contiguous() for name, tensor in scaled.items()}, folder / "model.safetensors")
    return folder


class Engine:
    """vLLM's `LLM` for a checkpoint, with the same model in paradec in float32 and float64."""

    def __init__(self, folder: Path, **options: Any):
        arguments: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options,
        }  # fmt: skip
        self.llm = LLM(
            model=str(folder), enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=True, **arguments
        )
        self.model: Model = paradec.load(folder)
        self.exact: Model = paradec.load(folder, dtype="float64")

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def params(self, new: int, settings: Any = None, **others: Any) -> SamplingParams:
        return SamplingParams(max_tokens=new, extra_args=None if settings is None else {"paradec": settings}, **others)

    def answers(self, prompts: list[list[int]], params: Any) -> list[Any]:
        result = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in result]

    def expected(self, prompt: list[int], new: int, **request: Any) -> list[int]:
        """Return the tokens of `paradec.generate` with the end token. They must be equal in float32 and float64."""
        outs = [paradec.generate(model, [prompt], max_new_tokens=new, **request) for model in (self.model, self.exact)]
        rows = [(output.sequences[0, output.filled[0]].tolist(), output.tokens[0]) for output in outs]
        result, exact = (row[:count] if request.get("eos_early_stop", True) else row for row, count in rows)
        assert result == exact, "a near-tie: give other weights"
        return result

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()
        torch._dynamo.reset()
