"""`longmoe bench kda` on a CPU, from the source tree.

    python benchmarks/kda_cpu.py --help
"""
from pallas_kernels.bench.kda_cpu import main

if __name__ == "__main__":
    main()
