"""How much of its past the journal keeps. A controller says the fleet on the journal in time for these bounds, and `holdfast up`,
which has the same flags, gives them to the stream."""

from datetime import timedelta

from pydantic import Field, model_validator

from controller.setting_types import Age, Size, Strict
from events.journal.bounds import AGE_MIN, BYTES_MIN, JournalBounds


class JournalSettings(Strict):
    """The bounds of the journal."""

    max_bytes: Size = Field(
        10 << 30,
        ge=0,
        description="how large the journal may get, as 10GiB: its oldest events go then, behind a snapshot; 0: no bound",
    )
    max_age: Age = Field(
        timedelta(0),
        ge=timedelta(0),
        description="how old its events may get, as 30d: older ones go, behind a snapshot; 0: no bound",
    )

    @model_validator(mode="after")
    def _not_tiny(self) -> "JournalSettings":
        if 0 < self.max_bytes < BYTES_MIN:
            raise ValueError(f"max_bytes is {self.max_bytes}: {BYTES_MIN} at least, or 0")
        if timedelta(0) < self.max_age < AGE_MIN:
            raise ValueError(
                f"max_age is {self.max_age.total_seconds():g} s: {AGE_MIN.total_seconds():g} at least, or 0"
            )
        return self

    def bounds(self) -> JournalBounds:
        """Return them as the journal takes them."""
        return JournalBounds(self.max_bytes or None, self.max_age or None)


class JournalSection(Strict):
    """The part of a controller's settings that `holdfast up` shares."""

    journal: JournalSettings = Field(default=JournalSettings(), json_schema_extra={"flags": "--journal-"})
