"""Response bodies of the small endpoints. /openapi.json is generated from these models, too."""

import msgspec


class Tokenized(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int  # maximum tokens of a prompt and its answer together
    tokens: list[int]
    token_strs: list[str] | None = None  # their names in the vocabulary


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class Version(msgspec.Struct):
    """The version of Holdfast."""

    version: str


class ModelEntry(msgspec.Struct):
    """One served model."""

    id: str
    max_model_len: int  # maximum tokens of a prompt and its answer together
    object: str = "model"
    created: int = 0  # unknown
    owned_by: str = "holdfast"
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an alias: the model it refers to


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelEntry]
    object: str = "list"
