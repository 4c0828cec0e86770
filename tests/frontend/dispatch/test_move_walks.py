"""Random orders of frames, losses, refusals, timeouts and move requests.

The tokens are always those of the undisturbed answer, every attempt is cancelled at most once, and no reservation is left.
"""

from collections import Counter

import pytest
from frontend_kit import check_slot_counts
from move_random_walk import NAMES, Walk
from scripted_worker import undisturbed

from events.observations import RequestAbandoned, RequestMigrated

WALKS = 12  # per case
STEPS = 900


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
async def test_a_random_walk_alters_no_token_and_leaks_nothing(block: int) -> None:
    methods: Counter[str] = Counter()
    orphans = cached = 0
    for seed in range(block * WALKS, (block + 1) * WALKS):
        walk = Walk(seed)
        for number in range(6):
            walk.ask(number)
        for number in range(STEPS):
            await walk.step()
            if number % 10 == 0:
                check_slot_counts(walk.director)
        await walk.settle()
        for live, writer, prompt in walk.requests:
            exact = undisturbed(prompt, min(live.request.sampling.max_tokens, writer.stop))
            assert live.over and live.answer.error is None, seed
            assert writer.said == (
                exact[: len(writer.said)] if live.answer.finish == "cancelled" else exact
            ), seed
        assert len(walk.director.routing.slots) == 0, seed
        for name in NAMES:
            model, endpoint = walk.models[name], walk.director.table.endpoints[(name, "i1")]
            assert (model.streams, model.reserved) == ({}, {}), seed
            assert (endpoint.active, endpoint.kept.requests, endpoint.tokens) == (0, 0, 0), seed
            assert not walk.director.running.at(endpoint), seed
            assert max(model.cancels.values(), default=0) <= 1, seed
        assert [
            f.reason for f in walk.facts if isinstance(f, RequestAbandoned) if f.reason != "cancelled"
        ] == []
        orphans += walk.orphans
        moves = [fact for fact in walk.facts if isinstance(fact, RequestMigrated)]
        methods.update(fact.method for fact in moves)
        cached += sum(f.method == "reprefill" and f.cause == "operator" and not f.refused for f in moves)
    assert min(methods["transfer"], methods["reprefill"]) > WALKS  # both methods occurred many times
    assert orphans > WALKS // 5  # a source was lost after the commit
    assert cached > WALKS // 5  # recomputed because almost nothing was missing
