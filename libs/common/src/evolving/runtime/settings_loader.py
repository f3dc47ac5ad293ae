"""Read a service's settings from flags, environment and file, with provenance in every error."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from evolving.runtime.settings import ServiceSettings, SettingsError

Settings = TypeVar("Settings", bound=ServiceSettings)

# Kubernetes puts these into every pod for a Service of the same name; they are nobody's settings.
_KUBERNETES_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)$")


def load(
    cls: type[Settings],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of a service, from flags > environment > `--config` file > defaults.

    argv: arguments without the program's name; None: this process's.
    prog: the command's name; None: "evolving-<service>".
    Exits 0 after --help, --version and --print-config, and 2 after one line on stderr for each wrong setting.
    """
    prog = prog or f"evolving-{cls.service.replace('_', '-')}"
    environ = os.environ if environ is None else environ
    try:
        flags = _read_flags(cls, sys.argv[1:] if argv is None else argv, prog)
        print_config = flags.pop("print_config", False)
        config = flags.pop("config", None) or environ.get(_env_name(cls, "config"))
        layers = [
            ("flag", flags),
            ("environment", _read_environment(cls, environ)),
            (f"file {config}", _read_file(cls, Path(config)) if config else {}),
        ]
        settings = _build(cls, layers)
    except SettingsError as error:
        for problem in error.problems:
            print(f"{prog}: {problem}", file=sys.stderr)
        print(f"{prog}: run {prog} --help to see every setting", file=sys.stderr)
        raise SystemExit(2) from None
    if print_config:
        print(to_toml(settings), end="")
        raise SystemExit(0)
    return settings


