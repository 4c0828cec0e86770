"""Whatever order frames, losses, refusals, timeouts and wishes come in: the tokens are those of the undisturbed answer, every
attempt is cancelled at most once, and nothing is left reserved anywhere."""

from collections import Counter

import pytest
from frontend_kit import counted_are_there
from move_walk import NAMES, Walk
from scripted_worker import undisturbed

from events.observations import RequestAbandoned, RequestMigrated

WALKS = 12  # per case
STEPS = 900


@pytest.mark.parametrize("block", range(5))
async def test_a_random_walk_alters_nothing_and_leaves_nothing(block: int) -> None:
    methods: Counter[str] = Counter()
    orphans = cached = 0
    for seed in range(block * WALKS, (block + 1) * WALKS):
        walk = Walk(seed)
        for number in range(6):
            walk.ask(number)
        for number in range(STEPS):
            await walk.step()
            if number % 10 == 0:
                counted_are_there(walk.desk)
        await walk.settle()
        for flight, ear, prompt in walk.flights:
            exact = undisturbed(prompt, min(flight.plan.sampling.max_tokens, ear.stop))
            assert flight.done and flight.error is None, seed
            assert ear.said == (exact[: len(ear.said)] if flight.finish == "cancelled" else exact), seed
        assert len(walk.desk.routing.choosing.slots) == 0, seed
        for name in NAMES:
            model, seat = walk.models[name], walk.desk.table.seats[(name, "i1")]
            assert (model.streams, model.reserved) == ({}, {}), seed
            assert (seat.active, seat.promised, seat.tokens, seat.flights) == (0, 0, 0, {}), seed
            assert max(model.cancels.values(), default=0) <= 1, seed
        assert [
            f.reason for f in walk.facts if isinstance(f, RequestAbandoned) if f.reason != "cancelled"
        ] == []
        orphans += walk.orphans
        moves = [fact for fact in walk.facts if isinstance(fact, RequestMigrated)]
        methods.update(fact.method for fact in moves)
        cached += sum(f.method == "reprefill" and f.cause == "operator" and not f.refused for f in moves)
    assert min(methods["transfer"], methods["reprefill"]) > WALKS  # both have happened, again and again
    assert orphans > WALKS // 5  # a source, after the commit
    assert cached > WALKS // 5  # computed again where next to nothing was missing
