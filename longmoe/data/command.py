"""longmoe data build | long | inspect.

    longmoe data build data/mine --text path/to/files --vocab-size 4096 --licence MIT
    longmoe data build data/mix --sources mix.json --vocab-size 32768
    longmoe data long long.jsonl --text path/to/files --tokenizer data/mine --most-tokens 65536
    longmoe data inspect --path data/mine --sequence-length 64
    longmoe data inspect --sources mix.json --tokenizer bytes --rows 4

`build` writes a token folder from sources of text; without any, from the Python standard library. `long` makes
long documents of short files: whole folders, planted facts with questions, traces of a tool's use. `inspect` shows what a run with the same
data flags would train on: counts a source, licences, and rows as text with what is no target between ⟦ and ⟧.
"""

import argparse
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from longmoe.configs import DataConfig, SourceConfig, from_json
from longmoe.data.corpus import build_stdlib_corpus, build_token_folder
from longmoe.data.loader import Batch, State, TextLoader, with_default_corpus
from longmoe.data.long_command import long
from longmoe.data.records import describe_left_out
from longmoe.data.sources import Source, load_tokenizer, open_sources
from longmoe.data.token_folder import TokenFolder
from longmoe.data.tokenizer import Tokenizer

_KINDS = ("text", "jsonl", "parquet", "array_record", "hugging_face")


def main(arguments: Sequence[str]) -> int:
    """Runs one command. ValueError for arguments that make no sense."""
    command, *rest = arguments or ["help"]
    if command in ("help", "-h", "--help"):
        print(__doc__)
        return 0
    commands = {"build": _build, "long": long, "inspect": _inspect}
    if command not in commands:
        raise ValueError(f"command: got {command!r}, wanted one of {', '.join(commands)}")
    commands[command](list(rest))
    return 0


def read_sources(file: str | Path) -> tuple[SourceConfig, ...]:
    """The sources that a JSON file lists: [{"kind": "jsonl", "path": "a.jsonl", "weight": 2.0}, ...], the fields of SourceConfig.

    Relative paths start at the file's folder.
    """
    listed = read_list(file, "sources")
    sources = from_json(DataConfig, json.dumps({"sources": listed})).sources
    return tuple(dataclasses.replace(source, path=str(Path(file).parent / source.path)) for source in sources)


