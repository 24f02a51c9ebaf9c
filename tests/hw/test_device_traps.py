"""The table of traps names tests that exist, and all the traps."""

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[2] / "docs" / "hardware_traps.md"


def rows():
    return [line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d+ \|", line)]


def test_every_trap_has_a_row():
    assert [int(row.split("|")[1]) for row in rows()] == list(range(1, 39))


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"trap{row.split('|')[1].strip()}")
def test_every_row_names_tests_or_a_limit(row):
    last = row.split("|")[-2]
    assert "::" in last or last.strip().startswith("limit")


def test_every_named_test_exists():
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)`", TABLE.read_text(encoding="utf-8")))
    assert len(named) > 40
    missing = []
    for file, test in named:
        path = Path(__file__).with_name(file)
        if not path.is_file() or f"def {test}(" not in path.read_text(encoding="utf-8"):
            missing.append(f"{file}::{test}")
    assert missing == []
