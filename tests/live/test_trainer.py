"""The training loop in this process: what pace and micro-batch change, resuming, checkpoints, models."""

import csv
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')
pytest.importorskip("transformers", reason='needs transformers and peft: pip install "wattgym[llm]"')

import torch
from safetensors.torch import load_file

from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.checkpoint import newest_checkpoint
from wattgym.live.learner import Learner
from wattgym.live.models import check_available, load_model
from wattgym.live.pacing import Reporter, StopFlag
from wattgym.live.records import read_examples
from wattgym.live.trainer import CHECKPOINTS, Trainer
from wattgym.phase import Phase


class FastReporter(Reporter):
    """Waits without waiting, follows a schedule of knobs by step, and can stop after so many micro-batches."""

    def __init__(self, channel, config, schedule=None, stop_after=None):
        self._skipped = 0.0
        self._schedule, self._stop_after = schedule or {}, stop_after
        self.phases = []
        import time

        def sleep(seconds):
            self._skipped += seconds

        status = JobStatus(pid=1, micro_batch=config.micro_batch, samples_per_update=config.samples_per_update)
        super().__init__(channel, StopFlag(), status, clock=lambda: time.monotonic() + self._skipped, sleep=sleep)

    def begin_step(self):
        if self.status.steps in self._schedule:
            self._channel.write_knobs(self._schedule[self.status.steps])
            self._read_knobs()
        return super().begin_step()

    def work(self):
        if self._stop_after is not None:
            self._stop_after -= 1
            if self._stop_after < 0:
                self.stop.reason = "SIGTERM"
        return super().work()

    def _enter(self, phase):
        self.phases.append(phase)
        super()._enter(phase)


@pytest.fixture
def train(tmp_path):
    """Runs a job; returns its losses, its trainer and its reporter."""
    made = []

    def run(config, name, **reporter_options):
        folder = tmp_path / name
        channel = Channel.create(folder / "channel", Knobs(), JobStatus())
        made.append(channel)
        reporter = FastReporter(channel, config, **reporter_options)
        trainer = Trainer(config, read_examples(config.data), folder, reporter)
        trainer.outcome = trainer.run()
        return losses(folder), trainer, reporter

    yield run
    for channel in made:
        channel.close()


def losses(folder, file="steps.csv"):
    with (folder / file).open(newline="") as text:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(text)}


def adapter(folder):
    found, _ = newest_checkpoint(folder / CHECKPOINTS)
    return load_file(found / "adapter" / "adapter_model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_learns_and_reports(config, train, tmp_path):
    job = config(max_steps=30, evaluate_every=10, checkpoint_every=15)
    found, trainer, reporter = train(job, "a")
    assert trainer.outcome is JobState.FINISHED
    assert list(found) == list(range(1, 31))
    assert found[1] == pytest.approx(np.log(259), rel=0.25)  # a random model hardly prefers any token
    assert np.mean([found[n] for n in (28, 29, 30)]) < 0.6 * found[1]
    evaluations = losses(tmp_path / "a", "evaluations.csv")
    assert list(evaluations) == [10, 20, 30]
    assert evaluations[30] < evaluations[10]
    status = reporter.status
    assert (status.steps, status.samples, status.eval_step, status.checkpoint_step) == (30, 240, 30, 30)
    assert (status.eval_loss, status.loss) == (evaluations[30], found[30])
    assert status.loss_mean == pytest.approx(np.mean([found[n] for n in range(11, 31)]))
    assert [reporter.phases.count(p) for p in (Phase.EVALUATE, Phase.CHECKPOINT)] == [3, 2]
    assert all(status.phase_s[p] > 0 for p in (Phase.LOAD, Phase.COMPUTE, Phase.EVALUATE, Phase.CHECKPOINT))
    assert sum(p.numel() for p in trainer._learner.model.parameters()) < 500_000


def test_first_loss_is_the_mean_over_answer_tokens(config, train):
    job = config(max_steps=1)
    found, trainer, _ = train(job, "a")
    model, tokeniser = load_model(job, "cpu")
    examples = read_examples(job.data)
    total, count = 0.0, 0
    for index in trainer._order.samples(0, 8):
        ids, prompt = tokeniser.encode(examples[index])
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(log_p[t - 1, ids[t]]) for t in range(prompt, len(ids)))
        count += len(ids) - prompt
    assert found[1] == pytest.approx(total / count, rel=1e-5)


