"""Loads what `save_hf` wrote into transformers and compares logits. Needs torch and transformers, not jax. Writes JSON.

    python3.11 -m venv build/transformers && build/transformers/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    python tests/hf_export.py --out build/hf_export
    build/transformers/bin/python tests/oracle/check_transformers.py build/hf_export [--out benchmarks/results/transformers_agreement.json]
        [--oracle FOLDER: also how far transformers' own bfloat16 is from the golden vectors there]

Fails when a key is missing or unexpected, or when the logits differ by more than 1e-5 RMS.
"""
import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

BOUND = 1e-5


def folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def logits_of(folder: Path, tokens: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, dict]:
    """Logits in float64 and what transformers says about the keys."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, attn_implementation="eager",
                                                                            experts_implementation="eager")
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits
    return logits.double().numpy(), {name: sorted(map(str, found)) for name, found in info.items() if found or name in ("missing_keys", "unexpected_keys")}


def rms_ratio(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want ** 2)))


def check(folder: Path) -> dict:
    stored = load_file(folder.parent / f"{folder.name}.logits.safetensors")
    logits, keys = logits_of(folder, stored["tokens"], torch.float32)
    wanted = stored["logits"].astype(np.float64)
    return dict(sha256=folder_hash(folder), logits_rms=rms_ratio(logits, wanted), top1=float(np.mean(logits.argmax(-1) == wanted.argmax(-1))), **keys)


def bfloat16(case: Path) -> dict:
    """transformers' own bfloat16 against its float64 logits: what rounding does to these weights."""
    held = load_file(case.parent / f"{case.name}.safetensors")
    logits, _ = logits_of(case, held["in.tokens"], torch.bfloat16)
    wanted = held["out.logits_f64"]
    return dict(logits_rms=rms_ratio(logits, wanted), top1=float(np.mean(logits.argmax(-1) == wanted.argmax(-1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exports", type=Path)
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/transformers_agreement.json"))
    arguments = parser.parse_args()
    record = dict(transformers=transformers.__version__, torch=torch.__version__, bound=BOUND,
                  **{name: check(arguments.exports / name) for name in ("seeded", "trained")})
    if arguments.oracle:
        record["bfloat16_of_transformers"] = {case: bfloat16(arguments.oracle / case) for case in ("kimi_linear_s1", "kimi_linear_s2")}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    for name in ("seeded", "trained"):
        found = record[name]
        if found["missing_keys"] or found["unexpected_keys"] or not found["logits_rms"] <= BOUND:
            raise SystemExit(f"{name}: got logits_rms {found['logits_rms']:.2e}, missing {found['missing_keys']}, unexpected {found['unexpected_keys']}")


if __name__ == "__main__":
    main()
