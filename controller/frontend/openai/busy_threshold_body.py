"""What does a request to `/busy_threshold` say?"""

from pydantic import BaseModel, ConfigDict

from controller.deciders.thresholds import BusyThresholds


class BusyThresholdBody(BaseModel):
    """What is asked: of which model, and what is to be set."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    @property
    def given(self) -> BusyThresholds:
        """What is to be set. Raise ValueError for what is out of range."""
        return BusyThresholds(
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )
