"""Hugging Face checkpoints of kimi_linear and of the text half of kimi_k3, read and written under their published names."""
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from longmoe.configs import ModelConfig
from longmoe.interop import hf_config, mxfp4
from longmoe.interop.hf_names import FAMILIES, Family, Leaf, Tensor, tensors, variable_shapes
from longmoe.interop.tensor_files import DTYPES, Entry, Folder, Reader, Stored, aligned_empty, copy_bits, new_folder, read_folder, write_tensors, write_text
from longmoe.model.lm import Variables

FLOATS = ("F64", "F32", "BF16", "F16")
MAX_SHARD_BYTES = 5 * 10**9


def load_hf(path: str | os.PathLike, *, dtype: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """A checkpoint's folder (config.json, safetensors) -> (ModelConfig, {"params", "router_state"}).

    dtype: of parameters and activations, "float32", "bfloat16" or "float64" (the last under jax.enable_x64); None keeps the files' dtypes and config.json's.
    Decay gates and expert_bias are float32 at least. MXFP4 experts are unpacked. Layers are stacked as scan_layers=True has it.

    Memory: the result, and the largest tensor. Names and shapes are checked before anything is read.
    Raises ValueError for a config of another family or one that this model cannot follow, and one that lists every unknown, missing or misshapen tensor with
    both shapes and every damaged file with the tensors it has lost.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"path: got {folder}, which holds no config.json, wanted a checkpoint's folder")
    held = read_folder(folder)
    try:
        family, config = hf_config.from_hf(json.loads((folder / "config.json").read_text()))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; tensors in the folder: {', '.join(sorted(held.tensors))}") from error
    if dtype is not None:
        name = jnp.dtype(dtype).name
        if name not in hf_config.DTYPES:
            raise ValueError(f"dtype: got {name}, wanted one of {', '.join(hf_config.DTYPES)}, or None")
        config = dataclasses.replace(config, dtype=name, param_dtype=name)
    shapes = variable_shapes(config)
    wanted = tensors(FAMILIES[family], config, shapes)
    sources = _match(FAMILIES[family], wanted, held, folder)
    dtypes = _leaf_dtypes(config, wanted, sources, shapes, cast=dtype is not None)
    if dtype is None:
        config = dataclasses.replace(config, param_dtype=dtypes["params", "embedding"].name)
    return config, _read(wanted, sources, shapes, dtypes)


def save_hf(model_config: ModelConfig, variables: Variables, path: str | os.PathLike, *, pack_experts: mxfp4.ScaleRule | None = None,
            max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes (model_config, variables) as a checkpoint of the family that expresses it: kimi_linear or kimi_k3. `path` is a new or an empty folder.

    Each tensor keeps its array's dtype; config.json's dtype is model_config.dtype. The folder appears whole or not at all, and the same variables give the
    same bytes. pack_experts: "floor" or "round" packs the routed experts as MXFP4 by that rule (see mxfp4.pack). Files hold at most max_shard_bytes each,
    a larger tensor apart.

    Raises ValueError, with the fields that stand against each family, for a config that neither expresses; for variables of another config; and for experts
    whose input width does not divide into MXFP4's groups.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}, wanted a positive number")
    family, content = hf_config.to_hf(model_config, is_mxfp4=pack_experts is not None)
    entries = [entry for tensor, array in published(model_config, variables)
               for entry in _entries(tensor, array, pack_experts if tensor.is_expert else None)]
    with new_folder(Path(path)) as folder:
        write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")
        write_tensors(folder, entries, max_shard_bytes)


def published(model_config: ModelConfig, variables: Variables) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Each tensor of the family's checkpoint and the array that it is made of (its part of ours; `tensor.kind.save` turns it), in the order of writing.

    Takes anything shaped like the variables, gradients too. Raises ValueError where the paths or shapes are not the config's.
    """
    family, _ = hf_config.to_hf(model_config)
    shapes = variable_shapes(model_config)
    got = {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(variables)}
    off = [f"{'/'.join(leaf)}: got {_shape_of(got, leaf)}, wanted {_shape_of(shapes, leaf)}" for leaf in sorted(set(got) | set(shapes))
           if _shape_of(got, leaf) != _shape_of(shapes, leaf)]
    if off:
        raise ValueError(f"variables: got arrays that are not those of model_config; stack_layers or unstack_layers changes the layout:\n  {'\n  '.join(off)}")
    for tensor in tensors(FAMILIES[family], model_config, shapes):
        yield tensor, np.asarray(got[tensor.leaf])[tensor.index]


def _shape_of(arrays: Mapping[Leaf, Any], leaf: Leaf) -> str:
    return str(list(arrays[leaf].shape)) if leaf in arrays else "nothing"


def _entries(tensor: Tensor, array: np.ndarray, rule: mxfp4.ScaleRule | None) -> list[Entry]:
    if rule is None:
        return [Entry(tensor.name, array.dtype, tensor.shape, lambda: tensor.kind.save(array))]
    rows, columns = tensor.shape
    if columns % mxfp4.GROUP:
        raise ValueError(f"pack_experts: got {rule!r} for {tensor.name} {list(tensor.shape)}, wanted an input width in multiples of {mxfp4.GROUP}; "
                         "leave the experts unpacked")
    packed, scale = _packed_names(tensor.name)
    # Packed twice rather than kept: the bytes of all experts would be the size of the file.
    return [Entry(packed, np.dtype(np.uint8), (rows, columns // 2), lambda: mxfp4.pack(tensor.kind.save(array), rule)[0]),
            Entry(scale, np.dtype(np.uint8), (rows, columns // mxfp4.GROUP), lambda: mxfp4.pack(tensor.kind.save(array), rule)[1])]


def _packed_names(name: str) -> tuple[str, str]:
    return f"{name}_packed", f"{name}_scale"


def _match(family: Family, wanted: list[Tensor], held: Folder, folder: Path) -> dict[str, tuple[Stored, ...]]:
    """Name -> the stored tensor, or the packed one and its scale. One ValueError says everything that does not fit."""
    sources: dict[str, tuple[Stored, ...]] = {}
    problems, used = list(held.problems), set()
    for tensor in wanted:
        name = next((name for name in (tensor.name, *tensor.aliases) if name in held.tensors), tensor.name)
        expected = {name: (FLOATS, tensor.shape)}
        if tensor.is_expert and name not in held.tensors and _packed_names(name)[0] in held.tensors:
            rows, columns = tensor.shape
            widths = (columns // 2, columns // mxfp4.GROUP)
            expected = {part: (("U8",), (rows, width)) for part, width in zip(_packed_names(name), widths)}
        used |= set(expected)
        for part, (dtypes, shape) in expected.items():
            stored = held.tensors.get(part)
            if stored is None:
                problems.append(f"missing: {part}: got nothing, wanted {list(shape)}")
            elif stored.shape != shape:
                problems.append(f"misshapen: {part}: got {list(stored.shape)}, wanted {list(shape)}")
            elif stored.dtype not in dtypes:
                problems.append(f"dtype: {part}: got {stored.dtype}{list(shape)}, wanted {' or '.join(dtypes)}")
            else:
                sources[tensor.name] = (*sources.get(tensor.name, ()), stored)
    problems += [f"unknown: {name}: got {list(stored.shape)}, wanted no such tensor in {family.name}"
                 for name, stored in held.tensors.items() if name not in used and not name.startswith(family.ignored or ("\0",))]
    if problems:
        raise ValueError(f"{folder}: got a checkpoint that does not fit its config.json ({family.name}); nothing was loaded:\n  {'\n  '.join(problems)}")
    return sources


def _leaf_dtypes(config: ModelConfig, wanted: list[Tensor], sources: Mapping[str, tuple[Stored, ...]], shapes: Mapping[Leaf, jax.ShapeDtypeStruct],
                 cast: bool) -> dict[Leaf, np.dtype]:
    """The dtype of each array: the config's where asked for, else the widest among its tensors; float32 at least where the model keeps that."""
    own: dict[Leaf, np.dtype] = {}
    for tensor in wanted:
        stored = sources[tensor.name]
        dtype = jnp.dtype(config.param_dtype) if cast or len(stored) > 1 else DTYPES[stored[0].dtype]
        own[tensor.leaf] = jnp.promote_types(dtype, own[tensor.leaf]) if tensor.leaf in own else dtype
    dtypes = {leaf: jnp.promote_types(dtype, jnp.float32) if shapes[leaf].dtype == jnp.float32 else dtype for leaf, dtype in own.items()}
    found = {dtype.name for dtype in dtypes.values()}
    if "float64" in found and not jax.config.jax_enable_x64:
        raise ValueError("dtype: got float64, which JAX would round to float32 now; load under `with jax.enable_x64(True)`, or ask for dtype='float32'")
    if "float16" in found:
        raise ValueError("dtype: got float16 tensors, wanted bfloat16, float32 or float64; ask for one of those with dtype=")
    return dtypes


def _read(wanted: list[Tensor], sources: Mapping[str, tuple[Stored, ...]], shapes: Mapping[Leaf, jax.ShapeDtypeStruct],
          dtypes: Mapping[Leaf, np.dtype]) -> dict[str, Any]:
    parts: dict[Leaf, list[Tensor]] = {leaf: [] for leaf in shapes}
    for tensor in wanted:
        parts[tensor.leaf].append(tensor)
    variables: dict[Leaf, jax.Array] = {}
    with Reader() as reader:
        for leaf, shape in shapes.items():
            buffer = aligned_empty(shape.shape, dtypes[leaf])
            for tensor in parts[leaf]:
                stored = reader.view(*sources[tensor.name])
                source = mxfp4.unpack(*stored) if len(stored) > 1 else stored[0]
                try:
                    copy_bits(tensor.kind.load(source, tensor.part_shape), buffer[tensor.index])
                except ValueError as error:
                    raise ValueError(f"{tensor.name}: {error}") from error
            # On a CPU the buffer becomes the array; elsewhere it is copied to the device and dropped.
            variables[leaf] = jax.device_put(buffer, may_alias=True)
    return traverse_util.unflatten_dict(variables)
