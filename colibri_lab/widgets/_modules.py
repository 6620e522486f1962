"""Several small ES modules as the one module text that anywidget takes. No bundler: each module becomes a function
scope.

Views share the modules of `static/common`. `import { a, b } from "./other.js";`, or from "../common/other.js", turns
into `const { a, b } = modules["other"];`, `export` before a declaration is taken off, and the names exported are
returned at the end of the scope. Modules are joined in the order of their imports; the last one keeps its
`export default`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["join_modules", "static_text", "style_sheet"]

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\.(/|\./common/)(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def _folder(view: str) -> Traversable:
    return files("colibri_lab.widgets") / "static" / view


def static_text(view: str, name: str) -> str:
    """The text of `static/{view}/{name}`."""
    return (_folder(view) / name).read_text(encoding="utf-8")


def style_sheet(view: str) -> str:
    """The look that all views share, and that of one view: its own sheet first, then those of its parts."""
    parts = sorted(part.name for part in _folder(view).iterdir() if part.name.endswith(".css"))
    names = [f"{view}.css", *(name for name in parts if name != f"{view}.css")]
    return static_text("common", "base.css") + "".join(static_text(view, name) for name in names)


def join_modules(view: str, entry: str) -> str:
    """One ES module text made of `static/{view}/{entry}.js` and everything it imports; no two of its modules share a
    name. Raises ValueError on a circular import.
    """
    done: list[str] = []
    scopes: list[str] = []

    def add(folder: str, name: str, above: tuple[str, ...]) -> str:
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
        text = static_text(folder, f"{name}.js")
        for _, place, wanted in _IMPORT.findall(text):
            if wanted not in done:
                scopes.append(_scope(wanted, add(folder if place == "/" else "common", wanted, (*above, name))))
                done.append(wanted)
        return _IMPORT.sub(lambda found: f'const {{{found[1]}}} = modules["{found[3]}"];', text)

    last = add(view, entry, ())
    return "\n".join(["const modules = {};", *scopes, last])


def _scope(name: str, text: str) -> str:
    exported = ", ".join(_EXPORT.findall(text))
    body = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'
