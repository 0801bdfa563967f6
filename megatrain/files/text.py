"""Bytes on disk, and the two text formats as plain values (tables, lists, texts, numbers, true and false, null).

YAML here is the core of YAML 1.2, without dates and merge keys: `1e-4` is a number (PyYAML alone reads a text), `on` is a text,
`3: resident` has the key "3", and a key that stands twice is refused. What `dump_yaml` writes, `parse_yaml` reads as it was.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import secrets
import zlib
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megatrain.files.fields import short

LINE = 120
"""Characters of JSON that stand on one line."""
LARGEST = 1 << 30
"""Bytes of text that are read: a record of as many events as a schedule may have ops needs less."""


def write_file(path: str | Path, data: bytes) -> None:
    """Replace the file by `data`, whole or not at all: written beside it, synced, renamed. A failure leaves nothing behind.

    ValueError for what exists and is no regular file (`refuse_irregular`) and for a file in a directory that does not exist;
    OSError for what the system refuses (a full disk).
    """
    refuse_irregular(path)
    target = Path(os.path.realpath(path))  # through a symbolic link, not over it
    if not target.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {Path(path).parent}")
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename survives a power cut only once the directory is on disk too; some file systems cannot sync one.
    with contextlib.suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def refuse_irregular(path: str | Path) -> None:
    """ValueError for a path that is there and, followed through symbolic links, no regular file: to replace a device or a FIFO by
    a file would take it from everyone who uses it."""
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise ValueError(f"{path}: is a directory, not a file")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise ValueError(f"{path}: must be a regular file or new, not a device, a FIFO, a socket or a link to itself")


def read_text(path: str | Path, most: int = LARGEST) -> str:
    """The text of a file, unpacked if its name ends in .gz. ValueError, naming the file, if there is none, it is empty or longer
    than `most` bytes: no more than that is read or unpacked."""
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"{path}: must hold at most {most:,} bytes of text")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a directory, not a file") from None
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}: is not UTF-8 text (byte {problem.start})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise ValueError(f"{path}: is not whole gzip data: {problem}") from None
    except OSError as problem:
        raise ValueError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    if not text.strip():
        raise ValueError(f"{path}: is empty")
    return text


def parse_json(path: str | Path, text: str) -> dict[str, Any]:
    """The table a JSON text holds; `path` is for the messages."""
    try:
        raw = msgspec.json.decode(text)
        json.loads(text, object_pairs_hook=_refuse_twice)  # msgspec takes the last of several keys
    except (msgspec.DecodeError, RecursionError) as problem:
        raise ValueError(f"{path}: is not JSON: {problem}") from None
    except _Twice as problem:
        raise ValueError(f"{path}: the key {problem} stands twice") from None
    return _table(path, raw)


class _Twice(Exception):
    """A key that stands twice in a table."""


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise _Twice(next(key for n, key in enumerate(keys) if key in keys[:n]))


def dump_json(value: dict[str, Any]) -> str:
    """JSON for programs that people can read too: whatever fits into a line stands on one, and so does every row of a list."""
    return _layout(value, "") + "\n"


def parse_yaml(path: str | Path, text: str) -> dict[str, Any]:
    """The table a YAML text holds; `path` is for the messages."""
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(filter(None, (problem.context, problem.problem)))
        raise ValueError(f"{path}: cannot be read as YAML: {where}{what}") from None
    except Exception as problem:  # PyYAML's constructors raise what they happen to on a tag that does not fit its value
        raise ValueError(f"{path}: cannot be read as YAML: {' '.join(str(problem).split())}") from None
    if raw is None:
        raise ValueError(f"{path}: is empty")
    return _table(path, raw)


def dump_yaml(value: dict[str, Any]) -> str:
    """YAML in the order of the table."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    return text


def _table(path: str | Path, raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a table of fields, got {short(raw)}")
    return raw


def _layout(value: Any, indent: str) -> str:
    flat = _on_one_line(value)
    if len(indent) + len(flat) <= LINE or not isinstance(value, (dict, list, tuple)):
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{_on_one_line(key)}: {_layout(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _on_one_line(row) for row in value) + f"\n{indent}]"


def _on_one_line(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


# ---- YAML: the core schema of YAML 1.2 (section 10.3) ----------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Keys are the texts that were written, each once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a single word", problem_mark=key.start_mark)
            if key.value in found:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            found[key.value] = self.construct_object(value, deep=True)
        return found


class _Dumper(yaml.SafeDumper):
    """Quotes whatever `_Loader` would not read as a text, and writes a value that stands twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # In double quotes all line breaks of YAML are escaped; in single ones some are written, and read as spaces.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAKS.intersection(text) else None)


_BREAKS = frozenset("\n\r\x85\u2028\u2029")
_Dumper.add_representer(str, _Dumper.represent_text)

_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
        ("float", _FLOAT, "-+.0123456789"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"({_pattern})\Z"), list(_first))
# Decimal, always: PyYAML reads 010 as 8 and 1:30 as 90.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
