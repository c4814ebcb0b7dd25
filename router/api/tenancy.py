"""Who asks, and which cache namespace is theirs."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from hotbranch.settings import Tenant
from router.api.errors import ApiError
from router.api.http import Headers

LOOPBACK = ("127.", "::1", "[::1]", "::ffff:127.", "[::ffff:127.")


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant a request belongs to. `salt` is empty where tenants share the cache."""

    tenant: str
    salt: str = ""
    secret: str = ""  # what its own cache salts are derived from

    def namespace_salt(self, cache_salt: str) -> str:
        """The salt of a request's namespace.

        A client's cache_salt separates within its tenant: another tenant that guesses it shares
        nothing.
        """
        return _derive(self.tenant, self.secret, cache_salt) if cache_salt else self.salt


ANYBODY = Caller("default")


class Tenants:
    """The configured tenants; with none, everybody is `default`."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._callers = [(tenant.key_sha256, _caller(tenant)) for tenant in tenants]

    @property
    def known(self) -> bool:
        """Whether there are tenants, who have keys of this router."""
        return bool(self._callers)

    def caller(self, headers: Headers) -> Caller:
        """The caller of a request. Raises a 401 on a missing or unknown key."""
        if not self._callers:
            return ANYBODY
        digest = _key_digest(headers)
        found = None
        for (
            expected,
            caller,
        ) in self._callers:  # all of them, so that time tells nothing
            if hmac.compare_digest(expected, digest):
                found = caller
        if found is None:
            raise _unauthorized()
        return found


def admit_operator(headers: Headers, client: str, key_sha256: str | None) -> None:
    """Raise a 401 unless the caller may use /admin: by its key, or from this host without one."""
    if key_sha256 is None:
        if not client.startswith(LOOPBACK):
            raise ApiError(403, "administration is open to this host only")
    elif not hmac.compare_digest(key_sha256, _key_digest(headers)):
        raise _unauthorized()


def _caller(tenant: Tenant) -> Caller:
    isolated = tenant.isolation == "tenant"
    salt = _derive(tenant.name, tenant.key_sha256, "") if isolated else ""
    return Caller(tenant.name, salt, tenant.key_sha256)


def _derive(*parts: str) -> str:
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in encoded)).hexdigest()


def _key_digest(headers: Headers) -> str:
    scheme, _, key = str(headers.get("authorization", "")).partition(" ")
    return sha256(key.strip().encode()).hexdigest() if scheme.lower() == "bearer" else ""


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
