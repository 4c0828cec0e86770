"""What is a worker asked for? The prompt and every token that was accepted, so that it goes on exactly there.

Most engines take and give tokens. Some take text only, and some give text only: what came as text is kept as text, and
what came as tokens is put into words where a text is asked for.
"""

import msgspec

from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.generation_request import GenerationRequest
from controller.router.endpoints import Endpoint
from events.wire import Generate


class Continuation(msgspec.Struct):
    """All that was accepted of one answer, as the next worker must be told it."""

    _request: GenerationRequest
    accepted: list[int]  # it grows with every step
    tokens: Tokens
    texts: list[str] = []  # what came from engines that give text and no tokens, and all before it
    _worded: int = 0  # accepted tokens that `texts` says

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was accepted."""
        return len(self._request.prompt) + len(self.accepted)

    def request(self, endpoint: Endpoint, rank: int = 0) -> Generate:
        """Return what this worker, and of its DP ranks this one, is asked for now."""
        asked, made = self._request, len(self.accepted)
        sampling = asked.sampling
        if made:
            left = sampling.max_tokens - made
            floor = max(0, sampling.min_tokens - made)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=left, min_tokens=floor, prompt_logprobs=None
            )
        return Generate(
            stream=0,
            request=asked.id,
            tokens=self._whole(),
            prompt_tokens=len(asked.prompt),
            sampling=sampling,
            guided=asked.guided,
            prompt_text=self._prompt_text() + self._text() if endpoint.joined.engine == "openai" else "",
            traceparent=asked.traceparent,
            cache_salt=asked.cache_salt,
            rank=rank,
            cache_epoch=endpoint.cache_epoch,
            priority=asked.priority,
        )

    def take_text(self, text: str) -> int:
        """Accept a text that came without tokens, and return of how many tokens it is."""
        tokens = self.tokens.encode_next(text)
        self.texts += (self._unworded(), text)
        self.accepted += tokens
        self._worded = len(self.accepted)
        return len(tokens)

    def rewind(self, count: int) -> None:
        """Forget what came after the first `count` tokens."""
        del self.accepted[count:]
        self.texts.clear()
        self._worded = 0

    def _whole(self) -> list[int]:
        """Return the prompt and all that was accepted.

        What came as text is read anew together with the prompt: tokenizers of Llama 2's kind put a space before each
        piece that they read by itself.
        """
        request = self._request
        if self.texts:
            encode, prompt_text = self.tokens.encode, self._prompt_text()
            for special in (False, True):
                if encode(prompt_text, special=special) == request.prompt:
                    return encode(prompt_text + self._text(), special=special)
        return request.prompt + self.accepted if self.accepted else request.prompt

    def _prompt_text(self) -> str:
        """Return the prompt as text, for engines that take nothing else."""
        return self._request.prompt_text or self.tokens.decode(self._request.prompt)

    def _text(self) -> str:
        """Return all that was accepted as text, whether it came as text or as tokens."""
        return "".join(self.texts) + self._unworded()

    def _unworded(self) -> str:
        """Return the text of the tokens that came after the last text, as it follows from what stands before them.

        A character of which only some bytes have come is left out: who goes on in text says it whole.
        """
        accepted, worded = self.accepted, self._worded
        if worded == len(accepted):
            return ""
        decode, prompt = self.tokens.decode, self._request.prompt
        before, whole = decode(prompt + accepted[:worded]), decode(prompt + accepted)
        if not whole.startswith(before):
            before, whole = "", decode(accepted[worded:])
        return whole[len(before) :].rstrip("\ufffd")
