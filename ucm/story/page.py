# SPDX-License-Identifier: Apache-2.0
"""
A drawing as one HTML file that needs no network, and cannot use one.

The page allows exactly its own style and script, by their digests. What logs say is data:
JSON in which nothing can end the element that it stands in, put into the page as text.
"""

import base64
import hashlib
import json
from importlib import resources

from ucm.story.drawing import STAGES, Bar, Drawing

__all__ = ["page_of"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ucm timeline</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>What became of each request</h1>
<p id="summary"></p>
<ul id="notes"></ul>
</header>
<div id="legend"></div>
<div id="controls" role="toolbar" aria-label="Zoom">
<button id="in" title="Zoom in (+)">+</button>
<button id="out" title="Zoom out (-)">&minus;</button>
<button id="all" title="Show all of it (0)">All</button>
<button id="before" title="The request before (p)">&lsaquo;</button>
<button id="next" title="Show one request after the other (n)">Next request &rsaquo;</button>
<label>Find a request <input id="find" type="search" maxlength="200"></label>
<span id="hint">Drag to move. Ctrl and wheel to zoom. Double-click a bar to zoom to it.</span>
</div>
<main><svg id="chart" role="group" aria-label="Timeline"></svg></main>
<section id="facts" aria-live="polite"></section>
<noscript>This page is drawn by its own script; allow scripts for it.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(drawing: Drawing) -> str:
    """Return the whole file."""
    files = resources.files("ucm.story")
    style, script = (
        files.joinpath(name).read_text(encoding="utf-8")
        for name in ("timeline.css", "timeline.js")
    )
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy, style=style, script=script, data=_data_of(drawing)
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _data_of(drawing: Drawing) -> str:
    """Return JSON in which no ``<`` begins anything."""
    told = {
        "began_s": drawing.began_s,
        "span_s": drawing.span_s,
        "gaps": drawing.gaps,
        "notes": drawing.notes,
        "stages": STAGES,
        "lanes": [
            {
                "kind": lane.kind,
                "process": lane.process,
                "rows": lane.rows,
                "bars": [_bar_dict(bar) for bar in lane.bars],
            }
            for lane in drawing.lanes
        ],
    }
    text = json.dumps(told, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _bar_dict(bar: Bar) -> dict[str, object]:
    return {
        "name": bar.name,
        "begin": round(bar.begin_s, 6),
        "end": round(bar.end_s, 6),
        "outcome": bar.outcome,
        "marks": bar.marks,
        "stages": [
            [name, round(begin, 6), round(end, 6)] for name, begin, end in bar.stages
        ],
        "owners": bar.owners,
        "facts": bar.facts,
        "released": bar.released_s,
        "row": bar.row,
    }
