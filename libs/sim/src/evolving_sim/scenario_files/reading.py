"""Reads scenario files, and says what is wrong with one: which key, and what it may be."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evolving_sim.scenario_files.model import ScenarioFile

Raw = Mapping[str, Any]


class ScenarioError(Exception):
    """A scenario that can't be: a line for each thing that is wrong with it."""


def read(path: Path) -> Raw:
    """The tables of a file, not looked at yet. Raises ScenarioError."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ScenarioError(f"{path} can't be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} is not TOML: {error}") from error


def parse(raw: Raw, folder: Path) -> ScenarioFile:
    """The scenario that tables describe; paths in them are relative to `folder`. Raises ScenarioError."""
    try:
        return ScenarioFile.model_validate(dict(raw), context={"folder": folder})
    except ValidationError as error:
        raise ScenarioError("\n".join(dict.fromkeys(_lines(error.errors())))) from error


def changed(raw: Raw, settings: Mapping[str, Any]) -> Raw:
    """Tables with some values set. A key is dotted: planner.window_s, workload.periods.0.from_s.

    Raises ScenarioError where the tables have something else on a key's way.
    """
    for key, value in settings.items():
        raw = _set(raw, key.split("."), value, key)
    return raw


def _set(table: Any, way: Sequence[str], value: Any, key: str) -> Any:
    name, *rest = way
    if isinstance(table, list) and name.isdigit() and int(name) < len(table):
        place = int(name)
        return [*table[:place], _set(table[place], rest, value, key) if rest else value, *table[place + 1 :]]
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{key}: nothing can be set there: {name!r} would be in {table!r}")
    return {**table, name: _set(table.get(name, {}), rest, value, key) if rest else value}


def values_of(text: str) -> list[Any]:
    """The values of a list such as `300,600` or `3P6D,4P5D`: as TOML has them, else as text."""
    try:
        return list(tomllib.loads(f"v = [{text}]")["v"])
    except tomllib.TOMLDecodeError:
        return [_value(part.strip()) for part in text.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


# -- errors


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrong:
    """Something that is wrong with the value at a key."""

    key: str
    keys: Sequence[str]  # of the table it is in
    choices: Sequence[tuple[str, str]]  # where types may be one of several: key and the type this is about
    error: ErrorDetails

    @property
    def line(self) -> str:
        """What is wrong, and what it may be."""
        name = self.key.rpartition(".")[2]
        message = self.error["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if self.error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(name, self.keys, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            return f"{self.key}: there is no such key{meant} (keys there: {', '.join(self.keys)})"
        if self.error["type"] in ("missing", "missing_argument"):
            return f"{self.key} is missing"
        if not self.key:
            return message
        given = self.error["input"]
        got = "" if isinstance(given, Mapping | list | tuple) or ", got " in message else f", got {given!r}"
        return f"{self.key}: {message}{got}"


def _lines(errors: Sequence[ErrorDetails]) -> Iterator[str]:
    """A line for each thing that is wrong. Of a value that could be of several types, by the one it is nearest to."""
    wrong = [_wrong(error) for error in errors]
    counts: dict[str, dict[str, int]] = {}
    for each in wrong:
        for key, kind in each.choices:
            tried = counts.setdefault(key, {})
            tried[kind] = tried.get(kind, 0) + 1
    for each in wrong:
        if all(kind == min(counts[key], key=counts[key].__getitem__) for key, kind in each.choices):
            yield each.line


def _wrong(error: ErrorDetails) -> _Wrong:
    """Follow an error's place through the types of a scenario file."""
    key, kinds, choices = "", [ScenarioFile], []
    keys: list[str] = []
    for part in error["loc"]:
        named = [kind for kind in kinds if getattr(kind, "__name__", None) == part]
        if named and len(kinds) > 1:
            choices.append((key, str(part)))
            kinds = named
            continue
        keys = [*_ALSO.get(key, []), *dict.fromkeys(name for kind in kinds for name in _fields(kind))]
        if key.startswith("kinds.") and key.count(".") == 1:
            keys.insert(0, "like")
        key = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}".removeprefix(".")
        kinds = list(itertools.chain.from_iterable(_below(kind, part) for kind in kinds))
    return _Wrong(key, keys, choices, error)


_ALSO = {"machine": ["like", "fitted"]}
"""Keys that are read before the table's type sees it."""


def _below(kind: Any, part: str | int) -> Iterator[Any]:
    """What may stand at a key or index of something of this type."""
    if isinstance(part, str) and part in (fields := _fields(kind)):
        yield from _plain(fields[part])
    elif arguments := typing.get_args(kind):  # of a sequence its items, of a mapping its values
        yield from _plain(arguments[0] if isinstance(part, int) else arguments[-1])


def _plain(kind: Any) -> Iterator[Any]:
    """A type without its annotations; of a union all that is in it."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from _plain(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for each in typing.get_args(kind):
            yield from _plain(each)
    elif kind is not type(None):
        yield kind


def _fields(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {}
