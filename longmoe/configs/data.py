"""What a step's batch is made of: the sources of documents, and how they fill rows."""
import dataclasses
import math
import pathlib
import typing
from typing import Literal

from longmoe.configs.checks import check, positive


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of documents (docs/data.md says how each kind is read)."""
    kind: Literal["token_folder", "text", "jsonl", "parquet", "array_record", "hugging_face"] = "token_folder"
    """token_folder: what `longmoe data build` wrote; text: one document a file; jsonl: one a line, also .gz and .zst; hugging_face: a dataset on disk."""
    path: str = ""
    """The folder or file; a folder is read with all its subfolders."""
    name: str = ""
    """Names the source in states, batches and reports, unique in a run; the path's last part where empty."""
    weight: float = 1.0
    """Share of the tokens, relative to the other sources' weights; 0 takes no new document and finishes open ones."""
    content: Literal["text", "messages"] = "text"
    """text: every token is a target; messages: a conversation of [{role, content}, ...], only the assistant's tokens are targets."""
    field: str = ""
    """Field or column that holds the content; where empty, "text" or "messages" as `content` says. * takes the whole record."""
    licence: str = ""
    """Licence of the text, for reports; a token folder brings its own."""
    suffixes: tuple[str, ...] = ()
    """Files of a folder that are read, by the end of their names; where empty, the usual ones of the kind."""
    whole: bool = False
    """Documents that a row can hold are not cut: one that does not fit behind the others begins the next row, and padding fills this one."""

    def __post_init__(self) -> None:
        for name in ("kind", "content"):   # a JSON list of sources comes without tyro's checks
            wanted = typing.get_args(typing.get_type_hints(SourceConfig)[name])
            check(getattr(self, name) in wanted, f"SourceConfig.{name}: got {getattr(self, name)!r}, wanted one of {', '.join(wanted)}")
        check(bool(self.path), "SourceConfig.path: got nothing, wanted a folder or a file")
        check(isinstance(self.weight, int | float) and 0 <= self.weight < math.inf,
               f"SourceConfig.weight: got {self.weight!r}, wanted 0 or a positive number")
        check(self.content == "text" or self.kind not in ("token_folder", "text"),
               f"SourceConfig.content: got {self.content!r} with kind {self.kind!r}, wanted 'text'; conversations come from records (jsonl, parquet, ...), "
               "and a token folder holds its own masks")
        for name, kinds in (("field", ("jsonl", "parquet", "array_record", "hugging_face")), ("suffixes", ("text", "jsonl", "parquet", "array_record"))):
            check(not getattr(self, name) or self.kind in kinds,
                   f"SourceConfig.{name}: got {getattr(self, name)!r} with kind {self.kind!r}, which has none; wanted it left empty")

    @property
    def label(self) -> str:
        """`name`, or the path's last part."""
        return self.name or pathlib.PurePath(self.path).name or self.path


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a step's batch is made of."""
    path: str = ""
    """A token folder (`longmoe data build` makes one) as the only source; used by task text."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources that are mixed, in place of `path`. On the command line `--data.sources FILE` reads a JSON list of them."""
    tokenizer: str = ""
    """Tokenizer of the sources that are text: "bytes", a tokenizer.json or a token folder. Where empty, that of the sources that are token folders."""
    task: Literal["text", "associative_recall"] = "text"
    """text: packed documents of `path` or `sources`; associative_recall: generated key-value pairs with queries."""
    sequence_length: int = 256
    """Tokens a row, T."""
    batch_size: int = 16
    """Rows a step over all devices and micro-batches, B."""
    num_pairs: int = 16
    """Key-value pairs a row; used by task associative_recall."""
    prefetch: int = 2
    """Batches made ahead of the step that takes them, by a thread; 0 makes each when it is asked for. Changes no batch."""
    workers: int = 0
    """Grain's threads that read and tokenise ahead for each source; 0 reads without Grain. Changes no batch."""

    def __post_init__(self) -> None:
        positive(self, "sequence_length", "batch_size", "num_pairs")
        for name in ("prefetch", "workers"):
            check(getattr(self, name) >= 0, f"DataConfig.{name}: got {getattr(self, name)}, wanted 0 or more")
        check(not (self.path and self.sources), f"DataConfig.path: got {self.path!r} beside sources, wanted one of the two; "
               "list the folder among the sources")
        labels = [source.label for source in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        check(not twice, f"DataConfig.sources: got {twice} more than once, wanted a name of its own for each source")
        check(not self.sources or any(source.weight > 0 for source in self.sources),
               "DataConfig.sources: got no weight above 0, wanted at least one source to take documents from")
