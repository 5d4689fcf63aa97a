"""Third-party clients: langchain-openai and litellm (the extra "clients")."""

from typing import Any

import pytest
from serving import BEGIN, CALL, NAME, scripted

langchain = pytest.importorskip("langchain_openai", reason='needs the extra "clients"')
litellm = pytest.importorskip("litellm", reason='needs the extra "clients"')

WEATHER = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}


@pytest.mark.filterwarnings("ignore")
def test_langchain_chats_streams_and_calls_tools() -> None:
    with scripted(f"Well. {CALL}") as (server, _, _):
        options: Any = {"model": NAME, "base_url": f"{server.address}/v1", "api_key": "none", "max_retries": 0}
        model = langchain.ChatOpenAI(**options, max_tokens=200, stream_usage=True)
        assert model.invoke("hi").content == f"Well. {CALL}"
        chunks = list(model.stream("hi"))
        full = chunks[0]
        for chunk in chunks[1:]:
            full += chunk
        assert full.content == f"Well. {CALL}" and full.usage_metadata["output_tokens"] > 0
        model_with_tools = model.bind_tools([WEATHER])
        answer = model_with_tools.invoke("hi")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("f", {"x": "\u00e9"})]
        from langchain_core.messages import HumanMessage, ToolMessage

        result = ToolMessage("21 degrees", tool_call_id=answer.tool_calls[0]["id"])
        assert model_with_tools.invoke([HumanMessage("hi"), answer, result]).tool_calls
        streamed = None
        for chunk in model_with_tools.stream("hi"):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None and streamed.content == "Well."
        assert [call["args"] for call in streamed.tool_calls] == [{"x": "\u00e9"}]
        texts = langchain.OpenAI(**options, max_tokens=200, temperature=0).generate([BEGIN, f"x{BEGIN}"])
        assert [generation.text for (generation,) in texts.generations] == [f"Well. {CALL}"] * 2


@pytest.mark.filterwarnings("ignore")
def test_litellm_chats_streams_and_calls_tools() -> None:
    with scripted(f"Well. {CALL}") as (server, _, _):
        options: Any = {"model": f"openai/{NAME}", "api_base": f"{server.address}/v1", "api_key": "none"}
        request: Any = {**options, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
        assert litellm.completion(**request).choices[0].message.content == f"Well. {CALL}"
        chunks = litellm.completion(**request, stream=True, stream_options={"include_usage": True})
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == f"Well. {CALL}"
        (call,) = litellm.completion(**request, tools=[WEATHER]).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("f", '{"x": "\u00e9"}')
        deltas = [chunk.choices[0].delta for chunk in litellm.completion(**request, tools=[WEATHER], stream=True)]
        arguments = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
        assert "".join(arguments) == '{"x": "\u00e9"}'
        options["model"] = f"text-completion-openai/{NAME}"
        answer = litellm.text_completion(**options, prompt=[BEGIN, f"x{BEGIN}"], max_tokens=200)
        assert [choice.text for choice in answer.choices] == [f"Well. {CALL}"] * 2
