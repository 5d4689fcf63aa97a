"""What mkdocs does besides for this site: a page for each notebook, and a warning where a page needs the network."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.paradec")
ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|video|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s>]*"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=[\"']?(?:https?:)?//[^\s>]*"
    r"|@import\s+url\((?:https?:)?//[^)]*"
)


def on_files(files: Any, config: Any) -> Any:
    """Every notebook gets a page, beside the file itself, which the page links to."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            cells = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))["cells"]
            text = markdown(cells, file.src_uri.rpartition("/")[2])
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=text))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Options of the command line in a span, since browsers break lines behind each of their hyphens."""
    return re.sub(r"(?<=[ >])--[a-z][\w-]*", r'<span class="option">\g<0></span>', html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """A warning, which `mkdocs build --strict` makes an error, for what a browser would ask the network for."""
    for match in ELSEWHERE.finditer(output):
        LOG.warning("%s asks for something from the network: %s", page.file.src_uri, match.group())
    return output


def markdown(cells: list[dict[str, Any]], name: str) -> str:
    """A notebook's cells as a page. Of outputs, texts (in lines of 80) and PNGs are shown."""
    parts = []
    for index, cell in enumerate(cells):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if index == 0:
            parts.append(f"[The notebook itself]({name}), to run where you like.")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="what the cell shows" src="data:image/png;base64,{png}">')
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                lines = [textwrap.fill(line, 80, subsequent_indent="    ") for line in text.rstrip().split("\n")]
                parts.append("```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts) + "\n"
