"""Measures the engine's speed at start, with a few steps of each kind: the worker's profile.

It is a first estimate for the capacity model, made in about a second on an idle machine. The frontends continuously measure the
durations of real requests.
"""

import time
from collections.abc import Callable

from events.observations import Profile
from events.wire import Generate, Sampling
from workers.engines.transformers.settings import TransformersSettings
from workers.engines.transformers.stepper import Stepper

BUDGET_S = 1.5  # the curve ends at the point reached when this time is spent
STEPS = 4
_PROMPT = 16


def measured_profile(stepper: Stepper, settings: TransformersSettings) -> Profile:
    """Measure prefill and decode and return the profile. The stepper must be idle, and is idle again afterwards."""
    deadline = time.monotonic() + BUDGET_S
    prompt = max(2, min(settings.prefill_tokens_max, stepper.limit - 2))
    prefill_s = min(_timed(lambda: _prefill(stepper, prompt)) for _ in range(2))  # the first one warms up
    curve: list[tuple[int, float]] = []
    for batch in sorted({1, min(8, settings.batch_max), settings.batch_max}):
        fits = batch * stepper.blocks.needed(_PROMPT + STEPS + 1) <= stepper.blocks.count
        if curve and (not fits or time.monotonic() > deadline):
            break
        curve.append((batch, round(_decode_ms(stepper, batch), 3)))
    return Profile(
        kv_blocks=stepper.blocks.count,
        block_tokens=stepper.blocks.tokens,
        max_batch=settings.batch_max,
        prefill_tokens_max=settings.prefill_tokens_max,
        prefill_tokens_per_s=round(prompt / prefill_s, 1),
        tpot_ms=_rising(curve),
    )


def _prefill(stepper: Stepper, tokens: int) -> None:
    stepper.submit(-1, _request(tokens, 1))
    while stepper.busy:
        stepper.step(stepper.plan())


def _decode_ms(stepper: Stepper, batch: int) -> float:
    prompt = min(_PROMPT, max(1, stepper.limit - STEPS - 2))
    for key in range(batch):
        stepper.submit(-1 - key, _request(prompt, STEPS + 1))
    while any(sequence.uncached > 1 for sequence in stepper.schedule.running) or stepper.schedule.waiting:
        stepper.step(stepper.plan())
    taken = []
    while stepper.busy:
        taken.append(_timed(lambda: stepper.step(stepper.plan())))
    return 1000 * sorted(taken)[len(taken) // 2] if taken else 0.0


def _request(prompt: int, tokens: int) -> Generate:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    token_ids = [3 + n % 200 for n in range(prompt)]
    return Generate(0, "measure", token_ids, prompt, sampling, canary=True)  # bypasses the prefix cache


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _rising(curve: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the curve without dips from noise: more sequences never take less time."""
    highest, risen = 0.0, []
    for batch, ms in curve:
        highest = max(highest, ms)
        risen.append((batch, highest))
    return tuple(risen)
