"""A scheduler that counts tokens and does not choose them, for virtual fleets of thousands of engines.

If the coming passes only generate tokens, `skip` advances by many of them at once.
"""

from collections.abc import Sequence

import xxhash

from events import blocks
from events.wire import Chunk
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape, Output, SimulatedSequence
from workers.engines.simulated.timing import StepPlan


class Silent(SimulatedSequence):
    """A request of which only token counts and block names are known.

    `names` are the names of the leading blocks, and may include blocks of the answer. Later blocks get names that no other
    request has.
    """

    __slots__ = ("_given", "_salt")

    def __init__(self, key: int, prompt: int, answer: int, names: Sequence[int]) -> None:
        super().__init__(key, prompt, prompt + answer)
        self._given = names
        self._salt = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))

    def name_blocks(self, block_tokens: int) -> list[int]:
        while len(self.names) < self.start // block_tokens:
            self.name_next(block_tokens)
        return self.names

    def name_next(self, block_tokens: int) -> int:
        names = self.names
        if len(names) < len(self._given):
            names.append(self._given[len(names)])
        else:
            names.append(blocks.follow(names[-1], self._salt) if names else self._salt)
        return names[-1]


class MuteScheduler(Scheduler):
    """Schedules requests of which only token counts and block names are known."""

    def __init__(self, shape: EngineShape) -> None:
        super().__init__(shape)
        self.kv.heard = True
        # the values of `_standing` when the last attempt to admit a request failed; None: no attempt has failed since
        self._stalled: tuple[int, int, int, int] | None = None

    def submit_silent(self, key: int, prompt: int, answer: int, names: Sequence[int]) -> str | None:
        """Queue a request. Return None, or the reason for a refusal.

        Args:
            key: the key of the request.
            prompt: number of prompt tokens, at least 1.
            answer: number of tokens of the answer, at least 1.
            names: the hashes of the full blocks of prompt and answer, as far as the trace gives them.
        """
        assert prompt > 0 < answer, "nothing to read, or nothing to say"
        if prompt >= self.shape.context_tokens:
            return f"{prompt} tokens leave no room in a context of {self.shape.context_tokens}"
        if against := self.overload(canary=False):
            return against
        self.waiting.add(Silent(key, prompt, min(answer, self.shape.context_tokens - prompt), names))
        return None

    def plan(self) -> StepPlan:
        plan = super().plan()
        self._stalled = self._standing() if self.waiting and not plan.prefills else None
        return plan

    def generate(self, gone: list[SimulatedSequence]) -> Output:
        """Return a chunk without tokens for each sequence that gets its first or last token in this pass.

        `gone` are the sequences that end in this pass.
        """
        through = self.prefill.through
        out = {one.key: Chunk(0, [], cached_tokens=one.cached) for one in through if not one.made}
        for one in through:
            one.fresh = False
        for one in gone:
            out.setdefault(one.key, Chunk(0, [])).finish = "length"
        return list(out.items())

    def steady(self) -> int:
        """Return the number of coming passes in which no request is admitted or ends, and no sequence needs another block.

        Return 0 if a sequence gets its first token in this pass, a prompt is being computed, or no sequence decodes.
        """
        if self.prefill.through or self.prefill.begun:
            return 0
        if self.waiting and self._stalled != self._standing():
            return 0
        return self.batch.ahead()

    def _standing(self) -> tuple[int, int, int, int]:
        """Return the values that decide whether the first waiting request can be admitted.

        If they are the same as at the last failed attempt, another attempt would fail, too.
        """
        return self.waiting.first.key, self.kv.used, self.seats(), self.batch_limit

    def skip(self, passes: int) -> None:
        """Advance by this many passes at once, at most by the result of `steady`."""
        assert 0 <= passes <= self.steady(), "only steady passes can be skipped"
        self.batch.passes += passes
