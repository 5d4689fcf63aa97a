"""Answers requests with one version of paradec, for `differential.py`, which starts it under two versions.

It may use public names alone, since it runs under versions whose modules stand elsewhere. What is documented but not
exported is looked up by its definition (`find`). Requests come as JSON lines on standard input; each is answered by one
line on what standard output was.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paradec

TESTS = Path(__file__).resolve().parent
SUPPORT = TESTS / "support"
GOLDEN = TESTS / "golden"
VOCAB, MASK, END = 41, 40, 39
"""Of the small random models that are made in memory."""
CODES, IMAGE_MASK = 32, 31
"""Of the small AmusedPipeline."""
FIELDS = (
    "text", "sequences", "new_tokens", "attention_mask", "filled", "row_nfe", "nfe", "row_forwards",
    "forwarded_tokens", "tokens", "finished", "fills", "race_winner", "cost", "attention", "images", "codes",
    "accepted", "steps", "prompt_lengths", "draft_nfe", "tokens_per_forward",
)  # fmt: skip
"""What is compared of an output, where it has it."""


# ---- what a request names --------------------------------------------------------------------------------------------


@functools.lru_cache(None)
def find(name: str) -> Any:
    """A public class or function of the package by the line that defines it, wherever its module stands."""
    root = Path(paradec.__file__).parent
    pattern = re.compile(rf"^(?:class|def) {name}\b", re.MULTILINE)
    for path in sorted(root.rglob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8")):
            parts = [part for part in path.relative_to(root.parent).with_suffix("").parts if part != "__init__"]
            return getattr(importlib.import_module(".".join(parts)), name)
    raise LookupError(f"no module of {root} defines {name}")


@functools.lru_cache(None)
def tiny_pipelines() -> Any:
    sys.path.append(str(SUPPORT))  # for what it imports beside it
    spec = importlib.util.spec_from_file_location("tiny_pipelines", SUPPORT / "tiny_pipelines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_module(kind: str, layers: int = 2, seed: int = 0, hidden: int = 32) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    sizes = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**sizes)).double().eval()
    sizes["num_key_value_heads"] = 2
    made = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "same" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    return made.double().eval()


class Plain(nn.Module):
    """A module of one's own: ids -> logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.config = type("Config", (), {"vocab_size": VOCAB})()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.mix = nn.Linear(16, 16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        with torch.no_grad():  # confident of pairs of tokens: ties, and confidences of exactly 1/2
            self.head.weight.mul_(60)
            self.head.weight[1::2] = self.head.weight[:-1:2].clone()
            self.head.bias[1::2] = self.head.bias[:-1:2].clone()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        after = hidden.flip(1).cumsum(1).flip(1)
        return self.head(torch.tanh(self.mix(hidden.cumsum(1) - 0.5 * after) + hidden))


@functools.lru_cache(None)
def model(name: str) -> Any:
    """A model by the name that requests give it, "kind:dtype"."""
    kind, _, dtype = name.partition(":")
    given: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if kind == "packaged":
        return paradec.load(**given)
    if kind in ("llada", "dream"):
        return paradec.load(GOLDEN / f"{kind}-tiny", **given)
    if kind in ("sdar", "fast", "mar"):
        return paradec.load(Path(os.environ["PARADEC_DIFFERENTIAL"]) / kind, **given)
    if kind.startswith("digits-"):
        return paradec.load(kind, **given)
    ids = {"mask_token_id": MASK, "eos_token_id": END}
    if kind == "bert":
        return paradec.wrap(random_module("bert"), **ids)
    if kind == "plain":
        return paradec.wrap(Plain().double().eval(), prediction="same", topology="bidirectional", **ids)
    if kind in ("same", "shifted"):
        return paradec.wrap(random_module(kind), prediction=kind, topology="bidirectional", **ids)
    if kind == "blocks":
        module = random_module("same", seed=7)
        return paradec.wrap(module, prediction="same", topology="block_causal", block_length=4, **ids)
    causal = {"causal": ("shifted", 2, 0), "causal-llama": ("same", 2, 3), "drafter": ("same", 1, 4)}
    module = random_module(causal[kind][0], causal[kind][1], causal[kind][2])
    return paradec.wrap(module, prediction="shifted", topology="causal", eos_token_id=END)


