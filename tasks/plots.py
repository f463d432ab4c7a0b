"""Plots of a drafter, or of two side by side, as SVG in the page's own colours: read in light and in dark.

matplotlib draws them with stand-in colours, which are then replaced by `currentColor` and the page's variables.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ONE, OTHER, INK, GRID = "#010101", "#020202", "#030303", "#040404"
CSS = {ONE: "var(--one)", OTHER: "var(--other)", INK: "currentColor", GRID: "var(--grid)"}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "eyas",  # the same figures give the same bytes
    "text.parse_math": False,  # names are people's own words; between two $ matplotlib would read TeX
    "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "axes.titlesize": 9, "axes.titleweight": "bold", "legend.frameon": False, "legend.labelcolor": INK,
}  # fmt: skip
LOOKS = ((ONE, "-", "o"), (OTHER, "--", "s"))  # told apart without colour too
MOST_SETS = 8  # shown side by side; more would be too small to read

Names = Sequence[str]


def differences(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Per set: every prompt's difference in acceptance length as a dot, the interval of the set's as a bar."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 0.9 + 0.62 * len(sets)), layout="constrained")
        axes = figure.subplots()
        for row, found in enumerate(sets.values()):
            each = sorted(prompt["one"] - prompt["other"] for prompt in found["each"])
            # neighbours are put apart in turn, so that equal ones are seen side by side
            places = [row - 0.14 - 0.05 * (n % 5) for n in range(len(each))]
            axes.plot(each, places, "o", color=INK, alpha=0.5, markersize=4, markeredgewidth=0)
            if found["low"] is not None:
                axes.plot([found["low"], found["high"]], [row + 0.12] * 2, color=INK, linewidth=4, alpha=0.8)
            axes.plot([found["difference"]], [row + 0.12], "|", color=INK, markersize=15, markeredgewidth=2)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(sets)), labels=[f"{key} ({found['prompts']})" for key, found in sets.items()])
        axes.set_ylim(len(sets) - 0.55, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("difference in acceptance length: a dot a prompt; bar: 95% interval of the set's")
        return _svg(figure, "differences", "Distribution of paired differences by prompt set")


def by_position(shares: Sequence[Mapping[str, Sequence[float]]], names: Names) -> str:
    """Per set: share of the verifications that accept at least 1, 2, ... drafted tokens.

    Args:
        shares: per drafter, by set.
    """
    shown = list(shares[0])[:MOST_SETS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 0.4 + 2.4 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        for axes, key in zip(grid, shown, strict=False):
            for side, (colour, line, mark) in zip(shares, LOOKS, strict=False):
                places = range(1, len(side[key]) + 1)
                axes.plot(places, side[key], line, marker=mark, color=colour, markersize=5)
            axes.set(title=key, xlabel="drafted token", ylim=(0, 1.02))
            axes.set_xticks(range(1, max(len(side[key]) for side in shares) + 1))
        for axes in list(grid)[len(shown) :]:
            axes.set_visible(False)
        figure.axes[0].set_ylabel("share of verifications\nthat accept it")
        _legend(figure, names)
        return _svg(figure, "by-position", "Acceptance by position")


def losses(curves: Sequence[Mapping[str, Sequence[Sequence[float]]]], names: Names) -> str:
    """Loss by optimiser step: training left, held-out split right."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 2.9), layout="constrained")
        for axes, (metric, title) in zip(
            figure.subplots(1, 2), {"train/loss": "training", "held_out/loss": "held-out split"}.items(), strict=True
        ):
            for side, (colour, line, _) in zip(curves, LOOKS, strict=False):
                points = side.get(metric, [])
                mark = "." if len(points) < 40 else ""
                axes.plot([p[0] for p in points], [p[1] for p in points], line, marker=mark, color=colour)
            axes.set(title=title, xlabel="optimiser step")
        figure.axes[0].set_ylabel("loss")
        _legend(figure, names)
        return _svg(figure, "losses", "Loss curves")


def throughput(figures: Sequence[Mapping[str, Mapping[str, Any]]], keys: Sequence[str], names: Names) -> str:
    """Per set: output tokens a second of a request, with each drafter and, hollow, without it on the same machine."""
    width = 0.2
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 3.0), layout="constrained")
        axes = figure.subplots()
        for number, (side, (colour, *_)) in enumerate(zip(figures, LOOKS, strict=False)):
            at = [place + (2 * number + 0.5 - len(figures)) * width for place in range(len(keys))]
            axes.bar(at, [side[key]["tokens_per_s"] for key in keys], width * 0.92, color=colour)
            hollow = [place + width for place in at]
            axes.bar(hollow, [side[key]["plain_tokens_per_s"] for key in keys], width * 0.92, fill=False,
                     edgecolor=colour)  # fmt: skip
            for place, key in zip(at, keys, strict=True):
                speed_up = f"×{side[key]['speed_up']:.2f}"
                axes.annotate(speed_up, (place, side[key]["tokens_per_s"]), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(keys)), labels=list(keys))
        axes.margins(y=0.12)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("tokens a second\n(hollow: plain decoding)")
        _legend(figure, names)
        return _svg(figure, "throughput", "Throughput and speed-up")


def standalone(svg: str) -> str:
    """The same as a file of its own, with the size and the colours that a page would bring."""
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    svg = svg.replace("<svg ", f'<svg width="{width}pt" height="{height}pt" ', 1)  # viewers show a size of 0 else
    light = "color:#1d2433;background:#fff;--one:#1b66c9;--other:#c25b00;--grid:#d9dde5"
    return svg.replace(">", f"><style>svg{{{light}}}</style>", 1)


def _legend(figure: Figure, names: Names) -> None:
    axes: Axes = figure.axes[0]
    handles = [
        axes.plot([], [], line, marker=mark, color=colour, label=name)[0]
        for name, (colour, line, mark) in zip(names, LOOKS, strict=False)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)


def _svg(figure: Figure, name: str, title: str) -> str:
    """The bare `<svg>` element, with an id, a name for screen readers, and the page's colours."""
    buffer = io.StringIO()
    with warnings.catch_warnings():  # a name in letters matplotlib's own font lacks: the page's font has them
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for stand_in, colour in CSS.items():
        text = text.replace(stand_in, colour)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)  # as wide as the page lets it be
    text = re.sub(r'(<g id=")', rf"\1{name}-", text)  # ids are the page's: two figures must not share one
    return text.replace("<svg ", f'<svg id="{name}" role="img" aria-label="{title}" ', 1).strip()
