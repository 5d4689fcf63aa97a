"""What the server relies on in transformers' private classes. Where this fails look at
`paradec/integrations/server`."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest
import transformers
from typer.testing import CliRunner

from paradec.cli import app
from paradec.integrations import server as serving


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def test_another_release_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if serving.tried(transformers.__version__):
        monkeypatch.setattr("importlib.metadata.version", lambda name: "5.24.0")
    done = CliRunner().invoke(app, ["serve"])
    found = importlib.metadata.version("transformers")
    assert done.exit_code == 2 and f"transformers>=5.23,<5.24, not {found}: install" in done.stderr


@pytest.mark.skipif(not serving.tried(transformers.__version__), reason="the server was not tried with it")
def test_the_classes_that_are_subclassed_are_as_they_were() -> None:
    from transformers.cli.serving import chat_completion, completion, server, utils
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.decision import template_utils

    chat, text = chat_completion.ChatCompletionHandler, completion.CompletionHandler
    base, manager, state = utils.BaseHandler, utils.BaseGenerateManager, utils.GenerationState
    handlers = ["chat_handler", "completion_handler", "response_handler", "transcription_handler", "systemone_handler"]
    assert parameters(server.build_server) == ["model_manager", *handlers, "generation_state", "enable_cors"]
    assert parameters(base.__init__) == ["model_manager", "generation_state", "chat_template_kwargs"]
    for handler in (chat, text):
        assert issubclass(handler, base)
        assert parameters(handler.handle_request) == ["body", "request_id"]
        assert parameters(handler._build_generation_config) == ["body", "model_generation_config", "use_cb"]
        assert parameters(handler._validate_request) == parameters(handler._resolve_model) == ["body"]
    assert parameters(SystemOneHandler._validate_request) == ["body"]
    assert parameters(template_utils.parse_questions) == ["questions", "config"]
    assert parameters(template_utils.Question.answer) == ["probabilities"]
    fields = [*inspect.signature(template_utils.Question).parameters]
    assert fields == ["name", "type", "instructions", "options", "labels", "descriptions"]
    asked = ["request_id", "model", "processor", "model_id", "inputs", "gen_config", "gen_manager"]
    assert parameters(chat._streaming) == [*asked, "tools"] and parameters(text._streaming) == [*asked, "suffix"]
    assert parameters(chat._build_chunk_sse)[:3] == ["request_id", "content", "model"]
    assert parameters(text._build_chunk_sse)[:3] == ["request_id", "model_id", "text"]
    assert parameters(base.get_processor_inputs_from_messages) == ["messages", "modality"]
    generation = ["model", "processor", "inputs", "gen_config", "request_id"]
    assert parameters(manager.generate_streaming) == [*generation, "response_parser"]
    assert parameters(manager.generate_non_streaming) == generation
    assert manager.__abstractmethods__ == {"generate_streaming", "generate_non_streaming", "stop"}
    assert parameters(state.use_continuous_batching) == ["model", "modality"]
    assert parameters(state.get_manager) == ["model_id", "use_cb"]
    assert parameters(state.is_cb_alive) == parameters(state.shutdown) == parameters(ModelManager.shutdown) == []
    assert {"device", "model_timeout", "force_model"} <= {*parameters(ModelManager.__init__)}
    assert parameters(ModelManager.get_gen_models) == ["cache_dir"]
    assert parameters(ModelManager.get_model_modality) == ["model", "processor"]
    assert parameters(utils.response_events_to_chunks) == ["events"] and utils._StreamError("x").msg == "x"
