"""A model as a plain folder: model_config.json and the variables under their own paths in safetensors files."""
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from longmoe.configs import ModelConfig, from_json, to_json
from longmoe.interop.hf_names import variable_shapes
from longmoe.interop.tensor_files import DTYPES, Entry, Reader, aligned_empty, copy_bits, new_folder, read_folder, write_tensors, write_text
from longmoe.model.lm import Variables

CONFIG = "model_config.json"
MAX_SHARD_BYTES = 5 * 10**9


def save_model(model_config: ModelConfig, variables: Variables, path: str | os.PathLike) -> None:
    """Writes (model_config, variables) into `path`, a new or an empty folder; whole or not at all."""
    entries = [Entry(name, array.dtype, array.shape, lambda array=array: np.asarray(array))
               for name, array in traverse_util.flatten_dict(dict(variables), sep="/").items()]
    with new_folder(Path(path)) as folder:
        write_text(folder / CONFIG, to_json(model_config) + "\n")
        write_tensors(folder, entries, MAX_SHARD_BYTES)


def load_model(path: str | os.PathLike) -> tuple[ModelConfig, dict[str, Any]]:
    """What save_model wrote. Raises ValueError where the folder is not one of its own or its arrays are not those of its config."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"path: got {folder}, which holds no {CONFIG}, wanted a folder that save_model or `longmoe import-hf` wrote")
    config = from_json(ModelConfig, (folder / CONFIG).read_text())
    held = read_folder(folder)
    wanted = {"/".join(leaf): list(shape.shape) for leaf, shape in variable_shapes(config).items()}
    got = {name: list(stored.shape) for name, stored in held.tensors.items()}
    problems = held.problems + [f"{name}: got {got.get(name, 'nothing')}, wanted {wanted.get(name, 'nothing')}" for name in sorted(set(got) | set(wanted))
                                if got.get(name) != wanted.get(name)]
    if problems:
        raise ValueError(f"{folder}: got arrays that are not those of its {CONFIG}; nothing was loaded:\n  {'\n  '.join(problems)}")
    variables = {}
    with Reader() as reader:
        for name, stored in held.tensors.items():
            buffer = aligned_empty(stored.shape, DTYPES[stored.dtype])
            copy_bits(reader.view(stored)[0], buffer)
            variables[name] = jax.device_put(buffer, may_alias=True)
    return config, traverse_util.unflatten_dict(variables, sep="/")


def describe(model_config: ModelConfig, variables: Variables) -> str:
    """One line: parameters, layers, dtypes."""
    leaves = jax.tree.leaves(variables["params"])
    dtypes = sorted({leaf.dtype.name for leaf in leaves})
    return json.dumps({"parameters": sum(leaf.size for leaf in leaves), "layers": model_config.num_layers, "dtypes": dtypes})
