"""Corpora of real text that need no download. `python -m longmoe.data.corpus OUT [--text FOLDER] [--vocab-size 4096]`.

The default is the source of the running interpreter's standard library without its tests: about 12 MB of Python by many hands.
Whole files are held out, chosen by a hash of their name, so that the choice does not move when files come or go.
"""

import argparse
import fnmatch
import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from longmoe.data.token_folder import TokenFolder, read_token_folder, write_token_folder
from longmoe.data.tokenizer import Tokenizer

HELDOUT_PERCENT = 8
_SKIPPED_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "_bundled", "config-*")
_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".toml", ".json", ".html", ".tex")
_log = logging.getLogger(__name__)


def read_documents(folder: str | Path, suffixes: Sequence[str] = _TEXT_SUFFIXES,
                   skipped_folders: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(path inside `folder` with forward slashes, text) of every file with one of `suffixes`, in order of the path.

    `skipped_folders` are names or patterns with `*`. Empty files, files that are not UTF-8, and exact copies of an earlier
    file are left out.
    """
    folder, skipped = Path(folder), list(skipped_folders)
    if not folder.is_dir():
        raise ValueError(f"folder: got {str(folder)!r}, which is no folder; wanted one that holds text files")
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not any(fnmatch.fnmatch(f, pattern) for pattern in skipped)]
        files += [Path(root, name) for name in names if name.endswith(tuple(suffixes))]
    documents, seen = [], set()
    for name, file in sorted((f.relative_to(folder).as_posix(), f) for f in files):
        data = file.read_bytes()
        digest = hashlib.sha256(data).digest()
        if not data.strip() or digest in seen:
            continue
        try:
            documents.append((name, data.decode("utf-8").replace("\r\n", "\n")))
        except UnicodeDecodeError:
            _log.info("left out %s: not UTF-8", file)
            continue
        seen.add(digest)
    return documents


def stdlib_documents() -> list[tuple[str, str]]:
    """(relative path, text) of the running interpreter's standard library in Python, tests and installed packages left out."""
    return read_documents(sysconfig.get_paths()["stdlib"], (".py",), _SKIPPED_FOLDERS)


def is_held_out(name: str, percent: int = HELDOUT_PERCENT) -> bool:
    """Whether the document of this name is held out: a fixed hash of the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < percent


def build_corpus(out: str | Path, documents: Sequence[tuple[str, str]], *, vocab_size: int, name: str, source: str,
                 licences: Sequence[str]) -> TokenFolder:
    """Splits `documents` by name, trains the tokenizer on the training part only, and writes the token folder `out`."""
    splits = {"train": [d for d in documents if not is_held_out(d[0])], "heldout": [d for d in documents if is_held_out(d[0])]}
    tokenizer = Tokenizer.train((text for _, text in splits["train"]), vocab_size)
    return write_token_folder(out, tokenizer, splits, name=name, source=source, licences=licences)


def build_stdlib_corpus(out: str | Path, vocab_size: int = 4096) -> TokenFolder:
    """The standard library of the running interpreter as a token folder (about 10 s on 2 cores)."""
    version = platform.python_version()
    return build_corpus(out, stdlib_documents(), vocab_size=vocab_size, name=f"python-{version}-stdlib",
                        source=f"the standard library of {platform.python_implementation()} {version}", licences=["PSF-2.0"])


def default_corpus(vocab_size: int = 4096) -> TokenFolder:
    """The standard-library corpus in the user's cache folder ($XDG_CACHE_HOME or ~/.cache), built on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "longmoe" / f"python-{platform.python_version()}-stdlib-{vocab_size}"
    if not path.exists():
        _log.warning("no data.path given: building the standard-library corpus in %s", path)
        build_stdlib_corpus(path, vocab_size)
    return read_token_folder(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m longmoe.data.corpus", description="Build a token folder for --data.path.")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--text", help="a folder of UTF-8 text files, one document a file (default: the Python standard library)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the byte-level BPE (default: %(default)s)")
    parser.add_argument("--licence", action="append", default=[], help="licence of the text, written into meta.json; may be repeated")
    args = parser.parse_args(argv)
    if args.text is None:
        folder = build_stdlib_corpus(args.out, args.vocab_size)
    else:
        documents = read_documents(args.text, skipped_folders=("__pycache__", ".git"))
        folder = build_corpus(args.out, documents, vocab_size=args.vocab_size, name=Path(args.text).name, source=args.text,
                              licences=args.licence)
    for split, counts in folder.meta["splits"].items():
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes")


if __name__ == "__main__":
    main()
