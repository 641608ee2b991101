"""Calls a server through the gate with gRPC's own library, which reads refusals and repeats what is unavailable."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

gate, port = sys.argv[1:]


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Echo(),))
server.add_insecure_port(f"127.0.0.1:{port}")
server.start()

policy = {
    "maxAttempts": 5,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.1s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
retries = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
channel = grpc.insecure_channel(f"127.0.0.1:{gate}", options=[("grpc.service_config", retries)])


def error_of(method):
    try:
        channel.unary_unary(method)(b"")
    except grpc.RpcError as error:
        return error
    raise SystemExit("an error was expected")


say = channel.unary_unary("/test.Echo/Say")
assert [say(b"a"), say(b"b")] == [b"a", b"b"]
refused = error_of("/test.Echo/Say")
assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, refused
metadata = dict(refused.initial_metadata() or ()) | dict(refused.trailing_metadata())
assert metadata["ratelimit"].startswith('"call";r=0'), metadata
assert refused.details() == f"Too many requests; retry after {metadata['retry-after']} s", refused
server.stop(None).wait()
gone = error_of("/test.Other/Say")
assert gone.code() == grpc.StatusCode.UNAVAILABLE, gone
print("ok")
