"""longmoe data long OUT: writes long documents as JSON lines for `--data.sources`."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import tyro

from longmoe.configs import SourceConfig
from longmoe.data.long_documents import Filling, LongDocument, Summary, folder_documents, log_uniform, write_long_documents
from longmoe.data.planted import KINDS, planted_documents
from longmoe.data.records import TEXT_SUFFIXES, TextFiles
from longmoe.data.sources import Contents, load_tokenizer
from longmoe.data.tokenizer import Tokenizer
from longmoe.data.traces import trace_documents


@dataclasses.dataclass(frozen=True)
class Long:
    """Writes long documents made of short ones as JSON lines, which `--data.sources` reads (kind jsonl; content messages for --form messages)."""
    out: tyro.conf.Positional[str]
    """The file to write."""
    text: str = ""
    """Folder of text files: what is put together (folders), or what facts and traces are hidden in."""
    kind: Literal["folders", "planted", "traces"] = "planted"
    """folders: each folder in `text` as one document; planted: text with facts in it and questions behind; traces: an agent's dialogue with a tool."""
    tokenizer: str = ""
    """"bytes", a tokenizer.json or a token folder: lengths and distances are counted in its tokens."""
    suffixes: tuple[str, ...] = ()
    """Files that are read, by the end of their names; where empty, the usual ones of text."""
    documents: int = 100
    """Documents to write; used by planted and traces."""
    least_tokens: int | None = None
    """Shortest document; 1,024 for planted and traces. Folders that are shorter are left out (None: none)."""
    most_tokens: int = 16384
    """Longest document: its filling's length is log-uniform up to it, and facts and questions come on top; used by planted and traces."""
    questions: int = 8
    """Questions behind a document, the most of them with least_questions; used by planted."""
    least_questions: int | None = None
    """Fewest questions behind a document: their number is log-uniform up to `questions` (None: always as many); used by planted."""
    facts: tuple[str, ...] = tuple(KINDS)
    """What is planted."""
    depth: Literal[0, 1] = 1
    """1: a document for each folder in `text`; 0: one for all of it; used by folders."""
    order: Literal["path", "toctree"] = "path"
    """Order of a folder's files; toctree follows the tables of contents of a Sphinx manual; used by folders."""
    form: Literal["text", "messages"] = "text"
    """text: all tokens are targets; messages: only answers (planted) or the assistant's turns (traces)."""
    seed: int = 0
    """The same seed, text and tokenizer give the same file."""
    replace: bool = False
    """Writes over a file that is there already."""


def long(arguments: Sequence[str]) -> None:
    """Runs the command. ValueError for arguments that make no sense."""
    args = tyro.cli(Long, args=list(arguments), prog="longmoe data long")
    if Path(args.out).exists() and not args.replace:
        raise ValueError(f"out: {args.out} is there already, wanted a new file, or --replace to write over it")
    if not args.text or not args.tokenizer:
        raise ValueError(f"text: got {args.text!r} with tokenizer {args.tokenizer!r}, wanted a folder of text files and a tokenizer, such as bytes")
    if args.documents < 1 or not 1 <= (args.least_tokens or 1) <= args.most_tokens:
        raise ValueError(f"documents: got {args.documents} of {args.least_tokens} to {args.most_tokens} tokens, wanted at least 1, and least_tokens from 1 to "
                         "most_tokens")
    if not 1 <= (args.questions if args.least_questions is None else args.least_questions) <= args.questions:
        raise ValueError(f"questions: got {args.questions} with least_questions={args.least_questions}, wanted at least 1, and no more at least than at most")
    tokenizer = load_tokenizer(args.tokenizer)
    least = args.least_tokens or 0 if args.kind == "folders" else 0
    _print(args.out, write_long_documents(args.out, _documents(args, tokenizer), tokenizer, form=args.form, least_tokens=least))


def _documents(args: Long, tokenizer: Tokenizer) -> Iterator[LongDocument]:
    suffixes = args.suffixes or TEXT_SUFFIXES
    if args.kind == "folders":
        return folder_documents(args.text, suffixes=suffixes, depth=args.depth, order=args.order)
    files = Contents(SourceConfig(kind="text", path=args.text), TextFiles(Path(args.text), suffixes))
    filling = Filling([files.content(i) for i in range(len(files))], tokenizer)
    least, most = args.least_tokens or 1024, args.most_tokens
    length = log_uniform(least, most)
    wanted = args.documents * (most - least) / max(math.log(most / least), 1e-9)
    if wanted > filling.tokens:
        print(f"{args.text} holds {filling.tokens:,} tokens of filling; {args.documents:,} documents take about {wanted:,.0f}, so that texts come again")
    if args.kind == "traces":
        made = trace_documents(filling, seed=args.seed, length=length)
    else:
        questions = args.questions if args.least_questions is None else log_uniform(args.least_questions, args.questions)
        made = planted_documents(filling, seed=args.seed, questions=questions, length=length, kinds=args.facts)
    return itertools.islice(made, args.documents)


def _print(out: str, found: Summary) -> None:
    print(f"{out}: {found.documents:,} documents, {found.tokens:,} tokens, the longest {found.longest:,}; {found.left_out:,} shorter ones left out")
    total = sum(found.distances.values())
    for start, count in sorted(found.distances.items()):
        print(f"evidence {start:,} to {2 * start - 1:,} tokens before its answer: {count:,} ({count / total:.1%})")
