"""A model with known right answers, for fault injection.

It has canaries chosen by the controller's code, users' questions, and its answers to both in its current state.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import xxhash
from tokenizers import Tokenizer

from controller.runtime.canary import goldens
from controller.runtime.canary.goldens import Calibration, covering, dealt
from controller.runtime.settings import CanarySettings
from events.observations import TopK
from events.wire import Chunk, Generate, Sampling
from workers.engines.transformers.loading import load_model
from workers.engines.transformers.sequence import SequenceWork
from workers.engines.transformers.sequence import TorchSequence as Running
from workers.engines.transformers.settings import TransformersSettings
from workers.engines.transformers.stepper import Stepper

USER_TOKENS = 48
ROUNDING = 1e-4  # of logprobs: the same answer, replayed and generated, differs by 2e-5 on some processors
USERS = (
    "How do I read a file line by line in Python without loading all of it into memory?",
    "Write a short poem about the sea in winter.",
    "import os\nimport sys\n\ndef walk(root):\n    for path in",
    "Explain the difference between a list and a tuple.",
    "What should I cook tonight with rice, eggs and spinach?",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Summarise the following minutes of our meeting in three sentences:",
    "Translate to German: the weather was fine and we walked along the river.",
    "Why is the sky blue, and why is it red in the evening?",
    'raise ValueError("expected a positive number, got',
    "My train leaves at 9:15 and takes 3 hours 50 minutes. When do I arrive?",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    "Once upon a time, in a town by a lake, there lived an old clockmaker who",
    "List five things to check before a long flight.",
    "def test_empty_list_is_sorted():\n    assert sorted([]) ==",
    "Dear Ms Weber, thank you for your letter of the 3rd of May. I am writing to",
)


@dataclass(frozen=True)
class Asked:
    """A question and its healthy answer. Without `top_k` only tokens are compared."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    id: str = ""  # of a canary
    cut: int = 0  # tokens of the golden: those before the first near tie; 0: all

    @property
    def golden(self) -> "Asked":
        """The question with the part of its answer that the controller uses as the golden."""
        cut = self.cut or len(self.tokens)
        return replace(self, tokens=self.tokens[:cut], top_k=self.top_k[:cut], cut=0)


