"""The one style sheet of HTML reports: light, dark and print."""

from __future__ import annotations

import base64
import hashlib

__all__ = ["STYLE", "style_source"]

STYLE = """
:root { color-scheme: light dark;
  --bg: #ffffff; --panel: #f6f8fa; --text: #1f2328; --muted: #59636e; --line: #d1d9e0;
  --ok: #116329; --ok-bg: #dafbe1; --bad: #a40e26; --bad-bg: #ffebe9;
  --open: #6f4400; --open-bg: #fff3c4; --mark: #ffd8b5; --curve: #0a5dc2; --curve2: #8250df;
  --near: #bc4c00; --band: #fff3c4; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0d1117; --panel: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #30363d;
  --ok: #7ee2a8; --ok-bg: #12361f; --bad: #ffb1a8; --bad-bg: #4b1113;
  --open: #f2cc60; --open-bg: #3b2a04; --mark: #7a3d00; --curve: #6cb6ff; --curve2: #c297ff;
  --near: #ffa657; --band: #2d2405; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--bg);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
h4 { font-size: .9rem; margin: 1.25rem 0 .4rem; font-weight: 600; }
p { margin: .25rem 0; }
a { color: var(--curve); }
.muted, dt, figcaption, th { color: var(--muted); }
code, pre, .field { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.chip { display: inline-block; padding: 0 .55em; border-radius: 1em; font-size: .85em;
  font-weight: 600; white-space: nowrap; border: 1px solid currentColor; }
.ok { color: var(--ok); background: var(--ok-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.open { color: var(--open); background: var(--open-bg); }
.problem { border-left: 4px solid var(--bad); padding: .25rem .75rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .25rem 0; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td { overflow-wrap: anywhere; }
td.field { overflow-wrap: normal; white-space: nowrap; font-size: .85rem; }
td.why { min-width: 18rem; } td.value { min-width: 6.5rem; }
td.num, th.num { text-align: right; }
details.cell { border: 1px solid var(--line); border-radius: .5rem; margin: .6rem 0; }
details.cell > summary { padding: .55rem .8rem; cursor: pointer; background: var(--panel);
  border-radius: .5rem; overflow-wrap: anywhere; }
details.cell[open] > summary { border-bottom: 1px solid var(--line);
  border-radius: .5rem .5rem 0 0; }
summary:focus-visible, a:focus-visible { outline: 3px solid var(--curve); outline-offset: 2px; }
.body { padding: .25rem .8rem .8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: .5rem 0; }
dt { grid-column: 1; } dd { grid-column: 2; margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem .75rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .875rem;
  line-height: 1.45; tab-size: 4; }
pre.prefix { border-radius: .4rem .4rem 0 0; border-bottom: 0; }
.sides { display: grid; grid-template-columns: 1fr 1fr; }
.sides > div { min-width: 0; display: flex; flex-direction: column; border: 1px solid var(--line);
  background: var(--panel); }
.sides > div + div { border-left: 0; }
.sides pre { border: 0; border-radius: 0; flex: 1; }
.side { margin: 0; padding: .15rem .75rem; font-size: .8rem; font-weight: 600;
  border-bottom: 1px solid var(--line); }
mark { background: var(--mark); color: inherit; padding: .05em 0; border-radius: .2em;
  text-decoration: underline; text-underline-offset: .2em; }
figure { margin: .75rem 0 0; overflow-x: auto; }
figcaption { font-size: .8rem; }
svg { display: block; width: 100%; max-width: 60rem; height: auto; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg .band { fill: var(--band); } svg .axis { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke: var(--curve); stroke-width: 1.5; }
svg .curve2 { fill: none; stroke: var(--curve2); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .near { fill: var(--near); } svg .tie { fill: var(--bad); }
svg .point { fill: var(--curve); }
svg .parting { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 2; }
svg text.parting-label { fill: var(--bad); }
footer { margin-top: 3rem; font-size: .8rem; color: var(--muted); }
@media (max-width: 40rem) { .sides { grid-template-columns: 1fr; }
  .sides > div + div { border-left: 1px solid var(--line); border-top: 0; }
  svg { min-width: 32rem; } td.why { min-width: 12rem; }
  dl { grid-template-columns: 1fr; } dt, dd { grid-column: 1; } }
@media print { :root { color-scheme: light; --bg: #fff; --panel: #fff; --text: #000;
  --muted: #444; --line: #999; --ok: #116329; --ok-bg: #fff; --bad: #a40e26; --bad-bg: #fff;
  --open: #6f4400; --open-bg: #fff; --mark: #eee; --curve: #0a5dc2; --curve2: #8250df;
  --near: #bc4c00; --band: #f3f3f3; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  details:not(.margins)::details-content { content-visibility: visible; block-size: auto; }
  details.margins { display: none; }
  h2, h3, h4, summary { break-after: avoid; } figure, tr, .sides { break-inside: avoid; }
  td.why, td.value { min-width: 0; overflow-wrap: break-word; } }
"""


def style_source() -> str:
    """Return the sheet as a source of a content security policy, by its digest."""
    digest = hashlib.sha256(STYLE.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
