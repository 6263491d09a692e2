"""Peak memory of importing a synthetic kimi_linear checkpoint, against 1.3 times its bfloat16 size plus 500 MB. Writes JSON.

    python benchmarks/hf_import_memory.py [--gigabytes 2.0] [--folder build/hf_import] [--out benchmarks/results/hf_import_memory.json]
"""
import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.interop.hf_config import to_hf
from longmoe.interop.hf_names import FAMILIES, tensors
from longmoe.interop.tensor_files import Entry, new_folder, write_tensors, write_text
from longmoe.presets import kimi_linear_48b

ROOT = Path(__file__).parent.parent
LIMIT_FACTOR, LIMIT_EXTRA = 1.3, 500e6
# VmHWM rather than ru_maxrss where there is one: the latter begins, after exec, at the parent's peak.
CHILD = """
import json, resource, sys, time
from pathlib import Path
import jax, longmoe

def peak():
    status = Path("/proc/self/status")
    if status.is_file():
        return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

jax.numpy.zeros(1).block_until_ready()
before, begin = peak(), time.perf_counter()
config, variables = longmoe.load_hf(sys.argv[1])
jax.block_until_ready(variables)
seconds, after = time.perf_counter() - begin, peak()
leaves = jax.tree.leaves(variables)
print(json.dumps(dict(peak_bytes=after, peak_before_bytes=before, result_bytes=sum(x.nbytes for x in leaves), seconds=round(seconds, 2))))
"""


def config_of(gigabytes: float) -> ModelConfig:
    """kimi_linear at width 1024 with 64 experts a layer, as many layers as the size asks for (about 0.21 GB each, 0.3 GB of embeddings and the dense layer)."""
    full = kimi_linear_48b().model
    layers = 1 + max(1, round((gigabytes - 0.3) / 0.2145))
    return dataclasses.replace(
        full, vocab_size=65536, width=1024, num_layers=layers, dense_dim=4096,
        kda=dataclasses.replace(full.kda, num_heads=8), mla=dataclasses.replace(full.mla, num_heads=8),
        moe=dataclasses.replace(full.moe, num_experts=64, expert_dim=512, shared_expert_dim=512))


def write_synthetic(config: ModelConfig, folder: Path) -> int:
    """Writes random bfloat16 weights tensor by tensor; returns their bytes."""
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(ml_dtypes.bfloat16)
    entries = []
    for tensor in tensors(FAMILIES["kimi_linear"], config):
        count = int(np.prod(tensor.shape))
        entries.append(Entry(tensor.name, block.dtype, tensor.shape, lambda count=count: np.resize(block, count)))
    with new_folder(folder) as partial:
        write_text(partial / "config.json", json.dumps(to_hf(config)[1]))
        write_tensors(partial, entries, max_shard_bytes=10**9)
    return sum(entry.size for entry in entries)


def measure(gigabytes: float, folder: Path) -> dict:
    """Writes the checkpoint, imports it in a process of its own, deletes it."""
    config = config_of(gigabytes)
    try:
        size = write_synthetic(config, folder)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        child = subprocess.run([sys.executable, "-c", CHILD, str(folder)], check=True, capture_output=True, text=True, env=environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(child.stdout)
    return dict(layers=config.num_layers, tensors=len(tensors(FAMILIES["kimi_linear"], config)), bfloat16_bytes=size, **found,
                limit_bytes=int(LIMIT_FACTOR * size + LIMIT_EXTRA), peak_over_size=round(found["peak_bytes"] / size, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=Path("build/hf_import"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hf_import_memory.json"))
    arguments = parser.parse_args()
    found = measure(arguments.gigabytes, arguments.folder)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    record = dict(measured="peak memory of load_hf", machine=dict(processor=platform.machine(), cores=os.cpu_count()), commit=commit,
                  command=f"python benchmarks/hf_import_memory.py --gigabytes {arguments.gigabytes}", **found)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    if found["peak_bytes"] > found["limit_bytes"]:
        raise SystemExit(f"peak memory: got {found['peak_bytes']:,} bytes, wanted at most {found['limit_bytes']:,}")


if __name__ == "__main__":
    main()
