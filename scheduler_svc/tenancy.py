"""What keeps tenants apart: each has request ids and cached prefixes of its own.

A tenant that met another's would learn what that one asks: from counts of cached tokens, from how
soon an answer begins, from ids that are in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Tenancy:
    """How names that clients choose are made the tenant's own."""

    has_tenants: bool = False
    """Whether any token names a tenant; without, ids are as the client gave them."""
    shares_prefixes: bool = False
    """Whether tenants share cached prefixes, where they also choose the same salt."""

    def request_id(self, tenant: str, client_id: str) -> RequestId:
        """The id inside the server, and for the operator. No tenant's name has a slash."""
        return RequestId(f"{tenant}/{client_id}" if self.has_tenants else client_id)

    def cache_salt(self, tenant: str, client_salt: str) -> bytes:
        """The salt of the request's block hashes. No tenant's name has a zero byte."""
        owner = b"" if self.shares_prefixes else tenant.encode()
        return owner + b"\0" + client_salt.encode()
