"""Load statistics of one rank, named like vLLM's and Dynamo's load metrics."""

from collections.abc import Sequence
from statistics import pvariance
from typing import NamedTuple

from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.timing import StepPlan


class Stats(NamedTuple):
    """One rank's load and its last pass, with the fields of Dynamo's snapshot.

    The values of an idle rank are zero, except its limits and its cache hit rate.
    """

    request_active_slots: int  # requests in the batch or in prefill
    request_total_slots: int
    num_requests_waiting: int
    kv_active_blocks: int
    kv_total_blocks: int
    gpu_cache_usage_perc: float  # share from 0 to 1
    gpu_prefix_cache_hit_rate: float  # share of the prompt tokens of recently admitted requests
    num_preemptions: int
    scheduled_num_prefill_requests: int = 0
    scheduled_sum_prefill_tokens: int = 0  # prompt tokens computed by the pass
    scheduled_var_prefill_length: float = 0.0  # variance of the prompts' lengths, up to the end of the pass
    scheduled_sum_prefill_kv_tokens: int = 0  # tokens of the same prompts computed earlier
    scheduled_num_decode_requests: int = 0
    scheduled_sum_decode_kv_tokens: int = 0
    scheduled_var_decode_kv_tokens: float = 0.0
    queued_num_prefill_requests: int = 0  # requests without output so far
    queued_sum_prefill_tokens: int = 0
    queued_var_prefill_length: float = 0.0
    queued_num_decode_requests: int = 0  # preempted requests
    queued_sum_decode_kv_tokens: int = 0
    queued_var_decode_kv_tokens: float = 0.0
    wall_time: float = 0.0  # seconds of the pass


def stats(scheduler: Scheduler, pass_s: float = 0.0) -> Stats:
    """Return a rank's statistics now, in a pass that takes `pass_s` seconds."""
    load, busy = scheduler.load(), scheduler.busy
    plan = scheduler.planned if busy else StepPlan()
    fresh, preempted = scheduler.waiting.lengths()
    return Stats(
        request_active_slots=load.running,
        request_total_slots=scheduler.batch_limit,
        num_requests_waiting=load.waiting,
        kv_active_blocks=load.kv_used,
        kv_total_blocks=load.kv_total,
        gpu_cache_usage_perc=load.kv_used / load.kv_total,
        gpu_prefix_cache_hit_rate=scheduler.prefill.hit_rate,
        num_preemptions=scheduler.preemptions,
        scheduled_num_prefill_requests=len(plan.prefills),
        scheduled_sum_prefill_tokens=plan.prefill_tokens,
        scheduled_var_prefill_length=_variance([*map(sum, zip(plan.starts, plan.prefills, strict=True))]),
        scheduled_sum_prefill_kv_tokens=sum(plan.starts),
        scheduled_num_decode_requests=plan.decodes,
        scheduled_sum_decode_kv_tokens=plan.context_tokens,
        scheduled_var_decode_kv_tokens=_variance(scheduler.batch.lengths()),
        queued_num_prefill_requests=len(fresh),
        queued_sum_prefill_tokens=sum(fresh),
        queued_var_prefill_length=_variance(fresh),
        queued_num_decode_requests=len(preempted),
        queued_sum_decode_kv_tokens=sum(preempted),
        queued_var_decode_kv_tokens=_variance(preempted),
        wall_time=pass_s if busy else 0.0,
    )


def _variance(numbers: Sequence[int]) -> float:
    return float(pvariance(numbers)) if len(numbers) > 1 else 0.0
