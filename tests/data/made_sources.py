"""Sources of made-up documents whose tokens say where they come from."""

import numpy as np

from longmoe.data.hashing import permutation, text_key
from longmoe.data.mixture import Mixture
from longmoe.data.packing import Packer
from longmoe.data.sources import FolderDocuments, Source
from longmoe.data.token_folder import Split
from longmoe.data.tokenizer import Tokenizer

EOS = 0
BYTES = Tokenizer.of_bytes()


def make_split(lengths) -> Split:
    """Documents of the given stored lengths; document d holds 1000 d + 1, 1000 d + 2, ... and the end-of-document token."""
    parts = [[1000 * d + i for i in range(1, n)] + [EOS] for d, n in enumerate(lengths, start=1)]
    return Split(np.concatenate(parts).astype(np.uint32), np.cumsum([0, *lengths]), [f"d{d}" for d in range(len(lengths))], EOS, 0)


def make_source(lengths, name="made", weight=1.0, whole=False) -> Source:
    return Source(name, "token_folder", weight, "", FolderDocuments(make_split(lengths), f"{name} {list(lengths)}"), BYTES, {}, whole)


def make_packer(sources, length, rows, lanes, *, repeat=False, workers=0, seed=3) -> Packer:
    mixture = Mixture(sources, seed=seed, repeat=repeat, workers=workers)
    return Packer(mixture, sequence_length=length, batch_size=rows, num_lanes=lanes)


def all_batches(packer) -> list[dict[str, np.ndarray]]:
    return list(iter(packer.next_batch, None))


def order_of(source, epoch, seed=3) -> list[int]:
    """The order that an epoch of a source must have, whatever else the run holds."""
    return permutation(len(source.documents), seed, text_key(source.name), epoch).tolist()


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == b[name].dtype
