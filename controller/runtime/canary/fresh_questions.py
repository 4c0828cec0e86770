"""Generates questions that no worker has seen: random prompts in the style of users."""

import random

from controller.runtime.canary.goldens import Canary, Vocabulary

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
    """Return a question of one to three requests, with an answer of about `tokens` tokens. Without a vocabulary: token ids."""
    length = draw.randrange(max(1, tokens // 2), 2 * tokens + 1)
    id = f"{draw.getrandbits(64):016x}"
    if vocabulary is None:
        ids = range(16, 1_000)  # which every language model's vocabulary has
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
