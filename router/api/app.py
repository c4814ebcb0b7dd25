"""The routes: which path and method leads where, and what all answers have in common."""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry

from hotbranch.settings import GatewaySettings
from router.api.errors import ApiError
from router.api.generate import Generator, log_crash
from router.api.http import Headers, Request, Response
from router.api.inference import Inference
from router.api.info import Info
from router.api.passing import Passing
from router.api.recorder import Recorder
from router.api.tenancy import Tenants, admit_operator
from router.generation import Dispatcher, Forwarder
from router.prompt.models import Catalog

Handler = Callable[[Request], Awaitable[Response]]
# Path, then method, to handler. A path that ends in a slash takes everything below it, which its
# handler finds in `Request.tail`.
Routes = Mapping[str, Mapping[str, Handler]]

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class App:
    """The router's HTTP application.

    The `dispatcher` places prompts on replicas, and answers are made here; without one, the
    `forwarder` passes requests and answers as they are. `ready` names the models that some replica
    is ready to serve. `admin` adds routes for operators only. Every answer carries x-request-id,
    the client's own where it is printable ASCII of at most 128 characters.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        catalog: Catalog,
        dispatcher: Dispatcher | None,
        recorder: Recorder,
        ready: Callable[[], Collection[str]],
        registry: CollectorRegistry,
        admin: Routes,
        now: Callable[[], float] = time.time,
        forwarder: Forwarder | None = None,
    ) -> None:
        self.max_body_bytes = settings.max_body_bytes
        self._recorder = recorder
        self._admin_key = settings.admin_key_sha256
        self._admin = admin
        tenants = Tenants(settings.tenants)
        info = Info(catalog, tenants, ready, registry)
        routes: Routes
        if dispatcher is None:
            assert forwarder is not None, "it serves somehow"
            routes = Passing(catalog.models, settings, forwarder, recorder).routes()
        else:
            self.generator = Generator(dispatcher, recorder, settings.max_open)
            inference = Inference(
                catalog, tenants, self.generator, settings.max_choices, settings.deadline_s, now
            )
            routes = {
                "/v1/chat/completions": {"POST": inference.chat},
                "/v1/completions": {"POST": inference.completions},
                "/v1/models": {"GET": info.list_models},
                "/v1/models/": {"GET": info.one_model},
                "/tokenize": {"POST": inference.tokenize},
                "/detokenize": {"POST": inference.detokenize},
            }
        self._routes: Routes = {
            **routes,
            "/health": {"GET": info.health},
            "/ready": {"GET": info.ready},
            "/metrics": {"GET": info.metrics},
            "/version": {"GET": info.version},
            **admin,
        }
        self._below = sorted((path for path in self._routes if path.endswith("/")), reverse=True)

    def identify(self, headers: Headers) -> str:
        given = headers.get("x-request-id")
        return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def failed(self, request_id: str, error: ApiError) -> Response:
        self._recorder.answered("unknown", error.status)
        return _error(error, request_id)

    async def respond(self, request: Request) -> Response:
        path = self._match(request.path)
        try:
            response = await self._handle(path, request)
        except ApiError as error:
            response = _error(error, request.request_id)
        except Exception as error:
            log_crash(error, request.request_id)
            response = _error(ApiError(500, "the router failed"), request.request_id)
        else:
            response.headers["x-request-id"] = request.request_id
        self._recorder.answered(path or "unknown", response.status)
        return response

    def _match(self, path: str) -> str:
        """The route of a path, empty when there is none."""
        if path in self._routes and not path.endswith("/"):
            return path
        return next((p for p in self._below if path.startswith(p) and path != p), "")

    async def _handle(self, path: str, request: Request) -> Response:
        if not path:
            raise ApiError(404, f"there is nothing at {request.path[:256]}", code="not_found")
        if path in self._admin:
            admit_operator(request.headers, request.client, self._admin_key)
        methods = self._routes[path]
        # The server leaves the body out of an answer to HEAD.
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            raise ApiError(
                405,
                f"{request.method} is not allowed here",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        return await handler(replace(request, tail=request.path[len(path) :]))


def _error(error: ApiError, request_id: str) -> Response:
    headers = {**error.headers, "x-request-id": request_id}
    return Response(error.status, error.body(), headers)
