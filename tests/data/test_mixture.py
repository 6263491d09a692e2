import dataclasses
import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sources import EOS, all_batches, equal, make_packer, make_source, order_of

from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.corpus import build_corpus
from longmoe.data.loader import make_loader
from longmoe.data.mixture import Mixture

# Rows of 32: documents that end exactly on a row's end, one token before and after it, and far beyond.
BOUNDARIES = [10, 22, 7, 25, 20, 64, 5, 27, 16, 16, 31, 33, 32, 100, 1]


def openings(packer, batches) -> dict[str, list[int]]:
    """Source -> the documents it began, in the order of the rows."""
    found = {}
    for batch in batches:
        for tokens, sources, targets in zip(batch["tokens"], batch["source_ids"], batch["targets"]):
            first = (tokens == EOS) & (sources >= 0) & ((targets % 1000 == 1) | (targets == EOS))
            for source_id in sources[first]:
                name, document = packer.locate(int(source_id))
                found.setdefault(name, []).append(int(document[1:]))
    return found


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("rows, lanes", [(1, 1), (2, 3), (4, 8)])
def test_the_state_through_json_goes_on_with_the_same_batches_at_every_step(repeat, rows, lanes):
    sources = [make_source(BOUNDARIES, "a", 3.0), make_source(BOUNDARIES[::-1], "b"), make_source([32, 64, 96], "c", 0.5)]
    packer = make_packer(sources, 32, rows, lanes, repeat=repeat)
    batches, states = [], [packer.state()]
    while len(batches) < 25 and (batch := packer.next_batch()) is not None:
        batches.append(batch), states.append(packer.state())
    assert len(batches) > 6
    for step, state in enumerate(states):
        again = make_packer(sources, 32, rows, lanes, repeat=repeat)
        again.restore(json.loads(json.dumps(state)))
        assert again.state() == state
        for batch, after in zip(batches[step:], states[step + 1:], strict=True):
            equal(again.next_batch(), batch)
            assert again.state() == after


def test_an_epoch_of_every_source_holds_each_token_once():
    sources = [make_source(BOUNDARIES, "a", 5.0), make_source([40] * 9, "b", 1.0)]
    packer = make_packer(sources, 32, 4, 6, repeat=True)
    batches = [packer.next_batch() for _ in range(60)]
    begun = openings(packer, batches)
    for source in sources:
        size = len(source.documents)
        epochs = list(itertools.batched(begun[source.name], size))
        assert len(epochs) >= 2
        counts = Counter((d, int(t)) for batch in batches for d, t in zip(batch["source_ids"].ravel(), batch["targets"].ravel()))
        for document in range(size):
            tokens = source.documents.document(document).tokens
            first_id = document + (0 if source.name == "a" else len(BOUNDARIES))
            started = begun[source.name].count(document)
            # Every beginning of the document brings all its tokens; the last one may still be open.
            assert all(started - 1 <= counts[first_id, int(t)] <= started for t in tokens[:-1])
    assert sum(s["tokens"] for s in packer.state()["sources"].values()) == 60 * 4 * 32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=4), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 5))
def test_orders_do_not_depend_on_weights_or_other_sources(weights, lengths, seed):
    sources = [make_source([*lengths, number + 1], f"s{number}", weight) for number, weight in enumerate(weights)]
    mixture = Mixture(sources, seed=seed, repeat=True)
    taken = {}
    for _ in range(60):
        source, index, _ = mixture.take()
        taken.setdefault(source, []).append(index)
    for number, indices in taken.items():
        wanted = [index for epoch in range(61) for index in order_of(sources[number], epoch, seed)]
        assert indices == wanted[:len(indices)]


def test_order_and_mix_do_not_move():
    """Pinned: a run that resumes under newer libraries must see the same documents."""
    mixture = Mixture([make_source([4, 9, 2, 7], "code", 2.0), make_source([30, 3], "web", 1.0)], seed=11, repeat=True)
    assert [mixture.take()[:2] for _ in range(14)] == [(0, 2), (1, 1), (0, 3), (1, 0), (0, 0), (0, 1), (0, 1), (0, 3), (0, 2), (0, 0), (0, 2), (0, 1), (0, 3),
                                                       (0, 0)]
    assert {name: (s["epoch"], s["next"], s["credit"]) for name, s in mixture.state().items()} == {"code": (3, 0, 33), "web": (1, 0, -33)}


