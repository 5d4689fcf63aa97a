"""Pack a folder of recorded cases into a ZIP file for tests/golden.

    python tests/pack.py FOLDER tests/golden/FAMILY.zip

To change a family, unpack it with `python -m zipfile -e tests/golden/FAMILY.zip FOLDER`, edit the files, and pack the
folder again. Equal files give equal archives.
"""

import sys
import zipfile
from pathlib import Path


def pack(folder: Path, target: Path) -> None:
    """Write all files of a folder into a ZIP file, sorted by name, with a fixed date and no permissions."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    with zipfile.ZipFile(target, "w") as archive:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980-01-01
            entry.create_system = 3  # the same on every system
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir() or not sys.argv[2].endswith(".zip"):
        sys.exit("usage: python tests/pack.py FOLDER FILE.zip")
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
