"""Does Quantile Balancing keep experts evenly loaded on real text? The demo's text run with the balancer and without, same seed and data.

    python experiments/balancing.py --corpus runs/demo/corpus [--run-dir runs/balancing] [--out results.json] [--smoke]

About 8 minutes on 2 CPU cores. Expected: MaxVio, mean over the last fifth of the steps, below a third of the run without balancing.
"""
import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from demo import SMOKE, Budget, prepare_corpus, text_config

import longmoe

ARMS = ("quantile", "none")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("runs/demo/corpus"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/balancing"))
    parser.add_argument("--out", type=Path, help="where the results go (default: RUN_DIR/results.json)")
    parser.add_argument("--smoke", action="store_true", help="a few steps, for tests")
    args = parser.parse_args(argv)
    prepare_corpus(args.corpus)
    budget = SMOKE if args.smoke else Budget()
    results = {}
    for arm in ARMS:
        cfg = text_config(args.corpus, budget)
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe=dataclasses.replace(cfg.model.moe, balancer=arm)))
        run = longmoe.fit(cfg, str(args.run_dir / arm))
        lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
        tail = lines[-max(1, len(lines) // 5):]
        results[arm] = dict(steps=cfg.steps, max_violation=np.mean([line["max_violation"] for line in tail], axis=0).round(4).tolist(),
                            loss=round(float(np.mean([line["loss"] for line in tail])), 4))
    ratio = np.divide(results["quantile"]["max_violation"], results["none"]["max_violation"])
    results["ratio"] = dict(by_layer=ratio.round(4).tolist(), mean=round(float(np.mean(results["quantile"]["max_violation"]) /
                                                                              np.mean(results["none"]["max_violation"])), 4))
    results["run"] = {name: json.loads(run.paths.run_json.read_text())[name] for name in ("versions", "commit", "device")}
    out = args.out or args.run_dir / "results.json"
    out.write_text(json.dumps(results, indent=1))
    print(json.dumps({name: results[name] for name in (*ARMS, "ratio")}, indent=1))


if __name__ == "__main__":
    main()
