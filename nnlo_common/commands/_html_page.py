"""HTML pages of reports: one file each that needs no network, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

__all__ = ["drawn", "html_page", "html_table"]

_STYLE = """
:root{color-scheme:light dark;--text:#1d2430;--soft:#5c677d;--line:#d8dde6;--ground:#fff}
@media(prefers-color-scheme:dark){:root{--text:#e4e8ef;--soft:#a0abc0;--line:#3a4354;--ground:#151a23}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.1rem;margin:2rem 0 .3rem}
p{margin:.3rem 0;color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .9rem .15rem 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600}td.long{white-space:normal;overflow-wrap:anywhere}
.big{color:var(--text);font-size:1.1rem}li{margin:.3rem 0}.scroll{overflow-x:auto}
pre{font-size:13px;overflow-x:auto}
@media print{body{max-width:none;margin:0}.scroll{overflow:visible}h2{break-after:avoid}}
"""
# Plotly has one colour for text and lines, so it must be seen on white and on black.
_SEEN, _FAINT, _CLEAR = "#7a8599", "rgba(128,139,160,.3)", "rgba(0,0,0,0)"


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: also the name of its tab.
        parts: what follows the heading, as HTML.
    """
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    # A path or a command may have bytes that are no text.
    return page.encode(errors="replace").decode()


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    long: bool = False,
    links: Sequence[str] = (),
) -> str:
    """Return a table.

    Args:
        heads: the names of the columns.
        rows: their texts.
        long: break lines within the cells.
        links: for each row the path that its last cell leads to; empty: none.

    Example:
        >>> print(html_table(["rank"], [["<0>"]]))
        <table><tr><th>rank</th></tr>
        <tr><td>&lt;0&gt;</td></tr>
        </table>
    """
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    cell = '<td class="long">' if long else "<td>"
    body = ""
    for number, row in enumerate(rows):
        cells = [escape(one) for one in row]
        if number < len(links) and links[number]:
            address = quote(links[number], errors="surrogateescape")
            cells[-1] = f'<a href="{address}">{cells[-1]}</a>'
        body += "<tr>" + "".join(f"{cell}{one}</td>" for one in cells) + "</tr>\n"
    return f"<table><tr>{head}</tr>\n{body}</table>"


def drawn(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return plotly's figures as HTML, by title; the first contains plotly, so that no network is needed."""
    for figure in figures.values():
        # Above are buttons, or the names of parallel axes; else nothing.
        above = figure.layout.updatemenus or any(one.type == "parcoords" for one in figure.data)
        figure.update_layout(
            title=None,
            margin={"l": 65, "r": 15, "t": 60 if above else 15, "b": 60},
            paper_bgcolor=_CLEAR,
            plot_bgcolor=_CLEAR,
            font={"color": _SEEN, "size": 12},
            modebar={"bgcolor": _CLEAR, "color": _SEEN},
            legend={"orientation": "h", "y": -0.2, "yanchor": "top"},  # beside, it would hide a narrow figure
        )
        figure.update_xaxes(gridcolor=_FAINT, zerolinecolor=_FAINT, linecolor=_SEEN)
        figure.update_yaxes(gridcolor=_FAINT, zerolinecolor=_FAINT, linecolor=_SEEN)
    return {
        title: figure.to_html(
            full_html=False,
            default_height=450,
            include_plotlyjs=number == 0,
            config={"responsive": True, "displaylogo": False},
        )
        for number, (title, figure) in enumerate(figures.items())
    }
