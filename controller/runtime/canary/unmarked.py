"""Checks whether a worker answers users as it answers canaries.

The worker gets fresh questions that look like a user's requests:

    a fresh question ──▶ the worker, as a user's request ──▶ a peer, marked as a canary (or the worker, without peers)
        the two answers agree ──▶ passed
        the two answers differ ──▶ the question is also sent, marked, to the worker and to its other peers
            most marked answers agree with the unmarked one, or have no majority ──▶ nothing is recorded
            most marked answers contradict the unmarked one ──▶ another fresh question; a second contradiction confirms the fault

A compromised worker can answer marked canaries correctly and users wrongly. It cannot recognize a fresh question, so each fresh
question is sent to the worker once without a mark. The marked answers can be trusted, because every worker that gives a marked
answer is continuously checked by goldens.

The questions do not replace canaries, and are sent at their own random times, so that a worker cannot recognize them by their
timing. A missing or late answer is no evidence, because a question can wait behind users' requests.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.deciders.votes import Vote, camps
from controller.runtime.canary.canary_set import CanarySet
from controller.runtime.canary.goldens import Canary, CanaryAnswer, GoldenDifference, Vocabulary, compare
from controller.runtime.canary.probe import ProbeResult, Verdict
from controller.runtime.canary.sampling_check import CONVICTED_EVERY
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.canary.turn import Probe
from controller.runtime.settings import CanarySettings
from events.decisions import HealthStatus
from events.observations import UNMARKED, CheckType
from events.wire import Sampling

REQUESTS = (
    "Explain to {reader} how {subject} {works}.",
    "Write {count} short sentences about {subject} for {reader}.",
    "What should {reader} know about {subject}? Give {count} points.",
    "Summarise what is known about {subject} in {count} lines.",
    "My colleague says that {subject} {works} only since {year}. Is that true?",
    "Draft a message of {count} lines to {reader} about {subject}.",
    "List {count} questions that {reader} could ask about {subject}.",
    "Compare {subject} with {other}: what do they have in common?",
    "Continue this story: In {year}, {reader} began to study {subject} and found that",
    "Translate to French: {reader} wrote {count} letters about {subject} in {year}.",
    "def describe_{count}(year={year}):\n    # returns {count} facts about {subject}\n    return",
    "Title: {subject} and {other}\nYear: {year}\nPages: {count}\nAbstract:",
)
READERS = (
    "a new employee", "my daughter", "a nurse", "the neighbours", "a student of physics", "our customers", "a farmer",
    "the board", "an engineer", "a tourist", "my landlord", "the football team", "a retired teacher", "a young chemist",
    "the city council", "a translator",
)  # fmt: skip
SUBJECTS = (
    "the tides", "a steam engine", "sourdough bread", "the stock exchange", "solar panels", "a violin", "the water cycle",
    "public libraries", "a bicycle gear", "chess openings", "the printing press", "coral reefs", "a refrigerator",
    "sign language", "the metric system", "volcanoes", "a database index", "compost", "the night train", "vaccines",
    "a suspension bridge", "honey bees", "time zones", "glass", "crosswords", "the postal service", "an electric kettle",
    "tree rings", "a mortgage", "the northern lights", "spreadsheets", "a lighthouse",
)  # fmt: skip
WORKS = ("works", "is made", "is paid for", "has changed", "is measured", "can fail", "is taught")


def fresh_question(draw: random.Random, vocabulary: Vocabulary | None, tokens: int) -> Canary:
    """Return a random question of one to three sentences, with an answer of half to twice `tokens` tokens.

    Without a vocabulary, the question consists of random token ids.
    """
    length = draw.randrange(max(1, tokens // 2), 2 * tokens + 1)
    id = f"{draw.getrandbits(64):016x}"
    if vocabulary is None:
        ids = range(16, 1_000)  # every language model's vocabulary has these ids
        return Canary(id, tuple(draw.choices(ids, k=draw.randrange(16, 128))), length)
    text = "\n\n".join(_request(draw) for _ in range(draw.randrange(1, 4)))
    return Canary(id, tuple(vocabulary.encode(text)), length, text=text)


def _request(draw: random.Random) -> str:
    subject, other = draw.sample(SUBJECTS, 2)
    return draw.choice(REQUESTS).format(
        reader=draw.choice(READERS),
        subject=subject,
        other=other,
        works=draw.choice(WORKS),
        count=draw.randrange(2, 30),
        year=draw.randrange(1820, 2026),
    )


PEERS_MAX = 8  # number of peers that receive the question
VOTERS_MIN = 2  # marked answers that must agree for a majority, if the worker has peers

log = structlog.get_logger(__name__)


Ask = Callable[[Probe, Sampling], Awaitable[ProbeResult]]
"""Sends a probe's question to its worker with these sampling settings. Measures the latency and the GPU time."""
Begin = Callable[[Worker, CanarySet, Canary, CheckType, int], Probe]


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """A worker's answer to an unmarked question, and the right answer if the two differ."""

    result: ProbeResult
    # the majority of the marked answers; None: the worker's answer is right
    right: CanaryAnswer | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """The conclusion about a worker after unmarked questions."""

    probing: Probe
    verdict: Verdict
    golden: Golden | None = None  # the right answer, as an agreed golden; None: the worker's answer was right


