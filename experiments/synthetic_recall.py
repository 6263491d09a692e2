"""What do the delta rule and a decay per channel each give to recall? KDA, one decay a head, and no delta rule, on three synthetic tasks.

    python experiments/synthetic_recall.py [--size h200|cpu] [--tasks mqar palindrome stack] [--arms kda scalar_decay no_delta_rule]
                                           [--run-dir runs/synthetic_recall] [--out results.json] [--steps N] [--jobs N] [--smoke]

The synthetic figure of Kimi Linear (arXiv 2510.26692, section 5.1): two layers of two heads of 128, MLP 4x, MQAR, palindromes and stacks at 256, 512,
1,024 and 2,048 tokens. Not published there and chosen here: the mimetic start of `mixers.init_params`, 32,768 tokens a step, 600 steps, AdamW (0.9, 0.95),
decay 0.1 of layers' matrices, 2% warm-up, cosine to 0, clip 1.0; a pair every 8 tokens; one training for all lengths. Expected: KDA at least as good as one
decay a head at every length, and without the delta rule far behind. Time: H200, 2 minutes for a (task, arm) pair with three at a time (--jobs 3: 35 GB each).
`--size cpu` (32 and 64 tokens, heads of 32, one rate, 400 steps) tries everything at lengths that do not fill the state. The same command again skips
finished (task, arm) pairs.

Rows all hold the longest length, packed: one example of it, two of half, and so on, a quarter of the rows each. So one program is compiled for an arm, and each
step has every length with as many tokens. Three seeds and three learning rates train side by side; those of a seed start alike and read the same
batches in the same order. The best rate of an arm is that of the best mean on rows that are neither trained on nor reported.
"""
import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import arms
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo import console
from mixers import ARMS, Arm, ModelSize, Params, apply, init_params, stack
from record import run_record

from longmoe import plotting
from longmoe.evaluation.examples import TokenTask
from longmoe.evaluation.statistics import student
from longmoe.evaluation.synthetic import make_batches, mqar_task, palindrome_task, stack_task
from longmoe.shapes import Array

