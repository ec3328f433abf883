"""Settings of judges: models that reward functions ask, `environment.judges`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, check_server_url
from sf_core.settings import Settings

JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class JudgeConfig(Settings):
    """A model that reward functions ask. `url` or `model` says where it is."""

    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a server with the OpenAI API, such as http://HOST:8000/v1. Its key is read from the
    environment variable SF_JUDGE_KEY_NAME, where NAME is the judge's in capitals; no key without it."""
    name: str | None = Field(None, min_length=1)
    """Name of the model at that server. Empty: the first that the server lists."""
    model: FilePath | None = None
    """Folder of a Hugging Face causal LM with a chat template, or the name of one that `sf model` has made.
    Each worker that carries `reward` serves it to itself by vLLM, which `make vllm` installs."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of its replies. At 0 an equal question is asked once per worker."""
    max_tokens: int = Field(256, ge=1)
    """Maximum number of tokens of a reply."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time, in seconds, that one call may take; beyond it the call is repeated."""
    concurrency: int = Field(16, ge=1, le=1024)
    """Calls that each worker that scores makes at once."""
    max_tokens_per_iteration: int | None = Field(None, ge=1)
    """Tokens, those of questions and of replies, that all calls together may take from one batch to the next.
    When more are spent, the run ends with a sentence that says so. Empty: no bound."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> JudgeConfig:
        if (self.url is None) == (self.model is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(f"give one of url and model, which say where the judge is; given: {given}")
        if self.name is not None and self.url is None:
            raise ValueError("name is that of a model at url; a judge given as model needs none")
        if self.max_tokens_per_iteration is not None and self.max_tokens_per_iteration < self.max_tokens:
            raise ValueError(
                f"max_tokens_per_iteration ({self.max_tokens_per_iteration}) is below one reply of "
                f"max_tokens ({self.max_tokens}): raise it, or leave it out"
            )
        return self
