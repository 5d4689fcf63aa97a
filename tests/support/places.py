"""Paths of the repository, its tests and the recorded data."""

import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
"""The folder of modules that several tests share."""
ROOT = TESTS.parent


def unpack(source: Path, folder: Path) -> Path:
    """Write the files of a ZIP file, or copies of the files of a folder, into a new folder."""
    if source.is_dir():
        shutil.copytree(source, folder)
    else:
        with zipfile.ZipFile(source) as archive:
            archive.extractall(folder)
    return folder


def make_temporary_folder() -> Path:
    """Make a folder that is deleted when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="paradec-golden-", ignore_cleanup_errors=True)
    _TEMPORARY.append(folder)
    return Path(folder.name)


def unpack_golden() -> Path:
    """Unpack tests/golden, ZIP files and folders, into one folder, which child processes (pytest's workers) share."""
    shared = os.environ.get(_SHARED)
    if shared and os.path.isdir(shared):
        return Path(shared)
    golden = make_temporary_folder()
    for source in sorted((TESTS / "golden").iterdir()):
        folder = golden / source.name.removesuffix(".zip")
        if folder.exists():
            raise FileExistsError(f"tests/golden has both {folder.name}/ and {folder.name}.zip: delete one")
        unpack(source, folder)
    os.environ[_SHARED] = str(golden)
    return golden


_SHARED = "PARADEC_GOLDEN"
"""The environment variable that names the unpacked folder."""
_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []
GOLDEN = unpack_golden()
"""The unpacked folder: small trained checkpoints in published formats, and runs of the reference implementations."""


def load_script(file: str) -> ModuleType:
    """Import a file such as "benchmarks/antibody.py"; its folder is appended to the import path."""
    path = ROOT / file
    name = f"{path.parent.name}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
