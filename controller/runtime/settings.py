"""Settings of the controller, the planner and the projector.

The deciders' policies, which are frozen dataclasses of numbers and durations, are used directly as fields.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controller.deciders.fleet import FleetPolicy
from controller.journal_settings import JournalSection
from controller.planner.plan import PlannerPolicy
from controller.setting_types import NotNegative, Positive, Strict
from events.intrusion.send_budget import HEARTBEATS, MIB, Rate, TrafficLimit, traffic


class ConfiguredCanary(Strict):
    """A canary with a right answer that an operator has configured.

    The prompt is sent unchanged, however short: extending it would change the expected answer. `expected_top_logit_range` limits
    the highest value at the first position of the answer. This value is a logprob, which is never above 0, because engines
    report no raw logits. With `check_logits`, a range that begins above 0 is refused.
    """

    prompt: str = Field(min_length=1)
    expected_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=4096)
    temperature: float = Field(default=0.0, ge=0, le=0)  # greedy: otherwise there is no single right answer
    check_logits: bool = False
    expected_top_logit_range: tuple[float, float] | None = None
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")
    model: str | None = None  # None: any model

    @model_validator(mode="after")
    def _consistent(self) -> "ConfiguredCanary":
        if len(self.expected_tokens) > self.max_tokens:
            raise ValueError(
                f"expected_tokens has {len(self.expected_tokens)} tokens, max_tokens is {self.max_tokens}: "
                "the answer could never be given"
            )
        if self.check_logits and self.expected_top_logit_range is None:
            raise ValueError("check_logits is on but expected_top_logit_range is missing")
        bounds = self.expected_top_logit_range
        if bounds is not None and not bounds[0] <= bounds[1]:
            raise ValueError(f"expected_top_logit_range {bounds} is not (low, high)")
        if self.check_logits and bounds is not None and bounds[0] > 0:
            raise ValueError(
                f"expected_top_logit_range {bounds}: engines report logprobs, which are never above 0, so no answer could "
                "lie in it; give the range of the first token's logprob, such as (-0.5, 0), or leave check_logits out"
            )
        return self


class CanarySettings(Strict):
    """How workers are probed. `tolerance` applies to one logprob: None calibrates it, 0.0 compares tokens only."""

    interval_s: Positive = 30.0  # from the start of a probe to the start of the next
    jitter: float = Field(default=0.05, ge=0, lt=1)  # share of the interval, either way
    timeout_s: Positive = 10.0  # of a whole probe, confirmations included
    busy_s: float = Field(default=120.0, ge=0)  # extra time while the engine makes progress on other requests
    max_retries: int = Field(default=2, ge=0, le=10)  # further questions, until a second wrong answer
    concurrency: int = Field(default=512, ge=1)  # concurrent probes, over the whole fleet
    canaries: int = Field(default=4, ge=1, le=64)  # per canary key
    tokens: int = Field(default=32, ge=1, le=1024)  # of an answer
    prompt_tokens_min: int = Field(default=32, ge=1, le=1024)  # of a question, its prefix included
    top_k: int = Field(default=5, ge=0, le=20)  # logprobs of each position; 0: only tokens are compared
    coverage: bool = True  # prefix questions with a part of the vocabulary, to check embeddings as well
    tolerance: float | None = Field(default=None, ge=0)  # of one logprob; none: calibrated, 0: unchecked
    tolerance_floor: Positive = 1e-3  # ten times the noise measured on healthy fp32 workers
    tolerance_margin: float = Field(default=3.0, ge=1)  # times the largest healthy distance
    tolerance_uncalibrated: Positive = 0.1  # until there are enough samples: coarse, but without false alarms
    tie_margin: float = Field(default=0.1, ge=0)  # logprob lead up to which a token may differ; 0: none
    margin_min: float = Field(default=0.02, ge=0)  # smallest logprob lead of a golden's tokens
    blind_repeats: int = Field(default=8, ge=2, le=32)  # wrong answers in a row that convict without logprobs
    samples_min: int = Field(default=30, ge=1)  # healthy answers from which the tolerance is calibrated
    calibrate_every_s: Positive = 1.0  # how often a healthy worker is probed until there are enough samples
    sampled_every: int = Field(default=5, ge=0)  # one canary in this many is sampled at random; 0: none
    unmarked_every: int = Field(
        default=10,
        ge=0,
        description="in one of this many canary intervals, a worker also gets a question that looks like a user's request; "
        "0: never",
    )
    sampled_as_users: bool = True  # at users' most common sampling parameters, once they are known
    sampled_temperature: float = Field(default=0.7, gt=0, le=1)  # of sampled canaries until then
    sampled_top_p: float = Field(default=0.95, gt=0, le=1)  # of sampled canaries until then
    sampled_top_k: int = Field(default=0, ge=0)  # of sampled canaries until then; 0: all tokens
    sampled_chance: float = Field(default=1e-10, gt=0, lt=0.01)  # P(one convicts a correct worker)
    slow_ratio: float = Field(default=3.0, gt=1)  # times the usual latency, from which an answer is slow
    slow_floor_ms: float = Field(default=50.0, ge=0)  # an excess over the baseline below this is never slow
    warmup_samples: int = Field(default=5, ge=1)  # answers until the usual latency is known
    canary_prompts: tuple[ConfiguredCanary, ...] = ()  # canaries with configured right answers, as JSON


class LivenessSettings(Strict):
    """When a worker counts as silent."""

    silent_after_s: Positive = 3.0  # without a beat, a link or an answer
    beat_s: Positive = 1.0  # interval of a worker's heartbeats
    tick_s: Positive = 0.25  # interval of the silence check
    answer_s: Positive = 0.3  # for a stalled worker to answer, where a spare is ready
    lag_max_s: Positive = 0.5  # an observer that lags more than this was not listening
    blind_share: float = Field(default=0.5, gt=0, le=1)  # silent share above which the observer is blind


class ActuatorSettings(Strict):
    """How persistently commands to workers are repeated."""

    answer_s: Positive = 1.0  # deadline of a worker's answer
    retry_s: Positive = 0.5  # until a command without an answer is repeated
    retry_max_s: Positive = 10.0  # maximum of the growing retry interval


class VersionSettings(Strict):
    """When new kinds of facts and a new version of the deciders are put in force during an upgrade."""

    soak_s: float = Field(
        default=900.0,
        ge=0,
        description="seconds for which every live process must know a new kind or version before it is used; until then "
        "the upgrade can be rolled back",
    )


class ControllerBudgets(Strict):
    """Traffic limits of one worker's account towards the controllers. Excess is dropped; the worker is reported and ejected."""

    facts_per_s: Positive = 50.0  # facts; a worker sends a few in an hour, the spool of a bad day hundreds
    facts_burst: Positive = 2_000.0  # facts at once
    fact_mb_per_s: Positive = 0.25  # MiB of facts
    fact_mb_burst: Positive = 4.0  # MiB of facts at once
    fact_mb_per_day: Positive = 64.0  # MiB of facts per day; beyond it the worker is ejected
    fact_kb_max: int = Field(default=64, ge=16)  # KiB of one fact; a registration has about 2
    beats_per_s: Positive = HEARTBEATS.messages.per_s  # heartbeats; a worker sends one a second
    beats_burst: Positive = HEARTBEATS.messages.burst  # heartbeats at once
    beat_mb_per_s: Positive = HEARTBEATS.size.per_s / MIB  # MiB of heartbeats
    beat_mb_burst: Positive = HEARTBEATS.size.burst / MIB  # MiB of heartbeats at once

    @property
    def facts(self) -> TrafficLimit:
        """The limits on the number and size of facts, per second and at once."""
        return traffic(self.facts_per_s, self.facts_burst, self.fact_mb_per_s, self.fact_mb_burst)

    @property
    def facts_of_a_day(self) -> Rate:
        """The limit on the size of a day's facts, so that one worker cannot displace others' facts from the journal."""
        return Rate(per_s=self.fact_mb_per_day * MIB / 86_400, burst=self.fact_mb_per_day * MIB)

    @property
    def beats(self) -> TrafficLimit:
        """The limits on the number and size of heartbeats, per second and at once."""
        return traffic(self.beats_per_s, self.beats_burst, self.beat_mb_per_s, self.beat_mb_burst)


