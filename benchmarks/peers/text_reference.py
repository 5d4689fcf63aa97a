"""A public decoder of LLaDA or Dream, run for `text.py` or `rule.py` in a separate interpreter and environment.

    python benchmarks/peers/text_reference.py NAME CHECKOUT TASK.json

The decoder (NAME in `REFERENCES`) is neither changed nor copied: it is imported from its checkout, and called as in its
own scripts. Modules that are missing on this machine are replaced; `text.PATCHED` lists them.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import serve


class StandIns:
    """Importer, for the end of `sys.meta_path`, of empty modules for packages that are imported but never called."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _nothing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _nothing(attribute: str) -> Any:
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Nothing


class _Nothing:
    """Any attribute of a replaced package; raises RuntimeError when it is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise RuntimeError("a stand-in was called")


def llada_model(module: Any, folder: str, dtype: torch.dtype) -> Any:
    """Build the LLaDA class of a decoder's `module`, with the weights of a checkpoint folder."""
    from safetensors.torch import load_file

    settings = json.loads((Path(folder) / "config.json").read_text())
    known = {name: value for name, value in settings.items() if name not in ("architectures", "torch_dtype")}
    config = sys.modules[module.LLaDAConfig.__module__].LLaDAConfig(**known)
    sizes = module.create_model_config_from_pretrained_config(config)
    sizes.init_device = "cpu"  # some decoders set another device
    model = module.LLaDAModelLM(config, model=module.LLaDAModel(sizes, init_params=False)).eval()
    weights = load_file(Path(folder) / "model.safetensors")
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise SystemExit(f"{folder} lacks {missing[:3]}")
    return model.to(dtype)


def _generate_arguments(task: dict[str, Any]) -> dict[str, int]:
    """Build the keyword arguments of LLaDA's `generate` and of functions derived from it."""
    keys = {"steps": "steps", "gen_length": "answer", "block_length": "block", "mask_id": "mask"}
    return {name: task[key] for name, key in keys.items()}


