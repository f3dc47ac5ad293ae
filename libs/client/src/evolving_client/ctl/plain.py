"""Protobuf messages as plain values for `--json`.

Fields keep their proto names and are all there, also the empty ones; bytes are hex; enums are their lower-case words
without the enum's prefix (`ROLE_PREFILL` → "prefill"); an unset message is null.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

Plain = dict[str, Any]


def plain(message: Message) -> Plain:
    """The message as a dict of JSON values."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def word(enum: Any, value: int) -> str:
    """An enum's value as a word: `word(common_pb2.Role, 1)` is "prefill"."""
    return _word(enum.DESCRIPTOR, value)


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        kind = entry.fields_by_name["value"]
        return {str(key): _value(value[key], kind) for key in sorted(value)}
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value


def _word(descriptor: Any, value: int) -> str:
    known = descriptor.values_by_number.get(value)
    if known is None:
        return str(value)
    name = descriptor.name
    prefix = "".join(f"_{letter}" if letter.isupper() and index else letter for index, letter in enumerate(name))
    return str(known.name).removeprefix(f"{prefix.upper()}_").lower()