@functools.lru_cache(None)
def eagle(base: str) -> Any:
    return paradec.load_drafter(Path(os.environ["PARADEC_DIFFERENTIAL"]) / "eagle", base=model(base))


class Recorder:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


class Callback:
    """Counts steps, and ends the decoding after `stop` of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.heard = stop, 0

    def __call__(self, state: Any, commit: Any) -> bool:
        self.heard += 1
        return self.heard == self.stop


def built(value: Any) -> Any:
    """What a request's JSON stands for: {"$": kind, ...} becomes an object of this version."""
    if isinstance(value, list):
        return [built(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    given = {key: built(entry) for key, entry in value.items() if key != "$"}
    kind = value.get("$")
    if kind is None:
        return given
    if kind in ("sampler", "cache"):
        registry = paradec.samplers if kind == "sampler" else paradec.caches
        settings = given.get("settings", {})
        for name in ("tree", "full_steps", "modules", "skip"):
            if isinstance(settings.get(name), list):
                settings[name] = tuple(tuple(e) if isinstance(e, list) else e for e in settings[name])
        return registry.create(given["name"], **settings)
    if kind in ("FixedBlocks", "AdaptiveBlocks", "PipelinedBlocks", "Prophet", "SparseD"):
        for name in ("delimiters", "gaps", "stages"):
            if name in given:
                given[name] = tuple(given[name])
        return getattr(paradec, kind)(**given)
    if kind in ("Verification", "AccumulatedChange", "DynamicTree"):
        return find(kind)(**given)
    if kind == "generator":
        return torch.Generator().manual_seed(given["seed"])
    if kind == "range":
        return range(given["first"], given["last"])
    if kind == "tensor":
        return torch.tensor(given["values"])
    if kind == "model":
        return model(given["name"])
    if kind == "eagle":
        return eagle(given["base"])
    if kind == "filter":
        return str(next(Path(paradec.__file__).parent.rglob("learn2pd.safetensors")))
    if kind == "streamer":
        return Recorder()
    if kind == "callback":
        return Callback(given.get("stop"))
    raise LookupError(f"requests know no {kind!r}")


# ---- what is told of an output ---------------------------------------------------------------------------------------


def told(value: Any) -> Any:
    """As JSON: integers and texts as they are, floats of tensors and pictures by a sha of their bytes."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iub" and value.size <= 512:
            return value.tolist()
        sha = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:24]
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sha": sha}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "getdata") and hasattr(value, "size"):  # a PIL image
        return told(np.asarray(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: told(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): told(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [told(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return type(value).__name__


def outcome(out: Any) -> dict[str, Any]:
    if not hasattr(out, "row_nfe"):
        return {"sequences": told(out)}
    answer = {}
    for name in FIELDS:
        try:
            value = getattr(out, name)
        except (AttributeError, ValueError):
            continue
        answer[name] = told(value)
    if hasattr(out, "tokens") and isinstance(out.tokens, Tensor):
        answer["tokens"] = told(out.tokens)
    trace = getattr(out, "trace", None)
    if trace is not None:
        answer["canvas"] = told(trace.canvas)
        answer["settings"] = told(trace.settings)
        answer["kinds"] = [step.kind for step in trace.steps]
        answer["forwarded"] = [told(step.forwarded) for step in trace.steps]
        answer["commits"] = [[[int(c[0]), int(c[1]), told(c[2])] for c in step.commits] for step in trace.steps]
        answer["confidences"] = told(np.array([float(c[3]) for step in trace.steps for c in step.commits]))
        answer["replayed"] = told(trace.replay()) if trace.canvas else None
    return answer


# ---- entry points ----------------------------------------------------------------------------------------------------


def listening(call: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    for name in ("streamer", "callback"):
        if call.get(name) is not None:
            answer[name] = told(call[name].heard)
    return answer


def do_generate(request: dict[str, Any]) -> dict[str, Any]:
    used, call = model(request["model"]), built(request["call"])
    out = paradec.generate(used, **call)
    answer = listening(call, outcome(out))
    if "next" in request:  # the next turn of the conversation, over what the first has kept
        turn = built(request["next"])
        rows = [row[mask.bool()].tolist() for row, mask in zip(out.sequences, out.attention_mask, strict=True)]
        prompts = [row + turn["more"] for row in rows]
        answer["next"] = outcome(paradec.generate(used, prompts, prefix=out.prefix, **turn["call"]))
    return answer


def do_infill(request: dict[str, Any]) -> dict[str, Any]:
    call = built(request["call"])
    return listening(call, outcome(paradec.infill(model(request["model"]), **call)))


def do_images(request: dict[str, Any]) -> dict[str, Any]:
    call = built(request["call"])
    return listening(call, outcome(paradec.generate_images(model(request["model"]), **call)))


@functools.lru_cache(None)
def hf_module(kind: str) -> Any:
    from transformers import GenerationConfig

    module = random_module(kind, seed=11)
    module.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    return module


def do_hf(request: dict[str, Any]) -> dict[str, Any]:
    call = built(request["call"])
    given = {"return_dict_in_generate": True} | call
    kind = request["model"]
    out = hf_module(kind).generate(custom_generate=paradec.hf_generate, prediction=kind, **given)
    if isinstance(out, Tensor):
        return {"sequences": told(out)}
    names = ("sequences", "nfe", "row_nfe", "row_forwards", "forwarded_tokens", "tokens_per_forward", "cost")
    return listening(call, {name: told(getattr(out, name)) for name in names if hasattr(out, name)})


@functools.lru_cache(None)
def pipeline(name: str) -> tuple[Any, Any]:
    """A pipeline or transformer, and what runs it: run(steps) -> the result."""
    tiny = tiny_pipelines()
    if name == "digits-dit":
        pipe = find("PixelDiTPipeline").digits()
        pipe.set_progress_bar_config(disable=True)

        def run(steps: int, **more: Any) -> Tensor:
            start = torch.Generator().manual_seed(3)
            labels = more.get("labels", [1])
            return pipe(labels, num_inference_steps=steps, generator=start, output_type="pt").images

        return pipe, run
    if name in ("dit", "flux", "wan"):
        pipe = getattr(tiny, f"{name}_pipeline")()
        return pipe, lambda steps, **more: getattr(tiny, f"run_{name}")(pipe, steps)
    kind, _, how = name.partition("/")
    if how == "loop":
        pipe, inputs = tiny.loop_pipeline(kind)
        return pipe, lambda steps, **more: pipe(inputs, steps, more.get("calls", 1))
    module, inputs = tiny.model(kind)
    return module, lambda steps, **more: tiny.denoise(module, inputs, steps, more.get("calls", 1))


@functools.lru_cache(None)
def bac(name: str, steps: int, updates: int, metric: str) -> Any:
    pipe, run = pipeline(name)
    return find("calibrate")(pipe, lambda: run(steps), updates, metric=metric)


def do_accelerate(request: dict[str, Any]) -> dict[str, Any]:
    pipe, run = pipeline(request["pipe"])
    steps, more = request["steps"], request.get("more", {})
    if request.get("settings") is None:
        return {"result": told(run(steps, **more))}
    settings = built(request["settings"])
    if "bac" in request:
        settings["schedule"] = bac(request["pipe"], steps, *request["bac"])
    for name in ("full_steps", "modules", "skip"):
        if name in settings:
            settings[name] = tuple(settings[name])
    session = paradec.accelerate(pipe, paradec.TaylorSeer(**settings))
    try:
        results = [run(steps, **more) for _ in range(request.get("runs", 1))]
        report = session.report()
    finally:
        session.detach()
    return {
        "result": [told(result) for result in results],
        "calls": [[call.step, call.kind] for call in report.calls],
        "full_steps": told(report.full_steps),
        "bytes": report.bytes,
        "modules": told(report.modules),
        "coverage": told(report.coverage),
        "notes": told(report.notes),
    }


@functools.lru_cache(None)
def llada2() -> Any:
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    module = find("BlockCausalModule")(model("blocks"))
    pipe = LLaDA2Pipeline(module, BlockRefinementScheduler(block_length=4))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.lru_cache(None)
def amused() -> Any:
    from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel

    torch.manual_seed(0)
    transformer = UVit2DModel(
        hidden_size=8, cond_embed_dim=8, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=8,
        vocab_size=CODES, codebook_size=CODES, in_channels=8, block_out_channels=8, num_res_blocks=1, downsample=True,
        upsample=True, block_num_heads=1, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    )  # fmt: skip
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.4)
    vqvae = VQModel(
        act_fn="silu", block_out_channels=[8], down_block_types=["DownEncoderBlock2D"], in_channels=3,
        latent_channels=8, layers_per_block=1, norm_num_groups=8, num_vq_embeddings=CODES, out_channels=3,
        sample_size=4, up_block_types=["UpDecoderBlock2D"], mid_block_add_attention=False, lookup_from_codebook=True,
    )  # fmt: skip
    pipe = AmusedPipeline(
        vqvae=vqvae, tokenizer=None, text_encoder=None, transformer=transformer.eval(),
        scheduler=AmusedScheduler(mask_token_id=IMAGE_MASK),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def scheduler_of(request: dict[str, Any], before: Any) -> Any:
    import paradec.schedulers

    made = getattr(paradec.schedulers, request["scheduler"])
    return made.from_config(before.config, **built(request.get("settings", {})))


def do_llada2(request: dict[str, Any]) -> dict[str, Any]:
    pipe = llada2()
    before, calls = pipe.scheduler, []
    pipe.scheduler = scheduler_of(request, before)
    hook = pipe.model.register_forward_pre_hook(lambda module, given: calls.append(1))
    session = None
    try:
        if request["cache"]:
            session = paradec.accelerate(pipe, cache="block")
        out = pipe(output_type="seq", mask_token_id=MASK, eos_token_id=END, **built(request["call"])).sequences
        report = None if session is None else told(session.report())
        config = {key: told(value) for key, value in pipe.scheduler.config.items() if not key.startswith("_")}
    finally:
        if session is not None:
            session.detach()
        hook.remove()
        pipe.scheduler = before
    return {"sequences": told(out), "calls": len(calls), "report": report, "config": config}


def do_amused(request: dict[str, Any]) -> dict[str, Any]:
    pipe = amused()
    before, calls = pipe.scheduler, []
    session = None
    condition = {"prompt_embeds": torch.ones(1, 8), "encoder_hidden_states": torch.ones(1, 8, 8)}
    condition |= {"negative_prompt_embeds": -torch.ones(1, 8), "negative_encoder_hidden_states": torch.zeros(1, 8, 8)}
    heard: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda module, given: calls.append(1))
    try:
        if "recap" in request:
            session = paradec.accelerate(pipe, paradec.samplers.create("recap", **request["recap"]))
        else:
            pipe.scheduler = scheduler_of(request, before)
        out = pipe(**condition, **built(request["call"]), callback=lambda i, t, found: heard.append(told(found))).images
        report = None if session is None else [told(session.report().cells), session.report().bytes]
    finally:
        if session is not None:
            session.detach()
        hook.remove()
        pipe.scheduler = before
    return {"images": told(out), "heard": heard, "calls": len(calls), "report": report}


def do_by_hand(request: dict[str, Any]) -> dict[str, Any]:
    """A scheduler stepped by hand over random logits, which depend on what is decided."""
    import paradec.schedulers

    scheduler = getattr(paradec.schedulers, request["scheduler"])(**built(request.get("settings", {})))
    generator = torch.Generator().manual_seed(request["seed"])
    sample, steps = torch.tensor(request["sample"]), request["steps"]
    table = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) * request["sharpness"]
    given = {"generator": torch.Generator().manual_seed(request["seed"] + 1)}
    if request["kind"] == "text":
        given |= {"mask_token_id": MASK} | request["call"]
    scheduler.set_timesteps(steps)
    found = []
    flat = sample.flatten(1)
    for index, time in enumerate(scheduler.timesteps.tolist()):
        logits = table[flat] + table[flat.roll(1, 1)] - table[flat.roll(-1, 1)]
        time = index if request["kind"] == "text" else time
        out = scheduler.step(logits, time, flat, return_dict=False, **given)
        flat = out[0]
        found.append([told(entry) for entry in out])
        if not (flat == MASK).any():
            break
    return {"steps": found}


def timeless(value: Any) -> Any:
    """Without what the clock and the machine say."""
    if isinstance(value, dict):
        timed = re.compile("second|machine|^out$")
        return {key: timeless(entry) for key, entry in value.items() if not timed.search(key)}
    if isinstance(value, list):
        return [timeless(entry) for entry in value]
    return value


def said(text: str) -> Any:
    """A command's output: its JSON, or its text, without times."""
    try:
        return timeless(json.loads(text))
    except ValueError:
        return re.sub(r"\d+(\.\d+)? m?s\b", "(time)", text)


class Exited(Exception):
    """A command that ended with another exit code than 0."""


def do_command(request: dict[str, Any]) -> dict[str, Any]:
    """The command line, in this process."""
    before, stdout, stderr = (sys.argv, Path.cwd()), io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = ["paradec", *request["arguments"]]
        code: Any = 0
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                runpy.run_module("paradec", run_name="__main__", alter_sys=True)
        except SystemExit as exit_:
            code = exit_.code
        finally:
            sys.argv = before[0]
            os.chdir(before[1])
        files = {}
        for path in sorted(Path(folder).iterdir()):
            data = path.read_bytes()
            files[path.name] = said(data.decode()) if path.suffix == ".json" else hashlib.sha256(data).hexdigest()[:24]
    if code:
        raise Exited(f"exit code {code}: {stderr.getvalue()}")
    return {"stdout": said(stdout.getvalue()), "stderr": said(stderr.getvalue()), "files": files}


ENTRIES = {
    "command": do_command,
    "generate": do_generate,
    "infill": do_infill,
    "images": do_images,
    "hf": do_hf,
    "accelerate": do_accelerate,
    "llada2": do_llada2,
    "amused": do_amused,
    "by hand": do_by_hand,
}


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """What this version does with a request: {"ok": ...} or {"error": type, "message": ...}, and its warnings."""
    if "model" in request and request["do"] in ("generate", "infill", "images"):
        model(request["model"])  # must load, whatever becomes of the request
    torch.manual_seed(request["id"])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            answer: dict[str, Any] = {"ok": ENTRIES[request["do"]](copy.deepcopy(request))}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
    answer["warnings"] = sorted({f"{entry.category.__name__}: {entry.message}" for entry in heard})
    return answer


def described() -> dict[str, Any]:
    """What this version has registered."""
    import paradec.schedulers

    found = {}
    for name in paradec.samplers.names():
        made = paradec.samplers.create(name)
        found[name] = {"family": made.family, "uses_steps": bool(getattr(made, "uses_steps", False))}
    return {"samplers": found, "caches": list(paradec.caches.names()), "schedulers": list(paradec.schedulers.__all__)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else may write among the answers
    inside, expected = Path(paradec.__file__).resolve(), Path(sys.argv[1]).resolve()
    assert inside.is_relative_to(expected), f"paradec is {inside}, not in {expected}"
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "80"
    for line in sys.stdin:
        request = json.loads(line)
        answer = described() if request == "describe" else answered(request)
        # where the package stands is no difference
        answers.write(json.dumps(answer).replace(str(inside.parent), "(paradec)") + "\n")


if __name__ == "__main__":
    main()
