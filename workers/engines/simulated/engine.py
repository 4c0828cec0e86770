"""The simulated engine's interface to the worker, over one or more simulated DP ranks."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import pvariance

from msgspec import structs

from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.engines.engine import Announce, Deliver, EngineDead, EngineIdentity, Phase, discard_events
from workers.engines.simulated.moving import SimulatedExport, SimulatedImport
from workers.engines.simulated.rank import IDLE, SimulatedRank
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming, StepPlan, Timing
from workers.kv_transfer.messages import Description

VERSION = "1"
TOKENIZER = "builtin:sim"


def stats(scheduler: Scheduler, pass_s: float = 0.0) -> dict[str, float]:
    """Return the load of one rank and the work of its current forward pass, by metric name.

    `pass_s` is the duration of the current pass in seconds. The values are those of Dynamo's load snapshot. Their names are those
    of vLLM's and Dynamo's load metrics. The `scheduled_…` values and `wall_time` describe the current pass, and are 0 while the
    rank is idle. `RANKS` in `workers/admin/server.py` explains each value.
    """
    load, busy = scheduler.load(), scheduler.busy
    plan = scheduler.planned if busy else StepPlan()
    fresh, preempted = scheduler.waiting.lengths()
    return {
        "request_active_slots": load.running,
        "request_total_slots": scheduler.batch_limit,
        "num_requests_waiting": load.waiting,
        "kv_active_blocks": load.kv_used,
        "kv_total_blocks": load.kv_total,
        "gpu_cache_usage_perc": load.kv_used / load.kv_total,
        "gpu_prefix_cache_hit_rate": scheduler.prefill.hit_rate,
        "num_preemptions": scheduler.preemptions,
        "scheduled_num_prefill_requests": len(plan.prefills),
        "scheduled_sum_prefill_tokens": plan.prefill_tokens,
        "scheduled_var_prefill_length": _variance([*map(sum, zip(plan.starts, plan.prefills, strict=True))]),
        "scheduled_sum_prefill_kv_tokens": sum(plan.starts),
        "scheduled_num_decode_requests": plan.decodes,
        "scheduled_sum_decode_kv_tokens": plan.context_tokens,
        "scheduled_var_decode_kv_tokens": _variance(scheduler.batch.lengths()),
        "queued_num_prefill_requests": len(fresh),
        "queued_sum_prefill_tokens": sum(fresh),
        "queued_var_prefill_length": _variance(fresh),
        "queued_num_decode_requests": len(preempted),
        "queued_sum_decode_kv_tokens": sum(preempted),
        "queued_var_decode_kv_tokens": _variance(preempted),
        "wall_time": pass_s if busy else 0.0,
    }


def _variance(numbers: Sequence[int]) -> float:
    return float(pvariance(numbers)) if len(numbers) > 1 else 0.0


class SimulatedEngine:
    """An `Engine` that simulates batching, timing and the KV cache, and needs no model."""

    def __init__(
        self,
        shape: EngineShape,
        timing: Timing | None = None,
        *,
        revision: str = "1",
        dp: int = 1,
        start_s: float = 0.0,
        turn_tokens: int = 0,
    ) -> None:
        """Create an engine of `dp` DP ranks. Its start takes `start_s` seconds.

        If steps have no duration, one iteration of the event loop runs several steps. These generate up to `turn_tokens` tokens
        in total, and one more step follows them in the same iteration.
        """
        timing = timing or ConstantTiming()
        self.shape = shape
        self.announces = shape.prefix_caching
        self.each = tuple(SimulatedRank(number, shape, timing, turn_tokens) for number in range(dp))
        self._start_s = start_s
        self.identity = EngineIdentity(
            model=shape.model,
            revision=revision,
            tokenizer=TOKENIZER,
            engine="simulated",
            engine_version=VERSION,
            dtype="none",
            tp=shape.tp,
            device="simulated",
            context_tokens=shape.context_tokens,
            exact=True,
            profile=_of_all(timing.profile(shape), dp),
            dp=dp,
            waiting_max=shape.waiting_max * dp,
            adapters=shape.adapters,
        )
        self.kv = tuple(_description(shape, revision, rank) for rank in range(shape.tp))

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        await asyncio.sleep(self._start_s)
        for rank in self.each:
            rank.start(deliver, announce)

    def awaits(self) -> None:
        """Return None: the engine waits for no model or server, although its start may take a configured time."""

    def submit(self, key: int, request: Generate) -> None:
        if isinstance(rank := self._of(request), SimulatedRank):
            rank.submit(key, request)
        else:
            self.each[0].refuse(key, Chunk(request.stream, [], error=f"not_serving: {rank}"))

    def cancel(self, key: int) -> None:
        for rank in self.each:
            rank.cancel(key)

    def export(self, key: int) -> SimulatedExport | None:
        for rank in self.each:
            if (departure := rank.transit.depart(key)) is not None:
                return SimulatedExport(rank, departure)
        return None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedImport | str:
        rank = self._of(request)
        if isinstance(rank, str):
            return rank
        arrival = rank.reserve(key, request, room_tokens)
        return arrival if isinstance(arrival, str) else SimulatedImport(rank, arrival)

    def trust(self, trusted: bool) -> None:
        for rank in self.each:
            rank.trust(trusted)

    def limit_batch(self, share: float) -> None:
        for rank in self.each:
            rank.limit_batch(share)

    def phase(self) -> Phase:
        """Return the phase of the rank that began its current step first; idle if all ranks are idle."""
        if len(self.each) == 1:
            return self.each[0].phase
        working = [rank.phase for rank in self.each if rank.phase is not IDLE]
        return min(working, key=lambda phase: phase.since, default=IDLE)

    def load(self) -> Load:
        loads = [rank.load() for rank in self.each]
        if len(loads) == 1:
            return loads[0]
        whole = Load(*map(sum, zip(*map(structs.astuple, loads), strict=True)))
        return structs.replace(whole, weight=loads[0].weight)  # of the worker, not a sum over its ranks

    def ranks(self) -> list[Load]:
        return [rank.load() for rank in self.each] if len(self.each) > 1 else []

    def stats(self) -> list[dict[str, float]]:
        """Return the statistics of each DP rank, in rank order."""
        return [stats(rank.scheduler, rank.pass_s) for rank in self.each]

    async def check(self) -> None:
        """Raise EngineDead if the injected fault `die` has killed the engine."""
        if any(rank.faults.dead for rank in self.each):
            raise EngineDead("the simulated engine died, as the rehearsal asked")

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Inject a fault into one rank. `die` and `heal` affect all ranks. Return False if the fault is unknown.

        `rank` is the DP rank times the number of TP ranks, plus the TP rank.
        """
        number, within = divmod(rank, self.shape.tp)
        if fault in ("die", "heal"):
            for one in self.each:
                one.faults.inject(fault, argument)
            return True
        return self.each[number].faults.inject(fault, argument, within)

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault of one rank. `rank` is the DP rank times the number of TP ranks, plus the TP rank."""
        number, within = divmod(rank, self.shape.tp)
        self.each[number].faults.heal(fault, within)

    async def stop(self) -> None:
        for rank in self.each:
            rank.stop()

    def _of(self, request: Generate) -> SimulatedRank | str:
        if 0 <= request.rank < len(self.each):
            return self.each[request.rank]
        return f"there is no DP rank {request.rank} here, only 0 to {len(self.each) - 1}"


def _of_all(profile: Profile, dp: int) -> Profile:
    """Return the profile of an engine with `dp` DP ranks, computed from `profile`, the profile of one rank."""
    if dp == 1:
        return profile
    return replace(
        profile,
        kv_blocks=profile.kv_blocks * dp,
        max_batch=profile.max_batch * dp,
        prefill_tokens_per_s=profile.prefill_tokens_per_s * dp,
        tpot_ms=tuple((running * dp, ms) for running, ms in profile.tpot_ms),
    )


def _description(shape: EngineShape, revision: str, rank: int) -> Description:
    """Return the layout of one TP rank's KV blocks: one layer and one head, with one byte per number."""
    size = max(1, shape.kv_block_bytes // (2 * shape.block_tokens))
    return Description(
        shape.model, revision, "uint8", 1, 1, size, shape.block_tokens, shape.kv_block_bytes, shape.tp, rank
    )
