"""Multi-hop questions over code: functions in many files call one another, and only the last of a chain returns a constant."""

from longmoe.data.draws import Draws
from longmoe.data.planted import draw_numbers
from longmoe.data.words import draw_pairs
from longmoe.evaluation.examples import Draft, Place, TextTask
from longmoe.evaluation.scoring import NUMBER, make_pattern_score

HOPS = (1, 2, 4)


def code_hop_tasks() -> list[TextTask]:
    """code_hops_1, _2 and _4: what a function returns after that many calls.

    Units are chains of the same number of calls, each with a constant of its own; their functions lie in one file each, the files in random order, so
    that only following the calls tells the asked chain's constant from the others. A guess is one of the constants.
    """
    build = lambda hops: lambda draws, place: _code(hops, draws, place)
    return [TextTask(f"code_hops_{hops}", "multi-hop", 32, build(hops), make_pattern_score(NUMBER), least_units=2) for hops in HOPS]


def _code(hops: int, draws: Draws, place: Place) -> Draft:
    pairs = draw_pairs(draws, place.units * (hops + 1))
    names = [pair.replace("-", "_") for pair in pairs]
    constants = draw_numbers(draws, place.units)
    chains = [names[i:i + hops + 1] for i in range(0, len(names), hops + 1)]
    functions = []
    for chain, constant in zip(chains, constants):
        functions += [_file(name, f"{called}()", called) for name, called in zip(chain, chain[1:])]
        functions.append(_file(chain[-1], constant, None))
    asked = draws.integer(len(chains))
    order = draws.permutation(len(functions)).tolist()
    files = "\n".join(functions[i] for i in order)
    prompt = (f"Below are the files of a Python package. Functions call functions of other files; only some return a number directly.\n{files}\n"
              f"Which number does {chains[asked][0]}() return? {chains[asked][0]}() returns")
    return Draft(prompt, (constants[asked],), tuple(constants), {"hops": hops, "start": chains[asked][0]})


def _file(name: str, value: str, imported: str | None) -> str:
    head = f"from package.{imported} import {imported}\n" if imported else ""
    return f"# package/{name}.py\n{head}def {name}():\n    return {value}\n"
