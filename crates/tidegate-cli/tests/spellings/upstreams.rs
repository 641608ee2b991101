//! Servers that route `/login` and all paths below `/api/` to a handler that reports it.

use std::process::Command;

use tidegate_testkit::servers::{
    ChildProcess, ScratchDir, require_program_in_full_run, require_python_module_in_full_run,
};

/// The body of the limited handler's response.
pub(crate) const LIMITED: &str = "ROUTED-TO-LIMITED";

pub(crate) fn nginx_routes(port: u16, settings: &str) -> String {
    format!(
        "server {{\n  listen 127.0.0.1:{port};\n  {settings}\n  keepalive_requests 100000000;\n  default_type text/plain;\n  \
         location = /login {{ return 200 '{LIMITED}'; }}\n  location /api/ {{ return 200 '{LIMITED}'; }}\n  \
         location / {{ return 200 'elsewhere'; }}\n}}\n"
    )
}

/// Routes of a Caddy site, with this body of the limited handler.
pub(crate) fn caddy_routes(limited: &str) -> String {
    format!(
        "\thandle /login {{\n\t\trespond \"{limited}\"\n\t}}\n\thandle /api/* {{\n\t\trespond \"{limited}\"\n\t}}\n\
         \thandle {{\n\t\trespond \"elsewhere\"\n\t}}"
    )
}

/// Takes the request target unchanged.
pub(crate) const RAW_PREFIX: &str = "req.url.split('?')[0]";
/// Takes the path from the URL parser of browsers.
pub(crate) const NEW_URL: &str = "new URL(req.url, 'http://localhost').pathname";

/// Removes parameters, then decodes escapes, then resolves dot segments.
pub(crate) const CUT_AND_DECODED: &str = "require('path').posix.normalize(decodeURIComponent(\
                                          req.url.split('?')[0].replace(/;[^/]*/g, '')).replace(/\\/+/g, '/'))";
/// Treats a semicolon as a question mark.
pub(crate) const UP_TO_SEMICOLON: &str = "decodeURIComponent(req.url.split(/[?;#]/)[0])";

/// A Node server that computes its path with this expression.
pub(crate) fn node(path: &str, port: u16) -> Option<ChildProcess> {
    let mut command = Command::new(require_program_in_full_run("node")?);
    let scratch = ScratchDir::new();
    let program = format!(
        "require('http').createServer((req, res) => {{\n  let path;\n  \
         try {{ path = {path}; }} catch {{ res.statusCode = 400; return res.end('bad'); }}\n  \
         res.end(path === '/login' || path.startsWith('/api/') ? '{LIMITED}' : 'elsewhere');\n\
         }}).listen({port}, '127.0.0.1');\n"
    );
    command.arg(scratch.write("server.js", &program));
    Some(ChildProcess::start(command, scratch, port))
}

pub(crate) fn python(port: u16) -> Option<ChildProcess> {
    let mut command = Command::new(require_program_in_full_run("python3")?);
    let scratch = ScratchDir::new();
    let program = format!(
        "import http.server, posixpath\nfrom urllib.parse import unquote, urlparse\n\
         class Routes(http.server.BaseHTTPRequestHandler):\n    protocol_version = 'HTTP/1.1'\n    disable_nagle_algorithm = True\n    \
             def log_message(self, *arguments):\n        pass\n    \
             def do_GET(self):\n        \
                 try:\n            path = posixpath.normpath(unquote(urlparse(self.path).path))\n        \
                 except ValueError:\n            path = 'bad'\n        \
                 is_limited = path == '/login' or path.startswith('/api/')\n        \
                 body = b'{LIMITED}' if is_limited else b'elsewhere'\n        \
                 self.send_response(200)\n        \
                 self.send_header('Content-Length', str(len(body)))\n        \
                 self.end_headers()\n        self.wfile.write(body)\n\
         http.server.ThreadingHTTPServer(('127.0.0.1', {port}), Routes).serve_forever()\n"
    );
    command.arg(scratch.write("routes.py", &program));
    Some(ChildProcess::start(command, scratch, port))
}

pub(crate) fn flask(port: u16) -> Option<ChildProcess> {
    let mut command = Command::new(require_python_module_in_full_run("flask")?);
    let scratch = ScratchDir::new();
    let program = format!(
        "from flask import Flask\nfrom werkzeug.serving import WSGIRequestHandler\n\
         WSGIRequestHandler.protocol_version = 'HTTP/1.1'\napp = Flask(__name__)\n\
         @app.route('/login')\ndef login():\n    return '{LIMITED}'\n\
         @app.route('/api/<path:rest>')\ndef api(rest):\n    return '{LIMITED}'\n\
         @app.errorhandler(404)\ndef elsewhere(error):\n    return 'elsewhere'\n\
         app.run('127.0.0.1', {port}, threaded=True)\n"
    );
    command.arg(scratch.write("app.py", &program));
    Some(ChildProcess::start(command, scratch, port))
}

pub(crate) fn java(port: u16) -> Option<ChildProcess> {
    let compiler = require_program_in_full_run("javac")?;
    let mut command = Command::new(require_program_in_full_run("java")?);
    let scratch = ScratchDir::new();
    let program = format!(
        "import com.sun.net.httpserver.*;\n\
         public class Routes {{\n\
           static HttpHandler says(String text) {{\n\
             return exchange -> {{\n\
               exchange.sendResponseHeaders(200, text.length());\n\
               exchange.getResponseBody().write(text.getBytes());\n\
               exchange.close();\n\
             }};\n\
           }}\n\
           public static void main(String[] arguments) throws Exception {{\n\
             var server = HttpServer.create(new java.net.InetSocketAddress(\"127.0.0.1\", {port}), 0);\n\
             server.createContext(\"/login\", says(\"{LIMITED}\"));\n\
             server.createContext(\"/api/\", says(\"{LIMITED}\"));\n\
             server.createContext(\"/\", says(\"elsewhere\"));\n\
             server.start();\n\
           }}\n\
         }}\n"
    );
    let source = scratch.write("Routes.java", &program);
    let compiled = Command::new(compiler).arg(source).status();
    assert!(compiled.is_ok_and(|status| status.success()), "javac compiles");
    command.arg("-Dsun.net.httpserver.nodelay=true").arg("-cp").arg(scratch.path()).arg("Routes");
    Some(ChildProcess::start(command, scratch, port))
}

pub(crate) fn go_mux(port: u16) -> Option<ChildProcess> {
    let compiler = require_program_in_full_run("go")?;
    let scratch = ScratchDir::new();
    let program = format!(
        "package main\n\nimport (\n\t\"io\"\n\t\"net/http\"\n)\n\n\
         func says(text string) http.HandlerFunc {{\n\
         \treturn func(w http.ResponseWriter, r *http.Request) {{ io.WriteString(w, text) }}\n}}\n\n\
         func main() {{\n\tmux := http.NewServeMux()\n\
         \tmux.HandleFunc(\"/login\", says(\"{LIMITED}\"))\n\
         \tmux.HandleFunc(\"/api/\", says(\"{LIMITED}\"))\n\
         \tmux.HandleFunc(\"/\", says(\"elsewhere\"))\n\
         \tpanic(http.ListenAndServe(\"127.0.0.1:{port}\", mux))\n}}\n"
    );
    let source = scratch.write("routes.go", &program);
    let built = Command::new(compiler).current_dir(scratch.path()).args(["build", "-o", "routes"]).arg(source).status();
    assert!(built.is_ok_and(|status| status.success()), "go builds");
    let command = Command::new(scratch.path().join("routes"));
    Some(ChildProcess::start(command, scratch, port))
}
