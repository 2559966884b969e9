"""Tables of texts, written as aligned columns for a terminal and as HTML for a notebook; numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

PREFIXES = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
    (1e-12, "p"),
)


@dataclass(frozen=True)
class Table:
    """A table: the columns named in `left` are aligned to the left, all others to the right."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Returns the table as aligned lines."""
        body = [list(self.heads), *map(list, self.rows)]
        widths = [max(len(row[column]) for row in body) for column in range(len(self.heads))]
        aligned = [head in self.left for head in self.heads]
        texts = [
            "  ".join(c.ljust(w) if a else c.rjust(w) for c, w, a in zip(row, widths, aligned)).rstrip() for row in body
        ]
        return [self.title, *texts] if self.title else texts


@dataclass(frozen=True)
class Report:
    """What is told about something: a title, lines above, tables, and lines below them."""

    title: str
    above: Sequence[str] = ()
    tables: Sequence[Table] = ()
    below: Sequence[str] = ()

    def text(self) -> str:
        """Returns the report for a terminal."""
        blocks = [[self.title, *self.above], *(table.lines() for table in self.tables), list(self.below)]
        return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"

    def html(self) -> str:
        """Returns the report for a notebook: tables that take their colours from where they stand."""
        return HTML.render(report=self)


HTML = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
    """<div><strong>{{ report.title }}</strong>{% for line in report.above %}<div>{{ line }}</div>{% endfor %}
{%- for table in report.tables %}
<table><caption style="text-align:left">{{ table.title }}</caption><thead><tr>{% for head in table.heads -%}
<th style="text-align:{{ 'left' if head in table.left else 'right' }}">{{ head }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr>{% for cell in row -%}
<td style="text-align:{{ 'left' if table.heads[loop.index0] in table.left else 'right' }}">{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table>{% endfor %}
{%- for line in report.below %}<div style="white-space:pre-wrap">{{ line }}</div>{% endfor %}</div>"""
)


def quantity(number: float, unit: str, sign: bool = False) -> str:
    """Returns a number of three digits with a prefix and its unit.

    >>> quantity(0.000105, "s"), quantity(1.5e9, "B"), quantity(-2e-6, "s", sign=True), quantity(0, "s", sign=True)
    ('105 µs', '1.5 GB', '-2 µs', '+0 s')
    """
    if not math.isfinite(number):
        return f"{number:+g} {unit}" if sign else f"{number:g} {unit}"
    size = abs(number)
    factor, prefix = next(((f, p) for f, p in PREFIXES if float(f"{size:.3g}") >= f), (1.0, ""))
    digits = f"{size / factor:.3g}" if size / factor < 999.5 else f"{size / factor:.0f}"
    plus = "-" if number < 0 else "+" if sign else ""
    return f"{plus}{digits} {prefix}{unit}"
