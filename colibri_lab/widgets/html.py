"""A view as one self-contained HTML page: the same module and style sheet, the data as base64, no request to
anywhere.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from colibri_lab._files import local_path, whole_file
from colibri_lab.widgets._modules import join_modules, style_sheet

__all__ = ["view_page", "write_page"]

# A stand-in for the widget model: it holds the state, answers "ready" with the saved messages, and drops the rest.
_MODEL = """
const unbase = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const saved = JSON.parse(document.getElementById("saved").textContent);
const handlers = {};
const model = {
  get: (name) => saved.state[name],
  set: (name, value) => { saved.state[name] = value; },
  save_changes: () => {},
  on: (name, handler) => { (handlers[name] ||= []).push(handler); },
  off: () => {},
  send: (message) => {
    if (message.kind !== "ready") return;
    for (const { content, buffers } of saved.messages)
      setTimeout(() => handlers["msg:custom"].forEach((handler) => handler(content, buffers.map(unbase))));
  },
};
const el = document.getElementById("view");
"""


def view_page(
    view: str, title: str, state: Mapping[str, Any], messages: Sequence[tuple[Mapping[str, Any], Sequence[bytes]]]
) -> str:
    """The text of a page of `view` ("explorer"). `state` is what the widget's traits hold, `messages` what Python would
    have sent: (content, buffers).
    """
    saved = {
        "state": {**state, "_page": True},
        "messages": [
            {"content": content, "buffers": [base64.b64encode(b).decode() for b in buffers]}
            for content, buffers in messages
        ],
    }
    data = json.dumps(saved, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    module = join_modules(view, view).replace("export default { render };", "")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
body {{ margin: 0; background: #ffffff; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111111; }} }}
#view {{ max-width: 1200px; margin: 0 auto; }}
{style_sheet(view)}
</style>
</head>
<body>
<main id="view"></main>
<script type="application/json" id="saved">{data}</script>
<script type="module">
{_MODEL}
{module}
render({{ model, el }});
</script>
</body>
</html>
"""


def write_page(path: str | PathLike[str], text: str) -> Path:
    """Writes `text` under a temporary name beside `path` and renames it, so that no half-written page is ever seen.

    Raises FileError when it cannot be written.
    """
    target = local_path(path)
    with whole_file(target, "the page") as file:
        file.write(text.encode())
    return target