def test_duty_speed_and_pause_change_no_bit(config, train, tmp_path):
    job = config(max_steps=8, lora={"targets": "all-linear", "dropout": 0.1}, evaluate_every=3)
    free, _, _ = train(job, "free")
    schedule = {0: Knobs(duty=0.3), 2: Knobs(speed=0.5), 4: Knobs(duty=0.7, speed=0.9), 6: Knobs(duty=0.05)}
    paced, _, reporter = train(job, "paced", schedule=schedule)
    assert paced == free
    assert same(adapter(tmp_path / "paced"), adapter(tmp_path / "free"))
    assert reporter.status.duty_held_s > 0
    assert reporter.status.speed_held_s > 0


def test_another_micro_batch_changes_rounding_only(config, train):
    reference, _, _ = train(config(max_steps=8), "four")
    for size in (1, 2, 8):
        found, _, reporter = train(config(max_steps=8, micro_batch=size), str(size))
        assert found == pytest.approx(reference, rel=2e-4)
        assert reporter.status.samples == 64
    schedule = {2: Knobs(micro_batch=8), 4: Knobs(micro_batch=1)}
    found, _, reporter = train(config(max_steps=8), "mixed", schedule=schedule)
    assert found == pytest.approx(reference, rel=2e-4)
    assert reporter.status.micro_batch == 1


@pytest.mark.parametrize(("stop_after", "steps"), [(8, 4), (9, 5)])
def test_a_resumed_job_continues_bit_for_bit(config, train, tmp_path, stop_after, steps):
    """Stopped after whole steps and in the middle of one, with dropout, warm-up and an evaluation in between."""
    changes = {
        "lora": {"targets": "all-linear", "dropout": 0.1},
        "optimiser": {"learning_rate": 0.02, "warmup_steps": 6},
        "evaluate_every": 5,
    }
    job = config(max_steps=9, **changes)
    whole, _, _ = train(job, "whole")
    _, first, reporter = train(job, "parts", stop_after=stop_after)
    assert first.outcome is JobState.STOPPED
    assert reporter.status.steps == reporter.status.checkpoint_step == steps
    assert reporter.status.samples == 8 * steps
    parts, _, reporter = train(job, "parts")
    assert parts == whole
    assert losses(tmp_path / "parts", "evaluations.csv") == losses(tmp_path / "whole", "evaluations.csv")
    assert same(adapter(tmp_path / "parts"), adapter(tmp_path / "whole"))
    assert reporter.status.loss_mean == pytest.approx(np.mean(list(whole.values())))
    assert reporter.status.samples == 72


def test_lost_work_and_torn_rows_leave_the_log(config, train, tmp_path):
    whole, _, _ = train(config(max_steps=6), "whole")
    train(config(max_steps=3), "parts")
    log = tmp_path / "parts" / "steps.csv"
    log.write_text(log.read_text() + "4,32,1,9.9,4,0.1,0.1,1.0,1.0\n5,40,1,9.")
    parts, _, _ = train(config(max_steps=6), "parts")
    assert parts == whole


