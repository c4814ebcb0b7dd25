"""Errors as OpenAI's API words them: a status, and {"error": {message, type, param, code}}."""

from collections.abc import Mapping

import orjson

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What the client is told. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON body, and what follows `data: ` when a stream fails."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400. The message starts with the field, so that it reads well without `param`."""
    return ApiError(400, f"{param}: {message}" if param else message, param, code)


def unknown_model(name: str) -> ApiError:
    return ApiError(
        404, f"the model {name[:128]!r} does not exist", "model", code="model_not_found"
    )


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")


def unavailable(message: str, retry_after_s: int, overloaded: bool = False) -> ApiError:
    """503, or 429 where the fleet is full rather than absent."""
    retry = {"retry-after": str(max(1, retry_after_s))}
    code = "overloaded" if overloaded else "unavailable"
    return ApiError(429 if overloaded else 503, message, code=code, headers=retry)


STOPPING = unavailable("the router is stopping", 1)
