"""The command `paradec serve`."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from serving import LONG, Running, chat
from typer.testing import CliRunner

import paradec
from paradec.cli import app

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).parents[1])}


def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "paradec", "serve", "--port", "0", "--name", "mine", "--api-key-file", "key"]
    command += ["--log-level", "info"]
    # background jobs ignore SIGINT, and child processes inherit this
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    assert process.stdout is not None
    name, address = process.stdout.readline().split()
    assert name == "mine:" and address.startswith("http://127.0.0.1:") and address.endswith("/v1")
    body = json.dumps({"messages": [{"role": "user", "content": "Sort: pear fig apple"}], "max_tokens": 256}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/chat/completions", body, headers)) as answer:
        actual = json.loads(answer.read())
    assert (actual["model"], actual["choices"][0]["message"]["content"]) == ("mine", "apple fig pear")
    process.send_signal(signal.SIGINT)
    logged, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and '"POST /v1/chat/completions HTTP/1.1" 200' in logged and "Error" not in errors


@pytest.mark.parametrize("stream", [False, True])
def test_open_requests_end_with_an_error_when_the_server_stops(stream: bool) -> None:
    script = "import paradec.integrations.server.app as app; app.GRACE = 0.2; import paradec.cli as cli; cli.app()"
    command = [sys.executable, "-c", script, "serve", "--port", "0", "--batch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2].split("/")[0])
    wire = Running(None, None, port).send(json.dumps(chat(**LONG, n=100, stream=stream)).encode())
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    answer = b"".join(iter(lambda: wire.recv(2**16), b"")).decode()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors and answer.startswith(f"HTTP/1.1 {200 if stream else 503} ")
    message = '{"error": {"message": "the server is stopping", "type": "server_error", "param": null, "code": null}}'
    assert (f"data: {message}\n\n" if stream else message.replace(": ", ":").replace(", ", ",")) in answer


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], "sampler threshold, cache none, blocks of 32, suffix 32, float32, answers of 64 tokens by default"),
        (["--sampler", "wino"], "sampler wino, cache none, blocks of 32, float32"),
        (["--model", "folder"], "cache dual (approximate), blocks of 32, float32, answers of 64 tokens"),
        (
            ["--model", "folder", "--cache", "none", "--max-answer", "9"],
            "cache none, blocks of 32, float32, answers of 9 ",
        ),
        (
            ["--max-new-tokens", "12", "--dtype", "float64"],
            "cache none, blocks of 32, suffix 32, float64, answers of 12",
        ),
    ],
)
def test_it_prints_the_settings_in_effect(options: list[str], settings: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    paradec.load().save_pretrained("folder")
    reported: list[Any] = []

    def read_settings(server_app: Any, *_: Any) -> None:
        routes = {route.path: route.endpoint for route in server_app.routes}
        reported.append(asyncio.run(routes["/v1/models"]())["data"][0]["paradec"])

    monkeypatch.setattr("paradec.integrations.server.app.serve", read_settings)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert result.exit_code == 0 and settings in result.stdout.splitlines()[1] and "at most 512)" in result.stdout
    assert reported[0]["cache"] in settings and reported[0]["is_approximate"] == ("approximate" in settings)


def test_help_states_defaults_that_depend_on_the_model() -> None:
    text = " ".join(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"}).stdout.split())
    assert "by default dual (approximate) on bidirectional models" in text and "the model's, or threshold" in text
    assert "a body without max_tokens gets the model's default" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "'--port'"),
        (["--timeout", "0"], "--timeout=0"),
        (["--log-level", "all"], "--log-level"),
        (["llada"], "--model"),
        (["--presets", "nowhere"], "presets='nowhere' must be a folder"),
        (["--api-key-file", "nowhere"], "nowhere"),
        # options with which every prompt would fail
        (["--port", "0", "--suffix", "8", "--cache", "dkv_decode"], "cache='dkv_decode' needs whole rows"),
        (["--port", "0", "--max-new-tokens", "600"], "= 601 is longer than tiny-llada takes (512)"),
        (["--port", "0", "--cache", "prefix", "--max-memory", "5000"], "more than --max-memory=5000"),
    ],
)
def test_wrong_options_print_one_line(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paradec.integrations.server.app.serve", None)  # errors come before the server starts
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2 and "the server needs fastapi, prometheus_client: install" in result.stderr
    assert "'.[serve]'" in result.stderr


def test_a_port_in_use_prints_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paradec, "load", None)  # the error comes before the model is loaded
    with socket.create_server(("127.0.0.1", 0)) as listening:
        result = CliRunner().invoke(app, ["serve", "--port", str(listening.getsockname()[1])])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and "Address already in use" in result.stderr
