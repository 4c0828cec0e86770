"""`holdfast model tiny DIR`: reproducible bytes, a model with varied output, clear refusals."""

import argparse
import hashlib
import json
from pathlib import Path

import jinja2.sandbox
import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from tokenizers import Tokenizer  # noqa: E402

from workers.engines.tiny import FolderInUse, add_arguments, build_tiny, run_cli  # noqa: E402
from workers.engines.torch_missing import TorchMissing, require_torch  # noqa: E402
from workers.engines.transformers.loading import revision_of  # noqa: E402


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_second_build_into_the_same_folder_replaces_the_first_with_the_same_bytes(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert digests(build_tiny(tmp_path)) == digests(tiny)


def test_the_folder_matches_the_specification(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (4, 256, 2048)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert config["initializer_range"] == 0.2
    assert 16e6 < (tiny / "model.safetensors").stat().st_size < 18e6


def test_all_of_its_files_have_the_same_permissions(tiny: Path) -> None:
    assert len({path.stat().st_mode for path in tiny.iterdir()}) == 1


def test_the_tokenizer_decodes_what_it_encodes(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    assert [tokenizer.id_to_token(n) for n in range(3)] == ["<unk>", "<s>", "</s>"]
    for text in ("def main() -> None:\n    return", "Grüße aus Köln 🙂", "日本語", " \t\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_renders_in_the_sandbox(tiny: Path) -> None:
    template = json.loads((tiny / "tokenizer_config.json").read_text())["chat_template"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": "Hello"}]
    said = environment.from_string(template).render(
        messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert said == "<s>### user\nHello\n### assistant\n"


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(FolderInUse, match=r"already holds thesis\.tex"):
        build_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_command_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run_cli(parser.parse_args([str(tmp_path / "file")])) == 1
    assert capsys.readouterr().err.endswith(
        f"{tmp_path / 'file'} is a file, not a folder. Use a new or empty folder.\n"
    )


def test_without_torch_the_extra_is_named() -> None:
    with pytest.raises(
        TorchMissing, match=r"real models need torch, which is not installed.*\[transformers\]"
    ):
        require_torch(lambda name: None if name == "torch" else object())


def test_one_flipped_bit_is_another_revision(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert revision_of(tmp_path) == revision_of(tiny)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[5_000_000] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert revision_of(tmp_path) != revision_of(tiny)