def read_list(file: str | Path, what: str) -> list[Any]:
    """The list of at least one thing that a JSON file holds; ValueError names the file, and what was wanted (a plural)."""
    try:
        listed = json.loads(Path(file).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{what}: {file} cannot be read as JSON ({error}); wanted a list of {what}") from error
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{what}: {file} holds {type(listed).__name__}, wanted a JSON list with at least one {what.removesuffix('s')}")
    return listed


def take_file(arguments: list[str], flag: str, what: str) -> str | None:
    """Takes `flag FILE` out of `arguments` -> the file's name; None where the flag is not there. what: what the JSON file lists."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            if not equals and i + 1 == len(arguments):
                raise ValueError(f"{flag.lstrip('-')}: got nothing, wanted a JSON file that lists {what}")
            value = value if equals else arguments[i + 1]
            del arguments[i:i + (1 if equals else 2)]
            return value
    return None


def _build(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="longmoe data build", description="Writes a token folder for --data.path.")
    parser.add_argument("out", help="the folder to write")
    for kind in _KINDS:
        parser.add_argument(f"--{kind.replace('_', '-')}", action="append", default=[], metavar="PATH", help=f"a source of kind {kind}; may be repeated")
    parser.add_argument("--sources", metavar="FILE", help="a JSON list of sources, in place of the flags above")
    parser.add_argument("--field", default="", help='field that holds the content (default: "text", or "messages" with --messages)')
    parser.add_argument("--messages", action="store_true", help="the records are conversations: only the assistant's tokens are targets")
    parser.add_argument("--licence", action="append", default=[], help="licence of the text, written into meta.json; may be repeated")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the byte-level BPE (default: %(default)s)")
    parser.add_argument("--tokenizer", default="", help='"bytes", a tokenizer.json or a token folder, in place of training a BPE')
    parser.add_argument("--name", default="", help="name of the corpus (default: that of its sources)")
    parser.add_argument("--replace", action="store_true", help="write a folder anew that is there already; runs that began with the old one cannot go on")
    args = parser.parse_args(arguments)
    if Path(args.out).exists() and not args.replace:
        raise ValueError(f"out: {args.out} is there already, wanted a new folder, or --replace to write it anew")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    content = "messages" if args.messages else "text"
    flagged = [SourceConfig(kind=kind, path=path, content=content, field=args.field if kind != "text" else "", licence=", ".join(args.licence))
               for kind in _KINDS for path in getattr(args, kind)]
    if args.sources and flagged:
        raise ValueError(f"sources: got {args.sources} beside {', '.join(s.path for s in flagged)}, wanted one of the two; list all in the file")
    sources = DataConfig(sources=read_sources(args.sources) if args.sources else tuple(flagged)).sources
    if sources:
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
        folder = build_token_folder(args.out, sources, vocab_size=args.vocab_size, tokenizer=tokenizer, name=args.name)
    else:
        folder = build_stdlib_corpus(args.out, args.vocab_size)
    _print_folder(folder)


def _print_folder(folder: TokenFolder) -> None:
    for source in folder.meta["built_from"]:
        print(f"{source['name']} ({source['kind']}; licence {source['licence'] or 'not stated'}): {source['documents']:,} documents; "
              f"left out: {describe_left_out(Counter(source['left_out']))}")
    for split, counts in folder.meta["splits"].items():
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes")
    print(f"vocabulary {folder.vocab_size:,}; {folder.path}")


@dataclasses.dataclass(frozen=True)
class Inspect(DataConfig):
    """Shows what a run with these data flags would train on."""
    split: Literal["train", "heldout"] = "train"
    """Split to read."""
    rows: int = 2
    """Rows shown as text."""
    batches: int = 1
    """Batches drawn; the counts are over all of them."""
    seed: int = 0
    """The run's seed."""


def _inspect(arguments: list[str]) -> None:
    file = take_file(arguments, "--sources", "sources")
    sources = None if file is None else read_sources(file)
    args = tyro.cli(Inspect, default=Inspect(sources=sources or ()), args=arguments, prog="longmoe data inspect")
    if args.task != "text":
        raise ValueError(f"task: got {args.task!r}, wanted 'text'; generated tasks have no sources")
    opened = open_sources(with_default_corpus(args), args.split)
    loader = TextLoader(args, opened, args.seed, args.split)
    drawn = [item for _, item in zip(range(args.batches), loader)]
    _print_sources(opened, drawn[-1][1])
    shown = 0
    for batch, _ in drawn:
        for row in range(len(batch["tokens"])):
            if shown < args.rows:
                _print_row(loader, opened[0].tokenizer, batch, row, shown)
                shown += 1


def _print_sources(sources: Sequence[Source], state: State) -> None:
    counts = state["packer"]["sources"]
    total = sum(count["tokens"] for count in counts.values())
    for source in sources:
        count = counts[source.name]
        print(f"{source.name} ({source.kind}; licence {source.licence or 'not stated'}): {len(source.documents):,} documents, weight {source.weight:g}; "
              f"drawn {count['tokens']:,} tokens ({count['tokens'] / total:.1%}), epoch {count['epoch']}, {count['next']:,} documents into it; "
              f"left out: {describe_left_out(Counter(source.left_out))}")


def _print_row(loader: TextLoader, tokenizer: Tokenizer, batch: Batch, row: int, number: int) -> None:
    segments, targets = batch["segment_ids"][row], batch["targets"][row]
    for segment in range(1, int(segments.max()) + 1):
        here = segments == segment
        name, document = loader.packer.locate(int(batch["source_ids"][row][here][0]))
        weights = batch["loss_weights"][row][here]
        print(f"\n--- row {number}, segment {segment}: {name}, {document}; {int(here.sum())} tokens, {int((weights > 0).sum())} of them targets")
        print(masked_text(tokenizer, targets[here], weights))
    if not segments.all():
        print(f"\n--- row {number}: {int((segments == 0).sum())} tokens of padding")


def masked_text(tokenizer: Tokenizer, tokens: np.ndarray, weights: np.ndarray) -> str:
    """The text of `tokens`, special tokens spelled out, with each stretch of weight 0 between ⟦ and ⟧."""
    counted = np.asarray(weights) > 0
    cuts = np.flatnonzero(np.diff(counted)) + 1
    pieces = [(flag[0], tokenizer.decode_with_special_tokens(part)) for flag, part in zip(np.split(counted, cuts), np.split(np.asarray(tokens), cuts))]
    return "".join(text if is_target else f"⟦{text}⟧" for is_target, text in pieces)

