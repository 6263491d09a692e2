import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from longmoe import plotting
from longmoe.evaluation.report import Picture, Section, Table, Verbatim, write_report

NAN, INF = float("nan"), float("inf")
FIGURES = {
    "loss": lambda: plotting.loss_curve([1, 2, 3], [3.0, float("nan"), 2.0], {"bigram": 2.5}),
    "violation": lambda: plotting.max_violation([1, 2], np.ones((2, 9))),
    "load": lambda: plotting.expert_load([1], np.ones((1, 2, 4))),
    "depth": lambda: plotting.depth_weights({"layer_00/attn": np.array([1.0]), "output": np.array([0.25, 0.75])}),
    "position": lambda: plotting.loss_by_position((0, 8, 32), {"a": [2.0, 1.0], "b": [float("nan"), 1.0]}),
    "heat": lambda: plotting.heat_map(np.array([[1.0, np.nan], [0.5, 0.0]]), ["a", "b"], [1, 2], xlabel="length", ylabel="task", label="score"),
    "gain": lambda: plotting.context_gain({"a": ([1024, 4096], [0.0, 0.1], [float("nan"), 0.05])}),
    "bands": lambda: plotting.band_panels([
        plotting.Panel("step", "loss", {"a": plotting.Band([1, 2], [3.0, 2.0], [2.9, 1.9], [3.1, 2.1]),
                                        "b": plotting.Band([1, 2], [3.0, 2.5], *[[NAN, NAN]] * 2)}),
        plotting.Panel("context", "ms", {"b": plotting.Band(*[[256, 4096]] * 4)}, "log", "log")], columns=2),
    "gaps": lambda: plotting.band_panels([plotting.Panel("size", "error", {"b": plotting.Band([1, 2], [1e-7, NAN], [1e-8, NAN], [1e-6, INF])}, "log2",
                                                         "log", "t")]),
    "intervals": lambda: plotting.interval_panels([plotting.Intervals("loss", {"a": (2.0, 1.9, 2.1), "b": (2.1, NAN, NAN)}),
                                                   plotting.Intervals("rise", {"b": (0.1, 0.0, 0.2)}, 0.0)]),
    "recall": lambda: plotting.recall_accuracy([1, 2], [3.0, 1.0], 0.97, 1 / 16),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_draw_without_a_display(name):
    figure = FIGURES[name]()
    assert isinstance(figure, Figure) and all(axes.get_ylabel() for axes in figure.axes if axes.lines or axes.patches)
    assert plotting.png(figure, dpi=40).startswith(b"\x89PNG")


def test_panels_show_each_series_with_its_interval():
    series = {"a": ([8, 16, 32], [0.5, 0.25, float("nan")], [0.4, 0.2, 0.0], [0.6, 0.3, 0.1]), "b": ([8], [0.1], [0.1], [0.1])}
    series = {name: plotting.Band(*values) for name, values in series.items()}
    first, second = plotting.band_panels([plotting.Panel("x", "y", series, xscale="log2"), plotting.Panel("x", "y", {"b": series["b"]})]).axes
    assert first.lines[0].get_ydata().tolist() == [0.5, 0.25] and [tick.get_text() for tick in first.get_xticklabels()] == ["8", "16", "32"]
    heights = first.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 0.6)
    assert first.lines[1].get_color() == second.lines[0].get_color() != first.lines[0].get_color()


def test_plotting_leaves_pyplot_alone():
    code = "import sys, longmoe.plotting; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def test_a_report_is_one_file_and_escapes_its_text(tmp_path):
    hostile = "<script>alert('x')</script> & \"quotes\""
    parts = [hostile, Table([("name", hostile), (hostile, 1)]), Picture(b"\x89PNG", hostile), Verbatim(hostile)]
    page = write_report(tmp_path / "deep" / "report.html", hostile, [Section(hostile, parts)]).read_text()
    links = Links()
    links.feed(page)
    assert "script" not in links.tags and links.tags.count("img") == 1 and links.tags.count("td") == 2
    assert links.sources == ["data:image/png;base64,iVBORw=="]
    with pytest.raises(ValueError, match="part: got int"):
        write_report(tmp_path / "r.html", "t", [Section("s", [3])])
