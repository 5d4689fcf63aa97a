"""SGLang's own algorithms, out of the released wheel, executed as they are.

The engine needs CUDA builds that are not to be had here. Its algorithms need torch alone, and the names of what they
are handed: those are stand-ins. `.ci/engines sglang` downloads the wheel; it is no part of this repository.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from places import ROOT

VERSION = "0.5.23"
FOLDER = Path(os.environ.get("PARADEC_ENGINE_WHEELS", ROOT / ".engines"))
PARTS = ("sglang/srt/dllm/", "sglang/srt/plugins/", "sglang/srt/environ.py")
"""What is executed."""
STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.server_args": {"ServerArgs": type("ServerArgs", (), {})},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": SimpleNamespace},
    "sglang.srt.model_executor.model_runner": {"ModelRunner": type("ModelRunner", (), {})},
    "sglang.srt.layers.logits_processor": {"LogitsProcessorOutput": SimpleNamespace},
    # read when the configuration is made of a server's arguments, which no test here does
    "sglang.srt.configs.model_config": {"ModelConfig": type("ModelConfig", (), {})},
    "sglang.srt.arg_groups.overrides": {"resolving_view": lambda arguments: arguments},
    "sglang.srt.utils": {"is_npu": lambda: False},
}
"""Modules that the algorithms import, and the names that they take from them."""


def wheel() -> Path | None:
    """The released wheel, if it was downloaded."""
    return next(iter(sorted(FOLDER.glob(f"sglang-{VERSION}-*.whl"))), None)


@contextmanager
def sglang(folder: Path) -> Iterator[SimpleNamespace]:
    """SGLang's modules, unpacked into `folder`, while the context lasts: `base`, `algorithm` (its list of them),
    `config`, `plugins`."""
    archive = wheel()
    assert archive is not None
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.startswith(PARTS)])
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    assert not before, "sglang is installed here: these tests are for places where it is not"
    try:
        for name, path in {"sglang": "sglang", "sglang.srt": "sglang/srt"}.items():
            sys.modules[name] = ModuleType(name)  # without what their __init__ imports
            sys.modules[name].__path__ = [str(folder / path)]
        for name, contents in STAND_INS.items():
            parent = name.rpartition(".")[0]
            if parent not in sys.modules:
                sys.modules[parent] = ModuleType(parent)
                sys.modules[parent].__path__ = []
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        yield SimpleNamespace(
            base=importlib.import_module("sglang.srt.dllm.algorithm.base"),
            algorithm=importlib.import_module("sglang.srt.dllm.algorithm"),
            config=importlib.import_module("sglang.srt.dllm.config"),
            plugins=importlib.import_module("sglang.srt.plugins"),
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]


class Runner:
    """SGLang's model runner, as far as its loops know it: logits of a batch by a function of ours."""

    def __init__(self, logits: Any):
        self.logits, self.calls = logits, 0

    def forward(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.calls += 1
        output = SimpleNamespace(full_logits=self.logits(forward_batch))
        return SimpleNamespace(logits_output=output, can_run_graph=False)
