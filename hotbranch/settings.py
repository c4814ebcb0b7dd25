"""Every setting of every process, typed, with one meaning each.

Values come, strongest first, from flags (`--kv-tokens 8192`), the environment
(`HOTBRANCH_KV_TOKENS`), a YAML file (`--config` or `HOTBRANCH_CONFIG`), and the defaults here.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from hotbranch.upstream import Upstream, from_text

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
# `router.schedule.policies.POLICIES`, which this package does not import.
RoutingPolicy = Literal[
    "hotbranch",
    "round_robin",
    "least_load",
    "power_of_two",
    "session_sticky",
    "consistent_hash_bounded",
    "sglang_threshold",
    "llm_d",
    "preble_e2",
    "dynamo_linear",
    "lmetric",
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _host_and_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    plain = re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.%\w]+\]", host)
    if not (plain and re.fullmatch(r"\d{1,5}", port) and int(port) <= 65535):
        raise ValueError("should be HOST:PORT")
    return address


Address = Annotated[str, AfterValidator(_host_and_port)]


class Tenant(BaseModel):
    """A tenant, known by its API key. `isolation: tenant` salts its cache namespace."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    key_sha256: Sha256
    isolation: Literal["shared", "tenant"] = "shared"
    weight: Annotated[float, Field(gt=0)] = 1.0  # its share of what busy replicas compute