TASKS = ("mqar", "palindrome", "stack")
TRAINING, CHOICE, REPORT = 0, 1, 2
"""Seeds of the rows that are trained on, that choose the learning rate and are plotted over steps, and that are reported."""
LARGE_VOCABULARY = 1024
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Budget:
    """Sizes of model, data and training."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    rows: int = 16
    """Packed rows of the longest length a step, shared evenly by the lengths."""
    steps: int = 600
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    seeds: int = 3
    mqar_ids: int = 8192
    symbols: int = 64
    width: int = 256
    head_dim: int = 128
    dtype: str = "bfloat16"
    steps_a_call: int = 50
    evaluate_every: int = 100
    evaluation_batches: int = 8

    @property
    def row_tokens(self) -> int:
        return max(self.lengths)


BUDGETS = {
    "h200": Budget(),
    "cpu": Budget(lengths=(32, 64), rows=16, steps=400, rates=(3e-3,), mqar_ids=128, symbols=32, width=64, head_dim=32, dtype="float32", steps_a_call=20,
                  evaluate_every=40),
    "smoke": Budget(lengths=(16, 32), rows=2, steps=4, rates=(1e-2,), seeds=2, mqar_ids=64, symbols=16, width=32, head_dim=16, dtype="float32",
                    steps_a_call=2, evaluate_every=2, evaluation_batches=1),
}
CURVE_LENGTH = {"h200": 1024, "cpu": 64, "smoke": 32}


def make_task(name: str, budget: Budget) -> TokenTask:
    makers = {"mqar": lambda: mqar_task(budget.mqar_ids), "palindrome": lambda: palindrome_task(budget.symbols),
              "stack": lambda: stack_task(stacks=budget.symbols, symbols=budget.symbols)}
    return makers[name]()


def model_size(task: TokenTask, budget: Budget) -> ModelSize:
    """Vocabularies are rounded up, so that small tasks share a program."""
    return ModelSize(vocab_size=-(-task.vocab_size // 256) * 256, width=budget.width, head_dim=budget.head_dim, dtype=budget.dtype)


def make_packed(task: TokenTask, budget: Budget, seed: int) -> Callable[[int], Batch]:
    """-> number -> tokens, segment_ids int32 [B, T] and, of the positions asked, places, answers int32, weights float32 [B, K]: equal shares of the rows for
    each length, in the order of the lengths, filled with examples of it. segment_ids are the same in every batch.

    K is a bound on what a row asks: half its tokens; an eighth, which is what MQAR asks, where the vocabulary makes logits dear.
    """
    per_length, row_tokens = budget.rows // len(budget.lengths), budget.row_tokens
    asked = row_tokens // (8 if task.vocab_size > LARGE_VOCABULARY else 2)
    sources = [make_batches(task, length=length, batch_size=per_length * row_tokens // length, seed=seed) for length in budget.lengths]

    def batch(number: int) -> Batch:
        parts = []
        for length, source in zip(budget.lengths, sources):
            part = source(number)
            part["segment_ids"] = part["segment_ids"] * (1 + np.arange(len(part["tokens"]))[:, None] % (row_tokens // length))
            parts.append({name: x.reshape(per_length, row_tokens) for name, x in part.items()})
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if (rows["loss_weights"].sum(axis=1) > asked).any():
            raise ValueError(f"task: got {task.name} with rows that ask more than {asked} times in {row_tokens} tokens, wanted at most so many")
        places = np.argsort(-rows["loss_weights"], axis=1, kind="stable")[:, :asked].astype(np.int32)
        take = partial(np.take_along_axis, indices=places, axis=1)
        return dict(tokens=rows["tokens"], segment_ids=rows["segment_ids"].astype(np.int32), places=places, answers=take(rows["targets"]),
                    weights=take(rows["loss_weights"]))

    return batch


def optimizer(budget: Budget) -> optax.GradientTransformation:
    """Everything but the learning rate, which is a member's own."""
    matrices = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key.endswith("_proj"), params)
    share = optax.schedules.warmup_cosine_decay_schedule(0.0, 1.0, max(1, budget.steps // 50), budget.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95), optax.add_decayed_weights(0.1, matrices),
                       optax.scale_by_schedule(share), optax.scale(-1.0))


def init_members(*, size: ModelSize, budget: Budget, arm: Arm) -> tuple[Params, Any, Array]:
    """Parameters and optimizer state of all members, and their learning rates [M]; member = rate * seeds + seed."""
    seeds = [init_params(seed, size, arm) for seed in range(budget.seeds)]
    params = jax.tree.map(jnp.asarray, stack(seeds * len(budget.rates)))
    return params, jax.vmap(optimizer(budget).init)(params), jnp.repeat(jnp.asarray(budget.rates), budget.seeds)


@partial(jax.jit, static_argnames=("size", "budget", "arm"), donate_argnums=(0, 1))
def train(params: Params, state: Any, rates: Array, batches: Batch, order: Array, *, size: ModelSize, budget: Budget, arm: Arm) -> tuple[Params, Any, Array]:
    """A step for each row of order [n, M], which of the n batches each member reads. -> parameters, state, mean loss [n, M] in nats an answer."""
    def loss(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
        logits = apply(params, batch["tokens"], batches["segment_ids"][0], batch["places"], size, arm)
        nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch["answers"][..., None], axis=-1)[..., 0]
        each = jnp.sum(nats * batch["weights"], axis=(1, 2)) / jnp.sum(batch["weights"], axis=(1, 2))
        return jnp.sum(each), each                                       # a sum over members keeps their gradients apart

    def step(carry: tuple[Params, Any], chosen: Array) -> tuple[tuple[Params, Any], Array]:
        params, state = carry
        (_, each), gradients = jax.value_and_grad(loss, has_aux=True)(params, {name: x[chosen] for name, x in batches.items()})
        updates, state = jax.vmap(optimizer(budget).update)(gradients, state, params)
        params = jax.vmap(lambda p, u, rate: jax.tree.map(lambda p, u: p + rate * u, p, u))(params, updates, rates)
        return (params, state), each

    (params, state), losses = jax.lax.scan(step, (params, state), order)
    return params, state, losses


@partial(jax.jit, static_argnames=("size", "budget", "arm"))
def count_right(params: Params, batch: Batch, *, size: ModelSize, budget: Budget, arm: Arm) -> tuple[Array, Array]:
    """-> answers that are right [M, lengths] and asked [lengths], of one batch that all members read."""
    members = len(budget.rates) * budget.seeds
    spread = lambda x: jnp.broadcast_to(x, (members, *x.shape))
    logits = apply(params, spread(batch["tokens"]), batch["segment_ids"], spread(batch["places"]), size, arm)
    right = (jnp.argmax(logits, axis=-1) == batch["answers"]) * batch["weights"]
    by_length = lambda x: jnp.sum(x.reshape(*x.shape[:-2], len(budget.lengths), -1), axis=-1)
    return by_length(right), by_length(batch["weights"])


def accuracy(params: Params, batches: Sequence[Batch], **static: Any) -> np.ndarray:
    """[M, lengths]."""
    counts = [jax.tree.map(lambda x: np.asarray(x, np.float64), count_right(params, batch, **static)) for batch in batches]
    return sum(right for right, _ in counts) / sum(asked for _, asked in counts)


def calls(task: TokenTask, budget: Budget) -> Iterator[tuple[Batch, np.ndarray]]:
    """(batches [n, ...], order [n, M]) of each call of `train`, made while the one before it runs; a seed has its own order."""
    source, n = make_packed(task, budget, TRAINING), budget.steps_a_call

    def make(call: int) -> tuple[Batch, np.ndarray]:
        made = [source(call * n + i) for i in range(n)]
        orders = np.stack([np.random.default_rng((call, seed)).permutation(n) for seed in range(budget.seeds)], axis=1)
        return {name: np.stack([batch[name] for batch in made]) for name in made[0]}, np.tile(orders, (1, len(budget.rates)))

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make, 0)
        for call in range(budget.steps // n):
            ready, ahead = ahead.result(), pool.submit(make, call + 1) if (call + 1) * n < budget.steps else None
            yield ready


def run_arm(name: str, arm: Arm, budget: Budget) -> dict[str, Any]:
    """Trains all members. -> steps of the evaluations, their accuracy [evaluations][M][lengths], that on the reported rows [M][lengths], losses."""
    task = make_task(name, budget)
    static = dict(size=model_size(task, budget), budget=budget, arm=arm)
    held_out = lambda seed: list(map(make_packed(task, budget, seed), range(budget.evaluation_batches)))
    choice, report = held_out(CHOICE), held_out(REPORT)
    params, state, rates = init_members(**static)
    began, done, steps, curve, losses = time.monotonic(), 0, [], [], []
    for batches, order in calls(task, budget):
        params, state, found = train(params, state, rates, batches, order, **static)
        done += len(order)
        losses.append(found)
        if done % budget.evaluate_every == 0 or done == budget.steps:
            steps.append(done)
            curve.append(accuracy(params, choice, **static).round(5).tolist())
            best = np.asarray(curve[-1])[:, -1].max()
            console.print(f"{name}, {arm}: {done} steps, {time.monotonic() - began:.0f} s, accuracy at the longest {best:.3f}", style="dim")
    return dict(steps=steps, curve=curve, report=accuracy(params, report, **static).round(5).tolist(),
                loss=np.concatenate(losses)[::budget.steps_a_call].astype(np.float64).round(4).tolist())


def run_arm_once(run_dir: Path, name: str, arm: Arm, budget: Budget) -> dict[str, Any]:
    """`run_arm`, or what it gave before for the same sizes on the same kind of device."""
    return arms.once(run_dir / f"{name}_{arm}.json", f"{budget} {jax.devices()[0].device_kind}", partial(run_arm, name, arm, budget))


def summary(found: dict[str, Any], budget: Budget, curve_length: int) -> dict[str, Any]:
    """The best rate, and with it accuracy at each length and over steps: mean over seeds with its interval, [mean, low, high], and each seed's."""
    by_rate = lambda x: np.asarray(x).reshape(len(budget.rates), budget.seeds, len(budget.lengths))
    means = by_rate(found["curve"][-1]).mean(axis=(1, 2))
    best = int(np.argmax(means))
    interval = lambda values: [round(float(x), 4) for x in dataclasses.astuple(student(values, least=0, most=1))[:3]]
    seeds = by_rate(found["report"])[best]
    column = budget.lengths.index(curve_length)
    return dict(rate=budget.rates[best], mean_by_rate={str(rate): round(float(x), 4) for rate, x in zip(budget.rates, means)},
                accuracy={str(length): interval(seeds[:, i]) for i, length in enumerate(budget.lengths)},
                seeds={str(length): [round(float(x), 4) for x in seeds[:, i]] for i, length in enumerate(budget.lengths)},
                steps=found["steps"], over_steps=[interval(by_rate(x)[best][:, column]) for x in found["curve"]])


def figure(results: dict[str, dict[str, Any]], curve_length: int) -> bytes:
    """A row a task: accuracy at each length, and over steps."""
    lines = lambda x, intervals: plotting.Band(x, *np.asarray(intervals).T)
    panels = []
    for task, found in results.items():
        at_length = {arm: lines([int(length) for length in one["accuracy"]], list(one["accuracy"].values())) for arm, one in found.items()}
        over_steps = {arm: lines(one["steps"], one["over_steps"]) for arm, one in found.items()}
        panels += [plotting.Panel("tokens", "accuracy", at_length, xscale="log2", title=task),
                   plotting.Panel("step", f"accuracy at {curve_length:,} tokens", over_steps, title=task)]
    return plotting.png(plotting.band_panels(panels, columns=2))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/synthetic_recall"))
    parser.add_argument("--out", type=Path, help="where the results and the plot beside them go (default: RUN_DIR/results.json)")
    parser.add_argument("--size", choices=("h200", "cpu"), default="h200")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, help="in place of the size's own; whole calls of its steps_a_call are done")
    parser.add_argument("--jobs", type=int, default=1, help="pairs of task and arm that are trained at a time, each in a process of its own")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, for tests")
    args = parser.parse_args(argv)
    size = "smoke" if args.smoke else args.size
    budget = BUDGETS[size]
    if args.steps is not None:
        if args.steps < budget.steps_a_call:
            parser.error(f"--steps: got {args.steps}, wanted at least {budget.steps_a_call}")
        budget = dataclasses.replace(budget, steps=args.steps // budget.steps_a_call * budget.steps_a_call)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    calls = [(args.run_dir, task, arm, budget) for task in args.tasks for arm in args.arms]
    with arms.clocked(args.run_dir / "seconds.json") as clock:
        found = dict(zip([call[1:3] for call in calls], arms.side_by_side(run_arm_once, calls, args.jobs)))
    results = {task: {arm: summary(found[task, arm], budget, CURVE_LENGTH[size]) for arm in args.arms} for task in args.tasks}
    out = args.out or args.run_dir / "results.json"
    out.write_text(json.dumps(dict(budget=dataclasses.asdict(budget), tasks=results,
                                   run=run_record("synthetic_recall.py", argv, clock[0])), indent=1) + "\n")
    out.with_suffix(".png").write_bytes(figure(results, CURVE_LENGTH[size]))
    print(json.dumps({task: {arm: one["accuracy"] for arm, one in by_arm.items()} for task, by_arm in results.items()}, indent=1))


if __name__ == "__main__":
    main()
