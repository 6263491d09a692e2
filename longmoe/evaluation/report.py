"""A report: one HTML file that needs nothing beside it."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

from etils import epath

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #eee; }
td { font-variant-numeric: tabular-nums; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .9rem; }
figure { margin: 1rem 0; } pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first names the columns."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file's bytes and what it shows."""

    png: bytes
    caption: str


@dataclass(frozen=True)
class Verbatim:
    """Text shown as it is, spaces and all."""

    text: str


@dataclass(frozen=True)
class Section:
    """A heading and its parts in order; a plain string is a paragraph."""

    heading: str
    parts: Sequence[str | Table | Picture | Verbatim]


def write_report(path: epath.PathLike, title: str, sections: Sequence[Section]) -> epath.Path:
    """Writes the sections under `title`. All text is escaped; pictures are inline."""
    body = "\n".join(f"<section><h2>{html.escape(s.heading)}</h2>\n" + "\n".join(map(_render, s.parts)) + "</section>" for s in sections)
    page = (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n")
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _render(part: str | Table | Picture | Verbatim) -> str:
    match part:
        case str():
            return f"<p>{html.escape(part)}</p>"
        case Verbatim(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Picture(png, caption):
            data, text = base64.b64encode(png).decode(), html.escape(caption)
            return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        case Table(rows):
            head, *rest = [[html.escape(str(cell)) for cell in row] for row in rows]
            lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
            lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rest]
            return "<table>" + "\n".join(lines) + "</table>"
    raise ValueError(f"part: got {type(part).__name__}, wanted a string, Table, Picture or Verbatim")