class Logged(BaseModel):
    """Settings of every process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="log lines as JSON or text; auto: text on a terminal"
    )


class Common(Logged):
    """Settings of every process that knows the model."""

    model: str = Field("smollm2", description="model directory (HF layout), or smollm2")
    served_name: str = Field("", description="model name on the API; default: the directory's name")
    cache_dir: Path = Field(
        Path("~/.cache/hotbranch"), description="where the converted embedded model is kept"
    )
    starvation_s: Seconds = Field(60.0, description="a request older than this goes first")


class EngineSettings(Common):
    """Settings of the engine of a replica."""

    engine: Literal["radix", "vllm", "simulated"] = Field(
        "radix", description="engine; simulated: the timing of a GPU, without one"
    )
    engine_args: dict[str, Any] = Field(
        {},
        description="an argument of vLLM's engine; repeat for more",
        json_schema_extra={"metavar": "NAME=VALUE"},
    )
    profile: str = Field(
        "h100-llama-3.1-8b", description="simulated GPU and model: a name, or a .yaml file"
    )
    device: str = Field("auto", description="torch device: auto, cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="weights")
    threads: int = Field(0, ge=0, description="torch threads; 0: all cores")
    block_size: Positive = Field(16, description="tokens in a KV block")
    kv_tokens: Positive = Field(16384, description="KV pool, in tokens")
    max_context: int = Field(0, ge=0, description="longest sequence; 0: the model's own limit")
    chunk_tokens: Positive = Field(512, description="prefill tokens computed in one step, at most")
    max_running: Positive = Field(64, description="sequences decoded together, at most")
    max_waiting: Positive = Field(4096, description="requests waiting in the engine, at most")
    policy: Literal["fcfs", "longest_prefix", "least_uncached", "dfs_weight"] = Field(
        "longest_prefix", description="admission order"
    )
    step_timeout_s: Seconds = Field(
        120.0, description="an engine with open requests and no step for so long hangs"
    )


class ReplicaSettings(EngineSettings):
    """Settings of a replica that runs alone."""

    replica_id: str = Field("", description="name of this replica; default: host:port")
    host: str = Field("127.0.0.1", description="address to listen on")
    grpc_port: Port = Field(0, description="gRPC port; 0 picks a free one")
    metrics_port: Port = Field(0, description="Prometheus port of the replica; 0 picks a free one")


class GatewaySettings(Common):
    """Settings of one router."""

    router_host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8080, description="HTTP port; 0 picks a free one")
    models: dict[str, str] = Field(
        {},
        description="a further model of the fleet; repeat for more",
        json_schema_extra={"metavar": "NAME=DIR"},
    )
    tenants: list[Tenant] = Field(
        [], description="tenants and their keys (YAML); none: open to all"
    )
    admin_key_sha256: Sha256 | None = Field(
        None, description="hash of the key for /admin; unset: loopback clients only"
    )
    max_body_bytes: Positive = Field(8 << 20, description="largest request body")
    max_choices: Positive = Field(
        16, description="largest n, and prompts in one completion request"
    )
    max_open: Positive = Field(4096, description="requests in flight, at most; beyond: 429")
    index_blocks: Positive = Field(
        1 << 22, description="blocks the index knows of, at most; from 90 bytes each"
    )
    routing_policy: RoutingPolicy = Field(
        "hotbranch",
        description="how a replica is chosen",
        json_schema_extra={"metavar": "NAME"},
    )
    window: Seconds = Field(
        1.0, description="chunks of prefill that a replica has ahead while others wait"
    )
    max_queued: Positive = Field(
        2048, description="requests waiting for their turn, at most; beyond: 429"
    )
    deadline_s: float = Field(
        0.0,
        ge=0,
        description="a request that cannot begin within so many seconds gets a 429; 0: it waits",
    )
    prediction_s: Seconds = Field(30.0, description="life of a predicted cache entry")
    drain_s: Seconds = Field(30.0, description="how long a stopping process lets requests finish")

    @field_validator("tenants")
    @classmethod
    def _distinct(cls, tenants: list[Tenant]) -> list[Tenant]:
        for field in ("name", "key_sha256"):
            if len({getattr(tenant, field) for tenant in tenants}) < len(tenants):
                raise ValueError(f"two tenants have the same {field}")
        return tenants


class RouterSettings(GatewaySettings):
    """Settings of a router that runs alone."""

    replica: list[Address] = Field(
        [],
        description="a replica; repeat for more",
        json_schema_extra={"metavar": "HOST:PORT"},
    )
    upstream: list[Annotated[Upstream, BeforeValidator(from_text)]] = Field(
        [],
        description="a plain OpenAI-compatible server, in place of replicas; repeat for more; "
        "options: kv_events=tcp://HOST:PORT, replay=tcp://HOST:PORT, topic=TEXT, block_size=N, "
        "blocks=N, ranks=N, api_key_env=VARIABLE",
        json_schema_extra={"metavar": "URL[,OPTION=VALUE]..."},
    )

    @field_validator("upstream", mode="before")
    @classmethod
    def _joined(cls, upstreams: object) -> object:
        """A list that was split at every comma has options as items of their own."""
        if not isinstance(upstreams, list):
            return upstreams
        joined: list[object] = []
        for item in upstreams:
            option = isinstance(item, str) and re.match(r"\w+=", item)
            if option and joined and isinstance(joined[-1], str):
                joined[-1] += f",{item}"
            else:
                joined.append(item)
        return joined

    @field_validator("upstream")
    @classmethod
    def _alone(cls, upstreams: list[Upstream], info: ValidationInfo) -> list[Upstream]:
        if len({upstream.url for upstream in upstreams}) < len(upstreams):
            raise ValueError("two upstreams have the same URL")
        if upstreams and info.data.get("replica"):
            raise ValueError("a router has replicas or upstreams, not both")
        for tenant in info.data.get("tenants", []) if upstreams else []:
            if tenant.isolation == "tenant":
                raise ValueError(
                    f"tenant {tenant.name} has isolation: tenant, which needs replicas: the body "
                    "of a request to an upstream is passed on as it is, without a salt"
                )
        return upstreams


class RaySettings(BaseModel):
    """How the processes lie on a Ray cluster."""

    replicas: Positive = Field(2, description="number of replicas")
    max_replicas: int = Field(
        0, ge=0, description="replicas that there may be while their work needs them; 0: no more"
    )
    target_queue_s: Seconds = Field(
        2.0, description="seconds of prefill that may wait for a replica before there are more"
    )
    scale_up_s: float = Field(
        10.0, ge=0, description="how long too much must have waited before replicas are added"
    )
    scale_down_s: float = Field(
        300.0, ge=0, description="how long replicas must have been too many before they go"
    )
    replica_gpus: float = Field(0.0, ge=0, description="GPUs of each replica")
    replica_cpus: float = Field(1.0, ge=0, description="CPUs Ray reserves for each replica")
    router_cpus: float = Field(0.1, ge=0, description="CPUs Ray reserves for the router")

    @field_validator("max_replicas")
    @classmethod
    def _no_fewer(cls, most: int, info: ValidationInfo) -> int:
        if 0 < most < info.data.get("replicas", 1):
            raise ValueError("should be 0, or no less than replicas")
        return most

    @property
    def most_replicas(self) -> int:
        """So many replicas there are at most."""
        return max(self.replicas, self.max_replicas)


class UpSettings(EngineSettings, GatewaySettings, RaySettings):
    """Settings of a fleet on Ray, which places replicas and tells the router where they are."""


class RayLlmSettings(BaseModel):
    """Settings of the request router for Ray Serve LLM: its `request_router_kwargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        "", description="model directory (HF layout), or smollm2; none: texts are compared"
    )
    block_size: Positive = Field(16, description="tokens in a KV block")
    kv_tokens: Positive = Field(400_000, description="KV pool of a replica, in tokens")
    prefill_s_per_token: Seconds = Field(
        1e-4, description="seconds that a replica computes a token of prompt"
    )


class DoctorSettings(Logged):
    """Settings of an examination."""

    url: str = Field(
        "http://127.0.0.1:8080",
        pattern=r"^https?://[^/\s]+/?$",
        description="the router; also the bare argument",
    )
    api_key: str = Field("", description="a tenant's key")
    admin_key: str = Field("", description="the key for /admin")
    as_json: bool = Field(
        False,
        description="findings as JSON",
        json_schema_extra={"alias": "--json"},
    )


class SimulateSettings(Common):
    """Settings of a simulation."""

    trace: str = Field("", description="file of requests, or shape:NAME; also the bare argument")
    replicas: Positive = Field(8, description="number of replicas")
    routers: Positive = Field(1, description="number of routers; requests come to them in turn")
    report_s: float = Field(
        0.0, ge=0, description="seconds until a router hears what a replica reports"
    )
    policies: list[str] = Field(
        [],
        description="a routing policy, or all; repeat or join by commas; default: hotbranch",
        json_schema_extra={"metavar": "NAME", "alias": "--policy"},
    )
    speed: Seconds = Field(1.0, description="how much faster than recorded requests arrive")
    requests: int = Field(0, ge=0, description="only the first so many; 0: all, or 4000 of a shape")
    profile: str = Field(
        "h100-llama-3.1-8b", description="timing model of a replica: a name, or a .yaml file"
    )
    block_size: int = Field(
        0, ge=0, description="tokens in a KV block; 0: 512 for a Mooncake trace, else 16"
    )
    seed: int = Field(0, description="of what is made up or drawn")
    rate: float = Field(
        0.0, ge=0, description="requests a second of a shape; 0: what keeps the replicas busy"
    )
    shape_tenants: Positive = Field(
        4, description="tenants of a shape", json_schema_extra={"alias": "--tenants"}
    )
    window: Seconds = Field(
        1.0, description="chunks of prefill that a replica has ahead while others wait"
    )
    order: Literal["depth_first", "arrival"] = Field(
        "depth_first", description="order of requests that wait at the router"
    )
    admission: Literal["auto", "fcfs", "longest_prefix", "least_uncached", "dfs_weight"] = Field(
        "auto",
        description="order of requests that wait at a replica; auto: as where the policy is from",
    )
    jobs: Positive = Field(1, description="policies simulated at the same time")
    json_file: Path | None = Field(
        None,
        description="where to write all results",
        json_schema_extra={"metavar": "FILE", "alias": "--json"},
    )
    plot: Path | None = Field(
        None,
        description="where to draw a comparison, .png or .svg (needs matplotlib)",
        json_schema_extra={"metavar": "FILE"},
    )

    @field_validator("policies")
    @classmethod
    def _split(cls, policies: list[str]) -> list[str]:
        return [name for item in policies for name in item.split(",") if name]

    @field_validator("plot")
    @classmethod
    def _drawable(cls, plot: Path | None) -> Path | None:
        if plot and plot.suffix not in (".png", ".svg"):
            raise ValueError("should end in .png or .svg")
        return plot
