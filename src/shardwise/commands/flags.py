"""Command-line flags generated from the dataclasses of settings, which alone state defaults,
choices and help (`shardwise/setting.py`).

A flag that is not given is absent from the parsed arguments, so that the dataclass fills in its
default.
"""

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwise.layout import Layout


def add_flags(
    parser: "argparse._ActionsContainer", kind: type, names: Sequence[str] = (), note: str = ""
) -> None:
    """Add a flag for each documented field of the dataclass `kind`, or for those in `names` only.

    `note` is appended to every help text.
    """
    for entry in documented_fields(kind, names):
        parser.add_argument(
            flag_of(entry),
            dest=entry.name,
            default=argparse.SUPPRESS,
            help=help_of(entry) + note,
            **value_options(get_type_hints(kind)[entry.name], entry),
        )


def given_values(args: argparse.Namespace, kind: type, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of `kind` that were given on the command line, as its keyword arguments.

    Raises ValueError for a layout that cannot be parsed.
    """
    values = {
        entry.name: getattr(args, entry.name)
        for entry in documented_fields(kind, names)
        if hasattr(args, entry.name)
    }
    hints = get_type_hints(kind)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        if hints[name] is Layout:
            values[name] = Layout.parse(value)
    return values


def documented_fields(kind: type, names: Sequence[str] = ()) -> list[Field[Any]]:
    """Return the fields that carry a help text, in order; with `names`, those only."""
    documented = [entry for entry in fields(kind) if entry.metadata.get("help")]
    return [entry for entry in documented if not names or entry.name in names]


def flag_of(entry: Field[Any]) -> str:
    return "--" + (entry.metadata["flag"] or entry.name.replace("_", "-"))


def help_of(entry: Field[Any]) -> str:
    """Return the help text with its default, escaped for argparse."""
    text: str = entry.metadata["help"]
    shown = entry.metadata["default_help"]
    if not shown and entry.default not in (MISSING, None, ()):
        shown = f"{entry.default:g}" if isinstance(entry.default, float) else str(entry.default)
    return (f"{text} (default: {shown})" if shown else text).replace("%", "%%")


def value_options(hint: Any, entry: Field[Any]) -> dict[str, Any]:
    """Return the options of `add_argument` that follow from a field's type."""
    if get_origin(hint) in (Union, types.UnionType):  # X | None
        hint = next(each for each in get_args(hint) if each is not type(None))
    metavar = entry.metadata["metavar"]
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return {"action": "append", "type": element, "metavar": metavar or metavar_of(element)}
    if hint is bool:
        return {"action": "store_true"}
    value_type = str if hint is Layout else hint
    return {"type": value_type, "metavar": metavar or metavar_of(value_type)}


def metavar_of(value_type: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[value_type]
