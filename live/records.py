"""Training records from JSON lines: a prompt and the answer to learn, or plain text."""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wattgym.errors import UserError
from wattgym.live.config import DataConfig
from wattgym.traces.catalogue import data_path

SHIPPED = {
    "gsm8k": ("instruct/gsm8k_train.jsonl.gz",),
    "self_instruct": ("instruct/self_instruct_seed_tasks.jsonl.gz", "instruct/self_instruct_user_oriented.jsonl.gz"),
}
"""Files of the shipped sources, below the data folder."""

PAIRS = (
    ("question", "answer"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
)
"""Usual names of prompt and answer, in the order in which they are looked for."""

CONTEXTS = ("input", "context")
"""Fields that, beside an `instruction`, hold what it is about."""


class Example(NamedTuple):
    """One record.

    Attributes:
        prompt: What the model is given; empty for plain text.
        response: What it learns to say.
    """

    prompt: str
    response: str


@dataclass(frozen=True)
class _Line:
    """One JSON object and where it stands."""

    where: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if name not in self.fields:
            close = difflib.get_close_matches(name, self.fields, n=1)
            hint = (
                f", did you mean '{close[0]}'?" if close else f"; it has {', '.join(map(repr, self.fields)) or 'none'}"
            )
            raise UserError(f"{self.where}: the record has no field '{name}'{hint}")
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{self.where}: '{name}' must be text that is not blank, got {_short(value)}")
        return value


Label = Callable[[dict[str, Any], Example], "str | None"]
"""Names the kind of a record by its line's fields and its example; None where they do not tell."""


def read_examples(config: DataConfig) -> list[Example]:
    """All records of the configured source, in the order of its files.

    Raises:
        UserError: As `read_labelled`.
    """
    return [example for example, _ in read_labelled(config, lambda fields, example: "")]


def read_labelled(config: DataConfig, label: Label) -> list[tuple[Example, str]]:
    """All records of the configured source, in the order of its files, each with its label.

    Blank lines are skipped. The fields are found by the first record of each file and then expected in all of it.

    Raises:
        UserError: A file is missing or unreadable, a line is no record (file and line are named), a field is
            missing, a record has no label, or there are fewer records than the hold-out and one to train on.
    """
    if config.path is not None:
        paths = [Path(config.path)]
    else:
        paths = [data_path(relative) for relative in SHIPPED[config.source]]
    examples: list[tuple[Example, str]] = []
    for path in paths:
        parse: Callable[[_Line], Iterator[Example]] | None = None
        for line in _lines(path):
            parse = parse or _parser(config, line)
            for example in parse(line):
                kind = label(line.fields, example)
                if kind is None:
                    raise UserError(f"{line.where}: the record does not say what kind it is")
                examples.append((example, kind))
            if config.max_records is not None and len(examples) >= config.max_records:
                return _enough(examples[: config.max_records], config, paths)
    return _enough(examples, config, paths)


def _enough(examples: list[tuple[Example, str]], config: DataConfig, paths: list[Path]) -> list[tuple[Example, str]]:
    if len(examples) <= config.holdout:
        names = ", ".join(map(str, paths))
        raise UserError(
            f"{names}: {len(examples)} records, but data.holdout keeps {config.holdout} for evaluation and at least "
            f"one must be left to train on"
        )
    return examples


def _lines(path: Path) -> Iterator[_Line]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _Line(f"{path}, line {number}", _object(raw, f"{path}, line {number}"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file after line {number}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from None


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); expected one object per line") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {_short(value)}")
    return value


def _parser(config: DataConfig, first: _Line) -> Callable[[_Line], Iterator[Example]]:
    """How to take examples from records of this file's shape."""
    if config.text_field is not None:
        return _text(config.text_field)
    if config.prompt_field is not None and config.response_field is not None:
        return _pair(config.prompt_field, config.response_field)
    if isinstance(first.fields.get("instances"), list) and "instruction" in first.fields:
        return _instances
    for prompt, response in PAIRS:
        if prompt in first.fields and response in first.fields:
            return _pair(prompt, response)
    if "text" in first.fields:
        return _text("text")
    pairs = ", ".join(f"{prompt}/{response}" for prompt, response in PAIRS)
    raise UserError(
        f"{first.where}: no known fields among {', '.join(map(repr, first.fields)) or 'none'}; expected {pairs} or "
        "text, or name them with data.prompt_field and data.response_field, or data.text_field"
    )


def _text(name: str) -> Callable[[_Line], Iterator[Example]]:
    def parse(line: _Line) -> Iterator[Example]:
        yield Example("", line.text(name))

    return parse


def _pair(prompt: str, response: str) -> Callable[[_Line], Iterator[Example]]:
    def parse(line: _Line) -> Iterator[Example]:
        yield Example(_with_context(line, prompt), line.text(response))

    return parse


def _with_context(line: _Line, prompt: str) -> str:
    text = line.text(prompt)
    if prompt != "instruction":
        return text
    contexts = [line.fields.get(name) for name in CONTEXTS]
    return "\n\n".join([text, *(c for c in contexts if isinstance(c, str) and c.strip())])


def _instances(line: _Line) -> Iterator[Example]:
    """Self-Instruct's form: an instruction with a list of inputs and outputs."""
    instances = line.fields.get("instances")
    if not isinstance(instances, list) or not instances:
        raise UserError(f"{line.where}: 'instances' must be a list that is not empty, got {_short(instances)}")
    for index, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise UserError(f"{line.where}: instances[{index}] must be an object, got {_short(instance)}")
        merged = _Line(f"{line.where}, instances[{index}]", {**instance, "instruction": line.fields.get("instruction")})
        yield Example(_with_context(merged, "instruction"), merged.text("output"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
