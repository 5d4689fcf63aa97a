"""The archive: the same bytes from the same files, and nothing read of one that is not whole."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from kit import data
from places import GOLDEN
from scripts import load_script

from paradec.tools.conformance import KIT_VERSION, archive

FILES = {
    "conformance/laws.json": b"{}",
    "traces/llada/a.json": b'{"model": "some"}',
    "some/config.json": b"{}",
    "some/model.safetensors": b"weights",
}


def folder(path: Path) -> Path:
    """A small tests/golden."""
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def packed(path: Path) -> dict[str, bytes]:
    """The members of the archive of such a folder, by name."""
    out = path / "kit.tar.gz"
    archive.pack(folder(path / "golden"), out, {"LICENSE": "free"})
    with tarfile.open(out) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def written(path: Path, members: dict[str, bytes], **change: Any) -> Path:
    """An archive of these members; change: of the tar entry of the last one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number, (name, content) in enumerate(members.items(), start=1):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            if number == len(members):
                for field, value in change.items():
                    setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    place = folder(tmp_path / "golden")
    (place / "traces/llada/a.json").touch()
    for name in ("one", "other"):
        archive.pack(place, tmp_path / name, {"LICENSE": "free"})
        (place / "traces/llada/a.json").chmod(0o600)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_folder_archive_and_what_was_unpacked_are_the_same_data(tmp_path: Path) -> None:
    members = packed(tmp_path)
    with archive.opened(tmp_path / "golden") as checkout, archive.opened(tmp_path / "kit.tar.gz") as kit:
        assert checkout.digest == kit.digest and kit.version == KIT_VERSION
        assert set(kit.files) == set(FILES) and kit.json("traces/llada/a.json") == {"model": "some"}
        inside = kit.folder
    assert not inside.exists()
    for name, content in members.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / "paradec-conformance"):
        with archive.opened(place) as unpacked:
            assert unpacked.digest == checkout.digest
    (tmp_path / "paradec-conformance" / "LICENSE").write_text("mine")
    with pytest.raises(ValueError, match="LICENSE has SHA-256"), archive.opened(tmp_path):
        pass
    (tmp_path / "paradec-conformance" / "LICENSE").unlink()
    with pytest.raises(ValueError, match="lacks LICENSE"), archive.opened(tmp_path):
        pass


def test_an_archive_that_is_not_whole_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, where = packed(tmp_path), tmp_path / "bad.tar.gz"
    laws, manifest = "paradec-conformance/conformance/laws.json", "paradec-conformance/manifest.json"

    def refused(path: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message), archive.opened(path):
            pass

    def without(name: str) -> dict[str, bytes]:
        return {key: value for key, value in good.items() if key != name}

    refused(written(where, good | {laws: b"{ }"}), "conformance/laws.json has SHA-256")
    refused(written(where, without(laws)), "lacks conformance/laws.json")
    refused(written(where, without(manifest)), "no manifest.json")
    refused(written(where, good | {"paradec-conformance/more": b""}), "holds more")
    refused(written(where, good | {"paradec-conformance/../../more": b""}), "no plain file of its own folder")
    refused(written(where, good | {"/more": b""}), "no plain file of its own folder")
    refused(written(where, good | {"elsewhere/more": b""}), "no plain file of its own folder")
    link = good | {"paradec-conformance/link": b""}
    refused(written(where, link, type=tarfile.SYMTYPE, linkname="/etc/hosts"), "no plain file of its own folder")
    monkeypatch.setattr(archive, "LARGEST", 100)
    refused(written(where, good), "would unpack to more than")
    monkeypatch.undo()
    said = json.loads(good[manifest])
    for change, message in [
        ({"schema": "other/1"}, "schema='other/1'"),
        ({"digest": "0"}, "digest='0'"),
        ({"files": {"../up": "0"}}, "names '../up', which is outside"),
        ({"files": {"C:/up": "0"}}, "names 'C:/up', which is outside"),
        ({"files": [1]}, "hashes of its files"),
    ]:
        refused(written(where, good | {manifest: json.dumps(said | change).encode()}), message)
    refused(written(where, good | {manifest: b"{"}), "is no JSON")
    whole = (tmp_path / "kit.tar.gz").read_bytes()
    where.write_bytes(whole[: len(whole) // 2])
    refused(where, "no whole .tar.gz archive")
    refused(tmp_path / "nothing", "neither a folder nor an archive")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no tests/golden of a checkout")
    place = folder(tmp_path / "elsewhere")
    (place / "some/config.json").unlink()
    refused(place, r"some' has no config.json: it is the checkpoint that .*traces.llada.a.json' names")
    (place / "traces/llada/a.json").write_text("[1]")
    refused(place, r"traces.llada.a.json' holds no recorded traces: it names no model")


def test_data_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "__file__", str(tmp_path / "paradec" / "tools" / "conformance" / "archive.py"))
    with pytest.raises(ValueError, match="not in the wheel: give --data .*conformance_archive.py"):
        archive.find()


def test_every_file_of_the_kit_is_found_in_the_checkout() -> None:
    """Checkpoints whole, own cases, and all traces but those that the kit leaves out."""
    names = set(data().files)
    of_traces = ("llada-tiny", "dream-tiny", "moe/llada2-tiny", "moe/llada-moe-tiny")
    for checkpoint in (*of_traces, "conformance/ties-one", "conformance/law-llama"):
        assert {f"{checkpoint}/config.json", f"{checkpoint}/model.safetensors"} <= names
    left_out = {path.parent.name for top in archive.TRACES for path in (GOLDEN / top).rglob("*.json")} - {
        name.split("/")[-2] for name in names
    }
    newer = {"dpad", "d2cache", "fastdllm-plusplus", "d3llm", "d2f", "lopa"}
    older = {"fastdllm-dream-cached", "freedave-dream", "sdar_generate", "diffusers_pipeline"}
    assert left_out == (newer | older) & left_out


def test_ties_are_those_of_the_script() -> None:
    """By hand: one token a forward, with the turn to the other one where 45% of the row are masks."""
    script = load_script("benchmarks/conformance_cases.py")
    assert script.tie_steps(lambda masks: 1, 8) == [[1]] * 4 + [[3]] * 4
    assert script.tie_steps(lambda masks: masks, 8) == [[1] * 8]
    assert script.tie_steps(lambda masks: masks, 4) == [[1] * 4, [3] * 4]
    assert script.tie_steps(script.capped, 8) == [[1] * 5, [3] * 3]
    # 8 masks of 20 are below the turn; with 28 more masks, 36 of 48 are above it
    assert script.tie_steps(lambda masks: masks, 8, prompt=12) == [[3] * 8]
    assert script.tie_steps(lambda masks: masks, 8, prompt=12, seen=28, of=28) == [[1] * 8]
    assert script.tie_steps(lambda masks: masks, 8, prompt=2, seen=38, of=0) == [[3] * 8]
