"""Encoding and decoding are exact, in any portions and across any cut."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import make_sim_tokenizer
import pytest
from frontend_kit import sentencepiece_like
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from waits import turns

from controller.frontend.openai.intake import Intake
from controller.frontend.openai.text.chat_templates import SIM_TEMPLATE, BadTemplate, ChatTemplate
from controller.frontend.openai.text.detokenizer import INCOMPLETE_TOKENS_MAX, StreamDetokenizer
from controller.frontend.openai.text.jinja_environment import ChatEnvironment
from controller.frontend.openai.text.tokenizer import (
    BUILTIN,
    TokenizerMissing,
    Tokens,
    load_tokenizer,
    load_tokens,
    ready_tokens,
)
from controller.frontend.settings import FrontendSettings
from events.token_bytes import BUILTIN_FILE

SIM = load_tokens(BUILTIN)
SIM_TOKENIZER = load_tokenizer(BUILTIN)
SPECIAL = ("<unk>", "<s>", "</s>")


@pytest.mark.slow
def test_the_shipped_tokenizer_is_the_scripts_output() -> None:
    assert json.loads(make_sim_tokenizer.make().to_str()) == json.loads(BUILTIN_FILE.read_text())


def test_the_shipped_tokenizer_has_the_promised_ids() -> None:
    assert SIM.size == 2048
    assert [SIM.bytes_of(i) for i in range(3)] == [b"<unk>", b"<s>", b"</s>"]
    assert sorted(SIM.bytes_of(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]
    assert all(SIM.bytes_of(i).isascii() and SIM.bytes_of(i) for i in range(259, 2048))


@given(st.lists(st.integers(0, 2047), max_size=40))
@settings(max_examples=300)
def test_byte_tables_decode_any_tokens_like_the_tokenizer(tokens: list[int]) -> None:
    detokenizer = SIM.detokenizer()
    text = "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()
    assert text == SIM.decode(tokens)


@given(st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assume(not any(name in text for name in SPECIAL))  # they are encoded as the special tokens that they name
    assert SIM.decode(SIM.encode(text, special=True)) == text


@given(st.text(max_size=60), st.booleans())
def test_texts_are_encoded_like_by_the_tokenizer(text: str, special: bool) -> None:
    for tokens, tokenizer in ((SIM, SIM_TOKENIZER), (SENTENCEPIECE, sentencepiece_like())):
        plainly = tokenizer.encode(text, add_special_tokens=special).ids
        assert tokens.encode(text, special=special) == plainly


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs /proc, where threads are counted: run it on Linux"
)
def test_a_text_is_encoded_without_starting_threads() -> None:
    code = (
        "import os\n"
        "from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "load_tokens(BUILTIN).encode('hello ' * 1000, special=False)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    unset = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=unset)
    assert ran.stdout == "0\n"


def test_tokens_that_do_not_exist_have_no_text() -> None:
    assert SIM.detokenizer().feed(999_999) == ""


def test_a_vocabulary_with_holes_keeps_its_highest_ids() -> None:
    letters = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"ab": 5000}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokens = Tokens(tokenizer, None)
    assert (tokens.size, tokens.detokenizer().feed(5000), tokens.detokenizer().feed(4000)) == (5001, "ab", "")


SENTENCEPIECE = Tokens(sentencepiece_like(), None)


def test_other_tokenizers_stream_exactly_and_flush() -> None:
    tokenizer = sentencepiece_like()
    tokens = [257, *"😀".encode(), 258, *"é".encode()[:1]]
    detokenizer = StreamDetokenizer(tokenizer)
    text = "".join(map(detokenizer.feed, tokens))
    assert text == "hi😀a"
    assert text + detokenizer.flush() == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 259), max_size=60))
def test_any_sequence_of_tokens_can_be_decoded(tokens: list[int]) -> None:
    detokenizer = StreamDetokenizer(sentencepiece_like())
    said = "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()
    assert bool(said.strip()) == bool(sentencepiece_like().decode(tokens).strip())


def test_a_run_of_incomplete_bytes_is_bounded() -> None:
    detokenizer = StreamDetokenizer(sentencepiece_like())
    out = [detokenizer.feed(0xF0) for _ in range(INCOMPLETE_TOKENS_MAX * 3)]
    assert any(out)


async def test_a_long_text_is_tokenized_outside_the_loop_with_the_same_result() -> None:
    text, threads = "hello wörld <|user|> " * 20_000, Intake(FrontendSettings()).long_texts

    async def turns_meanwhile() -> int:
        """Return how many turns the event loop makes until the text is tokenized."""
        reading, count = asyncio.ensure_future(SIM.encode_soon(text, threads, special=True)), 0
        while not reading.done():
            await turns()
            count += 1
        assert await reading == SIM.encode(text, special=True)
        return count

    for _ in range(5):
        if await turns_meanwhile() > 100:
            return  # otherwise the machine was stopped, which does not happen every time
    pytest.fail("the event loop was blocked")


async def test_a_tokenizer_requested_by_many_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BUILTIN_FILE.read_text())
    found = await asyncio.gather(*(ready_tokens(str(tmp_path)) for _ in range(8)))
    assert len({id(tokens) for tokens in found}) == 1


def test_the_error_for_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        load_tokens(str(tmp_path))


def test_a_model_folder_contains_its_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BUILTIN_FILE.read_text())
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = load_tokens(str(tmp_path))
    assert tokens.template is not None
    assert tokens.template.render([{"role": "user", "content": "é"}]) == '<s>[user]"é"'


def test_templates_run_in_the_sandbox() -> None:
    template = ChatTemplate(
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", {}
    )
    with pytest.raises(BadTemplate):
        template.render([])
    with pytest.raises(BadTemplate, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


def test_one_rendering_does_not_affect_the_next() -> None:
    said = "{{ x is defined }}{% set x = 1 %}{{ bos_token }}{{ range(2) }}{{ namespace(n=3).n }}{{ strftime_now('%%') }}"
    template = ChatTemplate(said, {"bos_token": "<s>"})
    for _ in range(2):
        assert template.render([]) == "False<s>range(0, 2)3%"
        with pytest.raises(BadTemplate, match="not callable"):
            template.render([], x=1, bos_token="odd", range=2)


@pytest.mark.parametrize(
    "source",
    [
        SIM_TEMPLATE,
        "{% macro say(m) %}{{ caller() }}{{ m.role }}{{ bos_token }}{% endmacro %}"
        "{% for m in messages %}{% call say(m) %}>{% endcall %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{{ cycler('a', 'b').next() }}{% endfor %}{{ ns.n }}",
        "{% block head %}{{ tools is none }}{{ x }}{% endblock %}{{ self.head() }}{{ dict(a=1) | tojson }}{{ joiner(', ')() }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m['content'] | trim | upper }}{% endfor %}{{ no }}",
        "{% set messages = messages[1:] %}{{ messages }}{{ range }}{% filter lower %}AB{{ x }}{% endfilter %}",
    ],
)  # fmt: skip
def test_a_template_renders_like_in_plain_jinja(source: str) -> None:
    messages = [{"role": "user", "content": " hi <b>\n"}, {"role": "assistant", "content": "é"}]
    template = ChatTemplate(source, {"bos_token": "<s>"})
    plainly = ChatEnvironment().from_string(source)
    for extra in ({}, {"x": 1}, {"range": 3, "bos_token": "odd", "messages": 1, "tools": []}):
        names = {
            "bos_token": "<s>",
            "add_generation_prompt": True,
            "tools": None,
            **extra,
            "messages": messages,
        }
        assert template.render(messages, **extra) == plainly.render(names)


def test_a_template_accepts_any_variables() -> None:
    said = [{"role": "user", "content": "hi"}]
    template = ChatTemplate("{{ self_ }}{{ messages[0].content }}{{ add_generation_prompt }}", {})
    extra = {"self": 1, "messages": [], "self_": "x", "add_generation_prompt": False}
    assert template.render(said, **extra) == "xhiFalse"
    for source in ("{{ 1 // n }}", "{{ range(10 ** 12) }}", "{{ n.a.b }}"):
        with pytest.raises(BadTemplate):
            ChatTemplate(source, {}).render(said, n=0)