@dataclass(eq=False)
class UnmarkedCheck:
    """Sends workers unmarked questions, and compares the answers with marked answers to the same questions."""

    look: Callable[[], Fleet]
    tools: ProberDependencies
    settings: CanarySettings
    begin: Begin
    ask: Ask

    def __post_init__(self) -> None:
        self._draw = self.tools.secret
        # unconfirmed wrong answers, by worker and instance
        self._doubts: dict[tuple[str, str], UserAnswer] = {}

    def forget(self, worker: str) -> None:
        """Drop the data of a worker that is gone."""
        self._doubts = {life: doubt for life, doubt in self._doubts.items() if life[0] != worker}

    @property
    def pause_s(self) -> float:
        """Seconds until the next call of `due` for a worker: 0.5 to 1.5 canary intervals, at random."""
        return self.settings.interval_s * self._draw.uniform(0.5, 1.5)

    def due(self, worker: Worker) -> bool:
        """Return whether to send a worker an unmarked question now: at random, in one of `unmarked_every` calls.

        Convicted workers get unmarked questions more often. Draining workers and joining workers get none. Workers that
        registered without `exact` get none either, because even correct answers of such workers vary.
        """
        every, health = self.settings.unmarked_every, worker.health
        if not every or not worker.joined.exact or health.joining or health.status is HealthStatus.DRAINING:
            return False
        return self._draw.random() * (min(every, CONVICTED_EVERY) if health.convicted else every) < 1

    async def examine(self, worker: Worker, canary_set: CanarySet) -> Examination | None:
        """Send a worker unmarked questions, and return the conclusion; None if no conclusion is possible.

        A right first answer ends the examination. After a wrong answer, more questions follow, at most `max_retries` + 1 in all,
        until a second wrong answer confirms the first. An unconfirmed wrong answer is kept for the next examination. A wrong
        answer in that examination confirms the kept one, and a right first answer drops it. If no wrong answer were kept, a
        compromised worker could evade conviction by answering correctly for the rest of each examination.
        """
        known = [golden for golden in canary_set.goldens(self.look()) if golden.status != "retired"]
        if not known:
            return None  # without goldens, the marked answers cannot be trusted
        rank = self._draw.randrange(max(1, worker.joined.dp))
        probing = self.begin(worker, canary_set, Canary("", (), 0), "scheduled", rank)
        probed = replace(probing.probed, canary=f"{known[0].canary}{UNMARKED}")
        probing, wrong, asked = replace(probing, probed=probed), list[UserAnswer](), 0
        doubt = self._doubts.pop((worker.joined.worker, worker.joined.instance), None)
        for _ in range(1 + self.settings.max_retries):
            answered = await self._ask_unmarked(worker, canary_set, rank)
            if answered is None:
                break
            asked += 1
            if answered.right is not None:
                wrong += [doubt, answered] if doubt is not None else [answered]
                doubt = None
            elif not wrong:
                return Examination(probing, Verdict(answered.result, GoldenDifference(None, None), 1, False))
            if len(wrong) > 1:
                break
        if len(wrong) == 1 or doubt is not None:
            self._doubts[worker.joined.worker, worker.joined.instance] = doubt or wrong[0]
        return self._examination(probing, wrong, asked) if wrong else None

    def _examination(self, probing: Probe, wrong: Sequence[UserAnswer], asked: int) -> Examination:
        first = wrong[-1]
        assert first.right is not None
        detail = f"answered users and canaries differently {len(wrong)} times, lately in {asked} questions"
        verdict = Verdict(
            first.result, GoldenDifference("token_mismatch", None, detail), asked, len(wrong) > 1
        )
        key, id = probing.canary_set.key, probing.probed.canary
        return Examination(probing, verdict, Golden(key, id, status="agreed", tokens=first.right.tokens))

    async def _ask_unmarked(self, worker: Worker, canary_set: CanarySet, rank: int) -> UserAnswer | None:
        """Send a worker a fresh question as a user's request, and compare the answer with marked answers to the same question.

        None if no conclusion is possible: the worker's context is too short for the question, the worker does not answer, or
        the marked answers have no majority.
        """
        joined = worker.joined
        question = fresh_question(self._draw, canary_set.vocabulary, self.settings.tokens)
        if len(question.prompt) + question.max_tokens > joined.context_tokens:
            return None
        plain = Sampling(max_tokens=question.max_tokens)
        probing = self.begin(worker, canary_set, question, "scheduled", rank)
        result = await self.ask(replace(probing, marked=False), plain)
        if result.answer is None:
            return None
        peers = self._peers(worker)
        first, *others = peers or [worker]
        (quick,) = await self._ask_marked([first], canary_set, question)
        if quick is not None and not self._contradicts(canary_set, result.answer, quick):
            return UserAnswer(result)
        answers = [quick, *await self._ask_marked([worker, *others] if peers else [], canary_set, question)]
        right = self._majority(canary_set, [one for one in answers if one is not None], alone=not peers)
        if right is None:
            log.warning("unmarked_undecided", worker=joined.worker, answers=len(answers))
            return None
        return UserAnswer(result, right if self._contradicts(canary_set, result.answer, right) else None)

    async def _ask_marked(
        self, workers: Sequence[Worker], canary_set: CanarySet, question: Canary
    ) -> list[CanaryAnswer | None]:
        """Send these workers a question marked as a canary, and return their answers in the same order.

        A missing answer is None. An answer counts as missing if it has no logprobs, or a logprob that is not finite. Without
        logprobs a near tie cannot be told from a wrong answer.
        """
        sampling = Sampling(max_tokens=question.max_tokens, logprobs=self.settings.top_k)

        async def ask(worker: Worker) -> CanaryAnswer | None:
            probing = self.begin(worker, canary_set, question, "confirm", 0)
            result = await self.ask(probing, sampling)
            answer = result.answer
            return answer if answer is not None and answer.top_k and answer.finite else None

        return list(await asyncio.gather(*map(ask, workers)))

    def _peers(self, worker: Worker) -> list[Worker]:
        """Return up to PEERS_MAX other healthy workers of the same canary key, in random order."""
        name, key = worker.joined.worker, worker.joined.canary_key
        peers = [
            other
            for other in self.look().workers.values()
            if other.joined.worker != name
            and other.joined.canary_key == key
            and other.health.status is HealthStatus.HEALTHY
            and not other.health.convicted
        ]
        return self._draw.sample(peers, min(len(peers), PEERS_MAX))

    def _majority(
        self, canary_set: CanarySet, answers: Sequence[CanaryAnswer], *, alone: bool
    ) -> CanaryAnswer | None:
        """Return the answer of the largest group of equal answers.

        None if another group is as large, or if the group has fewer than VOTERS_MIN answers. If the worker is `alone`, that is,
        without peers, return its own marked answer.
        """
        if alone:
            return answers[0] if answers else None
        votes = [Vote(str(n), "", one.tokens, one.top_k) for n, one in enumerate(answers)]
        found = sorted(camps(votes, 0.0, self._tie_margin(canary_set)), key=len, reverse=True)
        if not found or len(found[0]) < VOTERS_MIN or (len(found) > 1 and len(found[1]) == len(found[0])):
            return None
        return answers[int(found[0][0].worker)]

    def _contradicts(self, canary_set: CanarySet, answer: CanaryAnswer, right: CanaryAnswer) -> bool:
        """Return whether two answers differ, other than by a near tie.

        Tokens that only the longer answer has are not compared.
        """
        length = min(len(answer.tokens), len(right.tokens))
        found = compare(
            answer.begin(length),
            tokens=right.tokens[:length],
            top_k=right.top_k[:length],
            tolerance=0.0,
            tie_margin=self._tie_margin(canary_set),
        )
        return found.reason is not None

    def _tie_margin(self, canary_set: CanarySet) -> float:
        return max(canary_set.calibration.tolerance, self.settings.tie_margin)
