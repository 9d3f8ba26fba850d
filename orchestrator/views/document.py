"""The page through which people see runs: one HTML document, whatever it is fed by.

The files in `page/` are put into one document, which loads nothing from anywhere. Served, it asks this service for data;
with data inside it is a report, which needs no service. Only the scripts and styles that stand in `page/` may run: the
document's policy names their hashes, and data is a block that no browser executes. Owns the document and its policy,
not what is in the data.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SCRIPTS = (
    "text.js",
    "charts.js",
    "overview.js",
    "learning.js",
    "rollouts.js",
    "control.js",
    "live.js",
    "main.js",
)


@dataclass(frozen=True, slots=True)
class Page:
    """A document and the policy under which it is shown."""

    html: bytes
    policy: str


@cache
def served_page() -> Page:
    """The page that asks for its data where it came from."""
    return _build(None)


def report_page(data: bytes) -> Page:
    """The page with its data (JSON) inside."""
    return _build(data)


def page_file(name: str) -> str:
    """One of the files that the page is made of."""
    return resources.files("orchestrator.views").joinpath("page", name).read_text(encoding="utf-8")


def _build(data: bytes | None) -> Page:
    style = page_file("style.css")
    scripts = [page_file(name) for name in SCRIPTS]
    allowed = " ".join(_hash(script) for script in scripts)
    reach = "connect-src 'self'" if data is None else "connect-src 'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; {reach}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    html = page_file("page.html")
    html = html.replace("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    html = html.replace("<!-- style -->", f"<style>{style}</style>")
    html = html.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))
    before, _, after = html.partition("<!-- data -->")
    inside = (
        b"" if data is None else b'<script type="application/json" id="data">' + _inert(data) + b"</script>"
    )
    return Page(before.encode() + inside + after.encode(), policy + "; frame-ancestors 'none'")


def _inert(data: bytes) -> bytes:
    """JSON that cannot end the block that it stands in."""
    return (
        data.replace(b"<", b"\\u003c")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