def test_a_damaged_checkpoint_is_passed_over(config, train, tmp_path):
    job = config(max_steps=6, checkpoint_every=2)
    whole, _, _ = train(job, "a")
    folders = sorted((tmp_path / "a" / CHECKPOINTS).iterdir())
    assert [f.name for f in folders] == ["step-00000004", "step-00000006"]
    state = folders[1] / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\x01")
    again, _, _ = train(job, "a")
    assert again == whole
    for folder in (tmp_path / "a" / CHECKPOINTS).iterdir():
        (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no whole checkpoint to resume from: .*checksum differs"):
        train(job, "a")


def test_a_checkpoint_of_another_adapter_is_refused(config, train, tmp_path):
    train(config(max_steps=1), "a")
    with pytest.raises(UserError, match="other shapes"):
        train(config(max_steps=2, lora={"targets": "all-linear", "rank": 4}), "a")
    with pytest.raises(UserError, match="other layers"):
        train(config(max_steps=2, lora={"targets": ["q_proj"]}), "a")
    with pytest.raises(UserError, match="do not fit this job"):
        train(config(max_steps=2, samples_per_update=4), "a")


def test_other_records_are_refused_on_resuming(config, train, records):
    train(config(max_steps=1), "a")
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(UserError, match="the records have changed since this checkpoint"):
        train(config(max_steps=2), "a")


def test_memory_that_runs_out_in_an_evaluation_is_named_too(config, train, monkeypatch):
    def refuse(self, data, batch):
        if not torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return loss_sum(self, data, batch)

    loss_sum = Learner.loss_sum
    monkeypatch.setattr(Learner, "loss_sum", refuse)
    with pytest.raises(UserError, match=r"out of memory on cpu, float32 in a micro-batch of 4 x \d+ tokens"):
        train(config(max_steps=1, evaluate_every=1), "a")


def test_adapter_is_in_peft_s_own_format(config, train, tmp_path):
    from peft import PeftModel

    job = config(max_steps=3)
    _, trainer, _ = train(job, "a")
    folder, _ = newest_checkpoint(tmp_path / "a" / CHECKPOINTS)
    base = load_model(job, "cpu")[0].unload()
    ids = torch.arange(20)[None]
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        loaded = PeftModel.from_pretrained(base, folder / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trainer._learner.model(input_ids=ids).logits)


def test_gradient_checkpointing_gives_the_same_losses(config, train):
    plain, _, _ = train(config(max_steps=3), "plain")
    saving, _, _ = train(config(max_steps=3, gradient_checkpointing=True), "saving")
    assert saving == pytest.approx(plain, rel=1e-5)


def test_a_diverging_job_stops_before_it_saves(config, train, tmp_path):
    with pytest.raises(UserError, match=r"the loss is (nan|inf); lower optimiser\.learning_rate \(1e\+30\)"):
        train(config(max_steps=9, optimiser={"learning_rate": 1e30}, checkpoint_every=1), "a")
    found = newest_checkpoint(tmp_path / "a" / CHECKPOINTS)
    assert found is not None
    assert all(np.isfinite(found[1].losses))


def test_what_does_not_fit_the_model_is_refused(config, train):
    with pytest.raises(UserError, match=r"lora.targets \['qproj'\] .* its linear layers: down_proj, .* v_proj"):
        train(config(max_steps=1, lora={"targets": ["qproj"]}), "a")
    tiny = {"source": "tiny", "tiny": {"context": 32}}
    with pytest.raises(UserError, match=r"data.max_tokens = 64, but the model's context ends at 32"):
        train(config(max_steps=1, model=tiny), "b")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"'cuda' was asked for, .*valid here: cpu, auto"):
            train(config(max_steps=1, device="cuda"), "c")


@pytest.fixture
def model_folder(tmp_path, config):
    """A Hugging Face folder: a small Llama with a word-level tokeniser and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path / "model"
    words = ["[UNK]", "<eos>", "user", "bot", *"0123456789+=?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}?{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def test_any_local_model_folder(config, train, model_folder):
    job = config(max_steps=3, model={"source": "folder", "path": str(model_folder)}, lora={})
    check_available(job.model)
    found, _, _ = train(job, "a")
    assert found[3] < found[1]
    example = read_examples(job.data)[0]
    _, tokeniser = load_model(job, "cpu")
    ids, prompt = tokeniser.encode(example)
    assert example == ("1+1=?", "2")
    # ? 1 + 1 = ? =   2   <eos>, by the template
    assert (ids, prompt) == ([16, 5, 14, 5, 15, 16, 15, 6, 1], 7)
    assert tokeniser.pad_id == 1


def test_a_chat_template_that_refuses_is_named(config, model_folder):
    (model_folder / "chat_template.jinja").write_text("{{ raise_exception('needs a system turn') }}")
    _, tokeniser = load_model(config(model={"source": "folder", "path": str(model_folder)}), "cpu")
    with pytest.raises(UserError, match="chat template refuses a user's turn: needs a system turn"):
        tokeniser.encode(read_examples(config().data)[0])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: shutil.rmtree(f), "no such model folder"),
        (lambda f: (f / "config.json").unlink(), "not a Hugging Face model folder"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded as a causal language model"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded as a causal language model"),
        (lambda f: (f / "config.json").write_text(json.dumps({"model_type": "x"})), "cannot be loaded"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_model(config, model_folder, break_it, message):
    break_it(model_folder)
    job = config(model={"source": "folder", "path": str(model_folder)})

    def load():
        check_available(job.model)
        load_model(job, "cpu")

    with pytest.raises(UserError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)
    assert str(model_folder) in str(caught.value)
