"""What settings are made of: models that refuse names they do not know, and the kinds of number in them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
# Products of a few of these are still numbers.
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """A settings model that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)