def to_toml(settings: ServiceSettings) -> str:
    """The settings as a file that `--config` reads back."""
    lines = [f"# evolving-{settings.service.replace('_', '-')}"]
    for name, field in type(settings).model_fields.items():
        value = settings.model_dump(mode="json")[name]
        lines.append(f"\n# {field.description}")
        lines.append(f"# {name} =" if value is None else f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return json.dumps(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _read_flags(cls: type[ServiceSettings], argv: Sequence[str], prog: str) -> dict[str, Any]:
    parser = _Parser(
        prog=prog,
        description=(cls.__doc__ or "").strip().split("\n")[0],
        epilog=f"Each setting can also be given as an environment variable ({_env_name(cls, 'listen')}=…) or in the "
        "--config file under its name with underscores. Flags win over the environment, which wins over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"{prog} {_version(cls)}")
    parser.add_argument("--config", metavar="PATH", help="TOML or YAML file with any of the settings below")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force as TOML and exit")
    group = parser.add_argument_group("settings")
    for name, field in cls.model_fields.items():
        _add_flag(group, cls, name, field)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise SettingsError(*_unknown_words(unknown, [_flag(name) for name in cls.model_fields]))
    return vars(known)


def _unknown_words(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """A line for each unknown option; the word after one is taken for its value."""
    problems = []
    for before, word in zip(("", *words), words, strict=False):
        if word.startswith("-"):
            problems.append(f"{word.partition('=')[0]}: no such option{_hint(word, names)}")
        elif not before.startswith("-"):
            problems.append(f"{word}: unexpected; every setting is given as --name VALUE")
    return problems


def _add_flag(group: argparse._ArgumentGroup, cls: type[ServiceSettings], name: str, field: FieldInfo) -> None:
    default = field.get_default(call_default_factory=True)
    shown = ",".join(map(str, default)) if isinstance(default, tuple | list) else default
    shown = ("no", "yes")[shown] if isinstance(shown, bool) else shown
    suffix = "required" if field.is_required() else f"default: {'none' if shown in (None, '') else shown}"
    text = f"{field.description} [{suffix}; {_env_name(cls, name)}]".replace("%", "%%")
    choices = _choices(field.annotation)
    if field.annotation is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = "{" + ",".join(choices) + "}" if choices else _unit(name)
        group.add_argument(_flag(name), metavar=metavar, help=text)


def _choices(annotation: Any) -> list[str]:
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def _unit(name: str) -> str:
    """What to show as a flag's value: its unit where the name ends in one."""
    for suffix, unit in (
        ("_per_s", "PER-SECOND"),
        ("_s", "SECONDS"),
        ("_ms", "MILLISECONDS"),
        ("_bytes", "BYTES"),
        ("_tokens", "TOKENS"),
        ("_file", "PATH"),
        ("_dir", "PATH"),
        ("listen", "HOST:PORT"),
        ("advertise", "HOST:PORT"),
        ("_address", "HOST:PORT"),
        ("_endpoints", "HOST:PORT,…"),
    ):
        if name.endswith(suffix):
            return unit
    return "VALUE"


def _read_environment(cls: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = _env_name(cls, "")
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name in cls.model_fields:
            values[name] = _decode_text(cls.model_fields[name], text)
        elif name != "config" and not _KUBERNETES_LINK.fullmatch(variable.removeprefix(prefix)):
            names = [_env_name(cls, field) for field in cls.model_fields]
            unknown.append(f"{variable}: no such setting in the environment{_hint(variable, names)}")
    if unknown:
        raise SettingsError(*unknown)
    return values


def _decode_text(field: FieldInfo, text: str) -> Any:
    """An empty value of an optional setting means none; a mapping is written as JSON."""
    options = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    if text == "" and NoneType in options:
        return None
    if any(get_origin(option) is dict for option in options) and text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _read_file(cls: type[ServiceSettings], path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} can't be read ({error}); give a readable file") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        detail = " ".join(str(error).split())
        raise SettingsError(f"--config: {path} is not valid {kind} ({detail}); correct it") from error
    if not isinstance(values, dict):
        raise SettingsError(f"--config: {path} must hold names and values at its top level")
    unknown = [str(name) for name in values if name not in cls.model_fields]
    if unknown:
        names = list(cls.model_fields)
        raise SettingsError(*(f"{name}: no such setting in {path}{_hint(name, names)}" for name in unknown))
    return values


def _build(cls: type[Settings], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Settings:
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, values in layers:
        for name, value in values.items():
            if name not in merged:
                merged[name] = (
                    _decode_text(cls.model_fields[name], value)
                    if source == "flag" and isinstance(value, str)
                    else value
                )
                sources[name] = _env_name(cls, name) if source == "environment" else source
    try:
        return cls(**merged)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False, include_context=False):
            name = str(item["loc"][0]) if item["loc"] else ""
            problems.append(_problem(cls, name, item["msg"], merged, sources))
        raise SettingsError(*dict.fromkeys(problems)) from None


def _problem(
    cls: type[ServiceSettings], name: str, message: str, merged: Mapping[str, Any], sources: Mapping[str, str]
) -> str:
    message = message.removeprefix("Value error, ")
    if not name:  # a rule over several settings: its text names the setting first
        return f"{_flag(message.partition(':')[0])}:{message.partition(':')[2]}"
    description = cls.model_fields[name].description if name in cls.model_fields else ""
    if name not in merged:
        return f"{_flag(name)}: is required: {description} (or set {_env_name(cls, name)})"
    value = merged[name]
    return f"{_flag(name)}: {message}; got {value!r} from {sources[name]}; expected: {description}"


def _hint(word: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(word.split("=", maxsplit=1)[0], names, n=1)
    return f"; did you mean {close[0]}?" if close else "; remove it"


def _flag(name: str) -> str:
    return "--" + name.strip().replace("_", "-")


def _env_name(cls: type[ServiceSettings], name: str) -> str:
    return f"EVOLVING_{cls.service.upper()}_{name.upper()}"


def _version(cls: type[ServiceSettings]) -> str:
    package = cls.__module__.partition(".")[0].replace("_", "-")
    for candidate in (package, "evolving-common"):
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return "unknown"
