"""Text corpora as token folders, the packer, the loader and the synthetic tasks. NumPy only at run time."""