class ControllerSettings(JournalSection):
    """All settings of a controller process."""

    canary: CanarySettings = CanarySettings()
    liveness: LivenessSettings = LivenessSettings()
    actuator: ActuatorSettings = ActuatorSettings()
    versions: VersionSettings = VersionSettings()
    worker_budgets: ControllerBudgets = ControllerBudgets()
    policy: FleetPolicy = Field(
        default=FleetPolicy(),
        json_schema_extra={
            "nested": {
                "breaker.wait_min": ["--breaker-wait", "seconds until an open breaker's first trial"],
                "breaker.backoff": ["--breaker-backoff", "factor of that wait after each failed trial"],
            }
        },
    )
    chaos: bool = Field(False, description="allow fault injection (holdfast chaos); never in production")
    metrics_cardinality: Literal["full", "compact"] = Field(
        "full", description="full, or compact: no metric per pair of workers, no histogram per worker"
    )
    request_plane: Literal["tcp", "nats"] = Field(
        "tcp", description="nats: also reach workers through the broker"
    )
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health and /ready")
    admin_port: int = Field(0, ge=0, le=65535, description="port on admin_host; 0: any free one")


class PlannerSettings(Strict):
    """What the planner may do, and with how much caution."""

    mode: Literal["observe", "propose", "act"] = Field(
        "propose",
        description="observe: report what models can carry; propose: also how many workers they should have; act: also apply "
        "the proposals",
    )
    every_s: Positive = Field(5.0, description="seconds between two readings of the state store")
    lost_after_s: NotNegative = Field(
        120.0, description="seconds without service after which a worker counts as lost and is replaced"
    )
    repeat_s: NotNegative = Field(
        600.0, description="seconds until a proposal that was not applied is repeated"
    )
    policy: PlannerPolicy = PlannerPolicy()
    hook_command: str = Field(
        "",
        description="act: the command that scales, JSON on its standard input; split as a shell would, but no shell runs it",
    )
    hook_url: str = Field(
        "", description="act: URL of the scale subresource to call; {model} stands for the model's name"
    )
    hook_token_file: str = Field("", description="file with the bearer token for hook_url, read at each call")
    hook_ca_file: str = Field("", description="file with the CA certificates for hook_url's server")
    hook_timeout_s: Positive = Field(30.0, description="seconds that a hook call may take")
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health, /ready and /plan")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port on admin_host; 0: any")

    @model_validator(mode="after")
    def _one_hook(self) -> Self:
        if self.hook_command and self.hook_url:
            raise ValueError("hook_command and hook_url are both set: only one of them can scale a model")
        return self

    @property
    def by(self) -> str:
        """What applies proposals: "command", "http" or "supervisor"; "" if they are not applied."""
        if self.mode != "act":
            return ""
        return "command" if self.hook_command else "http" if self.hook_url else "supervisor"


class ProjectorSettings(Strict):
    """How the projector maintains the state store."""

    snapshot_every: Annotated[int, Field(gt=0)] = Field(
        5_000,
        description="maximum events between two kept snapshots, which bounds what a starting process folds; the first snapshots "
        "are closer",
    )
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health and /ready")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port on admin_host; 0: any")
    ready_lag: Annotated[int, Field(ge=0)] = Field(
        10_000, description="lag in events behind the journal beyond which the projector is not ready"
    )
