"""Which process runs which tests, where pytest-xdist runs several: those of a file run in one.

What the tests of a file share, models and processes of their own above all, is made once then. xdist's own groups are
names at the end of an item's `_nodeid`, which pytest 9.2 no longer reads: marked tests ran in any process, and each
process made it all.

Files that take longest begin first: nothing that takes long is begun when the rest is done.
"""

from __future__ import annotations

import collections
import zlib
from pathlib import Path
from typing import Any

import pytest

LONG = (
    "tests/samplers/masked/ahead/test_traces_freedave.py",
    "tests/cli/test_cli.py",
    "tests/samplers/masked/test_traces.py",
    "tests/samplers/masked/test_masked_properties.py",
    "tests/models/test_tensor_parallel.py",
    "tests/repository/test_examples.py",
    "tests/tools/tuning/test_tune.py",
    "tests/samplers/masked/test_closed_form.py",
    "tests/repository/test_docs.py",
    "tests/schedulers/test_schedulers.py",
    "tests/samplers/renoising/test_canvas_properties.py",
    "tests/samplers/masked/device/test_device_step.py",
    "tests/integrations/diffusers/test_runs.py",
    "tests/repository/test_house.py",
    "tests/api/test_images.py",
    "tests/caches/test_traces_caches.py",
    "tests/cli/test_chat.py",
    "tests/batching/test_many_images.py",
    "tests/benchmarks/test_digits_masked.py",
    "tests/cli/test_listings.py",
    "tests/api/test_front.py",
    "tests/integrations/server/test_command.py",
    "tests/samplers/masked/test_traces_moe.py",
)
"""Files that take longest, about in this order."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(items)
    if hasattr(config, "workerinput"):
        order = {file: turn for turn, file in enumerate(LONG)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def thin(items: list[pytest.Item]) -> None:
    """Mark three of four cases of each test that is `thinned` as `further`. Which ones follows from the test's name, so
    that what many tests are parametrised by, the registered samplers above all, is run by some of them."""
    seen = collections.Counter[str]()
    for item in items:
        if item.get_closest_marker("thinned"):
            name = item.nodeid.partition("[")[0]
            if (seen[name] + zlib.crc32(name.encode())) % 4:
                item.add_marker("further")
            seen[name] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # else the files with most tests come first
    return LoadFileScheduling(config, log)


def missing(root: Path) -> list[str]:
    """Files of `LONG` that are not there."""
    return [file for file in LONG if not (root / file).is_file()]
