"""Prints what SGLang's own parser accepts, as JSON; run as a script in an environment where SGLang imports."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from typing import Any

_NAMED = {int: "int", float: "float", str: "str", None: "str"}
_TOLD = {"human_readable_int": "size", "loads": "json", "json_list_type": "json"}


def described(action: argparse.Action) -> dict[str, Any]:
    """One row of the table: the first spelling names it."""
    plain = [flag.removeprefix("--") for flag in action.option_strings if not flag.startswith("--no-")]
    row = {
        "name": plain[0].replace("-", "_"),
        "type": _type(action),
        "choices": sorted(str(choice) for choice in action.choices or ()),  # some are sets
        "default": "" if action.default in (None, "", [], ()) else str(action.default),
        "also": [other.replace("-", "_") for other in plain[1:]],
        "negatable": isinstance(action, argparse.BooleanOptionalAction),
    }
    return {key: value for key, value in row.items() if value}


def _type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    one = _NAMED.get(action.type) or _TOLD.get(getattr(action.type, "__name__", ""), "str")  # type: ignore[arg-type]
    return one + ("*" if action.nargs in ("+", "*") else "")


def main() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    rows = [described(action) for action in parser._actions]
    print(json.dumps({"version": metadata.version("sglang"), "rows": rows}))


if __name__ == "__main__":
    main()
