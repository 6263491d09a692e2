"""The demo's report: its figures and the sentences that explain them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longmoe import plotting
from longmoe.data.token_folder import TokenFolder
from longmoe.evaluation.report import Picture, Section, Table, Verbatim, write_report

Lines = Sequence[Mapping[str, Any]]


def write_demo_report(path: Path, folder: TokenFolder, results: Mapping[str, Any], lines: Mapping[str, Lines],
                      figures: Sequence[tuple[str, str, str]], seconds: Mapping[str, float]) -> Path:
    """results: "text", "recall", "sample" as experiments/demo.py makes them; lines: the metrics.jsonl of both runs."""
    text = results["text"]
    sections = [
        Section("Results", [Table([("figure", "measured", "wanted"), *figures]),
                            Table([("part", "seconds"), *((name, f"{value:.0f}") for name, value in seconds.items())])]),
        corpus_section(folder),
        loss_section(text, lines["text"]),
        experts_section(lines["text"]),
        depth_section(text),
        position_section(text),
        silenced_section(text),
        recall_section(results["recall"], lines["recall"]),
        Section("A sample", ["The model's continuation of a prompt at temperature 0.8, top 50 tokens. It has seen a few million tokens of Python: "
                             "expect its look, not its sense.",
                             Verbatim(results["sample"]["prompt"] + results["sample"]["continuation"])]),
    ]
    return write_report(path, "longmoe demo: the nano preset on the Python standard library", sections)


def corpus_section(folder: TokenFolder) -> Section:
    rows = [("split", "documents", "tokens", "bytes")]
    rows += [(name, *(f"{counts[k]:,}" for k in ("documents", "tokens", "bytes"))) for name, counts in folder.meta["splits"].items()]
    return Section("Corpus", [
        f"{folder.meta['source']} ({', '.join(folder.meta['licences'])}), without its tests, held out by whole file. "
        f"The byte-level BPE of {folder.vocab_size:,} tokens was trained on the training files alone.", Table(rows)])


def loss_section(text: Mapping[str, Any], lines: Lines) -> Section:
    levels = {f"held-out {b['name']}": b["nats_per_token"] for b in text["ngrams"]}
    levels["held-out model"] = text["nats_per_token"]
    rows = [("", "nats per token", "bits per byte")]
    rows += [(b["name"], f"{b['nats_per_token']:.3f}", f"{b['bits_per_byte']:.3f}") for b in text["ngrams"]]
    rows.append(("model", f"{text['nats_per_token']:.3f}", f"{text['bits_per_byte']:.3f}"))
    figure = plotting.loss_curve([line["step"] for line in lines], [float(line["loss"]) for line in lines], levels)
    return Section("Loss", [
        "Training loss, with the loss of the trained model and of two n-gram models on the same held-out tokens. The unigram knows how often "
        "each token occurs; the bigram (interpolated Kneser-Ney) also knows the token before, and has counted the whole training split, "
        "of which the model may have seen only a part.", Picture(plotting.png(figure), "Training loss over steps"), Table(rows)])


def experts_section(lines: Lines) -> Section:
    steps = [line["step"] for line in lines]
    violation = plotting.max_violation(steps, np.array([line["max_violation"] for line in lines]))
    with_load = [line for line in lines if "expert_load" in line]
    load = plotting.expert_load([line["step"] for line in with_load], np.array([line["expert_load"] for line in with_load]))
    return Section("Experts", [
        "Quantile Balancing moves one bias an expert once a step so that each is chosen equally often; no loss term is involved. MaxVio is "
        "the busiest expert's load over the mean load, minus 1: 0 is perfect balance. A batch of a few thousand tokens cannot be perfectly even.",
        Picture(plotting.png(violation), "MaxVio of each MoE layer over steps"), Picture(plotting.png(load), "Load of each expert over steps")])


def depth_section(text: Mapping[str, Any]) -> Section:
    figure = plotting.depth_weights({site: np.array(w) for site, w in text["depth_weights"].items()})
    return Section("Depth weights", [
        "Block Attention Residuals: before each sublayer the model mixes the embedding, the summaries of finished blocks and the block at work "
        "with softmax weights. A row is one such site, its numbers sum to 1, and blank cells are sources that do not exist yet.",
        Picture(plotting.png(figure), "Mean weight of each depth source at each site")])


def position_section(text: Mapping[str, Any]) -> Section:
    edges = text["position_edges"]
    rows = [("tokens of context", *(f"{a}-{b - 1}" for a, b in zip(edges[:-1], edges[1:])))]
    names = {"by_document_position": "from the start of a file", "by_context": "pieces cut anywhere"}
    rows += [(label, *(f"{v:.3f}" for v in text[key])) for key, label in names.items()]
    figure = plotting.loss_by_position(edges, {label: text[key] for key, label in names.items()})
    return Section("Loss by position", [
        "A model that uses its context predicts better the more of it there is. The first row scores the beginning of each held-out file, "
        "where the kind of text changes with position too; the second scores whole rows cut out of files anywhere, the same rows in each "
        "bin, so that only the amount of context differs. Nats per token.",
        Picture(plotting.png(figure), "Loss by tokens of context"), Table(rows)])


def silenced_section(text: Mapping[str, Any]) -> Section:
    base = text["ablation_base"]
    rows = [("", "nats per token", "change"), ("all layers", f"{base:.3f}", "")]
    rows += [(f"all {mixer.upper()} layers at zero", f"{nats:.3f}", f"{nats / base - 1:+.1%}") for mixer, nats in text["silenced"].items()]
    return Section("What the mixers carry", [
        "Held-out loss after the output projection of one kind of layer is set to zero, without training again. A rise shows that the trained "
        "model relies on it.", Table(rows)])


def recall_section(recall: Mapping[str, Any], lines: Lines) -> Section:
    figure = plotting.recall_accuracy([line["step"] for line in lines], [float(line["loss"]) for line in lines], recall["accuracy"], recall["chance"])
    return Section("Associative recall", [
        f"A second model, one KDA and one MLA layer of the same shape, reads 16 key-value pairs and then the 16 keys in another order, "
        f"and must answer each with its value. Accuracy on {recall['answers']:,} answers of rows that training did not draw: "
        f"{recall['accuracy']:.1%}; guessing among the row's own values "
        f"gives {recall['chance']:.2%}.", Picture(plotting.png(figure), "Recall: training loss and accuracy")])
