"""Configuration of the remote-code model beside it: LLaDA's field names."""

from transformers import PretrainedConfig


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, use_cache=False, **fields):
        super().__init__(use_cache=use_cache, **fields)
