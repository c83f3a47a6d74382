"""What the blocks of the settings share."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
