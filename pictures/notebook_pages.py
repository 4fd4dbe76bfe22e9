"""Hook of mkdocs: each notebook in docs/ becomes a page beside it, with its text and pictures."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page and the pictures of each notebook; the notebook itself stays, to be downloaded."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = PurePosixPath(file.src_uri).with_suffix("")
            text, pictures = converted(json.loads(file.content_string), page.name)
            files.append(File.generated(config, f"{page}.md", content=text))
            for name, picture in pictures.items():
                files.append(File.generated(config, f"{page.parent}/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, **_others: Any) -> str:
    """Lead links of other pages to the page of a notebook; code hosts show the notebook itself."""
    return re.sub(r"\]\((\S*/\S+)\.ipynb\)", r"](\1.md)", markdown)


def converted(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, str]]:
    """Return a notebook as Markdown, and its pictures by their names."""
    parts, pictures = [], dict[str, str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            for kind, picture in output.get("data", {}).items():
                file = f"{name}{len(pictures) + 1}.svg"
                assert kind == "image/svg+xml", f"run pictures/notebook.py: {name} has {kind}"
                pictures[file] = "".join(picture)
                parts.append(f"![What the cell draws]({file})")
    return "\n\n".join(parts), pictures
