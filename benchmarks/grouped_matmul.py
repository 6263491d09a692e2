"""`longmoe bench grouped-matmul`, from the source tree.

    python benchmarks/grouped_matmul.py --help
"""
from pallas_kernels.bench.grouped_matmul import main

if __name__ == "__main__":
    main()
