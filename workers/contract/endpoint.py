"""The configuration of a model behind an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

from pydantic import Field, field_validator

from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.text import has_credentials, is_secret

_CREDENTIALS = "holds credentials, and a spec holds none: put the key into a variable (api_key_variable)"


class EndpointConfig(Frozen):
    """A model behind an endpoint that speaks OpenAI's protocol."""

    url: str
    """Address of the endpoint, such as `https://api.openai.com/v1`."""
    model: str
    """Name of the model."""
    api_key_variable: str = ""
    """Environment variable of the workers with the key; empty if the endpoint needs none."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of a request."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests of one worker at the same time."""
    retries: int = Field(default=4, ge=0)
    """Repetitions of a request that was refused for load (429), failed (5xx) or lost, with exponential back-off."""

    @field_validator("url")
    @classmethod
    def _has_no_credentials(cls, url: str) -> str:
        if has_credentials(url):
            raise ValueError(_CREDENTIALS)
        return url

    @field_validator("headers")
    @classmethod
    def _have_no_credentials(cls, headers: dict[str, str]) -> dict[str, str]:
        if any(is_secret(name.replace("-", "_")) for name in headers):
            raise ValueError(_CREDENTIALS)
        return headers
