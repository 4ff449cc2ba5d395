"""The scheduler container's health: does the gRPC port say that requests will be answered?

It does while a worker is ready. Speaks plaintext, as the compose file serves it.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main() -> int:
    """0 when the service is serving."""
    port = os.environ.get("QUIRE_LISTEN", "127.0.0.1:50051").rpartition(":")[2]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"no answer: {error}")
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
