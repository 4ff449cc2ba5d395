"""What a user reads when something fails: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import grpc

from quire_client import CallError

EXIT_FAILED = 1
"""The server could not be reached, or the request failed there."""
EXIT_USAGE = 2
"""A flag, a file or a value is wrong."""
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Ends the command with `exit_code`; `str(error)` is a sentence for the user."""

    def __init__(self, sentence: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class NoServer(CommandError):
    """Nothing answers at the address."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"no server answers at {address}; start one with `quire serve --model PATH`, "
            "or name another with --server"
        )


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
