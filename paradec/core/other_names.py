"""What papers and other libraries call things: for errors that say what to write here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "sampler": {
        "creditdecoding": "credit",
        "fastdllm": "threshold",
        "confidence": "low_confidence",
        "dparallel": "entropy_threshold",
        "ebsampler": "entropy_bound",
        "coradiff": "persistence",
        "mcsjd": "scd",
        "haltonmaskgit": "halton",
        "adablockdllm": "adablock",
    },
    "cache": {
        "dkv": "dkv_decode",
        "dkvcache": "dkv_decode",
        "fastdllm": "dual",
        "fastdllmv2": "hierarchical",
        "d2cache": "d2",
        "d3llm": "delayed",
        "kvcache": "prefix",
    },
}
"""Samplers and caches, by `paradec.core.checks.plain_name`."""
PIPELINE_METHODS = {
    "fbcache": "first_block",
    "fbc": "first_block",
    "blockcache": "first_block",
    "firstblockcache": "first_block",
    "cachedit": "dbcache",
}
"""Methods for diffusers pipelines, by `plain_name`."""
PIPELINE_SETTINGS = {
    "cache_interval": ("interval",),
    "fresh_threshold": ("interval",),
    "max_order": ("order",),
    "n_derivatives": ("order",),
    "disable_cache_before_step": ("first_enhance",),
    "max_warmup_steps": ("first_enhance", "retention_steps"),
    "residual_diff_threshold": ("threshold",),
    "rel_l1_thresh": ("threshold",),
    "refresh": ("when",),
    "basis": ("how",),
    "target": ("where",),
}
"""Settings of these methods."""
REQUEST_FIELDS = {
    "max_new_tokens": ("gen_length", "max_length", "max_tokens"),
    "guidance_scale": ("cfg", "cfg_scale", "negative_prompt_ids"),
    "block_length": ("block_size", "block_len"),
    "steps": ("diffusion_steps", "num_inference_steps"),
    "sampler": ("alg", "algorithm", "remasking"),
    "min_new_tokens": ("min_tokens",),
    "bad_words": ("bad_words_ids",),
    "num_return_sequences": ("num_samples", "n"),
}
"""Fields of a request: their other names."""
CONSTRAINTS = {
    "json_schema": "paradec.JsonSchema(schema)",
    "choice": 'paradec.Choice(["yes", "no"])',
    "choices": 'paradec.Choice(["yes", "no"])',
    "regex": 'paradec.Regex("[0-9]+")',
    "grammar": "paradec.Grammar(text)",
    "response_format": "paradec.JsonSchema(schema), or a class of pydantic",
}
"""Constraints, and what to write."""
LOAD_ARGUMENTS = {
    "torch_dtype": "write dtype=",
    "trust_remote_code": "remote code is never executed; leave it out (docs/models.md has the formats)",
    "load_in_8bit": 'write quantization="int8"',
    "load_in_4bit": "write quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)",
    "eos_token_id": "the end ids are the checkpoint's; set eos_token_id in its generation_config.json",
    "pad_token_id": "the padding id is the checkpoint's; set pad_token_id in its generation_config.json",
    "mask_id": "write mask_token_id=",
    "block_size": "write block_length=",
    "attention": "write attn_implementation=, or attention= in a request",
}
"""Arguments of `paradec.load`, and what to do instead."""


def check_setting_name(method: str, name: str, allowed: Collection[str]) -> None:
    """Raise ValueError for a setting of other tools that has another name here."""
    name_here = next((known for known in PIPELINE_SETTINGS.get(name, ()) if known in allowed), None)
    if name not in allowed and name_here is not None:
        raise ValueError(f"{method} has no setting {name!r}; it is called {name_here!r} here")
