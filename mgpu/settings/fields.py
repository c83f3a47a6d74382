"""What the blocks of the settings share."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from mgpu.model.addresses import Block as AddressBlock
from mgpu.model.addresses import read_block


class Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(listed)]


def _address_block(value: object) -> object:
    if isinstance(value, str):
        return read_block(value)
    if isinstance(value, AddressBlock):
        return value
    raise ValueError("must be an address or a block such as 192.0.2.0/24 or 2001:db8::/32")


AddressBlocks = Annotated[tuple[Annotated[AddressBlock, BeforeValidator(_address_block)], ...], BeforeValidator(listed)]
