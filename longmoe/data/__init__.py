"""Sources of documents, the mixture, the packer, the loader and the synthetic tasks. Token folders need NumPy and tokenizers only."""
