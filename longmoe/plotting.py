"""Functions that return matplotlib figures. They never show, save or touch pyplot, so they work without a display.

Colours are Okabe and Ito's (distinct for colour-blind readers); maps run from light to dark and survive a grey print.
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MAP = "cividis"
_WIDTH = 6.4


class Band(NamedTuple):
    """A line and the interval about it, a number each for every x; NaN bounds leave the interval out."""
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Panel(NamedTuple):
    """One of several plots below each other."""
    xlabel: str
    ylabel: str
    bands: Mapping[str, Band]
    """A name has one colour in all panels of a figure."""
    xscale: str = "linear"
    """Or "log", or "log2", whose ticks are the points themselves."""
    yscale: str = "linear"
    title: str = ""


class Intervals(NamedTuple):
    """One of several plots below each other: a row for each name with the (mean, low, high) of its interval."""
    xlabel: str
    rows: Mapping[str, tuple[float, float, float]]
    line: float | None = None
    """Marks a value, such as no difference."""


def png(figure: Figure, dpi: int = 120) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def loss_curve(steps: Sequence[int], losses: Sequence[float], levels: Mapping[str, float] | None = None, *, window: int = 20) -> Figure:
    """Training loss (nats a token) over steps, thin as logged and thick as a mean over `window` steps, with named horizontal lines."""
    figure, axes = _axes()
    losses = np.asarray(losses, float)
    axes.plot(steps, losses, color=PALETTE[0], alpha=0.3, linewidth=0.8)
    axes.plot(steps, _running_mean(losses, window), color=PALETTE[0], label=f"training loss (mean of {window} steps)")
    for (name, value), color in zip((levels or {}).items(), PALETTE[1:]):
        axes.axhline(value, color=color, linestyle="--", label=f"{name} ({value:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    return figure


def max_violation(steps: Sequence[int], values: np.ndarray) -> Figure:
    """values [steps, MoE layers]: load of the busiest expert over the mean load, minus 1, for each MoE layer."""
    figure, axes = _axes()
    for layer, (series, color) in enumerate(zip(np.asarray(values, float).T, PALETTE * 8)):
        axes.plot(steps, _running_mean(series, 10), color=color, label=f"MoE layer {layer}")
    axes.set(xlabel="step", ylabel="MaxVio (mean of 10 steps)", ylim=(0, None))
    axes.legend(ncols=2)
    return figure


def compare_runs(steps: Mapping[str, Sequence[int]], panels: Mapping[str, Mapping[str, Sequence[float]]], *, window: int = 20) -> Figure:
    """Several runs in one figure, a panel below the other: panels has y label -> run name -> a number for each of the run's steps.

    Lines are means over the last `window` steps; a run has one colour throughout.
    """
    figure = Figure(figsize=(_WIDTH, 0.5 + 2.3 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colors = dict(zip(steps, PALETTE * (1 + len(steps) // len(PALETTE))))
    for axes, (label, runs) in zip(rows, panels.items()):
        for name, values in runs.items():
            axes.plot(steps[name], _running_mean(np.asarray(values, float), window), color=colors[name], label=name)
        axes.set(ylabel=label)
        _tidy(axes)
    rows[-1].set(xlabel="step")
    rows[0].legend(ncols=3, fontsize=8)
    figure.align_ylabels()
    return figure


def band_panels(panels: Sequence[Panel], *, columns: int = 1) -> Figure:
    """Lines with the shaded intervals about them, row by row in `columns`; points and bounds that are not finite are left out."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=((0.75 if columns > 1 else 1) * _WIDTH * columns, 0.5 + 2.5 * rows), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels for name in panel.bands))
    styles = {name: dict(color=PALETTE[i % len(PALETTE)], linestyle=("-", "--", ":")[i // len(PALETTE) % 3]) for i, name in enumerate(names)}
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for name, band in panel.bands.items():
            x, mean, low, high = (np.asarray(values, float) for values in band)
            shown = np.isfinite(mean)
            axes.plot(x[shown], mean[shown], **styles[name], label=name, marker="o" if len(x) < 30 else None, markersize=3)
            axes.fill_between(x, low, high, where=np.isfinite(low) & np.isfinite(high), color=styles[name]["color"], alpha=0.2, linewidth=0)
        axes.set_xscale(panel.xscale.rstrip("2"), **({"base": 2} if panel.xscale == "log2" else {}))
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, yscale=panel.yscale, title=panel.title)
        if panel.xscale == "log2":
            ticks = sorted({point for band in panel.bands.values() for point in band.x})
            axes.set_xticks(ticks, [f"{tick:,.9g}" for tick in ticks])
        # A legend wider than its axes would take the layout's whole width from them.
        axes.legend(ncols=max(1, min(3, 75 // (6 + max(map(len, panel.bands))))), fontsize=7)
        _tidy(axes)
    figure.align_ylabels()
    return figure


def interval_panels(panels: Sequence[Intervals]) -> Figure:
    """Means with the bars of their intervals, a panel below the other; NaN bounds leave the bar out."""
    heights = [0.8 + 0.3 * len(panel.rows) for panel in panels]
    figure = Figure(figsize=(_WIDTH, 0.4 + sum(heights)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0], panels):
        for place, (mean, low, high) in enumerate(panel.rows.values()):
            axes.errorbar([mean], [place], xerr=np.nan_to_num([[mean - low], [high - mean]]), color=PALETTE[0], marker="o", markersize=4, capsize=3)
        if panel.line is not None:
            axes.axvline(panel.line, color="black", linewidth=0.8)
        axes.set(xlabel=panel.xlabel, ylabel="arm", yticks=range(len(panel.rows)), ylim=(len(panel.rows) - 0.5, -0.5))
        axes.set_yticklabels(list(panel.rows), fontsize=8)
        _tidy(axes)
    return figure


def expert_load(steps: Sequence[int], loads: np.ndarray) -> Figure:
    """loads [steps, MoE layers, E] counts -> one heat map a layer: load over the layer's mean, experts against steps."""
    loads = np.asarray(loads, float)
    share = loads / np.maximum(loads.mean(axis=-1, keepdims=True), 1e-9)
    layers = share.shape[1]
    figure = Figure(figsize=(_WIDTH, 0.6 + 1.3 * layers), layout="constrained")
    rows = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(rows):
        image = axes.imshow(share[:, layer].T, aspect="auto", cmap=_MAP, vmin=0, vmax=2, interpolation="nearest",
                            extent=(steps[0], max(steps[-1], steps[0] + 1), share.shape[2] - 0.5, -0.5))
        axes.set(ylabel=f"MoE layer {layer}\nexpert")
    rows[-1].set(xlabel="step")
    figure.colorbar(image, ax=list(rows), label="load / mean load (1 is balanced)")
    return figure


def depth_weights(weights: Mapping[str, np.ndarray]) -> Figure:
    """weights: site name -> [sources] that sum to 1 -> heat map of sites against depth sources; a site sees only what lies before it."""
    sources = max(len(w) for w in weights.values())
    table = np.full((len(weights), sources), np.nan)
    for row, values in zip(table, weights.values()):
        row[:len(values)] = values
    return heat_map(table, list(weights), range(sources), xlabel="depth source (0 is the embedding)", label="mean weight over tokens")


def heat_map(values: np.ndarray, rows: Sequence[object], columns: Sequence[object], *, xlabel: str, label: str, ylabel: str = "") -> Figure:
    """values [rows, columns] from 0 to 1 with each number in its cell; NaN leaves a cell empty."""
    values = np.asarray(values, float)
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.32 * len(values)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", cmap=_MAP, vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color="black" if value > 0.5 else "white")
    axes.set(xlabel=xlabel, ylabel=ylabel, xticks=range(len(columns)), yticks=range(len(rows)))
    axes.set_xticklabels([str(column) for column in columns], fontsize=8)
    axes.set_yticklabels([str(row) for row in rows], fontsize=8)
    axes.grid(False)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def context_gain(series: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]]) -> Figure:
    """Series name -> (tokens of context, gain in nats a token, half-width of its interval): lines with error bars on a logarithmic context axis."""
    figure, axes = _axes()
    for (name, (contexts, gains, half_widths)), color in zip(series.items(), PALETTE):
        axes.errorbar(contexts, gains, yerr=np.nan_to_num(half_widths), color=color, marker="o", markersize=4, capsize=3, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="tokens of context before the scored ones", ylabel="gain (nats per token)", xscale="log")
    shown = sorted({context for contexts, _, _ in series.values() for context in contexts})
    axes.set_xticks(shown, [f"{context:,}" for context in shown])
    axes.minorticks_off()
    axes.legend()
    return figure


def loss_by_position(edges: Sequence[int], series: Mapping[str, Sequence[float]]) -> Figure:
    """edges [bins + 1] token positions, series name -> [bins] mean loss: a step line for each series on a logarithmic position axis."""
    figure, axes = _axes()
    for (name, values), color in zip(series.items(), PALETTE):
        axes.stairs(values, np.maximum(edges, 0.5), baseline=None, color=color, linewidth=2, label=name)
    axes.set(xlabel="tokens of context before the predicted one", ylabel="loss (nats per token)", xscale="log")
    axes.legend()
    return figure


def recall_accuracy(steps: Sequence[int], losses: Sequence[float], accuracy: float, chance: float) -> Figure:
    """Left: training loss of the recall task over steps. Right: accuracy on new rows beside chance."""
    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    left.plot(steps, losses, color=PALETTE[0])
    left.axhline(-np.log(chance), color=PALETTE[1], linestyle="--", label=f"guessing among the row's values ({-np.log(chance):.2f})")
    left.set(xlabel="step", ylabel="loss (nats per answer)", ylim=(0, None))
    left.legend(fontsize=8)
    bars = right.bar(["model", "chance"], [accuracy, chance], color=PALETTE[:2])
    right.bar_label(bars, fmt="{:.1%}")
    right.set(ylabel="accuracy", ylim=(0, 1.1))
    for axes in (left, right):
        _tidy(axes)
    return figure


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    _tidy(axes)
    return figure, axes


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values, of fewer at the start; values that are not finite are left out."""
    finite = np.isfinite(values)
    total, count = np.cumsum(np.where(finite, values, 0)), np.cumsum(finite)
    before = np.maximum(np.arange(len(values)) - window, -1)
    earlier = before >= 0
    total = total - np.where(earlier, total[before], 0)
    count = count - np.where(earlier, count[before], 0)
    return total / np.maximum(count, 1)
