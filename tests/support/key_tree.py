"""Configuration models as trees of dotted keys, for tests that change every key once."""

from types import NoneType, UnionType

from pydantic import BaseModel


def leaves(model, prefix=""):
    """Dotted names of every leaf key, `*` for the keys of mappings to models."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, UnionType):  # a part that may be left out
            kind = next((part for part in kind.__args__ if part is not NoneType), kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
            continue
        yield prefix + name
        for part in getattr(kind, "__args__", ()):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from leaves(part, f"{prefix}{name}.*.")


def merged(*layers):
    """Nested mappings, later ones first."""
    result = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result
