"""`longmoe bench kda` on a Hopper GPU, from the source tree.

    python benchmarks/kda_gpu.py --help
"""
from pallas_kernels.bench.kda_gpu import main

if __name__ == "__main__":
    main()
