//! Uploads that are too large to keep in memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::random;

use crate::common::{gateway, provider};
use crate::upstream::{read_head, reply};

/// The peak memory of a process, in KiB.
fn most_memory(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn a_large_upload_uses_little_memory() {
    const CHUNK: usize = 64 << 10;
    let chunks = u64::from(random::case_count(1 << 10, 1 << 14));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().port();
    let (requests, arrived) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, bytes) = (Arc::clone(&requests), Arc::clone(&arrived));
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::with_capacity(CHUNK, stream);
            while read_head(&mut reader).is_some() {
                counted.fetch_add(1, Ordering::Relaxed);
                // The bytes that the client sends during this time have to be buffered or delayed.
                thread::sleep(Duration::from_secs(1));
                let mut size = String::new();
                let mut buffer = vec![0; 1 << 20];
                loop {
                    size.clear();
                    if reader.read_line(&mut size).is_err() {
                        return;
                    }
                    let Ok(length) = usize::from_str_radix(size.trim(), 16) else { return };
                    buffer.resize(buffer.len().max(length + 2), 0);
                    if reader.read_exact(&mut buffer[..length + 2]).is_err() {
                        return;
                    }
                    if length == 0 {
                        break;
                    }
                    bytes.fetch_add(length as u64, Ordering::Relaxed);
                }
                let unwell = reply("503 Service Unavailable", "", "not now");
                if reader.get_mut().write_all(unwell.as_bytes()).is_err() {
                    return;
                }
            }
        }
    });
    let settings = "limit = \"100/s\"\ntimeout = \"10m\"";
    let (gateway, port) = gateway(&provider(upstream, settings), &[]);
    let mut client = HttpClient::connect(port).unwrap();
    // The first request has one-time costs.
    assert_eq!(client.request(get_request("/nobody")).status, 404);
    let before = most_memory(gateway.id());
    client.send("PUT /api/object HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n");
    let mut chunk = format!("{CHUNK:x}\r\n").into_bytes();
    chunk.resize(chunk.len() + CHUNK, 0);
    chunk.extend_from_slice(b"\r\n");
    for _ in 0..chunks {
        client.send(&chunk);
    }
    let answer = client.request("0\r\n\r\n");
    assert_eq!((answer.status, answer.body.as_str()), (503, "not now"), "{}", answer.head);
    assert_eq!(answer.header("tidegate-attempts"), Some("1"));
    let why = "the request can't be sent again: its body is larger than what is kept for another attempt";
    assert_eq!(answer.header("tidegate-error"), Some(why));
    assert_eq!(requests.load(Ordering::Relaxed), 1);
    assert_eq!(arrived.load(Ordering::Relaxed), chunks * CHUNK as u64, "all of it and nothing besides");
    let grown = most_memory(gateway.id()) - before;
    println!("{} MiB took {grown} KiB", (chunks * CHUNK as u64) >> 20);
    // Independent of the size: the allocator's reserve, and the bytes between two sockets.
    assert!(grown < 16 << 10, "{grown} KiB for an upload");
}
