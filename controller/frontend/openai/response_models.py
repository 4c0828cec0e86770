"""Response bodies of the small endpoints. /openapi.json is made of these models, too."""

import msgspec


class Tokenized(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int  # tokens that a prompt and its answer may have together
    tokens: list[int]
    token_strs: list[str] | None = None  # what the vocabulary calls them


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class Version(msgspec.Struct):
    """Which Holdfast this is."""

    version: str


class ModelEntry(msgspec.Struct):
    """One model that is served."""

    id: str
    max_model_len: int  # tokens that a prompt and its answer may have together
    object: str = "model"
    created: int = 0  # not known
    owned_by: str = "holdfast"
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an alias: the model that it stands for


class ModelList(msgspec.Struct):
    """All models that are served."""

    data: list[ModelEntry]
    object: str = "list"
