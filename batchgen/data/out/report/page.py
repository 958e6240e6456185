"""A report as one HTML file: style, script, library and data inside it, and nothing loaded from elsewhere.

Its data is one JSON text that no script is made of, and its content security policy allows the scripts and styles with
these digests alone: text from rows is never code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pkgutil import get_data
from typing import Any, Final

from batchgen.request.printable import encodable

_ESCAPED: Final = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def island(value: Any) -> str:
    """JSON that is safe inside an HTML element: it has no markup. NaN is not allowed."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return encodable(text).translate(_ESCAPED)


def page(data: Any, title: str, library: str) -> bytes:
    """The page.

    Args:
        data: what the script shows, JSON.
        title: of the page, any text.
        library: the JavaScript of Vega-Embed, which sets `window.vegaEmbed`.
    """
    parts = {name: (get_data(__package__, f"page.{name}") or b"").decode() for name in ("html", "css", "js")}
    library = library.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (library, parts["js"]))
    filled = {
        "policy": f"default-src 'none'; script-src {scripts}; style-src 'sha256-{_digest(parts['css'])}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "style": parts["css"],
        "library": library,
        "script": parts["js"],
        "data": island(data),
    }
    made, rest = "", parts["html"]
    while rest:  # each place is filled once, so that no text is searched for places
        before, found, rest = rest.partition("{{")
        name, _, rest = rest.partition("}}")
        made += before + (filled[name] if found else "")
    return made.encode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
