"""Defines the types of settings that several blocks share.

The alias of a field, or else its name, is its key in files and environment variables. The other modules of
`mgpu.settings` use these types.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mgpu.model.addresses import Block as AddressBlock
from mgpu.model.addresses import read_block
from mgpu.model.card_policies import SELECTABLE


class Block(BaseModel):
    """A block of settings. It is frozen and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


def to_lower_case(value: object) -> object:
    """Return a text in lower case, and any other value unchanged."""
    return value.lower() if isinstance(value, str) else value


def split_list(value: object) -> object:
    """Return the parts of a comma-separated text, and any other value unchanged."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(split_list)]
"""A list of names, which may also be written as one string with commas."""


def _address_block(value: object) -> object:
    if isinstance(value, str):
        return read_block(value)
    if isinstance(value, AddressBlock):
        return value
    raise ValueError("must be an address or a block such as 192.0.2.0/24 or 2001:db8::/32")


AddressBlocks = Annotated[
    tuple[Annotated[AddressBlock, BeforeValidator(_address_block)], ...], BeforeValidator(split_list)
]

CARD_POLICIES = SELECTABLE
NODE_POLICIES = CARD_POLICIES

if TYPE_CHECKING:
    _Policy = str
else:
    _Policy = Literal[SELECTABLE]  # type checkers do not accept a variable in Literal, but pydantic does
Policy = Annotated[_Policy, BeforeValidator(to_lower_case)]
Port = Annotated[int, Field(ge=0, le=65535)]
ExtraPort = Annotated[int, Field(ge=-1, le=65535)]
"""The port of optional endpoints, or -1 if they are not served."""
