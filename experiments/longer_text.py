"""How far does the nano preset get on text in 20 minutes of 2 CPU cores?

    python experiments/longer_text.py --corpus runs/demo/corpus [--run-dir runs/longer_text] [--out results.json] [--steps 2500] [--smoke]

The demo's text run with six times the steps. Expected: held-out bits per byte below the Kneser-Ney bigram's.
"""
import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from demo import SMOKE, Budget, evaluate_text, prepare_corpus, text_config, variables_of

import longmoe

STEPS = 2500


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("runs/demo/corpus"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/longer_text"))
    parser.add_argument("--out", type=Path, help="where the results go (default: RUN_DIR/results.json)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--smoke", action="store_true", help="a few steps, for tests")
    args = parser.parse_args(argv)
    folder = prepare_corpus(args.corpus)
    budget = SMOKE if args.smoke else dataclasses.replace(Budget(), steps=args.steps)
    cfg = text_config(args.corpus, budget)
    run = longmoe.fit(cfg, str(args.run_dir))
    text = evaluate_text(cfg, folder, variables_of(run.state), budget)
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    results = dict(steps=cfg.steps, tokens=sum(line["tokens"] for line in lines), elapsed_seconds=round(lines[-1]["elapsed_seconds"], 1),
                   bits_per_byte=text["bits_per_byte"], nats_per_token=text["nats_per_token"], ngrams=text["ngrams"],
                   position_edges=text["position_edges"], by_context=text["by_context"], by_document_position=text["by_document_position"],
                   silenced={mixer: nats / text["ablation_base"] - 1 for mixer, nats in text["silenced"].items()},
                   run={name: json.loads(run.paths.run_json.read_text())[name] for name in ("versions", "commit", "device")})
    out = args.out or args.run_dir / "results.json"
    out.write_text(json.dumps(results, indent=1))
    print(json.dumps({name: value for name, value in results.items() if name != "run"}, indent=1))


if __name__ == "__main__":
    main()
