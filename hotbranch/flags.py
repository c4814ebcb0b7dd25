"""One flag for each setting, generated from the settings classes."""

import argparse
import inspect
from pathlib import Path
from typing import Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotbranch.load_settings import SettingsError, flag, variable

METAVARS = {int: "N", float: "X", Path: "PATH"}


class Parser(argparse.ArgumentParser):
    """A parser that raises SettingsError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


def add_flags(parser: Parser, kind: type[BaseModel]) -> None:
    """Add the settings of `kind`, grouped by the class that declares them.

    Values stay strings; the settings class converts and checks them.
    """
    for owner in kind.__mro__:
        names = [name for name in inspect.get_annotations(owner) if name in kind.model_fields]
        if not names:
            continue
        title = (inspect.getdoc(owner) or owner.__name__).partition("\n")[0].rstrip(".").lower()
        records = [name for name in names if _is_record(kind.model_fields[name])]
        notes = [f"{name}: {_help(name, kind.model_fields[name])}" for name in records]
        group = parser.add_argument_group(title, "; ".join(notes) or None)
        for name in names:
            field = kind.model_fields[name]
            if name in records:
                continue
            if field.annotation is bool:
                group.add_argument(
                    *_flags(name, field), dest=name, action="store_true", help=_help(name, field)
                )
                continue
            many = get_origin(field.annotation) in (list, dict)
            group.add_argument(
                *_flags(name, field),
                dest=name,
                action="append" if many else "store",
                metavar=_metavar(field),
                help=_help(name, field),
            )


def _is_record(field: FieldInfo) -> bool:
    """A list of models: too much for a flag, so it comes from YAML or the environment."""
    return any(
        isinstance(item, type) and issubclass(item, BaseModel)
        for item in get_args(field.annotation)
    )


def _flags(name: str, field: FieldInfo) -> list[str]:
    """The flag of a setting, after the shorter one that it may have."""
    extra = field.json_schema_extra
    short = [str(extra["alias"])] if isinstance(extra, dict) and "alias" in extra else []
    return [*short, flag(name)]


def _metavar(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "metavar" in field.json_schema_extra:
        return str(field.json_schema_extra["metavar"])
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(map(str, get_args(field.annotation))) + "}"
    return next((name for kind, name in METAVARS.items() if field.annotation is kind), "TEXT")


def _help(name: str, field: FieldInfo) -> str:
    plain = field.default is False or field.default in ("", None, [], {})
    default = "" if plain else f"{field.default}, "
    return f"{field.description} [{default}{variable(name)}]".replace("%", "%%")
