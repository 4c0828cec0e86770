"""Type aliases for decoded JSON objects."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
"""A JSON object."""

JsonView: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
