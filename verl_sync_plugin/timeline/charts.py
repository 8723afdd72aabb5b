# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML: bars, columns, a waterfall, tables. Shapes are inline SVG or boxes, every text is HTML and wraps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from verl_sync_plugin.timeline.figures import Column

GIB = 2**30
UNTOLD = "not told"  # by a report of an older version


def seconds(value: float) -> str:
    """A time for people: 7.73 s, 0.19 s, 26 ms, 1.31 ms, 31 µs."""
    if value >= 0.1:
        return f"{value:.2f} s"
    if value >= 1e-4:
        return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.0f} µs" if value else "0 s"


def gigabytes(value: float) -> str:
    """Bytes that travelled: decimal units, as verl's metrics have them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def gibibytes(value: float) -> str:
    """Memory: binary units, as keys and drivers have them."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def legend(names: Mapping[str, str]) -> str:
    """The colours of a chart: label by part."""
    items = "".join(f'<li><i class="c-{part}"></i>{escape(label)}</li>' for part, label in names.items())
    return f'<ul class="legend">{items}</ul>'


def bar(parts: Mapping[str, float], labels: Mapping[str, str], whole: float, show: str, said: str) -> str:
    """One horizontal stacked bar.

    Args:
        parts: value by part, in the order in which they are drawn.
        labels: of the parts.
        whole: the value that fills the width.
        show: the attribute that the value is left in, for whoever reads the page by a program.
        said: the text behind the bar.
    """
    boxes = "".join(
        f'<i class="c-{part}" style="width:{100 * value / whole:.4f}%" data-part="{part}" data-{show}="{value!r}" '
        f'title="{escape(labels[part])}"></i>'
        for part, value in parts.items()
        if value > 0 and whole > 0
    )
    return f'<div class="bar"><div class="track">{boxes}</div><span class="said">{escape(said)}</span></div>'


def ticks(top: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / count
    power = 10.0 ** _exponent(rough)
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * index for index in range(-int(-top // step) + 1)]


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def stacked_columns(shown: Sequence[Column], labels: Mapping[str, str], show: str, unit: object, axis: str) -> str:
    """Stacked columns over steps.

    Args:
        shown: the columns.
        labels: of the parts that are drawn, bottom first.
        show: the attribute that each value is left in.
        unit: function of a value that gives its text.
        axis: what the columns stand for.
    """
    assert callable(unit)
    sums = [sum(column.parts.get(part, 0.0) for part in labels) for column in shown]
    marks = ticks(max(sums))
    top = marks[-1]
    lines = "".join(
        f'<line x1="0" x2="{len(shown)}" y1="{100 - 100 * mark / top:.3f}" y2="{100 - 100 * mark / top:.3f}"/>'
        for mark in marks
    )
    drawn = "".join(_stack(x, column, labels, show, unit, top) for x, column in enumerate(shown))
    upright = "".join(
        f'<span style="bottom:{100 * mark / top:.3f}%">{escape(_short(unit(mark)))}</span>' for mark in marks
    )
    return (
        f'<div class="columns"><div class="yaxis">{upright}</div>'
        f'<svg viewBox="0 0 {len(shown)} 100" preserveAspectRatio="none" role="img">{lines}{drawn}</svg>'
        f'<div class="xaxis">{_labels(shown)}</div><div class="axis">{escape(axis)}</div></div>'
    )


def _short(text: str) -> str:
    """A tick's text without needless zeros."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}".strip()


def _stack(x: int, column: Column, labels: Mapping[str, str], show: str, unit: object, top: float) -> str:
    assert callable(unit)
    boxes, height = "", 0.0
    for part in labels:
        value = column.parts.get(part, 0.0)
        if value <= 0:
            continue
        height += 100 * value / top
        boxes += (
            f'<rect class="c-{part}" x="{x + 0.06:.2f}" width="0.88" y="{100 - height:.4f}" '
            f'height="{100 * value / top:.4f}" data-part="{part}" data-{show}="{value!r}"/>'
        )
    told = [f"{labels[part]}: {unit(column.parts[part])}" for part in labels if column.parts.get(part, 0.0) > 0]
    title = "\n".join([f"step {column.label}: {unit(sum(column.parts.get(part, 0.0) for part in labels))}", *told])
    return f'<g data-step="{escape(column.label)}"><title>{escape(title)}</title>{boxes}</g>'


def _labels(shown: Sequence[Column]) -> str:
    """At most seven steps under the columns, each under its own."""
    every = -(-len(shown) // 7)
    return "".join(
        f'<span style="left:{100 * (x + 0.5) / len(shown):.3f}%">{escape(column.label.partition(" ")[0])}</span>'
        for x, column in enumerate(shown)
        if x % every == 0
    )


def waterfall(spans: Iterable[tuple[str, float, float]], lanes: Sequence[str], whole: float) -> str:
    """When each stage ran: one lane per stage, one box per span.

    Args:
        spans: (stage, start, seconds), starts since the sync's first span.
        lanes: the stages, in the order in which they are drawn.
        whole: the seconds that fill the width.
    """
    by_lane: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
    for stage, start, length in spans:
        by_lane[stage].append((start, length))
    rows = ""
    for lane, own in by_lane.items():
        boxes = "".join(
            f'<i class="c-{escape(lane)}" style="left:{100 * start / whole:.4f}%;width:{100 * length / whole:.4f}%" '
            f'data-stage="{escape(lane)}" data-start="{start!r}" data-seconds="{length!r}" '
            f'title="{escape(lane)}: {seconds(length)}, from {seconds(start)}"></i>'
            for start, length in own
        )
        total = seconds(sum(length for _, length in own))
        rows += f'<dt>{escape(lane)}</dt><dd><div class="lane">{boxes}</div><span class="said">{total}</span></dd>'
    scale = f'<dt></dt><dd class="scale"><span>0</span><span>{seconds(whole)}</span></dd>'
    return f'<dl class="waterfall">{rows}{scale}</dl>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> str:
    """A table; the first cell of a row is its heading.

    Args:
        head: the first row.
        rows: the others.
        name: the table's id; none when empty.
    """
    known = f' id="{name}"' if name else ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table{known}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
