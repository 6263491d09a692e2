"""Probes on token ids: multi-query associative recall, palindromes, stacks, state tracking.

A row is answered in one pass: after each position that is asked, the model's most likely token must be the target, and later positions read the right
answers, not the model's own. `make_batches` lays rows out as the training batches of `longmoe.data` are, so that a model can be trained on them too.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from longmoe.data.draws import Draws
from longmoe.evaluation.examples import SizeError, TokenTask, make_examples

Row = tuple[np.ndarray, np.ndarray, np.ndarray]
FILLER = 0
MQAR_VOCAB = 8192
MQAR_POWER = 0.01
"""Exponent of the power law that query gaps follow (Zoology)."""
MAX_PAIRS = 1024
SYMBOLS = 64
STACKS = 64
MODULUS = 5


def mqar_task(vocab_size: int = MQAR_VOCAB, num_pairs: int | None = None) -> TokenTask:
    """Multi-query associative recall (Arora et al., 2023, "Zoology", arXiv 2312.04927): N pairs `key value`, then each key once more at a gap drawn
    from a power law, and the value is asked there; all between is filling, and values are not shown again.

    Keys are ids of the lower half of the vocabulary and values of the upper one; filling is of ids that are neither in the row, so that a key has one
    value. num_pairs None takes a pair every 8 tokens, at most MAX_PAIRS and an eighth of the vocabulary. Lengths hold 4 N at least.
    """
    half = vocab_size // 2
    if half < 8 or num_pairs is not None and not 1 <= num_pairs <= half // 2:
        raise ValueError(f"vocab_size: got {vocab_size} with num_pairs={num_pairs}, wanted at least 16 and at least 4 * num_pairs ids")

    def build(draws: Draws, length: int) -> Row:
        pairs = num_pairs or max(1, min(length // 8, MAX_PAIRS, half // 4))
        if length < 4 * pairs:
            raise SizeError(f"length: got {length}, wanted at least 4 * num_pairs = {4 * pairs} for mqar")
        keys, values = draws.distinct(half, pairs), half + draws.distinct(vocab_size - half, pairs)
        is_free = np.ones(vocab_size, bool)
        is_free[keys] = is_free[values] = False
        free = np.flatnonzero(is_free)
        tokens = free[draws.integers(len(free), length)]
        tokens[0:2 * pairs:2], tokens[1:2 * pairs:2] = keys, values
        space = (length - 2 * pairs) // 2
        weights = np.arange(1, space + 1, dtype=np.float64)**(MQAR_POWER - 1)
        # The `pairs` smallest of exponential variables with these rates are a sample without replacement (Efraimidis and Spirakis, 2006).
        gaps = np.argsort(-np.log(draws.uniform(space)) / weights, kind="stable")[:pairs]
        places = 2 * pairs + 2 * gaps
        tokens[places] = keys
        return _row(tokens, places, values)

    return TokenTask("mqar", "recall", vocab_size, range(half, vocab_size), build)


def palindrome_task(symbols: int = SYMBOLS) -> TokenTask:
    """n random symbols, a separator (id `symbols`), and the symbols in reverse, each asked after the one before it; rows have 2 n tokens.

    Kimi Linear (arXiv 2510.26692), section 5.1.
    """
    def build(draws: Draws, length: int) -> Row:
        n = length // 2
        if n < 1:
            raise SizeError(f"length: got {length}, wanted at least 2 for palindrome")
        forward = draws.integers(symbols, n)
        tokens = np.concatenate([forward, [symbols], forward[:0:-1]])
        return _row(tokens, np.arange(n, 2 * n), forward[::-1])

    return TokenTask("palindrome", "recall", symbols + 1, range(symbols), build)


def stack_task(stacks: int = STACKS, symbols: int = SYMBOLS) -> TokenTask:
    """Operations `push id element` and `pop id element` on `stacks` stacks, a fair coin between the two and pops on stacks that hold something; the
    element of a pop is asked at its id. Ids of tokens: elements, then stacks, then push and pop. Kimi Linear, section 5.1.
    """
    push, pop = symbols + stacks, symbols + stacks + 1

    def build(draws: Draws, length: int) -> Row:
        operations = length // 3
        if operations < 2:
            raise SizeError(f"length: got {length}, wanted at least 6 for stack")
        coins, pushed = draws.integers(2, operations), draws.integers(symbols, operations)
        picks = draws.bits(operations).tolist()
        coins[0], coins[1] = 0, 1                                            # so that something is asked
        held: list[list[int]] = [[] for _ in range(stacks)]
        filled: list[int] = []                                               # stacks that hold something, once each
        rows = np.empty((operations, 3), np.int64)
        for i, (coin, element, pick) in enumerate(zip(coins.tolist(), pushed.tolist(), picks)):
            if coin and filled:
                place = pick % len(filled)
                chosen = filled[place]
                rows[i] = pop, symbols + chosen, held[chosen].pop()
                if not held[chosen]:
                    filled[place] = filled[-1]
                    filled.pop()
            else:
                chosen = pick % stacks
                if not held[chosen]:
                    filled.append(chosen)
                held[chosen].append(element)
                rows[i] = push, symbols + chosen, element
        asked = np.flatnonzero(rows[:, 0] == pop)
        return _row(rows.ravel(), 3 * asked + 1, rows[asked, 2])

    return TokenTask("stack", "recall", symbols + stacks + 2, range(symbols), build)


def state_tasks() -> list[TokenTask]:
    """Running products of random elements of a group, asked after every token: parity (Z2), a counter (Z5), permutations of 3 and of 5 things (S3, S5).

    A token is an element, and so is the target. A transition with eigenvalues in (0, 1) alone cannot follow parity or S5 (Grazzi et al., 2024,
    arXiv 2411.12537), so that these are controls as much as tests.
    """
    counter = lambda n: [[(a + b) % n for b in range(n)] for a in range(n)]
    return [_state_task("state_parity", counter(2)), _state_task("state_modular", counter(MODULUS)),
            _state_task("state_s3", _permutation_table(3)), _state_task("state_s5", _permutation_table(5))]


def synthetic_tasks(vocab_size: int = MQAR_VOCAB) -> list[TokenTask]:
    """All of them; those with a vocabulary of free size take vocab_size, MQAR_VOCAB at most."""
    return [mqar_task(min(vocab_size, MQAR_VOCAB)), palindrome_task(), stack_task(), *state_tasks()]


def make_batches(task: TokenTask, *, length: int, batch_size: int, seed: int) -> Callable[[int], dict[str, np.ndarray]]:
    """-> step -> tokens, targets, segment_ids int32 and loss_weights float32 (1 where asked), all [batch_size, length], as `make_loader` gives them.

    Rows step * batch_size on of `make_examples`; rows shorter than `length` end in padding (segment 0).
    """
    example = make_examples(task, length=length, seed=seed)

    def batch(step: int) -> dict[str, np.ndarray]:
        rows = [example(step * batch_size + i) for i in range(batch_size)]
        arrays = {"tokens": [row.tokens for row in rows], "targets": [row.targets for row in rows],
                  "segment_ids": [np.ones(len(row.tokens), np.int32) for row in rows], "loss_weights": [row.asked.astype(np.float32) for row in rows]}
        return {name: _padded(part, length) for name, part in arrays.items()}

    return batch


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row)), constant_values=FILLER) for row in rows])


def _row(tokens: np.ndarray, places: np.ndarray, answers: np.ndarray) -> Row:
    targets, asked = np.full(len(tokens), FILLER), np.zeros(len(tokens), bool)
    targets[places], asked[places] = answers, True
    return tokens, targets, asked


def _permutation_table(n: int) -> list[list[int]]:
    """table[a][b]: the number of the permutation "a, then b", in the order of itertools.permutations."""
    elements = list(itertools.permutations(range(n)))
    number = {element: i for i, element in enumerate(elements)}
    return [[number[tuple(b[x] for x in a)] for b in elements] for a in elements]


def _state_task(name: str, table: Sequence[Sequence[int]]) -> TokenTask:
    size = len(table)

    def build(draws: Draws, length: int) -> Row:
        tokens = draws.integers(size, length)
        states = list(itertools.accumulate(tokens.tolist(), lambda state, element: table[state][element]))
        return _row(tokens, np.arange(length), np.array(states))

    return TokenTask(name, "state tracking", size, range(size), build)
