"""Asks the gate through gRPC's own library and Envoy's own messages, with and without the certificate of a client."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.auth.v3.external_auth_pb2 import CheckRequest
from envoy.service.auth.v3.external_auth_pb2_grpc import AuthorizationStub
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

port, folder = sys.argv[1], Path(sys.argv[2])
authority, certificate, key = ((folder / name).read_bytes() for name in ("ca.pem", "client.pem", "client.key"))
OK, OVER = RateLimitResponse.OK, RateLimitResponse.OVER_LIMIT


def connect(**credentials):
    # Each channel has a connection of its own.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(authority, **credentials), options)


def descriptor(hits=None, **entries):
    made = RateLimitDescriptor()
    for name, value in entries.items():
        made.entries.add(key=name, value=value)
    if hits is not None:
        made.hits_addend.value = hits
    return made


def error_of(call):
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise SystemExit("an error was expected")


stranger = error_of(lambda: HealthStub(connect()).Check(HealthCheckRequest()))
assert stranger.code() == grpc.StatusCode.UNAVAILABLE, stranger

channel = connect(private_key=key, certificate_chain=certificate)
service = RateLimitServiceStub(channel)
for name in ("", "envoy.service.ratelimit.v3.RateLimitService", "envoy.service.auth.v3.Authorization"):
    health = HealthStub(channel).Check(HealthCheckRequest(service=name))
    assert health.status == HealthCheckResponse.SERVING, name
unknown = error_of(lambda: HealthStub(channel).Check(HealthCheckRequest(service="other")))
assert unknown.code() == grpc.StatusCode.NOT_FOUND, unknown


def ask(domain, *descriptors, hits=0):
    return service.ShouldRateLimit(RateLimitRequest(domain=domain, descriptors=descriptors, hits_addend=hits))


# The policy's own limits: 5 per hour.
login = {"action": "login", "remote_address": "203.0.113.7"}
for left in (4, 3, 2):
    answer = ask("tidegate", descriptor(**login))
    assert answer.overall_code == OK and answer.statuses[0].limit_remaining == left, answer
assert ask("tidegate", descriptor(hits=0, **login)).statuses[0].limit_remaining == 2
refused = [ask("tidegate", descriptor(**login), hits=2), ask("tidegate", descriptor(**login))][1]
assert refused.overall_code == OVER, refused
limit = refused.statuses[0].current_limit
assert (limit.requests_per_unit, limit.unit, limit.name) == (5, RateLimitResponse.RateLimit.HOUR, "login"), limit
headers = {header.key: header.value for header in refused.response_headers_to_add}
assert int(headers["retry-after"]) == refused.statuses[0].duration_until_reset.seconds, headers

# Limits of Envoy's and of limitador's files, and one that the request states.
edge = [ask("edge", descriptor(user="alice"), descriptor(other="x")) for _ in range(3)]
assert [answer.overall_code for answer in edge] == [OK, OK, OVER], edge
assert [status.code for status in edge[2].statuses] == [OVER, OK], edge
shop = [ask("shop", descriptor(user="alice")).overall_code for _ in range(3)]
assert shop == [OK, OK, OVER], shop
stated = descriptor(stated="x")
stated.limit.requests_per_unit, stated.limit.unit = 1, RateLimitResponse.RateLimit.MINUTE
assert [ask("edge", stated).overall_code for _ in range(2)] == [OK, OVER]
for wrong in (RateLimitRequest(domain="tidegate"), RateLimitRequest(descriptors=[descriptor(user="a")])):
    invalid = error_of(lambda: service.ShouldRateLimit(wrong))
    assert invalid.code() == grpc.StatusCode.INVALID_ARGUMENT, invalid

# The authorization service has the same counts.
check = CheckRequest()
check.attributes.source.address.socket_address.address = "203.0.113.7"
request = check.attributes.request.http
request.method, request.path, request.host = "POST", "/login?next=/", "a.test"
request.header_map.headers.add(key="accept", raw_value=b"application/problem+json")
denied = AuthorizationStub(channel).Check(check)
assert (denied.status.code, denied.denied_response.status.code) == (8, 429), denied
assert "quota-exceeded" in denied.denied_response.body, denied
check.attributes.source.address.socket_address.address = "203.0.113.8"
admitted = AuthorizationStub(channel).Check(check)
told = {option.header.key: option.header.value for option in admitted.ok_response.response_headers_to_add}
assert admitted.status.code == 0 and told["ratelimit"].startswith('"login";r=4'), admitted

# Four connections of 64 streams at a time never exceed a limit of 100.
channels = [RateLimitServiceStub(connect(private_key=key, certificate_chain=certificate)) for _ in range(4)]
busy = RateLimitRequest(domain="tidegate", descriptors=[descriptor(action="busy", key="k")])
with ThreadPoolExecutor(256) as pool:
    codes = list(pool.map(lambda n: channels[n % 4].ShouldRateLimit(busy).overall_code, range(1000)))
assert (codes.count(OK), codes.count(OVER)) == (100, 900), codes
print("ok")