def llada(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of LLaDA's `generate`. LLaDA's model class is only on the hub, so Fast-dLLM's copy is used."""
    sys.path.insert(0, str(Path(task["model_checkout"]) / "llada"))
    import model.modeling_llada as classes

    module = llada_model(classes, task["folder"], getattr(torch, task["dtype"]))
    sys.path.insert(0, str(checkout))
    sys.modules.pop("generate", None)
    import generate

    prompt = torch.tensor(task["prompt"])

    def run() -> Any:
        return generate.generate(module, prompt, **_generate_arguments(task), temperature=task["temperature"])

    return run


def dream(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of Dream's `diffusion_generate` with the entropy rule, from Fast-dLLM's copy of Dream."""
    from safetensors.torch import load_file

    sys.path.insert(0, str(checkout / "dream"))
    import model.modeling_dream as classes

    folder = Path(task["folder"])
    settings = json.loads((folder / "config.json").read_text())
    known = {name: value for name, value in settings.items() if name not in ("architectures", "torch_dtype")}
    module = classes.DreamModel(classes.DreamConfig(**known)).eval()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    module.to(getattr(torch, task["dtype"]))
    end = task["end"]
    ids = {"mask_token_id": task["mask"], "pad_token_id": end, "eos_token_id": end, "bos_token_id": end}
    drawn = {"temperature": task["temperature"], "top_p": task.get("top_p")}
    config = classes.DreamGenerationConfig(
        max_new_tokens=task["answer"], steps=task["steps"], alg="entropy", **drawn, **ids
    )
    prompt = torch.tensor(task["prompt"])

    def run() -> Any:
        return module.diffusion_generate(prompt, generation_config=config)

    return run


def fast_dllm(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of Fast-dLLM (v1) with the threshold rule and the cache "none", "prefix" or "dual"."""
    sys.path.insert(0, str(checkout / "llada"))
    import generate
    import model.modeling_llada as classes

    module = llada_model(classes, task["folder"], getattr(torch, task["dtype"]))
    decode = {
        "none": generate.generate,
        "prefix": generate.generate_with_prefix_cache,
        "dual": generate.generate_with_dual_cache,
    }[task["cache"]]
    prompt = torch.tensor(task["prompt"])

    def run() -> Any:
        tokens, _ = decode(module, prompt, **_generate_arguments(task), threshold=task["threshold"])
        return tokens

    return run


def dkv_cache(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of dKV-Cache-Decode with a forward over all positions every `refresh` steps."""
    sys.path.insert(0, str(checkout))
    import generation_utils.llada_dkv_cache_decode as decoding
    import models.modeling_llada_dkv_cache_decode as classes

    module = llada_model(classes, task["folder"], getattr(torch, task["dtype"]))
    prompt = torch.tensor(task["prompt"])

    def run() -> Any:
        with contextlib.redirect_stdout(io.StringIO()):  # discard its prints
            return decoding.generate(
                module,
                None,
                prompt,
                **_generate_arguments(task),
                enable_cache=True,
                cache_reloading_step=task["refresh"],
            )

    return run


def _import_dinfer(checkout: Path) -> None:
    """Make `dinfer` importable without its __init__ files, which import models of newer releases, and servers."""
    sys.meta_path.append(StandIns("vllm", "sglang", "flashinfer", "deepspeed"))  # type: ignore[arg-type]
    for name, folder in (("dinfer", "dinfer"), ("dinfer.model", "dinfer/model")):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(checkout / "python" / folder)]
    alone = sys.modules["vllm.distributed"] = types.ModuleType("vllm.distributed")
    alone.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    alone.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]


def dinfer_rule(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of dInfer's compiled threshold rule without a model, over one block with prepared logits."""
    _import_dinfer(checkout)
    from dinfer.decoding.parallel_strategy import ThresholdParallelDecoder

    decoder = ThresholdParallelDecoder(0, threshold=task["threshold"], mask_id=task["mask"], eos_id=task["end"])
    steps = rule_logits(task["words"], task["rows"], task["block"], task["steps"])

    def run() -> Any:
        block = torch.full((task["rows"], task["block"]), task["mask"])
        for logits in steps:
            decoder.decode(logits, 0, task["block"], block)
        return block

    return run


def rule_logits(vocab: int, rows: int, block: int, steps: int) -> list[torch.Tensor]:
    """Draw logits [rows, block, vocab] of each step. Step i is confident of its own block // steps positions."""
    draw, logits_by_step = torch.Generator().manual_seed(0), []
    per_step = block // steps
    for step in range(steps):
        logits = 2 * torch.randn((rows, block, vocab), generator=draw)
        place = torch.randint(vocab - 2, (rows, per_step, 1), generator=draw)
        logits[:, step * per_step : (step + 1) * per_step].scatter_(-1, place, 40.0)
        logits_by_step.append(logits)
    return logits_by_step


def dinfer(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a run of dInfer, block by block with its compiled threshold rule and the cache "none" or "dual"."""
    _import_dinfer(checkout)
    import dinfer.model.modeling_llada as classes
    from dinfer.decoding.generate_uniform import BlockWiseDiffusionLLM
    from dinfer.decoding.parallel_strategy import ThresholdParallelDecoder
    from dinfer.decoding.utils import BlockIteratorFactory, KVCacheFactory

    module = llada_model(classes, task["folder"], getattr(torch, task["dtype"]))
    decoder = ThresholdParallelDecoder(0, threshold=task["threshold"], mask_id=task["mask"], eos_id=task["end"])
    cache = None if task["cache"] == "none" else KVCacheFactory(task["cache"])
    engine = BlockWiseDiffusionLLM(module, decoder, BlockIteratorFactory(), early_stop=False, cache_factory=cache)
    prompt = torch.tensor(task["prompt"])

    def run() -> Any:
        return engine.generate(prompt, gen_length=task["answer"], block_length=task["block"])

    return run


REFERENCES = {
    "llada": llada,
    "dream": dream,
    "fast_dllm": fast_dllm,
    "dkv_cache": dkv_cache,
    "dinfer": dinfer,
    "dinfer_rule": dinfer_rule,
}


def main() -> None:
    name, checkout, task = sys.argv[1], Path(sys.argv[2]).resolve(), json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    serve(REFERENCES[name](checkout, task), version=str(task.get("version", "")))


if __name__ == "__main__":
    main()
