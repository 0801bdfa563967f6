"""Plain values to nouns and back, and sizes in bytes as people write them.

A noun is built from a table of its fields. Nouns within nouns, tables and lists of nouns are taken one by one, so that a message
can name the field (`plan.placement['3']`, `sharing[2].adam_threads`); the rest is left to msgspec. Then the noun checks itself,
and its message is given the field's place in the file: what calls itself `hardware.link` is `h2d` there.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import reprlib
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, TypeVar

import msgspec

from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe

_Noun = TypeVar("_Noun")

# ---- sizes -----------------------------------------------------------------------------------------------------------

_BINARY = {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)}
_UNITS = {unit.lower(): nbytes for unit, nbytes in ({"": 1, "B": 1} | _BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"([0-9]{1,25}(?:\.[0-9]{1,25})?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str | int) -> int:
    """A size in bytes: an integer, or a text such as 24GiB (2^30), 24 GB (10^9), 1.5TB, 4096. Rounded down to a whole byte.

    ValueError for anything else, such as a bare G, which some mean as 2^30 and some as 10^9.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"must be a size in bytes, such as 24GiB, 24 GB, 1.5TB or 4096, got {short(text)}")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_bytes(nbytes: int) -> str:
    """A size for people, in binary units with at most two decimals: 32MiB, 1.5GiB, 139GiB, 12B."""
    size, unit = float(abs(nbytes)), "B"
    for larger, least in _BINARY.items():
        if abs(nbytes) >= least:
            size, unit = abs(nbytes) / least, larger
    return f"{'-' if nbytes < 0 else ''}{size:.2f}".rstrip("0").rstrip(".") + unit


# ---- plain values to nouns -------------------------------------------------------------------------------------------

# What a noun calls itself in its messages, where that is not its name.
_OWN_NAME = {
    "AdamW": "recipe.optimizer", "HardwareProfile": "hardware", "Link": "hardware.link", "Compute": "hardware.compute",
    "SharingRow": "hardware.sharing",
}  # fmt: skip
# Where a field that stands in the wrong section of a job belongs.
_SECTIONS = {"plan": Plan, "recipe.optimizer": AdamW, "recipe": Recipe}
_HOME = {f.name: section for section, noun in _SECTIONS.items() for f in dataclasses.fields(noun)}
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list", "object": "a table",
}  # fmt: skip


@functools.cache
def _hints(noun: Any) -> dict[str, Any]:
    return typing.get_type_hints(noun)


def build(noun: type[_Noun], raw: object, where: str = "") -> _Noun:
    """A noun (a dataclass or NamedTuple) from the table of its fields; `where` is the table's own field in the file.

    ValueError that begins with the field: for a key that is none of the noun's, a field that is missing, a value of another type,
    and whatever the noun itself refuses.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: must be a table of fields, got {short(raw)}")
    hints, optional = _hints(typing.cast(Any, noun)), _optional(noun)
    for key in raw:
        if key not in hints:
            raise ValueError(f"{_join(where, key)}: is no field; {_hint(key, list(hints), where)}")
    for name in hints:
        if name not in raw and name not in optional:
            raise ValueError(f"{_join(where, name)}: is missing")
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in raw.items()}
    try:
        return noun(**values)
    except ValueError as problem:
        text, own = str(problem), _OWN_NAME.get(noun.__name__, noun.__name__.lower())
        raise ValueError((where + text.removeprefix(own)).lstrip(".") if text.startswith(own) else text) from None


def _optional(noun: Any) -> set[str]:
    if not dataclasses.is_dataclass(noun):
        return set(noun._field_defaults)
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(noun) if f.default is not missing or f.default_factory is not missing}


def _hint(key: str, fields: list[str], where: str) -> str:
    """What the writer of an unknown key may have meant."""
    near = difflib.get_close_matches(key, fields, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if key in _HOME and (where.split(".")[0] in ("recipe", "plan") or "recipe" in fields):
        return f"it belongs to {_HOME[key]}"
    return f"the fields are {', '.join(fields)}"


def _convert(hint: Any, value: object, where: str) -> Any:
    """The value of a field of type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: must be a table, got {short(value)}")
        return {key: _convert(args[1], entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if origin is tuple and isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        return tuple(_convert_row(args[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is Literal and value not in args:
        raise ValueError(f"{where}: must be one of {', '.join(map(str, args))}, got {short(value)}")
    if hint is int and isinstance(value, str) and where.endswith("_bytes"):
        try:
            return parse_bytes(value)
        except ValueError as problem:
            raise ValueError(f"{where}: {problem}") from None
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as problem:
        raise ValueError(_reworded(str(problem), value, where)) from None


def _convert_row(hint: Any, value: object, where: str) -> Any:
    """An entry of a list of nouns: a table, of a NamedTuple a list of its values too."""
    if isinstance(value, Mapping) and hasattr(hint, "_fields"):
        return build(hint, value, where)
    return _convert(hint, value, where)


def _reworded(problem: str, value: Any, where: str) -> str:
    """msgspec's message (Expected `int | null`, got `str` - at `$[0][1]`) in this project's form."""
    rule, _, at = problem.partition(" - at `$")
    for index in re.findall(r"\[([0-9]+)\]", at):
        value, where = value[int(index)], f"{where}[{index}]"
    expected = re.match(r"Expected `([a-z |]+)`( of length [0-9]+)?", rule)
    if expected is not None:
        rule = f"must be {' or '.join(_WORDS.get(word, word) for word in expected[1].split(' | '))}{expected[2] or ''}"
    elif rule.startswith("Invalid enum value"):
        rule = "must be one of its field's values"
    return f"{where}: {rule}, got {short(value)}"


# ---- nouns to plain values -------------------------------------------------------------------------------------------


def plain(noun: object) -> dict[str, Any]:
    """The table of every field of a dataclass; NamedTuples within it become lists."""
    found: dict[str, Any] = msgspec.to_builtins(noun, enc_hook=dict)  # the hook: a mapping that is no dict
    return found


def without_defaults(noun: Any) -> dict[str, Any]:
    """The table of the fields that are not at their default, sizes as texts where those are exact."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(noun):
        value = getattr(noun, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if value == default:
            continue
        if dataclasses.is_dataclass(value):
            value = without_defaults(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif f.name.endswith("_bytes") and value >= 1024 and parse_bytes(format_bytes(value)) == value:
            value = format_bytes(value)
        found[f.name] = value
    return found


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 100


def short(value: object) -> str:
    """A value for a message: null and true as files say them, and no more than a line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _repr.repr(value)
