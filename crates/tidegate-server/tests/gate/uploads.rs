//! Refused uploads: the client can read the response.

use std::process::Command;
use std::time::Duration;

use tidegate_testkit::servers::{ScratchDir, require_program};
use tokio::io::AsyncWriteExt as _;

use crate::common::{Echo, HELLO, Peer, get, start, status};

/// A policy that refuses requests to `/full` by a limit, and to `/blocked` by a block.
const FULL: &str = "[inbound.action.full]\nmatch = { path = \"/full\" }\nlimit = \"1 per 1h\"\n\
    [inbound.action.blocked]\nmatch = { path = \"/blocked\" }\nlimit = \"1 per 1h\"\nban = \"1h\"\n";

/// The number of requests of 5 MB that each client sends.
const UPLOADS: usize = 30;

const NODE: &str = r#"
const http = require('http');
const [url, way, count] = [process.argv[2], process.argv[3], Number(process.argv[4])];
const body = Buffer.alloc(5e6, 'x');
const fetched = () => fetch(url, { method: 'POST', body }).then(async r => { await r.text(); return r.status; });
const requested = () => new Promise((resolve, reject) => {
  const request = http.request(url, { method: 'POST', headers: { 'content-length': body.length } }, r => {
    r.resume();
    r.on('end', () => resolve(r.statusCode));
  });
  request.on('error', reject);
  request.end(body);
});
(async () => {
  const seen = {};
  for (let n = 0; n < count; n++) {
    const what = await (way === 'fetch' ? fetched() : requested()).catch(e => e.cause?.code ?? e.code ?? String(e));
    seen[what] = (seen[what] ?? 0) + 1;
  }
  console.log(JSON.stringify(seen));
  process.exit(0);
})();
"#;

const GO: &str = r#"package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
)

func main() {
	count, _ := strconv.Atoi(os.Args[2])
	seen := map[string]int{}
	body := bytes.Repeat([]byte("x"), 5000000)
	for n := 0; n < count; n++ {
		what := ""
		if answer, err := http.Post(os.Args[1], "text/plain", bytes.NewReader(body)); err != nil {
			what = err.Error()
		} else {
			_, _ = io.Copy(io.Discard, answer.Body)
			answer.Body.Close()
			what = strconv.Itoa(answer.StatusCode)
		}
		seen[what]++
	}
	text, _ := json.Marshal(seen)
	fmt.Println(string(text))
}
"#;

/// Runs a client that prints the results of its uploads to a refused path.
async fn outcome(mut command: impl FnMut(&str) -> Command) -> String {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FULL).await;
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(get("/full")).await), 200);
    let mut command = command(&format!("http://{}/full", gate.inbound));
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_clients_receive_every_upload_refusal() {
    let Some(node) = require_program("node") else { return };
    let scratch = ScratchDir::new();
    let script = scratch.write("upload.cjs", NODE);
    for way in ["fetch", "http"] {
        let seen = outcome(|url| {
            let mut command = Command::new(&node);
            command.arg(&script).args([url, way, &UPLOADS.to_string()]);
            command
        })
        .await;
        assert_eq!(seen, format!("{{\"429\":{UPLOADS}}}"), "{way}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_clients_receive_every_upload_refusal() {
    let Some(go) = require_program("go") else { return };
    let scratch = ScratchDir::new();
    let script = scratch.write("upload.go", GO);
    let seen = outcome(|url| {
        let mut command = Command::new(&go);
        command.arg("run").arg(&script).args([url, &UPLOADS.to_string()]).env("GOTOOLCHAIN", "local");
        command
    })
    .await;
    assert_eq!(seen, format!("{{\"429\":{UPLOADS}}}"));
}

/// Sends the head of a large upload, reads the refusal, and then sends pieces until the gate has closed.
async fn pushed(address: std::net::SocketAddr, path: &str, piece: usize, pause: Duration, most: usize) -> usize {
    let mut client = Peer::connect(address).await;
    let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000000\r\n\r\n");
    assert!([403, 429].contains(&status(&client.ask(head).await)));
    let piece = vec![b'x'; piece];
    let mut sent = 0;
    while sent < most && client.stream.write_all(&piece).await.is_ok() {
        sent += piece.len();
        tokio::time::sleep(pause).await;
    }
    sent
}

/// Far more bytes than socket buffers and the discard limit of a client that may not go on.
const PLENTY: usize = 48 << 20;

#[tokio::test]
async fn only_unblocked_clients_refused_uploads_are_discarded() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FULL).await;
    for path in ["/full", "/blocked"] {
        assert_eq!(status(&Peer::connect(gate.inbound).await.ask(get(path)).await), 200);
        assert_eq!(status(&Peer::connect(gate.inbound).await.ask(get(path)).await), 429);
    }
    assert_eq!(pushed(gate.inbound, "/full", 256 << 10, Duration::ZERO, PLENTY).await, PLENTY);
    assert!(pushed(gate.inbound, "/blocked", 256 << 10, Duration::ZERO, PLENTY).await < PLENTY);
}

#[tokio::test]
async fn denied_clients_uploads_are_not_read_fully() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound]\ndeny = [\"127.0.0.0/8\"]\n").await;
    assert!(pushed(gate.inbound, "/", 256 << 10, Duration::ZERO, PLENTY).await < PLENTY);
}

#[tokio::test]
async fn slow_refused_uploads_are_read_two_seconds() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FULL).await;
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(get("/full")).await), 200);
    // 10 KB a second: some progress, but less than a connection must make.
    let sent = pushed(gate.inbound, "/full", 1000, Duration::from_millis(100), 200_000).await;
    assert!(sent < 200_000, "{sent}");
}

#[tokio::test]
async fn concurrently_discarded_uploads_are_bounded() {
    let upstream = Echo::start(HELLO).await;
    // One in eight, of eight connections.
    let gate = start(upstream.address, &format!("{FULL}[inbound.caps]\nconnections = 8\n")).await;
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(get("/full")).await), 200);
    let (piece, pause) = (64 << 10, Duration::from_millis(100));
    let first = tokio::spawn(pushed(gate.inbound, "/full", piece, pause, 60 * piece));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(pushed(gate.inbound, "/full", 256 << 10, Duration::ZERO, PLENTY).await < PLENTY);
    assert_eq!(first.await.unwrap(), 60 * piece, "more than 1 MiB, for more than 2 s");
    assert_eq!(pushed(gate.inbound, "/full", 256 << 10, Duration::ZERO, PLENTY).await, PLENTY);
}
