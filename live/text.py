"""Records as token sequences, in an order that only the seed decides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.live.records import Example

IGNORED = -100
"""Label of a token that does not count, as `torch.nn.functional.cross_entropy` has it."""

IntArray = NDArray[np.int64]


class Tokeniser(Protocol):
    """Turns a record into token ids."""

    @property
    def pad_id(self) -> int:
        """Id that fills short sequences up."""
        ...

    def encode(self, example: Example) -> tuple[list[int], int]:
        """Ids of prompt and answer, and how many of them are the prompt's."""
        ...


@dataclass(frozen=True, eq=False)
class Sequences:
    """Tokenised records.

    Attributes:
        ids: Token ids, one array of shape `(n_i,)` per record.
        prompt_tokens: Leading tokens that do not count, per record.
        left_out: Records whose prompt left no room for an answer.
        pad_id: Id that fills short sequences up.
    """

    ids: tuple[IntArray, ...]
    prompt_tokens: tuple[int, ...]
    left_out: int
    pad_id: int

    def batch(self, indices: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Ids and labels of the given records, padded on the right, each of shape `(len(indices), longest)`.

        `labels[:, t]` is the token that position `t` must predict, `IGNORED` where nothing is learned.
        """
        longest = max(self.ids[i].size for i in indices)
        ids = np.full((len(indices), longest), self.pad_id, dtype=np.int64)
        labels = np.full((len(indices), longest), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            sequence, first = self.ids[index], max(self.prompt_tokens[index], 1)
            ids[row, : sequence.size] = sequence
            labels[row, first - 1 : sequence.size - 1] = sequence[first:]
        return ids, labels

    def answer_tokens(self, indices: Sequence[int]) -> int:
        """Tokens of the given records that count."""
        return sum(self.ids[i].size - max(self.prompt_tokens[i], 1) for i in indices)

    def digest(self) -> str:
        """Identifies the records as the model sees them."""
        digest = hashlib.sha256()
        for sequence, prompt in zip(self.ids, self.prompt_tokens, strict=True):
            digest.update(np.array([sequence.size, prompt], dtype="<i8").tobytes() + sequence.astype("<i8").tobytes())
        return digest.hexdigest()

    def tokens(self, indices: Sequence[int]) -> int:
        """Tokens of the given records, prompts included."""
        return sum(self.ids[i].size for i in indices)


def tokenise(examples: Sequence[Example], tokeniser: Tokeniser, max_tokens: int) -> Sequences:
    """Tokenises records; an answer is cut at `max_tokens`, a record without room for an answer is left out.

    Raises:
        UserError: No record has room for an answer.
    """
    ids: list[IntArray] = []
    prompts: list[int] = []
    for example in examples:
        tokens, prompt = tokeniser.encode(example)
        tokens = tokens[:max_tokens]
        if len(tokens) > max(prompt, 1):
            ids.append(np.array(tokens, dtype=np.int64))
            prompts.append(prompt)
    if not ids:
        raise UserError(
            f"none of the {len(examples)} records has room for an answer within data.max_tokens = {max_tokens}"
        )
    return Sequences(tuple(ids), tuple(prompts), len(examples) - len(ids), tokeniser.pad_id)


class Order:
    """Which record is the n-th sample: fixed hold-out, then one permutation per epoch.

    Any position can be asked for, so a resumed job needs to know nothing but how many samples it has seen.

    Args:
        n: Records in all.
        holdout: Records kept out of training.
        seed: The job's seed.

    Raises:
        UserError: Nothing is left to train on.
    """

    def __init__(self, n: int, holdout: int, seed: int) -> None:
        if n <= holdout:
            raise UserError(f"{n} records fit data.max_tokens, but data.holdout keeps {holdout} of them for evaluation")
        shuffled = np.random.default_rng([seed, 0]).permutation(n)
        self.held_out: tuple[int, ...] = tuple(int(i) for i in shuffled[:holdout])
        self._train = shuffled[holdout:]
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def samples(self, first: int, count: int) -> list[int]:
        """Records that are the samples `first` to `first + count - 1`."""
        n = self._train.size
        return [int(self._train[self._epoch(s // n)[s % n]]) for s in range(first, first + count)]

    def _permutation(self, epoch: int) -> IntArray:
        return np.random.default_rng([self._seed, 1, epoch]).permutation(self._train.size)


def split(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    """The records in order, `size` at a time."""
    for start in range(0, len(indices), size):
        yield list(indices[start : start + size])