@dataclass
class Bench:
    """A model for fault injection, with its questions."""

    stepper: Stepper
    settings: CanarySettings
    tolerance: float = 0.0
    plain: list[Asked] = field(default_factory=list)  # canaries: a question each
    covering: list[Asked] = field(
        default_factory=list
    )  # canaries: a slice of the vocabulary before each question
    users: list[Asked] = field(default_factory=list)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Asked]:
        """Generate the model's free answers, all prompts in one batch."""
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=self.settings.top_k)
        chunks: list[list[Chunk]] = [[] for _ in prompts]
        for key, prompt in enumerate(prompts):
            self.stepper.submit(key, Generate(key, f"r{key}", list(prompt), len(prompt), sampling))
        while self.stepper.busy:
            for key, chunk in self.stepper.step(self.stepper.plan()):
                chunks[key].append(chunk)
        answers = [goldens.read(one) for one in chunks]
        return [Asked(tuple(p), a.tokens, a.top_k) for p, a in zip(prompts, answers, strict=True)]

    def replay(self, asked: Sequence[Asked]) -> list[goldens.CanaryAnswer]:
        """Return the answers of the model in its current state, by replaying the healthy answers through it."""
        works, blocks = [], self.stepper.blocks
        for one in asked:
            tokens = [*one.prompt, *one.tokens[:-1]]
            sequence = Running(0, tokens, len(one.prompt), Sampling(max_tokens=1), 0)
            sequence.blocks = [blocks.take() for _ in range(blocks.needed(len(tokens)))]
            self.stepper.pool.clear(sequence.blocks)
            works.append(SequenceWork(sequence, 0, len(tokens)))
        logits = self.stepper.model.forward(works, self.stepper.pool, every=True)
        answers, start = [], 0
        for one, work in zip(asked, works, strict=True):
            rows = logits[start + len(one.prompt) - 1 : start + work.count]
            answers.append(_answer(rows, one.tokens, self.settings.top_k if one.top_k else 0))
            start += work.count
            blocks.give_back(work.sequence.blocks)
        return answers

    def differences(self, asked: Sequence[Asked]) -> list[goldens.GoldenDifference]:
        """Judge the model in its current state by these canaries, as the controller would."""
        tie_margin = max(self.tolerance, self.settings.tie_margin)
        return [
            self._judged(one, answer, tie_margin)
            for one, answer in zip(asked, self.replay(asked), strict=True)
        ]

    def noticed(self) -> tuple[list[goldens.GoldenDifference], list[goldens.GoldenDifference]]:
        """Judge the model in its current state by the covering canaries: under the controller's rules, and under those of 0.2.0,
        which compared whole answers and counted each token that differs."""
        today, before = [], []
        for one, answer in zip(self.covering, self.replay(self.covering), strict=True):
            before.append(self._judged(one, answer, 0.0))
            length = len(one.golden.tokens)
            sound = answer.finite or len(answer.tokens) >= length
            part = goldens.CanaryAnswer(answer.tokens[:length], answer.top_k[:length], sound)
            today.append(self._judged(one.golden, part, max(self.tolerance, self.settings.tie_margin)))
        return today, before

    def _judged(
        self, one: Asked, answer: goldens.CanaryAnswer, tie_margin: float
    ) -> goldens.GoldenDifference:
        return goldens.compare(
            answer, tokens=one.tokens, top_k=one.top_k, tolerance=self.tolerance, tie_margin=tie_margin
        )

    def altered(self) -> bool:
        """Return whether any user's answer differs from that of a healthy model."""
        answers = zip(self.users, self.replay(self.users), strict=True)
        return any(answer.tokens != one.tokens or not answer.finite for one, answer in answers)

    def confirms(self, altered: bool) -> bool:
        """Return whether generating confirms the result of replaying, `altered`. A fault may bring two tokens within rounding of
        each other: then the generated token depends on a buffer's place in memory, and either result is right."""
        said = self.ask([one.prompt for one in self.users], USER_TOKENS)
        if any(one.tokens != other.tokens for one, other in zip(self.users, said, strict=True)) == altered:
            return True
        return any(_lead(top) <= ROUNDING for one in said for top in one.top_k)

    def checksum(self) -> int:
        """Return a checksum over every weight."""
        digest = xxhash.xxh3_64()
        for weight in self.stepper.model.parameters().values():
            digest.update(memoryview(weight.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return digest.intdigest()


def prepared(folder: Path, threads: int) -> Bench:
    """Load the model, choose canaries as the controller does, record every healthy answer, calibrate."""
    torch.set_num_threads(threads)
    model = load_model(TransformersSettings(folder=folder, context_tokens=4096))
    settings = CanarySettings()
    bench = Bench(
        Stepper(model, TransformersSettings(folder=folder, prefill_tokens_max=4096, prefix_caching=False)),
        settings,
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    pool = goldens.pool(encode, tokens=settings.tokens, prompt_tokens_min=settings.prompt_tokens_min)
    bench.plain = [one.golden for one in _chosen(bench, pool, cover=False)]
    bench.covering = _chosen(bench, covering(pool, model.vocabulary), cover=True)
    users = bench.ask([encode(text) for text in USERS], USER_TOKENS)
    bench.users = [Asked(one.prompt, one.tokens) for one in users]
    bench.tolerance = _calibrated(bench)
    return bench


def _chosen(bench: Bench, pool: Sequence[goldens.Canary], *, cover: bool) -> list[Asked]:
    settings = bench.settings
    asked = bench.ask([canary.prompt for canary in pool], settings.tokens)
    by_id = {canary.id: one for canary, one in zip(pool, asked, strict=True)}
    answers = {id: goldens.CanaryAnswer(one.tokens, one.top_k) for id, one in by_id.items()}
    order = goldens.rank(answers, tokens=settings.tokens)
    chosen = (dealt(order, pool) if cover else order)[: settings.canaries]
    margins = ", ".join(f"{id} {answers[id].margin:.3f}" for id in chosen)
    print(f"{'covering' if cover else 'plain'} canaries, with their margins: {margins}", file=sys.stderr)
    return [_cut(replace(by_id[id], id=id), settings.margin_min) for id in chosen]


def _cut(asked: Asked, margin_min: float) -> Asked:
    """Return a question with the part of its answer that the controller uses as the golden."""
    answer = goldens.CanaryAnswer(asked.tokens, asked.top_k)
    part = goldens.settled_part(answer, answer, margin_min)
    assert part is not None
    return replace(asked, cut=len(part.tokens))


def _calibrated(bench: Bench) -> float:
    """Return the tolerance as the controller calibrates it: from healthy samples, alone and in a batch."""
    s = bench.settings
    found = Calibration(s)
    draw = random.Random(2)
    while not found.enough:
        company = [one.prompt for one in draw.sample(bench.users, draw.randrange(9))]
        said = bench.ask([*[canary.prompt for canary in bench.plain], *company], s.tokens)
        for canary, one in zip(bench.plain, said, strict=False):
            far = goldens.distance(canary.top_k, one.top_k, positions=s.tokens)
            found.add(far if far is not None else float("nan"))
    return found.tolerance


def _lead(top: TopK) -> float:
    """Return the lead of the likeliest token over the next one."""
    return top[0][1] - top[1][1]


def _answer(rows: torch.Tensor, healthy: tuple[int, ...], top_k: int) -> goldens.CanaryAnswer:
    """Return the answer of these rows of logits, up to the first token that differs."""
    said = rows.argmax(dim=-1).tolist()
    wrong = next((n for n, (one, other) in enumerate(zip(said, healthy, strict=True)) if one != other), None)
    end = len(said) if wrong is None else wrong + 1
    sound = torch.isfinite(rows[:end]).all(dim=-1).tolist()
    if False in sound:  # the engine ends an answer there
        return goldens.CanaryAnswer(tuple(said[: sound.index(False)]), (), finite=False)
    tops: tuple[TopK, ...] = ()
    if top_k:
        top = rows[:end].log_softmax(dim=-1).topk(top_k, dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        tops = tuple(tuple(zip(ids, values, strict=True)) for ids, values in pairs)
    return goldens.CanaryAnswer(tuple(said[:end]), tops)
