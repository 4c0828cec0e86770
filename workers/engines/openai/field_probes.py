"""Probes whether an upstream obeys a request field, and remembers the result for a while.

A server accepts a request with a field that it does not know, and ignores the field. So each field is probed when a request first
needs it. A failed probe is repeated after 10 s at the earliest. With each further failure, this time doubles, up to 15 min. The
result of a successful probe is valid for 15 min. It becomes invalid earlier after a 401, 403, 404 or a broken connection, because
another server may have replaced the upstream.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from events.refusal import unsupported
from events.wire import Generate, Sampling
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.stream_decoder import Fault
from workers.engines.openai.upstream import CLIENT_MISTAKES, PROMPT_IDS, Upstream, refusal_in

REPEAT_S_MIN = 10.0
REPEAT_S_MAX = 900.0
_WORD = re.compile(r"\w+")


@dataclass(slots=True)
class Failed:
    """A failed probe of a request field, and the time at which to repeat the probe."""

    again_at: float  # time of the repetition; loop seconds
    wait_s: float  # seconds between the failure and the repetition


@dataclass(frozen=True, slots=True)
class Obeyed:
    """A successful probe of a request field, and the limits of its validity."""

    until: float  # time of its expiry; loop seconds
    doubts: int  # the upstream's doubt count at the probe; the probe is invalid when the count has changed


@dataclass(eq=False)
class FieldProbes:
    """The results of the probes of one upstream, by field. Probes are sent one after the other."""

    doubts: Callable[[], int] = lambda: 0  # returns how often the upstream has behaved like another server
    _obeyed: dict[str, Obeyed] = field(default_factory=dict)
    _failed: dict[str, Failed] = field(default_factory=dict)
    _probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def obeys(self, name: str, probe: Callable[[], Awaitable[bool]]) -> bool:
        """Return whether the upstream obeys the field `name`. `probe` finds it out, if the result is not known."""
        async with self._probing:
            now, failed = asyncio.get_running_loop().time(), self._failed.get(name)
            obeyed, doubts = self._obeyed.get(name), self.doubts()
            if obeyed is not None and now < obeyed.until and doubts == obeyed.doubts:
                return True
            if failed is not None and now < failed.again_at:
                return False
            if await probe():
                self._obeyed[name] = Obeyed(now + REPEAT_S_MAX, doubts)
                self._failed.pop(name, None)
                return True
            self._obeyed.pop(name, None)
            wait_s = REPEAT_S_MIN if failed is None else min(2 * failed.wait_s, REPEAT_S_MAX)
            self._failed[name] = Failed(now + wait_s, wait_s)
            return False


@dataclass(eq=False)
class TokenLimitProbes:
    """Refuses `allowed_token_ids` and `bad_words` if the upstream does not obey them.

    For the first field, a probe allows one token only, and the answer must consist of it. For the second, a probe bans a word of
    the upstream's own answer, and the same greedy request must then give an answer without that word.
    """

    upstream: Upstream
    abilities: Abilities
    probes: FieldProbes

    async def check(self, sampling: Sampling) -> None:
        """Raise Fault if a request has a field that the upstream does not obey, and UpstreamUnavailable without an answer."""
        fields = (
            ("allowed_token_ids", sampling.allowed_token_ids, self._allows_only),
            ("bad_words", sampling.bad_words, self._bans),
        )
        for name, value, probe in fields:
            if value and not (self.abilities.exact and await self.probes.obeys(name, probe)):
                raise Fault(unsupported(name, "this model's server does not obey it").error)

    async def _allows_only(self) -> bool:
        token = PROMPT_IDS[-1]
        sampling = Sampling(max_tokens=2, ignore_eos=True, allowed_token_ids=[token])
        request = Generate(0, "probe", PROMPT_IDS, len(PROMPT_IDS), sampling)
        status, body = await self.upstream.ask(self.abilities, request)
        if status in CLIENT_MISTAKES:
            return False
        if status >= 400:
            raise Fault(refusal_in(body, status, canary=True))
        with suppress(ValueError, LookupError, TypeError):
            return bool(json.loads(body)["choices"][0]["token_ids"] == [token] * 2)
        return False

    async def _bans(self) -> bool:
        usual = await self.upstream.completed_text(self.abilities, {})
        found = _WORD.search(usual or "")
        if found is None:
            return False
        text = await self.upstream.completed_text(self.abilities, {"bad_words": [found[0]]})
        return text is not None and found[0] not in _WORD.findall(text)
