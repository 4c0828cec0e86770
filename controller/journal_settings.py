"""Defines the settings of the journal's retention bounds: its maximum size and age.

`holdfast up` has the same settings as flags, and sets the bounds on the stream. Before the broker drops events at these
bounds, a controller writes a snapshot of the fleet to the journal, so that readers do not need the dropped events."""

from datetime import timedelta

from pydantic import Field, model_validator

from controller.setting_types import Age, Size, Strict
from events.journal.retention import AGE_MIN, BYTES_MIN, JournalBounds


class JournalSettings(Strict):
    """How much of its past the journal keeps."""

    max_bytes: Size = Field(
        10 << 30,
        ge=0,
        description="size limit, e.g. 10GiB; beyond it a snapshot replaces the oldest events; 0: no limit",
    )
    max_age: Age = Field(
        timedelta(0),
        ge=timedelta(0),
        description="age limit of events, e.g. 30d; a snapshot replaces older ones; 0: no limit",
    )

    @model_validator(mode="after")
    def _not_tiny(self) -> "JournalSettings":
        if 0 < self.max_bytes < BYTES_MIN:
            raise ValueError(f"max_bytes is {self.max_bytes}: must be at least {BYTES_MIN}, or 0")
        if timedelta(0) < self.max_age < AGE_MIN:
            raise ValueError(
                f"max_age is {self.max_age.total_seconds():g} s: must be at least {AGE_MIN.total_seconds():g}, or 0"
            )
        return self

    def bounds(self) -> JournalBounds:
        """Return the bounds as the journal's type, in which None means no limit."""
        return JournalBounds(self.max_bytes or None, self.max_age or None)


class JournalSection(Strict):
    """The journal settings that the controller shares with `holdfast up`."""

    journal: JournalSettings = Field(default=JournalSettings(), json_schema_extra={"flags": "--journal-"})
