"""Creates many concurrent requests in one frontend, without clients, for scenarios and benchmarks."""

from collections import Counter
from collections.abc import Iterable

from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Lineage
from events.blocks import BlockNames
from events.wire import Sampling

FIRST, SPAN = 259, 1700  # token ids that are not special tokens of the simulated engine


def crowd(requests: int, tokens: int, model: str, lineage: Lineage) -> list[Choice]:
    """Return `requests` requests of `tokens` tokens each. No two share a prefix, and none ends early."""
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
    """Return the number of tokens that each worker must compute again for the requests that continue there."""
    load: Counter[str] = Counter()
    for live in requests:
        assert live.endpoint is not None
        load[live.endpoint.worker] += live.length
    return load


def most_over_even(load: Counter[str], workers: int) -> float:
    """Return the highest load of one worker as a multiple of the even load over `workers` workers."""
    return max(load.values()) * workers / load.total()