def test_shares_are_those_of_the_weights_in_tokens():
    rng = np.random.default_rng(0)
    sources = [make_source(rng.integers(*bounds, 50), name, weight) for name, bounds, weight in
               (("short", (2, 9), 0.7), ("long", (200, 400), 0.2), ("mixed", (1, 300), 0.1))]
    mixture = Mixture(sources, seed=0, repeat=True)
    drawn = np.zeros(3)
    for _ in range(5000):
        source, _, document = mixture.take()
        drawn[source] += len(document.tokens)
        # Never further off than two of the longest documents, at any moment.
        assert np.abs(drawn - drawn.sum() * np.array([0.7, 0.2, 0.1])).max() < 800


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.integers(0, 9), st.tuples(st.floats(0, 9), st.floats(0.1, 9), st.floats(0.1, 9)))
def test_new_weights_at_a_resume_repeat_nothing_before_its_epoch_ends(lengths, steps, weights):
    old = [make_source(lengths, "a", 0.8), make_source(lengths[::-1], "b", 0.2)]
    first = make_packer(old, 16, 2, 3, repeat=True)
    batches = [first.next_batch() for _ in range(steps)]
    new = [dataclasses.replace(s, weight=w) for s, w in zip([old[1], old[0], make_source([5, 9], "c")], (weights[1], weights[0], weights[2]))]
    second = make_packer(new, 16, 3, 4, repeat=True)
    second.restore(json.loads(json.dumps(first.state())))
    begun, later = openings(first, batches), openings(second, [second.next_batch() for _ in range(30)])
    for source in new:
        indices = begun.get(source.name, []) + later.get(source.name, [])
        size = len(source.documents)
        wanted = [index for epoch in range(len(indices) // size + 1) for index in order_of(source, epoch)]
        assert all(sorted(epoch) == list(range(size)) for epoch in itertools.batched(indices[:len(indices) // size * size], size))
        assert indices == wanted[:len(indices)]


def test_weight_zero_finishes_open_documents_and_takes_no_more():
    sources = [make_source([200] * 5, "a"), make_source([20] * 50, "b")]
    first = make_packer(sources, 16, 2, 4, repeat=True)
    for _ in range(3):
        first.next_batch()
    state = json.loads(json.dumps(first.state()))
    open_tokens = sum(200 - offset for name, _, offset in [piece for piece in state["lanes"] if piece] if name == "a")
    second = make_packer([dataclasses.replace(sources[0], weight=0.0), sources[1]], 16, 2, 4, repeat=True)
    second.restore(state)
    for _ in range(200):
        second.next_batch()
    before, after = state["sources"]["a"], second.state()["sources"]["a"]
    assert open_tokens > 0 and after["tokens"] == before["tokens"] + open_tokens
    assert (after["epoch"], after["next"]) == (before["epoch"], before["next"])


def test_a_single_pass_takes_all_sources_in_turn_whatever_their_weights():
    sources = [make_source([5, 9, 33], "a", 0.0), make_source([8, 1], "b", 7.0)]
    batches = all_batches(make_packer(sources, 16, 2, 1))
    ids = np.concatenate([b["source_ids"].ravel() for b in batches])
    np.testing.assert_array_equal(ids[ids >= 0], np.repeat([0, 1, 2, 3, 4], [5, 9, 33, 8, 1]))


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory, documents, folder) -> DataConfig:
    root = tmp_path_factory.mktemp("two")
    (root / "more.jsonl").write_text("\n".join(json.dumps({"text": f"{n} {text[:n * 20]}"}) for n, (_, text) in enumerate(documents)))
    return DataConfig(sources=(SourceConfig(path=str(folder.path), name="folder", weight=3), SourceConfig(kind="jsonl", path=str(root / "more.jsonl"))),
                      sequence_length=128, batch_size=8, prefetch=0)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("changes", [{"prefetch": 4}, {"workers": 1}, {"workers": 3, "prefetch": 4}])
def test_prefetch_and_workers_change_no_batch_and_no_state(two_sources, split, changes):
    whole = list(itertools.islice(make_loader(two_sources, seed=1, split=split), 60))
    other = dataclasses.replace(two_sources, **changes)
    assert len(whole) > 3
    for start in (0, 1, len(whole) // 2):   # a resume with other threads than the run began with, too
        state = json.loads(json.dumps(whole[start - 1][1])) if start else None
        found = list(itertools.islice(make_loader(other, seed=1, split=split, state=state), 60 - start))   # a held-out pass ends before that
        for (batch, after), (wanted, wanted_after) in zip(found, whole[start:], strict=True):
            equal(batch, wanted)
            assert after == wanted_after
    if split == "train":
        assert all(s["epoch"] > 0 for s in whole[-1][1]["packer"]["sources"].values())


def test_the_state_does_not_run_ahead_of_the_batch(two_sources):
    _, state = next(make_loader(dataclasses.replace(two_sources, prefetch=4), seed=1))
    assert sum(s["tokens"] for s in state["packer"]["sources"].values()) == 8 * 128


@pytest.mark.parametrize("changes", [{"prefetch": 2}, {"prefetch": 0}, {"prefetch": 2, "workers": 2}])
def test_an_error_while_reading_reaches_the_reader(two_sources, monkeypatch, changes):
    from longmoe.data.sources import RecordDocuments
    loader = make_loader(dataclasses.replace(two_sources, **changes), seed=1)

    def broken(self, index):
        raise ValueError("disk on fire")

    next(loader)
    monkeypatch.setattr(RecordDocuments, "document", broken)
    with pytest.raises(Exception, match="disk on fire"):
        for _ in range(400):
            next(loader)


def test_another_corpus_under_the_same_name_is_refused(two_sources, documents, tmp_path):
    _, state = next(make_loader(two_sources, seed=1))
    changed = tmp_path / "more.jsonl"
    lines = open(two_sources.sources[1].path).read().replace("lambda", "Lambda", 1)
    changed.write_text(lines)
    sources = (two_sources.sources[0], dataclasses.replace(two_sources.sources[1], path=str(changed)))
    with pytest.raises(ValueError, match="source 'more.jsonl' was saved with fingerprint"):
        make_loader(dataclasses.replace(two_sources, sources=sources), seed=1, state=state)
    # The same documents at another place are the same source.
    changed.write_text(open(two_sources.sources[1].path).read())
    make_loader(dataclasses.replace(two_sources, sources=sources), seed=1, state=state)


def test_folders_of_different_vocabularies_do_not_mix(folder, documents, tmp_path):
    other = build_corpus(tmp_path / "other", documents, vocab_size=290, name="other", source="x", licences=[])
    sources = (SourceConfig(path=str(folder.path), name="small"), SourceConfig(path=str(other.path)))
    with pytest.raises(ValueError, match=r"source small \(300 tokens\) and source other \(290 tokens\) have different vocabularies"):
        make_loader(DataConfig(sources=sources), seed=0)
    with pytest.raises(ValueError, match="data.tokenizer=bytes"):
        make_loader(DataConfig(sources=sources[:1], tokenizer="bytes"), seed=0)


def test_token_folders_need_no_library_but_numpy_and_tokenizers(folder):
    code = f"""
import sys
for name in ("grain", "pyarrow", "pyarrow.parquet", "datasets", "zstandard", "array_record"):
    sys.modules[name] = None   # an import raises ImportError
from longmoe.configs import DataConfig, SourceConfig
from longmoe.data.loader import make_loader
loader = make_loader(DataConfig(path={str(folder.path)!r}, sequence_length=32, batch_size=2), seed=0)
print([int(next(loader)[0]["tokens"].sum()) for _ in range(3)])
for changes, kind in ((dict(workers=2), "token_folder"), ({{}}, "parquet"), ({{}}, "hugging_face"), ({{}}, "array_record")):
    try:
        suffixes = (".json",) if kind in ("parquet", "array_record") else ()
        source = SourceConfig(kind=kind, path={str(folder.path)!r}, suffixes=suffixes)
        next(make_loader(DataConfig(sources=(source,), tokenizer={str(folder.path)!r}, prefetch=0, **changes), seed=0))
    except ValueError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    loader = make_loader(DataConfig(path=str(folder.path), sequence_length=32, batch_size=2), seed=0)
    assert found[0] == str([int(next(loader)[0]["tokens"].sum()) for _ in range(3)])
    assert "workers: got 2, but Grain" in found[1] and len(found) == 5
    assert all(f'pip install "{package}"' in line for line, package in zip(found[2:], ("longmoe[data]", "longmoe[data]", "grain")))
