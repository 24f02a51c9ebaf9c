"""Frozen, strict configuration models and their YAML files."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from wattgym.errors import UserError

ModelT = TypeVar("ModelT", bound="FrozenModel")


class FrozenModel(BaseModel):
    """Base of every configuration: immutable, unknown keys refused, defaults validated, NaN refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def parse_config(model: type[ModelT], data: Any, source: str) -> ModelT:
    """Validates a mapping against a configuration model.

    Args:
        model: The configuration class.
        data: What the YAML or JSON file held.
        source: File name (or other origin) for messages.

    Returns:
        The validated, frozen configuration.

    Raises:
        UserError: Names the key, the reason, and for an unknown key the nearest valid one.
    """
    if not isinstance(data, dict):
        raise UserError(f"{source}: expected a mapping of keys to values, got {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: " + "; ".join(_explain(model, e) for e in error.errors())) from None


def load_config(model: type[ModelT], path: str | Path) -> ModelT:
    """Reads one YAML file into a configuration model.

    Raises:
        UserError: The file is missing, is not YAML, or does not fit the model.
    """
    return parse_config(model, read_yaml(path), str(path))


def read_yaml(path: str | Path) -> Any:
    """Reads YAML with plain types only.

    Raises:
        UserError: The file cannot be read or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read: {error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML with plain types only; `1e-3` is a number, as YAML 1.2 has it.

    Args:
        text: YAML.
        source: Where it is from, for messages.

    Raises:
        UserError: It is not YAML.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_yaml_loader())
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


@lru_cache(maxsize=1)
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML follows YAML 1.1, in which a number without a decimal point has no exponent."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return Loader


def _explain(model: type[BaseModel], error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"]) or "(top level)"
    if error["type"] == "extra_forbidden":
        known = sorted(_fields_at(model, error["loc"][:-1]))
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
        return f"unknown key '{location}', {hint}"
    return f"{location}: {error['msg'].removeprefix('Value error, ')} (got {error['input']!r})"


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Field names of the nested model that `path` leads to (unions and containers are searched)."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        following: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            following += _models_in(field.annotation) if field is not None else []
        models = following or models
    return [name for candidate in models for name in candidate.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]
