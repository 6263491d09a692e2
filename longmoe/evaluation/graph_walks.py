"""Walks on a graph given as a list of edges: the nodes at a distance, or the parents of a node, as a set."""

import numpy as np

from longmoe.data.draws import Draws
from longmoe.evaluation.examples import Draft, Place, TextTask
from longmoe.evaluation.scoring import list_score

DEPTH = 2
_DIGITS = 8
_NODES_AN_EDGE = 0.5
_LARGEST = 16


def graph_walk_tasks() -> list[TextTask]:
    """graph_bfs: the nodes at distance DEPTH from a start, the start not among them. graph_parents: the nodes with an edge to a node.

    Units are edges of a random directed graph with two edges a node; names are eight hexadecimal digits; the answer is the last line
    `Final Answer: [a, b]`, of 1 to 16 names. A guess draws as many nodes of the graph. Source: OpenAI's GraphWalks; the generator is ours.
    """
    render = lambda answers: f"Final Answer: [{', '.join(answers)}]"
    return [TextTask(name, "multi-hop", 256, build, list_score, render, least_units=8) for name, build in (("graph_bfs", _bfs), ("graph_parents", _parents))]


def _bfs(draws: Draws, place: Place) -> Draft:
    names, sources, targets = _graph(draws, place.units)
    order = np.argsort(sources, kind="stable")
    starts = np.searchsorted(sources[order], np.arange(len(names) + 1))
    neighbours = lambda node: targets[order[starts[node]:starts[node + 1]]].tolist()
    for start in draws.permutation(len(names)).tolist():
        seen, frontier = {start}, {start}
        for _ in range(DEPTH):
            frontier = {there for node in frontier for there in neighbours(node)} - seen
            seen |= frontier
        if 1 <= len(frontier) <= _LARGEST:
            break
    else:      # a graph so small that no node has one: the next stream of draws gives another
        return _bfs(draws, place)
    question = f"Which nodes are exactly {DEPTH} steps away from {names[start]} and no fewer, following edges from left to right?"
    return _draft(names, sources, targets, question, sorted(frontier), {"start": names[start], "depth_of_walk": DEPTH})


def _parents(draws: Draws, place: Place) -> Draft:
    names, sources, targets = _graph(draws, place.units)
    degree = np.bincount(targets, minlength=len(names))
    possible = np.flatnonzero((degree >= 1) & (degree <= _LARGEST))
    node = int(possible[draws.integer(len(possible))])
    question = f"Which nodes have an edge to {names[node]}?"
    return _draft(names, sources, targets, question, np.sort(sources[targets == node]).tolist(), {"start": names[node]})


def _graph(draws: Draws, edges: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(names, source of each edge, target of each edge): different edges, none from a node to itself."""
    nodes = max(4, int(edges * _NODES_AN_EDGE))
    names = [f"{code:0{_DIGITS}x}" for code in draws.distinct(16**_DIGITS, nodes).tolist()]
    codes = draws.distinct(nodes * (nodes - 1), edges)
    sources, others = codes // (nodes - 1), codes % (nodes - 1)
    return names, sources, others + (others >= sources)


def _draft(names: list[str], sources: np.ndarray, targets: np.ndarray, question: str, answer: list[int], metadata: dict) -> Draft:
    edges = "\n".join(f"{names[a]} -> {names[b]}" for a, b in zip(sources.tolist(), targets.tolist()))
    prompt = (f"Below is a directed graph, one edge a line, from the node on the left to the node on the right.\n{edges}\n{question} "
              f"The last line of your reply must be of the form: Final Answer: [node, node]\nFinal Answer:")
    return Draft(prompt, tuple(names[node] for node in answer), tuple(names), metadata)
