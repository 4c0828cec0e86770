"""Many requests at once in one frontend, with nobody who reads their answers: for scenarios and benchmarks."""

from collections import Counter
from collections.abc import Iterable

from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Lineage
from events.blocks import BlockNames
from events.wire import Sampling

FIRST, SPAN = 259, 1700  # token ids that are no special ones of the simulated engine


def crowd(requests: int, tokens: int, model: str, lineage: Lineage) -> list[Choice]:
    """Return this number of requests of `tokens` tokens each. No two have a prefix in common, and none ends soon."""
    answers = []
    for n in range(requests):
        prompt = [FIRST + (n * 31 + k) % SPAN for k in range(tokens)]
        request = GenerationRequest(
            id=f"r{n + 1}",
            model=model,
            lineage=lineage,
            prompt=prompt,
            names=BlockNames(prompt),
            prompt_text="",
            sampling=Sampling(max_tokens=4000, ignore_eos=True),
            guided=None,
            deterministic=True,
        )
        answers.append(Choice(request, ResponseWriter()))
    return answers


def computed_again(requests: Iterable[LiveRequest]) -> Counter[str]:
    """Return the tokens that each worker has to compute, now that these requests continue there."""
    load: Counter[str] = Counter()
    for live in requests:
        assert live.endpoint is not None
        load[live.endpoint.worker] += live.length
    return load


def most_over_even(load: Counter[str], workers: int) -> float:
    """Return how many times the even spread over so many workers that one has to compute which has most."""
    return max(load.values()) * workers / load.total()
