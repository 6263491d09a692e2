"""What the tests of long-context tasks share: a fixed haystack, a cheap tokenizer, every task, and solvers that read a prompt as a careful person would."""
import re
from collections import Counter

from longmoe.evaluation.examples import TextTask
from longmoe.evaluation.haystack import Essay
from longmoe.evaluation.suites import SUITES, TOKEN_SUITES, make_tasks

ESSAY = Essay("""The mill stood at the end of the village, where the road met the water. Nobody had ground corn there for thirty years! In spring the
river rose to the lowest step of the stair, and children sailed boats of bark along the wall. Would it ever work again? An old man said that it would, if
somebody mended the wheel. He had counted 12 paddles that were whole and 9 that were not. So the village collected wood and nails, and in autumn the
wheel turned. It made a noise like rain on a well-worn roof.""")
TEXT_TASKS = {task.name: task for task in make_tasks([name for name in SUITES if name not in TOKEN_SUITES], essay=ESSAY)}
TOKEN_TASKS = {task.name: task for task in make_tasks(TOKEN_SUITES)}
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.")


def count(text: str) -> int:
    """Four characters a token."""
    return -(-len(text) // 4)


def samples(task: TextTask) -> int:
    """Enough for every kind of example that a task has."""
    return max(3, task.draws_shared_by)


def solve(task: str, prompt: str) -> set[str]:
    """The answers, from the prompt alone."""
    for prefix, solver in SOLVERS.items():
        if task.startswith(prefix):
            return set(solver(prompt))
    raise AssertionError(f"no solver for {task}")


def _needles(prompt: str) -> list[str]:
    *_, question = prompt.splitlines()
    found = NEEDLE.findall(prompt)
    asked = re.findall(r"(?<![\w-])(?:[a-z]+-[a-z]+|[0-9a-f]{8}(?:-[0-9a-f]+){4})(?![\w-])", question)
    return [value for key, value in found if key in asked]


def _grid(prompt: str) -> list[str]:
    return _needles(prompt)[-1:] or ["not stated"]


def _variables(prompt: str) -> list[str]:
    asked = prompt.rsplit("\n\n", 1)[1]
    value = re.search(r"have the value (\d+)", asked)[1]
    known: list[str] = []
    for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", asked):
        if source == value or source in known:
            known.append(name)
    return known


def _common(prompt: str) -> list[str]:
    listed = re.findall(r"\d+\. (\S+)", prompt.rsplit("Memorise those that do.", 1)[1])
    return [word for word, _ in Counter(listed).most_common(10)]


def _frequent(prompt: str) -> list[str]:
    return [word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", prompt.split("\n")[1])).most_common(3)]


def _edges(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\w+) -> (\w+)$", prompt, re.MULTILINE)


def _walk(prompt: str) -> set[str]:
    start = re.search(r"2 steps away from (\w+)", prompt)[1]
    step = lambda nodes: {b for a, b in _edges(prompt) if a in nodes}
    return step(step({start})) - step({start}) - {start}


def _parents(prompt: str) -> list[str]:
    node = re.search(r"have an edge to (\w+)\?", prompt)[1]
    return [a for a, b in _edges(prompt) if b == node]


def _run_code(prompt: str) -> list[str]:
    """Runs the functions, imports left out."""
    code = "\n".join(line for line in prompt.splitlines()[1:-1] if not line.startswith("from "))
    functions: dict = {}
    exec(code, functions)  # noqa: S102
    return [str(functions[re.search(r"does (\w+)\(\) return", prompt)[1]]())]


def _repeat(prompt: str) -> list[str]:
    ordinals = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    prefix, which, request = re.search(r'User: Write (\w{10}) and .* your (\w+) reply to "(.*)", and nothing else', prompt).groups()
    return [prefix + re.findall(rf"^User: {re.escape(request)}\nAssistant: (.*)$", prompt, re.MULTILINE)[ordinals.index(which)]]


def _noted(prompt: str) -> list[str]:
    key = re.search(r"What is the access number of (\S+)\?", prompt)[1]
    return [value for name, value in re.findall(r"noted that the access number of (\S+) is (\d+)\.", prompt) if name == key]


SOLVERS = {"needle_": _grid, "niah_": _needles, "vt": _variables, "cwe": _common, "fwe": _frequent, "graph_bfs": _walk, "graph_parents": _parents,
           "code_hops": _run_code, "mrcr": _repeat, "consistency": _noted}
