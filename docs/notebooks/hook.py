"""Hooks of mkdocs: make a page of every notebook, and warn if a page of the site loads something from the network."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.paradec")
NETWORK_REFERENCE = re.compile(
    r"<(?:script|img|iframe|video|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s>]*"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=[\"']?(?:https?:)?//[^\s>]*"
    r"|@import\s+url\((?:https?:)?//[^)]*"
)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every notebook; the page links to the notebook's file."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            cells = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))["cells"]
            text = to_markdown(cells, file.src_uri.rpartition("/")[2])
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=text))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put command-line options into spans, because browsers break lines after each of their hyphens."""
    return re.sub(r"(?<=[ >])--[a-z][\w-]*", r'<span class="option">\g<0></span>', html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn about everything that a browser would load from the network. `mkdocs build --strict` fails on warnings."""
    for match in NETWORK_REFERENCE.finditer(output):
        LOG.warning("%s loads something from the network: %s", page.file.src_uri, match.group())
    return output


def to_markdown(cells: list[dict[str, Any]], name: str) -> str:
    """Convert a notebook's cells to a page. It shows PNG outputs and texts (in lines of 80)."""
    parts = []
    for index, cell in enumerate(cells):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if index == 0:
            parts.append(f"[Download the notebook]({name}) to run it yourself.")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="output of the cell" src="data:image/png;base64,{png}">')
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                lines = [textwrap.fill(line, 80, subsequent_indent="    ") for line in text.rstrip().split("\n")]
                parts.append("```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts) + "\n"
