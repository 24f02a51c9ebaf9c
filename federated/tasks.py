"""Generated tasks: eight families of short questions with one right answer each, for tests and dry runs.

They need no download and no licence, are natural domains for uneven splits, and an exact answer can be counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wattgym.live.records import Example

WORDS = (
    "apple", "river", "stone", "cloud", "tiger", "bread", "chair", "horse", "piano", "lemon", "eagle", "train", "shirt",
    "plum", "wolf", "lamp", "bus", "pear", "crow", "desk", "goat", "ship", "coat", "fig", "owl", "sofa", "bee", "car",
)  # fmt: skip

CATEGORIES = {
    "fruit": ("apple", "lemon", "plum", "pear", "fig"),
    "animal": ("tiger", "horse", "wolf", "goat"),
    "bird": ("eagle", "crow", "owl"),
    "vehicle": ("train", "bus", "ship", "car"),
    "furniture": ("chair", "desk", "sofa", "lamp"),
}
"""What the words of the family `category` are."""

_CATEGORY = {word: name for name, words in CATEGORIES.items() for word in words}


def _word(rng: np.random.Generator) -> str:
    return str(rng.choice(WORDS))


def _add(rng: np.random.Generator) -> Example:
    a, b = (int(n) for n in rng.integers(0, 50, 2))
    return Example(f"{a} + {b} =", str(a + b))


def _reverse(rng: np.random.Generator) -> Example:
    word = _word(rng)
    return Example(f"reverse {word}", word[::-1])


def _uppercase(rng: np.random.Generator) -> Example:
    word = _word(rng)
    return Example(f"uppercase {word}", word.upper())


def _category(rng: np.random.Generator) -> Example:
    word = str(rng.choice(sorted(_CATEGORY)))
    return Example(f"category of {word}", _CATEGORY[word])


def _first_letter(rng: np.random.Generator) -> Example:
    word = _word(rng)
    return Example(f"first letter of {word}", word[0])


def _repeat(rng: np.random.Generator) -> Example:
    word, times = _word(rng), int(rng.integers(2, 4))
    return Example(f"repeat {word} {times} times", " ".join([word] * times))


def _larger(rng: np.random.Generator) -> Example:
    a, b = (int(n) for n in rng.choice(100, 2, replace=False))
    return Example(f"larger of {a} and {b}", str(max(a, b)))


def _length(rng: np.random.Generator) -> Example:
    word = _word(rng)
    return Example(f"length of {word}", str(len(word)))


FAMILIES: dict[str, Callable[[np.random.Generator], Example]] = {
    "add": _add,
    "reverse": _reverse,
    "uppercase": _uppercase,
    "category": _category,
    "first letter": _first_letter,
    "repeat": _repeat,
    "larger": _larger,
    "length": _length,
}
"""Families by name."""


def generate(families: tuple[str, ...], records: int, seed: int) -> list[tuple[Example, str]]:
    """Records of some families, dealt evenly, each with its family's name; the same for the same arguments.

    Args:
        families: Names among `FAMILIES`.
        records: How many records in all.
        seed: Drives everything that is drawn.
    """
    rng = np.random.default_rng([seed, 7])
    return [(FAMILIES[name](rng), name) for name in (families[i % len(families)] for i in range(records))]
