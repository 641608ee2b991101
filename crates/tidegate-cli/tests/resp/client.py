"""Asks the gate through redis-py, in both versions of the protocol."""

import sys
import time

import redis
from redis.cache import CacheConfig

for protocol in (2, 3):
    client = redis.Redis(port=int(sys.argv[1]), password="a password", protocol=protocol, client_name="a-test")
    assert client.ping() is True
    assert client.client_getname() in ("a-test", b"a-test")
    assert client.info()["redis_mode"] == "standalone"
    assert abs(client.time()[0] - time.time()) < 60
    assert client.config_get("maxmemory*") == {}
    assert client.client_list()[0]["name"] in ("a-test", b"a-test")

    def check(key):
        answer = client.execute_command("TG.CHECK", "login", "KEY", key)
        return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2]))

    first = check(f"one-{protocol}")
    assert (first[b"allowed"], first[b"remaining"], first[b"retry_after"]) == (True, 4, None), first
    pipeline = client.pipeline(transaction=False)
    for _ in range(1000):
        pipeline.execute_command("TG.CHECK", "login", "KEY", f"pipeline-{protocol}")
    allowed = [dict(a if isinstance(a, dict) else zip(a[::2], a[1::2]))[b"allowed"] for a in pipeline.execute()]
    assert sum(allowed) == 5 and all(allowed[:5]), sum(allowed)
    try:
        client.execute_command("TG.CHECK", "lgoin", "KEY", "a")
        raise SystemExit("an unknown action is an error")
    except redis.ResponseError as error:
        assert 'did you mean "login"?' in str(error), error
    try:
        client.pipeline(transaction=True).execute_command("PING").execute()
        raise SystemExit("a transaction is an error")
    except redis.ResponseError as error:
        assert "is not supported" in str(error), error
    print(f"ok {protocol}")

# With its cache, the library asks the server to track keys.
cached = redis.Redis(port=int(sys.argv[1]), password="a password", protocol=3, cache_config=CacheConfig())
assert cached.execute_command("TG.CHECK", "login", "KEY", "cached")[b"remaining"] == 4
print("ok cache")

try:
    redis.Redis(port=int(sys.argv[1]), password="another").ping()
    raise SystemExit("a wrong password is an error")
except redis.AuthenticationError:
    print("ok password")
