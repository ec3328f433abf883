"""What an attempt to work on a run leaves in the run directory: where it can be asked for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.json_files import first_fault


class Attempt(BaseModel):
    """Nothing is known of attempts of earlier versions: their files are empty."""

    model_config = ConfigDict(frozen=True)

    dataplane: str | None = None
    """URL of the data plane that serves it; empty if none does any more."""
    host: str | None = None
    """Name of the machine on which it began: elsewhere, a URL on loopback means another data plane."""
    evaluate_only: bool = False
    """It measures a policy version and trains nothing."""


def parse_attempt(uri: str, text: bytes) -> Attempt:
    """Raises ValueError with one sentence if this is no attempt."""
    try:
        return Attempt.model_validate_json(text) if text else Attempt()
    except ValidationError as error:
        raise ValueError(f"{uri}: attempt cannot be read: {first_fault(error)}") from None
