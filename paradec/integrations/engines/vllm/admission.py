"""Check of a request's parameters when it arrives, before vLLM schedules it."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from paradec.integrations.engines.vllm.settings import server_defaults, settings_of

_models: dict[str, Any] = {}
"""vLLM's `ModelConfig`s in this process, by model name."""


def record_model(model_config: Any) -> None:
    """Add a model to `_models`. Raises ValueError, TypeError: the server's default settings are invalid."""
    from vllm import SamplingParams

    settings_of(SamplingParams(max_tokens=None), server_defaults(model_config.hf_config))
    _models[str(model_config.model)] = model_config


class Admission(LogitsProcessor):
    """Check of each request's parameters. It processes no logits: it is a logits processor only because vLLM calls
    `validate_params` of every logits processor."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for unsupported parameters; the message names the parameter, its value and alternatives."""
        models = list(_models.values())
        # vLLM does not pass the model; if there are several, checks that need the model are left out
        model = models[0] if len(models) == 1 else None
        try:
            settings = settings_of(sampling_params, None if model is None else server_defaults(model.hf_config))
            if model is not None:
                _check_fit(settings, model)
        except TypeError as error:  # vLLM reports the message of a ValueError, but not of a TypeError
            raise ValueError(str(error)) from None

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return False

    def apply(self, logits: Any, ctx: Any) -> Any:
        return logits


def _check_fit(settings: Any, model_config: Any) -> None:
    """Check the settings with the model and a prompt of one token. Raises the errors of `ServedModel.open_row`."""
    from paradec.integrations.engines.vllm.slots import read_model

    served = read_model(model_config)
    for token in settings.template:
        if token >= served.facts.vocab_size:
            raise ValueError(f"template={token} is not in the vocabulary (0 to {served.facts.vocab_size - 1})")
    prompt_token = 1 if served.facts.mask_id == 0 else 0
    fields = {name: value for name, value in settings.fields.items() if name != "steps"}  # steps: needs the prompt
    room = max(1, (served.facts.max_length or 2) - 1 - len(settings.template))
    new = min(settings.max_new_tokens, room) if settings.template else max(1, min(settings.max_new_tokens, room))
    served.open_row([prompt_token], type(settings)(settings.sampler, settings.template, new, fields, settings.stop_ids))
