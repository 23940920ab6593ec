"""Tables of the site that can be read on a phone too.

`extra.css` makes a card of each row of a table of texts, with the column's title before each text,
and keeps the numbers of a table of figures in one line. Here each table learns which it is.
"""

import html
import re

TEXT, FIGURE = 70, 36
"""Letters of a cell: with a longer one a table is of texts, with none as long of figures."""

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<t[dh]([^>]*)>(.*?)</t[dh]>", re.DOTALL)
MARK = re.compile(r"<[^>]*>")


def responsive(page: str) -> str:
    """The HTML of a page, in which tables say what they are and cells what column they are of."""
    return TABLE.sub(_marked, page)


def _marked(match: re.Match[str]) -> str:
    table = match[0]
    cells = [_text(cell[2]) for cell in CELL.finditer(table)]
    longest = max(map(len, cells), default=0)
    if longest <= FIGURE:
        return table.replace("<table>", "<table data-figures>", 1)
    if longest <= TEXT:
        return table
    head, *rows = ROW.findall(table)
    titles = [_text(cell[2]) for cell in CELL.finditer(head)]
    for row in rows:
        table = table.replace(row, _with_titles(row, titles), 1)
    return table.replace("<table>", "<table data-cards>", 1)


def _with_titles(row: str, titles: list[str]) -> str:
    names = iter(titles)

    def titled(cell: re.Match[str]) -> str:
        name = html.escape(next(names), quote=True)
        return f'<td{cell[1]} data-title="{name}">{cell[2]}</td>'

    return CELL.sub(titled, row)


def _text(cell: str) -> str:
    return html.unescape(MARK.sub("", cell)).strip()
