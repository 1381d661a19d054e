"""One HTML page that holds everything it shows: style and pictures inline, nothing fetched, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

_OPEN_ROWS = 12                    # a longer table opens on a click

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --fg: #1c2430; --muted: #667085; --line: #e3e7ee;
  --accent: #2f6fed; --good: #0f9d6b; --bad: #d1495b; --s0: #2f6fed; --s1: #12a594; --s2: #f2a33a; --s3: #d1495b;
  --s4: #8e6ad8; --s5: #5b8def; --s6: #7a8699; --s7: #c17ec9; }
@media (prefers-color-scheme: dark) { :root { --bg: #10141b; --card: #181e28; --fg: #e6eaf1; --muted: #94a0b3; --line: #2a3240;
  --accent: #6b9bff; --good: #3ecf9a; --bad: #f0788a; --s0: #6b9bff; --s1: #38c7b6; --s2: #f5b95f; --s3: #f0788a; --s4: #ab8df0;
  --s5: #8fb2ff; --s6: #94a0b3; --s7: #d9a3df; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--muted); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 20px 0; }
.fact, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.fact { padding: 12px 16px; } .fact b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.fact span { color: var(--muted); font-size: 13px; }
section { padding: 18px 20px; margin: 0 0 16px; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; }
svg text { fill: var(--fg); } svg .small { fill: var(--muted); font-size: 12px; } svg .note { font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); } svg .native { stroke: var(--muted); stroke-dasharray: 5 4; }
svg .best { fill: none; stroke: var(--good); stroke-width: 2; }
svg .trial { fill: var(--accent); } svg .trial.pruned { fill: var(--card); stroke: var(--muted); stroke-width: 1.5; }
svg .interval { stroke: var(--muted); stroke-width: 1; opacity: 0.55; }
svg .cross { stroke: var(--bad); stroke-width: 1.8; fill: none; }
svg .bar { fill: var(--accent); } svg .bar.worse { fill: var(--bad); } svg .whisker { stroke: var(--fg); stroke-width: 1.4; fill: none; }
svg .s0 { fill: var(--s0); } svg .s1 { fill: var(--s1); } svg .s2 { fill: var(--s2); } svg .s3 { fill: var(--s3); }
svg .s4 { fill: var(--s4); } svg .s5 { fill: var(--s5); } svg .s6 { fill: var(--s6); } svg .s7 { fill: var(--s7); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; padding-right: 18px; }
pre { margin: 0; white-space: pre-wrap; font: 12.5px/1.45 ui-monospace, monospace; }
summary { cursor: pointer; color: var(--accent); font-size: 13.5px; padding: 6px 0; }
footer { color: var(--muted); font-size: 13px; margin-top: 24px; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A card of the page: a heading, a sentence, and ready HTML."""

    title: str
    lead: str
    body: str


def render(title: str, subtitle: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section], footer: str) -> str:
    """The whole page. `facts` are (value, what it is) pairs, shown large."""
    cards = "".join(f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in facts)
    body = "".join(f"<section><h2>{escape(section.title)}</h2><p>{escape(section.lead)}</p>{section.body}</section>\n"
                   for section in sections)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>"
            f'<div class="facts">{cards}</div>\n{body}<footer>{escape(footer)}</footer></main></body></html>\n')


def table(frame: pd.DataFrame) -> str:
    """A frame as an HTML table, numbers to the right, missing values as a dash; folded where it is long."""
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    classes = [' class="number"' if number else "" for number in numeric]
    head = "".join(f"<th{css}>{escape(str(name))}</th>" for name, css in zip(frame.columns, classes))
    rows = "".join("<tr>" + "".join(f"<td{css}>{escape(cell(value))}</td>" for value, css in zip(row, classes)) + "</tr>"
                   for row in frame.itertuples(index=False))
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return whole if len(frame) <= _OPEN_ROWS else f"<details><summary>{len(frame)} rows</summary>{whole}</details>"


def cell(value: object) -> str:
    """One value as a person reads it."""
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
