"""A server that a router passes requests on to, as settings name it."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _server_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^?#\s]*)?", url):
        raise ValueError("should be http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def _zmq_endpoint(endpoint: str) -> str:
    if not re.fullmatch(r"tcp://[^/\s]+:\d{1,5}|ipc://\S+", endpoint):
        raise ValueError("should be tcp://HOST:PORT or ipc://PATH")
    return endpoint


Endpoint = Annotated[str, AfterValidator(_zmq_endpoint)]


class Upstream(BaseModel):
    """A plain OpenAI-compatible server, written `URL[,option=value]...`.

    `kv_events` and `replay` are the ZMQ endpoints of rank 0; those of rank r are r ports further.
    0 blocks, or blocks of 0 tokens, are what the server says, or an assumption.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, AfterValidator(_server_url)]
    kv_events: Endpoint | None = None
    replay: Endpoint | None = None
    topic: str = ""
    block_size: int = Field(0, ge=0)
    blocks: int = Field(0, ge=0)
    ranks: int = Field(1, ge=1, le=1024)
    api_key_env: str = ""

    @model_validator(mode="after")
    def _whole(self) -> "Upstream":
        if not self.kv_events and (self.replay or self.topic):
            raise ValueError("replay and topic go with kv_events")
        if self.ranks > 1 and (self.kv_events or "").startswith("ipc:"):
            raise ValueError("the kv_events of several ranks need tcp://HOST:PORT")
        return self


def from_text(value: object) -> object:
    """`http://a:8000,block_size=16` as the fields of an Upstream."""
    if not isinstance(value, str):
        return value
    url, *options = value.split(",")
    fields = {"url": url}
    for option in options:
        name, equals, given = option.partition("=")
        if not equals or name not in Upstream.model_fields or name == "url":
            known = ", ".join(name for name in Upstream.model_fields if name != "url")
            raise ValueError(f"{option!r} is no option of a server: {known}")
        fields[name] = given
    return fields
