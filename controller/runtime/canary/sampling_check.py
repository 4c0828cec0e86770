"""Checks workers' samplers: one canary in N uses the sampling parameters that users send most often.

Greedy canaries cannot detect a broken sampler, because engines do not use the sampler at temperature 0. A sampled answer is
compared with the greedy golden of the same prompt. The module `sampled` has the statistics.

- A check begins with a question that has a fixed seed. An engine that reproduces seeded draws gives the same answer each time, so
  an answer that was once judged ordinary needs no further check. If the same seed gives two different ordinary answers, later
  checks begin without a seed.
- After an unlikely answer the canary is repeated with other seeds, until the probability of chance is below `sampled_chance` or
  chance explains the answers.
- A sampled canary convicts a worker only if the comparison can be trusted: the golden is agreed, and more workers of the model
  recently gave ordinary answers than unlikely ones. The last worker in service is never convicted. If a worker is not convicted,
  `TokensUnlikely` is recorded.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.runtime.canary.goldens import Canary, ExpectedAnswer, GoldenDifference
from controller.runtime.canary.probe import ProbeResult, Verdict
from controller.runtime.canary.sampled import SURPRISE_MIN, SamplingParameters, UserTokens, combined, surprise
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.settings import CanarySettings
from events.decisions import HealthStatus
from events.fact import Fact
from events.observations import CanaryFailed, CanaryPassed, CanarySlow, RequestsServed, TokensUnlikely
from events.wire import Sampling

SUSPECT = 0.05  # p-value at or below which the canary is repeated
ATTEMPTS_MAX = 16
ATTEMPTS_MIN = 3  # answers needed before chance may explain an unlikely first one
SEED = 20_260_101  # seed of each first question
NOT_FINITE = SURPRISE_MIN  # p-value of an answer with a NaN, which no correct sampler returns
CONVICTED_EVERY = 2  # `sampled_every` for a convicted worker, because greedy canaries alone do not acquit it
USERS_CHANCE = 1e-6  # probability that a worker's share of unlikely tokens is reported by mistake
ACCUSED_S = 30.0  # time within which a reported wrong answer is folded and decided on
USERS_AGAIN_S = 600.0  # time before a worker's share of unlikely tokens is reported again

log = structlog.get_logger(__name__)

Ask = Callable[[Sampling, ExpectedAnswer | None, bool], Awaitable[ProbeResult]]
"""Sends one question. Arguments: sampling settings, the golden to compare with on arrival, whether this is a repetition."""


@dataclass(slots=True)
class KnownAnswers:
    """The known answer to one question that is sampled with a fixed seed, and whether engines reproduce that answer.

    Only an ordinary answer is stored: one that is not unlikely for a correct sampler.
    """

    answers: list[tuple[int, ...]] = field(default_factory=list)  # at most one
    reproduced: bool = True  # false once the same seed has given two ordinary answers


class SamplingCheck:
    """Sends and judges sampled canaries; tracks whether each worker's last sampled answer was ordinary or unlikely."""

    def __init__(
        self, look: Callable[[], tuple[Fleet, int]], tools: ProberDependencies, settings: CanarySettings
    ) -> None:
        self._look = look
        self._tools = tools
        self._clock = tools.clock
        self._draw = tools.draw
        self._settings = settings
        self._users = UserTokens()
        self._ordinary: dict[tuple[str, str], bool] = {}  # by worker, instance: last answer ordinary
        # by worker, instance: time of its last reported wrong answer
        self._accused_at: dict[tuple[str, str], float] = {}
        self._known: dict[str, KnownAnswers] = {}  # by canary key, question and parameters
        self._reported_at: dict[str, float] = {}  # by worker: monotonic time of the last report
        self.wanted: set[str] = set()  # workers to probe next, because they sent users unlikely tokens

    # --- when ---------------------------------------------------------------------------------------------

    def due(self, since: int, worker: Worker) -> bool:
        """Return whether a worker's next canary is to be a sampled one.

        `since` is the number of greedy canaries since the worker's last sampled one.
        """
        every = self._settings.sampled_every
        if not every:
            return False
        if worker.joined.worker in self.wanted:
            return True
        return since + 1 >= (min(every, CONVICTED_EVERY) if worker.health.convicted else every)

    @property
    def parameters(self) -> SamplingParameters:
        """The parameters of the next sampled canary: those that users send most often, or the configured ones if unknown."""
        s = self._settings
        own = SamplingParameters(s.sampled_temperature, s.sampled_top_p, s.sampled_top_k)
        usual = self._users.common_parameters if s.sampled_as_users else None
        return (usual or own).bounded

    def receive(self, fact: Fact) -> None:
        """Process a fact from the journal: a frontend's report about users' tokens, or the outcome of a sampled canary."""
        if isinstance(fact, RequestsServed):
            self._users.add(fact)
            if fact.unlikely and self._tools.leading():
                self._compare(fact.worker)
        elif isinstance(fact, CanaryPassed | CanarySlow | CanaryFailed) and fact.temperature is not None:
            self._ordinary[fact.worker, fact.instance] = not isinstance(fact, CanaryFailed)

    def forget(self, worker: str) -> None:
        """Drop the data of a worker that is gone."""
        self._users.forget(worker)
        self.wanted.discard(worker)
        self._reported_at.pop(worker, None)
        for known in (self._ordinary, self._accused_at):
            for key in [key for key in known if key[0] == worker]:
                del known[key]

    # --- users' tokens ------------------------------------------------------------------------------------

    def _compare(self, name: str) -> None:
        """Compare a worker's share of unlikely tokens with its peers' share.

        If the difference is unlikely to be chance, record TokensUnlikely, and send the worker a sampled canary next.
        """
        worker = self._look()[0].workers.get(name)
        now = self._clock.monotonic()
        if worker is None or now - self._reported_at.get(name, -USERS_AGAIN_S) < USERS_AGAIN_S:
            return
        peers = [other.joined.worker for other in self._peers(worker)]
        tokens, unlikely, share, chance = self._users.compare(name, peers)
        if chance > USERS_CHANCE:
            return
        self._reported_at[name] = now
        self.wanted.add(name)
        log.warning("tokens_unlikely", worker=name, tokens=tokens, unlikely=unlikely, peers_share=share)
        self._tools.journal.observe(
            TokensUnlikely(
                worker=name,
                instance=worker.joined.instance,
                found_by="users",
                tokens=tokens,
                unlikely=unlikely,
                peers_share=share,
                probability=chance,
            )
        )

    def _peers(self, worker: Worker) -> list[Worker]:
        """Return the other live workers of the same model."""
        name, model = worker.joined.worker, worker.joined.model
        workers = self._look()[0].workers.values()
        return [w for w in workers if w.joined.worker != name and w.joined.model == model and w.alive]

    # --- one sampled canary -------------------------------------------------------------------------------

    async def ask(
        self,
        worker: Worker,
        canary: Canary,
        golden: Golden,
        drawn: SamplingParameters,
        tolerance: float,
        ask: Ask,
    ) -> Verdict:
        """Send a sampled canary, and repeat it until its answers are clearly ordinary or clearly unlikely.

        `drawn` has the sampling parameters. The callback `ask` sends the question once, with the sampling settings, the golden to
        compare with while reading, and whether this is a repetition. The verdict's `confirmed` is true if a correct sampler gives
        such answers with a probability below `sampled_chance`.
        """
        known = self._known.setdefault(f"{golden.canary_key}|{canary.id}|{drawn.name}", KnownAnswers())
        first = await ask(self._sampling(canary, drawn, SEED if known.reproduced else None), None, False)
        if first.answer is None and first.failure != "non_finite":
            return Verdict(first, GoldenDifference(None, None, first.detail), 1, False)
        tokens = first.answer.tokens if first.answer is not None else ()
        if tokens in known.answers:
            return Verdict(first, GoldenDifference(None, None), 1, False)
        surprises = [self._surprise(golden, first, drawn, tolerance)]
        chance = surprises[0]
        while _undecided(chance, surprises):
            seed = self._draw.randrange(1, 2**31)
            again = await ask(self._sampling(canary, drawn, seed), ExpectedAnswer(golden.tokens), True)
            if again.answer is None and again.failure != "non_finite":
                break
            surprises.append(self._surprise(golden, again, drawn, tolerance))
            chance = combined(surprises)
            if chance <= self._settings.sampled_chance / ATTEMPTS_MAX:
                return Verdict(first, self._finding(drawn, chance, surprises), len(surprises), True)
        self._learn(known, tokens)
        return Verdict(first, GoldenDifference(None, None), len(surprises), False)

    def _sampling(self, canary: Canary, drawn: SamplingParameters, seed: int | None) -> Sampling:
        return Sampling(
            max_tokens=canary.max_tokens,
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            seed=seed,
            ignore_eos=True,
            logprobs=self._settings.top_k,
        )

    def _surprise(
        self, golden: Golden, asked: ProbeResult, drawn: SamplingParameters, tolerance: float
    ) -> float:
        if asked.answer is None or not asked.answer.finite:
            return NOT_FINITE
        return surprise(golden.top_k, golden.tokens, asked.answer.tokens, drawn, tolerance)

    def _learn(self, known: KnownAnswers, tokens: tuple[int, ...]) -> None:
        """Store an ordinary answer to the fixed seed.

        If a different answer is already stored, record that engines do not reproduce seeded draws.
        """
        if not known.reproduced or not tokens or tokens in known.answers:
            return
        if known.answers:
            known.reproduced, known.answers = False, []
        else:
            known.answers = [tokens]

    def _finding(self, drawn: SamplingParameters, chance: float, surprises: list[float]) -> GoldenDifference:
        if all(one == NOT_FINITE for one in surprises):
            detail = f"NaN or infinity {len(surprises)} times at temperature {drawn.temperature:g}"
            return GoldenDifference("non_finite", None, detail)
        detail = (
            f"drew unlikely tokens {len(surprises)} times at temperature {drawn.temperature:g}; "
            f"a correct sampler does so with a probability of {chance:.1g}"
        )
        return GoldenDifference("token_mismatch", None, detail)

    # --- conviction ---------------------------------------------------------------------------------------

    def note_wrong_answer(self, worker: str, instance: str) -> None:
        """Record that a wrong answer of this worker was just reported.

        The decision that takes the worker out of service follows later. So for ACCUSED_S from now, `may_convict` already counts
        the worker as out of service.
        """
        self._accused_at[worker, instance] = self._clock.monotonic()

    def _accused(self, worker: Worker) -> bool:
        at = self._accused_at.get((worker.joined.worker, worker.joined.instance))
        return at is not None and self._clock.monotonic() - at < ACCUSED_S

    def may_convict(self, worker: Worker) -> bool:
        """Record that this worker's last sampled answer was unlikely, and return whether that answer may convict the worker."""
        joined = worker.joined
        self._ordinary[joined.worker, joined.instance] = False
        # already out of service; greedy canaries alone must not acquit the worker
        if worker.health.convicted:
            return True
        peers = self._peers(worker)
        seen = [self._ordinary.get((peer.joined.worker, peer.joined.instance)) for peer in peers]
        serving = [
            peer
            for peer, ordinary in zip(peers, seen, strict=True)
            if ordinary
            and peer.health.status is HealthStatus.HEALTHY
            and not peer.health.convicted
            and not self._accused(peer)
        ]
        return bool(serving) and seen.count(True) >= seen.count(False) + 1

    def report(self, worker: Worker, canary: str, verdict: Verdict) -> None:
        """Record TokensUnlikely: a worker's sampler is in doubt, but the worker is not convicted."""
        log.warning("tokens_unlikely", worker=worker.joined.worker, canary=canary)
        self._tools.journal.observe(
            TokensUnlikely(
                worker=worker.joined.worker,
                instance=worker.joined.instance,
                found_by="canary",
                canary=canary,
                tokens=verdict.attempts,
                unlikely=verdict.attempts,
                peers_share=0.0,
                probability=self._settings.sampled_chance,
                detail=verdict.worst.detail,
            )
        )


def _undecided(chance: float, surprises: list[float]) -> bool:
    """Return whether another answer is needed to distinguish chance from a fault.

    `chance` is the combined p-value of all `surprises`, the p-values of the answers so far.
    """
    if len(surprises) >= ATTEMPTS_MAX:
        return False
    return chance <= SUSPECT or (surprises[0] <= SUSPECT and len(surprises) < ATTEMPTS_MIN)


def sampled_id(canary: Canary, drawn: SamplingParameters) -> str:
    """Return the id under which a sampled canary's outcomes are recorded. No golden has this id."""
    return f"{canary.id}@{drawn.name}"
