"""Records, tokens and their order."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.live.config import DataConfig
from wattgym.live.models import ByteTokeniser
from wattgym.live.records import Example, read_examples
from wattgym.live.text import IGNORED, Order, Sequences, split, tokenise


def data(path, **changes):
    return DataConfig(source="file", path=str(path), **{"holdout": 1, **changes})


def lines(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_shipped_sources():
    gsm8k = read_examples(DataConfig(source="gsm8k"))
    assert len(gsm8k) == 7473
    assert gsm8k[0].prompt.startswith("Natalia sold clips to 48")
    assert gsm8k[0].response.endswith("#### 72")
    own = read_examples(DataConfig(source="self_instruct"))
    assert len(own) == 173 + 250  # lines of the two files; each has one instance
    assert own[0].response.startswith("Yes, you can have 1 oatmeal")
    assert "Grammarly" not in own[173].prompt
    assert "If you have any questions about my rate" in own[173].prompt


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "q", "answer": "a"}, Example("q", "a")),
        ({"prompt": "q", "completion": "a", "id": 3}, Example("q", "a")),
        ({"instruction": "q", "input": "", "output": "a"}, Example("q", "a")),
        ({"instruction": "q", "input": "c", "output": "a"}, Example("q\n\nc", "a")),
        ({"instruction": "q", "context": "c", "response": "a"}, Example("q\n\nc", "a")),
        ({"text": "all of it"}, Example("", "all of it")),
        ({"instruction": "q", "instances": [{"input": "c", "output": "a"}]}, Example("q\n\nc", "a")),
    ],
)
def test_usual_fields_are_found(tmp_path, record, expected):
    assert read_examples(data(lines(tmp_path / "d.jsonl", record, record)))[0] == expected


def test_named_fields_and_compressed_files(tmp_path):
    path = tmp_path / "d.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('\ufeff{"frage": "ü", "antwort": "1", "text": "t"}\n\n{"frage": "b", "antwort": "2", "text": "t"}\n')
    named = data(path, prompt_field="frage", response_field="antwort")
    assert read_examples(named) == [Example("ü", "1"), Example("b", "2")]
    assert read_examples(data(path, text_field="text")) == [Example("", "t"), Example("", "t")]
    assert len(read_examples(data(path, text_field="text", max_records=2, holdout=1))) == 2


GOOD = '{"question": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{GOOD}\n{{'x': 1}}\n", r"d\.jsonl, line 2: not JSON"),
        (f"{GOOD}\n\n[1]\n", r"line 3: expected a JSON object, got \[1\]"),
        (f"{GOOD}\n{GOOD[:-5]}", "line 2: not JSON"),
        (
            f'{GOOD}\n{{"question": "q", "answr": "a"}}\n',
            "line 2: the record has no field 'answer', did you mean 'an",
        ),
        (f'{GOOD}\n{{"question": "q", "answer": 5}}\n', "line 2: 'answer' must be text that is not blank, got 5"),
        (f'{GOOD}\n{{"question": " ", "answer": "a"}}\n', "line 2: 'question' must be text"),
        ('{"a": 1}\n', "no known fields among 'a'; expected question/answer"),
        ("{}\n", "no known fields among none"),
        ('{"instruction": "q", "instances": []}\n', "'instances' must be a list that is not empty"),
        ('{"instruction": "q", "instances": [{"input": ""}]}\n', r"instances\[0\]: the record has no field 'output'"),
        ("", "0 records, but data.holdout keeps 1"),
        ("\n \n", "0 records"),
        (GOOD, "1 records, but data.holdout keeps 1"),
        (b"\xff\xfe{}\n", "line 1: not UTF-8"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
    ],
)
def test_what_is_no_record_is_named_by_file_and_line(tmp_path, content, message):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(UserError, match=message) as caught:
        read_examples(data(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read: No such file"):
        read_examples(data(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="cannot read: Is a directory"):
        read_examples(data(tmp_path))
    plain = tmp_path / "d.jsonl.gz"
    plain.write_text(GOOD)
    with pytest.raises(UserError, match="damaged gzip"):
        read_examples(data(plain))
    whole = gzip.compress((GOOD + "\n").encode() * 500)
    plain.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged gzip"):
        read_examples(data(plain))
    with pytest.raises(UserError, match="no field 'qestion', did you mean 'question'"):
        read_examples(
            data(lines(plain.with_suffix(""), json.loads(GOOD)), prompt_field="qestion", response_field="answer")
        )


def test_only_answers_count():
    sequences = tokenise([Example("ab", "xyz")], ByteTokeniser(), 200)
    ids, labels = sequences.batch([0])
    prompt = "### Instruction:\nab\n\n### Response:\n"
    assert bytes(ids[0, 1:-1].astype(np.uint8)).decode() == prompt + "xyz"
    learned = labels[0][labels[0] != IGNORED]
    assert learned.tolist() == [*b"xyz", ByteTokeniser.eos_id]
    # Position t predicts token t + 1: the prompt's last token predicts the answer's first.
    assert labels[0, len(prompt)] == ord("x")
    assert (sequences.answer_tokens([0]), sequences.tokens([0])) == (4, 1 + len(prompt) + 4)


def test_plain_text_counts_from_its_second_token():
    sequences = tokenise([Example("", "xyz")], ByteTokeniser(), 200)
    ids, labels = sequences.batch([0])
    assert ids[0].tolist() == [ByteTokeniser.bos_id, *b"xyz", ByteTokeniser.eos_id]
    assert labels[0].tolist() == [*b"xyz", ByteTokeniser.eos_id, IGNORED]


def test_long_records_are_cut_or_left_out():
    examples = [Example("q", "a" * 500), Example("q" * 500, "a"), Example("q", "a")]
    sequences = tokenise(examples, ByteTokeniser(), 60)
    assert [s.size for s in sequences.ids] == [60, 37]
    assert sequences.left_out == 1
    with pytest.raises(UserError, match=r"none of the 1 records has room for an answer within data\.max_tokens = 60"):
        tokenise(examples[1:2], ByteTokeniser(), 60)
    with pytest.raises(UserError, match=r"2 records fit data\.max_tokens, but data\.holdout keeps 2"):
        Order(2, 2, 0)


def test_padding_lies_right_and_never_counts():
    sequences = tokenise([Example("", "a"), Example("", "abc")], ByteTokeniser(), 60)
    ids, labels = sequences.batch([0, 1])
    assert ids.shape == labels.shape == (2, 5)
    assert ids[0].tolist() == [256, ord("a"), 257, 258, 258]
    assert labels[0].tolist() == [ord("a"), 257, IGNORED, IGNORED, IGNORED]


@settings(max_examples=60)
@given(n=st.integers(2, 60), part=st.floats(0.05, 0.9), seed=st.integers(0, 2**31), position=st.integers(0, 500))
def test_order_is_random_access_and_covers_every_epoch_once(n, part, seed, position):
    holdout = max(1, min(n - 1, int(part * n)))
    order = Order(n, holdout, seed)
    train = n - holdout
    assert len(set(order.held_out)) == holdout
    epoch = order.samples(3 * train, train)
    assert sorted([*epoch, *order.held_out]) == list(range(n))
    one_go = Order(n, holdout, seed).samples(0, position + 5)
    assert order.samples(position, 5) == one_go[position:]


def test_order_depends_on_the_seed_only():
    assert Order(50, 5, 1).samples(0, 45) != Order(50, 5, 2).samples(0, 45)
    assert Order(50, 5, 1).samples(0, 45) != Order(50, 5, 1).samples(45, 45)
    assert list(split([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert isinstance(tokenise([Example("", "a")], ByteTokeniser(), 9), Sequences)
