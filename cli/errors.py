"""What a user reads when something fails: one sentence and an exit code, never a traceback."""

from __future__ import annotations

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
