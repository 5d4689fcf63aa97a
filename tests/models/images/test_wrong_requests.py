"""Requests that a model of pictures cannot take: the error names the argument."""

from typing import Any

import pytest
from images import FAMILIES

import paradec
from paradec import samplers

REQUESTS: dict[str, dict[str, Any]] = {
    "glm_image": {"prompts": [[100, 64]], "height": 64, "width": 64},
    "janus": {"prompts": [[1, 9]]},
    "emu3": {"prompts": [[1, 9]], "height": 24, "width": 24, "negative_prompt": [[1]]},
}
WRONG: dict[str, list[dict[str, Any]]] = {
    "glm_image": [
        *({"height": 100}, {"guidance_scale": 2.0}, {"output_type": "pt"}, {"prompts": [[160, 64]]}),
        *({"prompts": "a fox"}, {"prompts": [[64, 1, 2, 65, 100, 64]]}),
    ],
    "janus": [{"prompts": "a cat"}, {"height": 16}, {"prompts": [[1, 64]]}, {"negative_prompt": [[1]] * 3}],
    "emu3": [{"negative_prompt": None}, {"class_labels": 1}],
    "llamagen": [
        *(
            {"height": 16},
            {"height": True},
            {"width": 7},
            {"class_labels": 10},
            {"class_labels": []},
            {"num_images": 0},
        ),
        *({"prompts": "a cat", "class_labels": None}, {"class_labels": None}, {"sampler": "threshold"}, {"chat": True}),
        *(
            {"guidance_scale": -1},
            {"top_k": -1},
            {"output_type": "np"},
            {"negative_prompt": "x"},
            {"max_new_tokens": 4},
        ),
    ],
    "lpd": [{"class_labels": [5]}, {"class_labels": []}, {"height": 9}, {"height": 16}, {"sampler": "sjd"}],
    "mar": [{"class_labels": None}, {"class_labels": [10]}, {"class_labels": []}, {"height": 16}, {"steps": 17}],
    "nar": [{"guidance_scale": -1}, {"height": 32}, {"top_p": 0.0}, {"sampler": "sjd"}],
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "mar": [
        *({"local_steps": -1}, {"head_steps": 1001}, {"fast_ratio": 0}, {"temperature": -1}),
        {"chunk_order": "random"},
    ],
    "groups": [{"order": 3}, {"guidance_schedule": "cosine"}],
    "nar": [{"cfg_interval": -2}],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, each in WRONG.items() for wrong in each])
def test_the_argument_is_named(name: str, wrong: dict[str, Any]) -> None:
    request = REQUESTS.get(name, {"class_labels": [1]})
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        paradec.generate_images(FAMILIES[name](), **{"output_type": "latent"} | request | wrong)


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, each in SETTINGS.items() for wrong in each])
def test_the_setting_is_named(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        samplers.create(name, **wrong)
