"""Settings from their sources: flags, then the environment, then a YAML file, then the defaults.

The sources know every setting of every command, so one YAML file or environment serves all of them;
what another command owns is passed over, what no command owns is refused.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hotbranch.settings import (
    DoctorSettings,
    RayLlmSettings,
    ReplicaSettings,
    RouterSettings,
    SimulateSettings,
    UpSettings,
)

PREFIX = "HOTBRANCH_"
CONFIG = "HOTBRANCH_CONFIG"
FIELDS: Mapping[str, FieldInfo] = {
    **RayLlmSettings.model_fields,
    **DoctorSettings.model_fields,
    **SimulateSettings.model_fields,
    **ReplicaSettings.model_fields,
    **RouterSettings.model_fields,
    **UpSettings.model_fields,
}
# Kubernetes describes a Service called hotbranch to every pod in variables of this form.
SERVICE_LINK = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT\w*|_PORT_\d+_(TCP|UDP|SCTP)\w*)$")
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

Settings = TypeVar("Settings", bound=BaseModel)
Given = dict[str, tuple[str, object]]  # setting -> (the name the user gave it, its value)


class SettingsError(Exception):
    """A setting is wrong; the message is one line that names it and where it came from."""


def load_settings(
    kind: type[Settings],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
) -> Settings:
    """The settings of one command.

    `flags` are by setting name; a list or mapping setting may be a list of strings. `config` (else
    HOTBRANCH_CONFIG) is the YAML file. Raises SettingsError.
    """
    config = config or (Path(environ[CONFIG]) if environ.get(CONFIG) else None)
    given = _from_yaml(config) if config else {}
    given |= _from_environment(environ)
    given |= _from_flags(flags)
    values = {name: value for name, (_, value) in given.items() if name in kind.model_fields}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_complaints(error, given))) from None


def flag(name: str) -> str:
    """`kv_tokens` -> `--kv-tokens`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """`kv_tokens` -> `HOTBRANCH_KV_TOKENS`."""
    return PREFIX + name.upper()


def suggestion(name: str, valid: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest valid name, or nothing."""
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _from_yaml(path: Path) -> Given:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise SettingsError(f"{path}: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # no text, no such date, no end
        raise SettingsError(f"{path}: is not a YAML text") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: should be a mapping of settings")
    for name in content:
        if name not in FIELDS:
            hint = suggestion(str(name), FIELDS)
            raise SettingsError(f"{path}: unknown setting {name!r}{hint}")
    return {name: (f"{path}: {name}", value) for name, value in content.items()}


def _from_environment(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    names = {variable(name): name for name in FIELDS}
    for key in sorted(environ):
        text = environ[key]
        if not key.startswith(PREFIX) or key == CONFIG or not text:
            continue
        if SERVICE_LINK.search(key) or SERVICE_URL.match(text):
            continue
        if key not in names:
            raise SettingsError(f"unknown variable {key}{suggestion(key, [*names, CONFIG])}")
        name = names[key]
        given[name] = (key, _parsed(key, text, FIELDS[name]))
    return given


def _from_flags(flags: Mapping[str, object]) -> Given:
    given: Given = {}
    for name, value in flags.items():
        if name not in FIELDS:
            raise SettingsError(f"unknown setting {name!r}{suggestion(name, FIELDS)}")
        if get_origin(FIELDS[name].annotation) is dict and isinstance(value, list):
            value = _pairs(flag(name), value)
        given[name] = (flag(name), value)
    return given


def _parsed(key: str, text: str, field: FieldInfo) -> object:
    """A list or mapping as JSON or comma-separated; anything else is left to its type."""
    kind = get_origin(field.annotation)
    if kind not in (list, dict):
        return text
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise SettingsError(f"{key}: is not valid JSON: {error}") from None
    items = [item.strip() for item in text.split(",") if item.strip()]
    return items if kind is list else _pairs(key, items)


def _pairs(origin: str, items: list[Any]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = str(item).partition("=")
        if not (name and equals and value):
            raise SettingsError(f"{origin} {item}: should be name=value")
        pairs[name] = value
    return pairs


def _complaints(error: ValidationError, given: Given) -> Iterable[str]:
    """`--port 70000: should be less than or equal to 65535`, one for each wrong value."""
    for wrong in error.errors(include_url=False):
        name, *inner = wrong["loc"] or ("",)
        origin = given[str(name)][0] if name in given else flag(str(name))
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
        value = wrong["input"]
        # What stands where a key's hash belongs may be the key itself.
        plain = isinstance(value, str | int | float) and "key" not in f"{name}{place}"
        shown = f" {value!s:.80}" if plain and wrong["type"] != "extra_forbidden" else ""
        message = wrong["msg"].removeprefix("Input ").removeprefix("Value error, ")
        yield " ".join(f"{origin}{place}{shown}: {message}".split())
