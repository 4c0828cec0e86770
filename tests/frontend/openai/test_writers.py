"""Response writers drop tokens that no client has received, with everything that belongs to them."""

import pytest

from controller.frontend.openai.request_parser import parse_completion
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from controller.frontend.openai.writers import AnswerContext, BufferedWriter, ResponseFormat
from events.wire import Logprob


@pytest.mark.parametrize("kept", [0, 1])
def test_a_restarted_echo_has_the_logprobs_of_its_own_tokens(kept: int) -> None:
    """An attempt from the beginning returns the prompt's logprobs again; one that continues after a token does not."""
    tokens, prompt = load_tokens(BUILTIN), [300, 301, 302]
    parsed = parse_completion({"model": "m", "prompt": prompt, "echo": True, "logprobs": 0})
    format = ResponseFormat(parsed, tokens, "1", 5)
    accepted: list[int] = []
    context = AnswerContext(prompt, tokens.decode(prompt), accepted=accepted, logprobs=True)
    writer = BufferedWriter(format, context)
    of_prompt = [Logprob(0.0), Logprob(-1.0), Logprob(-2.0)]
    writer.write([400, 401], [*of_prompt, Logprob(-3.0), Logprob(-4.0)])
    accepted += [400, 401]
    del accepted[kept:]
    writer.rewind(kept)
    again, own = ([400], [*of_prompt, Logprob(-3.0)]) if not kept else ([401], [Logprob(-4.0)])
    assert writer.write(again, own) == 1
    writer.finish("stop")
    found = writer.choice(0)["logprobs"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0, *([-4.0] if kept else [])]
    assert len(found["tokens"]) == 4 + kept
