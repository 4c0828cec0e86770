"""Builds a tiny real model: `holdfast model tiny DIR`.

The model allows tests with real tensors, a real KV cache and real faults without a download. Its answers make no sense. It has
the Llama architecture with 4 layers, a hidden size of 256, and 8 heads over 4 KV heads. Its vocabulary is a byte-level BPE of
2,048 tokens, trained on the sources of Python's standard library. Its 4.2 million parameters (17 MB) are seeded random numbers.

The weights are drawn with a standard deviation of 0.2 instead of Llama's usual 0.02. At 0.02, a greedy answer repeats itself (11
distinct tokens in 128), so it would be useless as a canary. At 0.2, an answer has 124 distinct tokens in 128.

The same versions of Python and of the libraries give the same bytes. Another Python release has other sources, so its vocabulary
differs. To use the same model on several hosts, copy the folder, because a worker's revision is a hash of the folder's content.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from events.errors import HoldfastError
from workers.engines.torch_missing import require_torch

VOCABULARY = 2048
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2
CORPUS_BYTES_MAX = 8_000_000
WEIGHT_DEVIATION = 0.2
SEED = 20_2611

Config = dict[str, Any]
"""The content of a model's config.json."""

CONFIG: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": WEIGHT_DEVIATION,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'] + '\\n' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)

Progress = Callable[[str], None]


class FolderInUse(HoldfastError):
    """The folder already holds other files. Use a new or empty folder, or one that holds a tiny model."""


def build_tiny(directory: Path, progress: Progress = lambda line: None) -> Path:
    """Write the tiny model and its tokenizer into `directory`, and return `directory`. This takes about ten seconds.

    `progress` is called with a line of text before each slow part. Raise TorchMissing if torch is not installed, and FolderInUse
    if the folder has foreign files.
    """
    require_torch()
    _claim(directory)
    progress("training a byte-level BPE vocabulary of 2,048 on the standard library's sources")
    _train_tokenizer(directory / "tokenizer.json")
    progress("drawing 4.2 million weights")
    write_model(directory, CONFIG)
    return directory


def write_model(directory: Path, config: Config) -> None:
    """Write the weights and the configuration files of a model into a folder, but no vocabulary.

    `config` is the content of config.json, which contains the sizes of the model.
    """
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    _write_weights(directory / "model.safetensors", config)
    # safetensors makes the file readable only by its owner; give the file the mode of the other files
    (directory / "model.safetensors").chmod((directory / "tokenizer_config.json").stat().st_mode & 0o666)
    # config.json is written last, so that a folder with a config.json is complete
    _write_json(directory / "config.json", config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `holdfast model tiny`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to write the model to (17 MB)")


def run_cli(args: argparse.Namespace) -> int:
    """Build the tiny model and return the exit code: 0 for success, 1 for an error, which is printed to stderr."""
    try:
        directory = build_tiny(args.directory, lambda line: print(f"{line} …", file=sys.stderr))
    except HoldfastError as error:
        print(f"holdfast model tiny: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"holdfast model tiny: cannot write to {args.directory}: {error.strerror}", file=sys.stderr)
        return 1
    print(
        f"The model is in {directory}. Serve it with: holdfast up --engine transformers --model {directory}"
    )
    return 0


def _claim(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise FolderInUse(f"{directory} is a file, not a folder. Use a new or empty folder.")
    directory.mkdir(parents=True, exist_ok=True)
    ours = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    if foreign := sorted(path.name for path in directory.iterdir() if path.name not in ours):
        raise FolderInUse(f"{directory} already holds {foreign[0]}. Use a new or empty folder.")
    (directory / "config.json").unlink(missing_ok=True)


def _corpus() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    left = CORPUS_BYTES_MAX
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-r]*/*.py")):
        if "site-packages" in path.parts or left <= 0:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        yield text


def _train_tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(file))


def _tokenizer_config() -> dict[str, object]:
    unknown, begin, end = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }


def _shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (wide, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (wide, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _write_weights(path: Path, config: Config) -> None:
    """Write seeded random weights. They are drawn with numpy's PCG64, because torch's generators may change between releases."""
    import numpy
    import torch
    from safetensors.torch import save_file

    draw = numpy.random.Generator(numpy.random.PCG64(SEED))
    weights = {}
    for name, shape in _shapes(config):
        if len(shape) == 1:
            values = numpy.ones(shape, dtype=numpy.float32)
        else:
            values = draw.standard_normal(shape, dtype=numpy.float32) * numpy.float32(WEIGHT_DEVIATION)
        weights[name] = torch.from_numpy(values)
    save_file(weights, path, metadata={"format": "pt"})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
