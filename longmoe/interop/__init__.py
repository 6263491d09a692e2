"""Exchange with other software: Hugging Face checkpoints, MXFP4, and plain folders of variables."""
