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


class Panel(NamedTuple):
    """One of `interval_panels`. series: name -> (x, y, least, most), each [points]; the last two are the interval of y, y itself where it has none."""

    xlabel: str
    ylabel: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]]
    xscale: str = "linear"
    yscale: str = "linear"
    title: str = ""


def interval_panels(panels: Sequence[Panel], *, columns: int = 2) -> Figure:
    """Panels of lines with their intervals as bands, row by row. A series keeps its colour and marker in all of them; points that are not finite are left out.

    Where the x axis is logarithmic to the base 2 ("log2"), its ticks are the points themselves.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(0.75 * _WIDTH * columns, 3.0 * rows), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        for name, values in panel.series.items():
            place = names.index(name)
            x, y, least, most = (np.asarray(v, float) for v in values)
            color, shown = PALETTE[place % len(PALETTE)], np.isfinite(y)
            axes.plot(x[shown], y[shown], color=color, marker="osD^v<>P"[place % 8], markersize=4, label=name)
            axes.fill_between(x, least, most, where=np.isfinite(least) & np.isfinite(most), color=color, alpha=0.2, linewidth=0)
        base = {"base": 2} if panel.xscale == "log2" else {}
        axes.set_xscale(panel.xscale.rstrip("2"), **base)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, yscale=panel.yscale, title=panel.title)
        if base:
            ticks = sorted({point for series in panel.series.values() for point in series[0]})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.legend(fontsize=8)
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
