"""`longmoe bench attention` on a Hopper GPU, from the source tree.

    python benchmarks/attention_gpu.py --help
"""
from pallas_kernels.bench.attention_gpu import main

if __name__ == "__main__":
    main()
