"""Errors that a caller can act on: typed, with fields; mapped to gRPC statuses in one place."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every operating error. `str(error)` is a sentence for the user."""


class InvalidArgument(QuireError):
    """A request breaks a documented limit.

    `field` is the proto path of what is wrong, such as "sampling.top_p".
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ResourceExhausted(QuireError):
    """A named limit is reached; the same request may pass after `retry_after_s` seconds."""

    def __init__(self, limit: str, description: str, retry_after_s: float) -> None:
        super().__init__(description)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Unavailable(QuireError):
    """No ready worker, draining, or paused; try again after `retry_after_s` seconds."""

    def __init__(self, description: str, retry_after_s: float) -> None:
        super().__init__(description)
        self.retry_after_s = retry_after_s


class AlreadyExists(QuireError):
    """Another live request has this id."""


class NotFound(QuireError):
    """No such model, request or worker."""


class DeadlineExceeded(QuireError):
    """The request waited longer than its queue timeout, or can't start in time."""


class Aborted(QuireError):
    """The request was lost and can't be recovered, or failed by itself on the worker."""


class Unauthenticated(QuireError):
    """The call shows no token that is good at its port."""


class ConfigError(QuireError):
    """A flag, file or environment value is wrong; the process exits with code 2."""


class ModelLoadError(QuireError):
    """A model's files are missing, broken or of an unsupported kind."""


class ProtocolError(QuireError):
    """A frame on the worker plane breaks the protocol; it is dropped and counted."""
