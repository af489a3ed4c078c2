"""A hook of mkdocs: links to files outside of ``docs/`` lead to the project's pages."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

ROOT = Path(__file__).parents[2]
_URL = re.search(r'^URL = "(.+)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.M)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces the relative links of a page that leave ``docs/``."""

    def absolute(link: re.Match[str]) -> str:
        path, _, heading = link[1].partition("#")
        target = normpath(join("docs", dirname(page.file.src_uri), path))
        if "://" in path or target.startswith("docs/"):
            return link[0]
        assert _URL
        assert (ROOT / target).exists(), link[0]
        return f"]({_URL[1]}/blob/main/{target}{'#' * bool(heading)}{heading})"

    return re.sub(r"\]\(([^)\s]+)\)", absolute, markdown)
