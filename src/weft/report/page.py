"""The frame of every HTML page: one file, system fonts, light and dark, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2330; --soft: #5d6778; --line: #dfe3ea; --paper: #ffffff; --panel: #f6f7f9; --bar: #7fa9d9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e7ee; --soft: #98a2b3; --line: #323a47; --paper: #14181f; --panel: #1b212a; --bar: #3f74b3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: 24px; line-height: 1.25; font-weight: 650; margin: 0 0 24px; letter-spacing: -0.01em; }
h2 { font-size: 16px; font-weight: 600; margin: 32px 0 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px 6px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap;
} th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; } th.number, td.number {
text-align: right; padding: 6px 0 6px 22px; } th.barred { padding-left: 22px; }
td.barred { position: relative; min-width: 260px; padding-left: 22px; }
td.barred span { display: inline-block; min-width: 40px; text-align: right; }
td.barred i { position: absolute; left: 76px; right: 0; top: 9px; bottom: 9px; }
td.barred b { display: block; height: 100%; background: var(--bar); border-radius: 3px; }
.note { margin: 4px 0; }
div + .note { margin-top: 10px; }
.note, footer { color: var(--soft); font-size: 13px; } footer {
margin-top: 40px; padding-top: 12px; border-top: 1px solid var(--line); } figure { margin: 0 0 8px; padding:
16px; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; } figure svg { display:
block; width: 100%; height: auto; } pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation
Mono", monospace; } #tip { position: fixed; pointer-events: none; display: none; white-space: pre; z-index: 1;
max-width: 480px; background: var(--ink); color: var(--paper); font-size: 12.5px; line-height: 1.45; padding:
6px 10px; border-radius: 6px; box-shadow: 0 2px 10px rgb(0 0 0 / 0.25); }
"""


def page(title: str, body: Sequence[str], *, footer: str = "", script: str = "") -> str:
    """A whole page; `body` holds elements, `title` and `footer` are text."""
    foot = f"<footer>{escape(footer)}</footer>" if footer else ""
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{chr(10).join(body)}\n{foot}\n</main>\n{code}\n</body>\n</html>\n"
    )
