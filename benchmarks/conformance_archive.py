"""Pack the conformance kit's data (docs/conformance.md); the same checkout gives the same bytes.

    python benchmarks/conformance_archive.py [--out FOLDER]

The archive holds checkpoints, recorded traces and the kit's own cases from tests/golden, a manifest with the SHA-256 of
every file, and the licence. It is not in the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from paradec.tools.conformance import KIT_VERSION
from paradec.tools.conformance.archive import pack

ROOT = Path(__file__).resolve().parents[1]
NOTE = """Data of paradec's conformance kit.

Small checkpoints, trained or drawn at random for the purpose, in the file formats of LLaDA, Dream, LLaDA2, LLaDA-MoE,
Llama and DiffusionGemma; what published decoding code did with them, as data (the field `reference` of each trace says
which code, at which commit); cases made for the kit. No weights and no code of others are in it.

Licence: Apache-2.0 (LICENSE). `paradec verify --data` reads the archive as it is; manifest.json has the SHA-256 of
every file. docs/conformance.md of paradec explains the files and how results are reported.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="an existing folder")
    out = parser.parse_args().out / f"paradec-conformance-{KIT_VERSION}.tar.gz"
    texts = {"README": NOTE, "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8")}
    manifest = pack(ROOT / "tests" / "golden", out, texts)
    print(f"{out}: {len(manifest['files'])} files, {out.stat().st_size / 2**20:.1f} MiB")
    print(f"data {manifest['digest']}")
    print(f"SHA-256 of the archive {hashlib.sha256(out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
