"""A page of HTML that needs no other file and follows the reader's light or dark scheme."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = (
    "body{margin:0 auto;max-width:980px;padding:24px;font:15px/1.5 system-ui,sans-serif;background:#fff;color:#1b1f24}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;display:block;overflow-x:auto}"
    "th,td{padding:4px 10px;border-bottom:1px solid #d3dae1;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    "@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#2a333d}}"
)


def page(title: str, parts: Iterable[str]) -> str:
    """A page of parts that are HTML already, such as charts and what `paragraphs` and `table` make."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{escape(title)}</h1>\n{''.join(parts)}</body>\n</html>\n"
    )


def paragraphs(lines: Iterable[str]) -> str:
    """A paragraph a line."""
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column names the row."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"
