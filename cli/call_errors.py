"""What a call's failure is to the user."""

from __future__ import annotations

import grpc

from cli.errors import EXIT_FAILED, EXIT_USAGE, CommandError
from quire_client import CallError

_WRONG_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


def from_call_error(error: CallError) -> CommandError:
    """The server's own sentence, with its status where the sentence may not say enough."""
    if error.code in _WRONG_REQUEST:
        return CommandError(str(error), EXIT_USAGE)
    return CommandError(f"{error} ({error.code.name})", EXIT_FAILED)
