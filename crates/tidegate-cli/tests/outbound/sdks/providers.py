"""The APIs of OpenAI, Anthropic, GitHub and TMDB on one port, as their documentation describes them.

Each request must carry the provider's real credential. What a request asks for says how it is answered: `throttled`
is refused once with 429 and Retry-After, `failing` fails once with 500, `broken` fails always.
"""

import json
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

KEY = "the-real-credential"
seen = Counter()
lock = Lock()


def is_first(what):
    with lock:
        seen[what] += 1
        return seen[what] == 1


class Provider(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body, headers=()):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [*events, ""]:
            data = event.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def handle_all(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        provider, _, path = url.path.lstrip("/").partition("/")
        getattr(self, provider)(path, query, body)

    do_GET = do_POST = handle_all

    def trouble(self, what, error):
        """Answers a request that asks for trouble; returns true if it did."""
        name = str(what)
        if name.endswith("throttled") and is_first(name):
            self.reply(429, error("rate limited"), [("Retry-After", "1")])
        elif name.endswith("failing") and is_first(name) or name.endswith("broken"):
            self.reply(500, error("an internal error"))
        else:
            return False
        return True

    def openai(self, path, query, body):
        def error(message):
            return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}

        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.reply(401, error("a wrong key"))
        if path == "v1/files":
            after = int(query.get("after", "file-0")[5:])
            files = [
                {"id": f"file-{n}", "object": "file", "bytes": 1, "created_at": 1, "filename": "a", "purpose": "batch",
                 "status": "processed"}
                for n in range(after + 1, after + 3)
            ]
            return self.reply(200, {"object": "list", "data": files, "has_more": after < 4})
        model = body["model"]
        if self.trouble(f"openai {model}", error):
            return None
        start = {"id": "c1", "created": 1, "model": model}
        if body.get("stream"):
            pieces = [
                {**start, "object": "chat.completion.chunk",
                 "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
                for word in ["Hello", " ", "you"]
            ]
            return self.stream([f"data: {json.dumps(piece)}\n\n" for piece in pieces] + ["data: [DONE]\n\n"])
        message = {"role": "assistant", "content": "Hello you"}
        return self.reply(200, {
            **start, "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        })

    def anthropic(self, path, query, body):
        def error(message):
            return {"type": "error", "error": {"type": "api_error", "message": message}}

        if self.headers.get("X-Api-Key") != KEY:
            return self.reply(401, error("a wrong key"))
        if path == "v1/models":
            after = int(query.get("after_id", "m0")[1:])
            models = [
                {"type": "model", "id": f"m{n}", "display_name": "M", "created_at": "2026-01-01T00:00:00Z"}
                for n in range(after + 1, after + 3)
            ]
            ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return self.reply(200, {"data": models, "has_more": after < 4, **ends})
        if path != "v1/messages":
            return self.reply(404, error(f"no such path: {path}"))
        model = body["model"]
        if self.trouble(f"anthropic {model}", error):
            return None
        message = {"id": "m1", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
        if body.get("stream"):
            text = {"type": "text_delta", "text": "Hello you"}
            events = [
                {"type": "message_start", "message": {
                    **message, "content": [], "stop_reason": None, "usage": {"input_tokens": 5, "output_tokens": 1}}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": text},
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                 "usage": {"output_tokens": 2}},
                {"type": "message_stop"},
            ]
            return self.stream([f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events])
        return self.reply(200, {
            **message, "content": [{"type": "text", "text": "Hello you"}], "stop_reason": "end_turn",
            "usage": {"input_tokens": 5, "output_tokens": 2},
        })

    def github(self, path, query, _):
        def error(message):
            return {"message": message, "documentation_url": "https://docs.github.com/rest"}

        if self.headers.get("Authorization", "").split(" ")[-1] != KEY:
            return self.reply(401, error("Bad credentials"))
        if self.trouble(f"github {path}", error):
            return None
        base = f"http://{self.headers['Host']}/github"
        own = "https://api.github.com"
        repository = {
            "id": 1, "name": "r", "full_name": "o/r", "url": f"{own}/repos/o/r", "owner": {"login": "o"},
            "issues_url": f"{own}/repos/o/r/issues{{/number}}",
        }
        if path in ("repos/o/r/issues", "repositories/1/issues"):
            page = int(query.get("page", "1"))
            size = int(query.get("per_page", "2"))
            issues = [{"id": n, "number": n, "title": f"issue {n}", "url": f"{own}/repos/o/r/issues/{n}"}
                      for n in range(1 + (page - 1) * size, 1 + page * size)]
            link = [(rel, number) for rel, number in [("next", page + 1), ("last", 3)] if page < 3]
            links = ", ".join(f'<{base}/repositories/1/issues?per_page={size}&page={n}>; rel="{rel}"' for rel, n in link)
            return self.reply(200, issues, [("Link", links)] if links else [])
        if path == "user":
            return self.reply(200, {"login": "o", "id": 1, "url": f"{own}/users/o"})
        return self.reply(200, repository)

    def tmdb(self, path, query, _):
        def error(message):
            return {"success": False, "status_code": 7, "status_message": message}

        if self.headers.get("Authorization") != f"Bearer {KEY}" or "api_key" in query:
            return self.reply(401, error("Invalid API key: You must be granted a valid key."))
        if self.trouble(f"tmdb {path}", error):
            return None
        page = int(query.get("page", "1"))
        return self.reply(200, {"id": 603, "title": "The Matrix", "page": page, "total_pages": 3, "results": []})


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Provider).serve_forever()
