"""Settings that are stated once: the fields of a dataclass carry their default and their help.

Command-line flags (`commands/flags.py`), the template of `shardwise config` and the errors of
`shardwise train` are generated from them. Imports no torch.
"""

from dataclasses import MISSING, field
from typing import Any

REQUIRED = MISSING


def setting(
    default: Any, help: str, *, flag: str = "", metavar: str = "", default_help: str = ""
) -> Any:
    """Return a dataclass field with a default (or REQUIRED) and its documentation.

    `help` is one clause. `flag` is the name of the command-line flag, without dashes, where it
    differs from the field's; `metavar` stands for its value. `default_help` replaces the default
    in the help text, for a default such as None that means something.
    """
    metadata = {"help": help, "flag": flag, "metavar": metavar, "default_help": default_help}
    return field(default=default, metadata=metadata)
