//! The Redis protocol.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tidegate::Span;
use tidegate_testkit::servers::free_port;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{PATIENCE, Running, capture, json as parsed, nobody, once, policy, post, start, status, try_start};

const FILE: &str = r#"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.tenant]
    key = ["header:x-tenant", "key"]
    limit = "1000 per 1h"
    [inbound.action.held]
    key = "key"
    limit = "1 in flight"
"#;

/// A gate with the protocol, and its address.
async fn serve(more: &str) -> (Running, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    (start(nobody(), &format!("{FILE}[resp]\nlisten = \"{address}\"\n{more}")).await, address)
}

fn request(words: &[&str]) -> Vec<u8> {
    let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), words.collect::<String>()).into_bytes()
}

/// Sends bytes, and returns all bytes until the server closes the connection.
async fn until_closed(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut received = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut received)).await.unwrap().unwrap();
    String::from_utf8(received).unwrap()
}

/// Sends requests at once, then `QUIT`, and returns the replies without that of `QUIT`.
async fn ask(address: SocketAddr, requests: &[&[&str]]) -> String {
    let mut bytes: Vec<u8> = requests.iter().flat_map(|words| request(words)).collect();
    bytes.extend(request(&["QUIT"]));
    let replies = until_closed(address, &bytes).await;
    replies.strip_suffix("+OK\r\n").unwrap_or_else(|| panic!("{replies}")).to_owned()
}

#[tokio::test]
async fn commands_of_connections_have_exact_replies() {
    let (_gate, address) = serve("").await;
    for (words, reply) in [
        (&["PING"][..], "+PONG\r\n"),
        (&["ping", "a b"], "$3\r\na b\r\n"),
        (&["PING", "a", "b"], "-ERR wrong number of arguments for 'ping' command\r\n"),
        (&["ECHO", ""], "$0\r\n\r\n"),
        (&["ECHO"], "-ERR wrong number of arguments for 'echo' command\r\n"),
        (&["SELECT", "0"], "+OK\r\n"),
        (&["SELECT", "1"], "-ERR DB index is out of range: there is only 0\r\n"),
        (&["RESET"], "+RESET\r\n"),
        (&["MULTI"], "-ERR MULTI is not supported: each command is decided by itself\r\n"),
        (&["GET", "a\r\nb"], "-ERR unknown command 'GET', with args beginning with: 'a\\r\\nb' \r\n"),
        (&["CLIENT", "SETNAME", "worker-1"], "+OK\r\n"),
        (&["CLIENT", "SETNAME", "a b"], "-ERR Client names cannot contain spaces, newlines or special characters.\r\n"),
        (&["CLIENT", "GETNAME"], "$-1\r\n"),
        (&["CLIENT", "SETINFO", "LIB-NAME", "redis-py"], "+OK\r\n"),
        (
            &["CLIENT", "KILL"],
            "-ERR CLIENT has SETNAME, GETNAME, ID, INFO, LIST, SETINFO, TRACKING, CACHING, NO-EVICT and NO-TOUCH here\r\n",
        ),
        (&["CLIENT", "TRACKING", "ON", "OPTIN"], "+OK\r\n"),
        (&["CONFIG", "GET", "maxmemory", "save"], "*0\r\n"),
        (&["CONFIG", "SET", "maxmemory", "1"], "-ERR CONFIG has only GET here, which finds nothing\r\n"),
        (&["CONFIG", "GET"], "-ERR CONFIG has only GET here, which finds nothing\r\n"),
        (&["TIME", "x"], "-ERR wrong number of arguments for 'time' command\r\n"),
        (&["COMMAND", "COUNT"], ":23\r\n"),
        (&["COMMAND", "DOCS"], "*0\r\n"),
        (
            &["COMMAND", "INFO", "ping", "get"],
            "*2\r\n*6\r\n$4\r\nping\r\n:-1\r\n*1\r\n+fast\r\n:0\r\n:0\r\n:0\r\n$-1\r\n",
        ),
        (
            &["AUTH", "a"],
            "-ERR AUTH <password> called without any password configured. Are you sure your configuration is correct?\r\n",
        ),
        (&["AUTH", "default", "a"], "+OK\r\n"),
        (&["HELLO", "4"], "-NOPROTO unsupported protocol version\r\n"),
        (&["HELLO", "three"], "-ERR Protocol version is not an integer or out of range\r\n"),
        (&["HELLO", "3", "SETNAME"], "-ERR Syntax error in HELLO option 'SETNAME'\r\n"),
    ] {
        assert_eq!(ask(address, &[words]).await, reply, "{words:?}");
    }
    let named = ask(
        address,
        &[&["HELLO", "3", "SETNAME", "w"], &["CLIENT", "GETNAME"], &["CLIENT", "SETNAME", ""], &["CLIENT", "GETNAME"]],
    )
    .await;
    assert!(named.starts_with("%7\r\n$2\r\nid\r\n:") && named.contains("$5\r\nproto\r\n:3\r\n"), "{named}");
    assert!(named.ends_with("\r\n$1\r\nw\r\n+OK\r\n_\r\n"), "{named}");
    let listed = ask(address, &[&["CLIENT", "SETNAME", "w"], &["CLIENT", "LIST"]]).await;
    assert!(
        listed.contains("\r\nid=") && listed.contains(" addr=127.0.0.1:") && listed.contains(" name=w resp=2\n"),
        "{listed}"
    );
    let told = ask(address, &[&["TIME"]]).await;
    let time: Vec<&str> = told.split("\r\n").collect();
    assert!(
        matches!(time[..], ["*2", "$10", secs, _, micros, ""] if secs.len() == 10 && micros.parse::<u32>().is_ok()),
        "{told}"
    );
    let info = ask(address, &[&["INFO", "server"]]).await;
    assert!(info.contains("\r\nredis_version:7.4.0\r\n") && info.contains("\r\nloading:0\r\n"), "{info}");
    // Inline commands, and requests in pieces.
    assert_eq!(
        until_closed(address, b"PING\r\n\r\n*0\r\nping  hello\r\nQUIT\r\n").await,
        "+PONG\r\n$5\r\nhello\r\n+OK\r\n"
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    for byte in request(&["ECHO", "slowly"]) {
        stream.write_all(&[byte]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut reply = [0; 12];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut reply)).await.unwrap().unwrap();
    assert_eq!(&reply, b"$6\r\nslowly\r\n");
}

#[tokio::test]
async fn decisions_are_maps() {
    let (gate, address) = serve("").await;
    let check = ["TG.CHECK", "login", "IP", "203.0.113.7"];
    let first = "$7\r\nallowed\r\n:1\r\n$15\r\nbackoff_seconds\r\n$-1\r\n$7\r\nblocked\r\n:0\r\n$8\r\nbound_by\r\n$5\r\nlogin\r\n\
                 $5\r\nlimit\r\n:5\r\n$15\r\nnext_allowed_at\r\n$-1\r\n$6\r\nreason\r\n$2\r\nok\r\n$9\r\nremaining\r\n:4\r\n\
                 $11\r\nreset_after\r\n:60\r\n$11\r\nretry_after\r\n$-1\r\n$6\r\nsource\r\n$6\r\naction\r\n";
    assert_eq!(ask(address, &[&check]).await, format!("*22\r\n{first}"));
    let by_path = ["TG.CHECK", "", "method", "POST", "path", "/login", "ip", "203.0.113.7", "cost", "2"];
    let replies = ask(address, &[&["HELLO", "3"], &by_path, &["TG.STATUS", "login", "IP", "203.0.113.7"]]).await;
    assert_eq!(replies.matches("$9\r\nremaining\r\n:2\r\n").count(), 2, "{replies}");
    assert!(replies.contains("%11\r\n$7\r\nallowed\r\n#t\r\n$15\r\nbackoff_seconds\r\n_\r\n"), "{replies}");
    let refunded = ask(address, &[&["TG.REFUND", "login", "IP", "203.0.113.7"]]).await;
    assert_eq!(refunded, "*2\r\n$8\r\nrefunded\r\n:1\r\n");
    // The same count as in the API.
    for _ in 0..3 {
        assert_eq!(status(&once(gate.api, post("/v1/check", r#"{"action":"login","ip":"203.0.113.7"}"#)).await), 200);
    }
    let refused = ask(address, &[&check]).await;
    assert!(
        refused.contains("$7\r\nallowed\r\n:0\r\n") && refused.contains("$11\r\nretry_after\r\n:2\r\n"),
        "{refused}"
    );
    let blocked = parsed(&once(gate.admin, "GET /v1/blocks HTTP/1.1\r\nhost: gate.test\r\n\r\n").await);
    assert_eq!(blocked["clients"][0]["client"], json!({ "client_ip": "203.0.113.7" }));
    let reset = ask(address, &[&["TG.RESET", "login", "IP", "203.0.113.7"], &check]).await;
    assert!(reset.contains("$9\r\nremaining\r\n:4\r\n"), "{reset}");
    let tenant = ["TG.CHECK", "tenant", "HEADER", "x-tenant", "a", "KEY", "k"];
    assert!(ask(address, &[&tenant]).await.contains("$9\r\nremaining\r\n:999\r\n"));
}

#[tokio::test]
async fn calls_may_state_their_own_rate() {
    let (gate, address) = serve("").await;
    let throttle = |words: &str| {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        async move {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            ask(address, &[&words]).await.replace("\r\n", " ").trim_end().to_owned()
        }
    };
    let numbers = |numbers: [i64; 5]| format!("*5{}", numbers.map(|number| format!(" :{number}")).concat());
    // As redis-cell answers.
    for (words, answer) in [
        ("CL.THROTTLE a 15 30 60", [0, 16, 15, -1, 2]),
        ("cl.throttle a 15 30 60 1", [0, 16, 14, -1, 4]),
        ("CL.THROTTLE a 15 30 60 0", [0, 16, 14, -1, 4]),
        ("CL.THROTTLE a 15 30 60 14", [0, 16, 0, -1, 32]),
        ("CL.THROTTLE a 15 30 60", [1, 16, 0, 2, 32]),
        ("CL.THROTTLE a 15 30 60 17", [1, 16, 0, -1, 32]),
        ("CL.THROTTLE a 15 30 60 -3", [0, 16, 3, -1, 26]),
        ("CL.THROTTLE b -1 30 60", [1, 0, 0, -1, 0]),
        // As throttlecrab's: the first number is 1 for an admitted call, and the last two are swapped.
        ("THROTTLE c 2 30 60", [1, 2, 1, 2, 0]),
        ("THROTTLE c 2 30 60 1", [1, 2, 0, 4, 0]),
        ("THROTTLE c 2 30 60 1", [0, 2, 0, 4, 2]),
    ] {
        assert_eq!(throttle(words).await, numbers(answer), "{words}");
    }
    gate.clock.advance(Span::from_secs(26));
    assert_eq!(throttle("CL.THROTTLE a 15 30 60 16").await, numbers([0, 16, 0, -1, 32]), "the wait was true");
    for (words, error) in [
        ("CL.THROTTLE a 15 30", "-ERR wrong number of arguments for 'cl.throttle' command"),
        (
            "CL.THROTTLE a 15 30 60 1 1",
            "-ERR Usage: CL.THROTTLE <key> <max_burst> <count per period> <period> [<quantity>]",
        ),
        ("CL.THROTTLE a x 30 60", "-ERR Couldn't parse as integer: x"),
        ("CL.THROTTLE a 15 0 60", "-ERR Zero rates are not supported"),
        ("CL.THROTTLE a 15 30 0", "-ERR Zero rates are not supported"),
        ("CL.THROTTLE a 15 -30 60", "-ERR the count per period is negative"),
        ("CL.THROTTLE a 9223372036854775807 30 60", "-ERR the burst would take more than 73 years to refill"),
    ] {
        assert_eq!(throttle(words).await, error, "{words}");
    }
    let any_bytes = until_closed(
        address,
        b"*5\r\n$11\r\nCL.THROTTLE\r\n$2\r\n\xff\xfe\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n9\r\n*1\r\n$4\r\nQUIT\r\n",
    )
    .await;
    assert_eq!(any_bytes, "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:9\r\n+OK\r\n");
    // They are counted, and are no limit of the policy.
    let state = once(gate.admin, "GET /v1/state HTTP/1.1\r\nhost: gate.test\r\n\r\n").await;
    assert_eq!(state.matches("\"limit\":\"CL.THROTTLE\",\"outcome\"").count(), 2, "{state}");
    assert_eq!(state.matches("CL.THROTTLE").count(), 2, "{state}");
}

#[tokio::test]
async fn permits_are_renewed_and_released() {
    let (_gate, address) = serve("").await;
    let check = ["TG.CHECK", "held", "KEY", "k"];
    let held = ask(address, &[&check]).await;
    let permit = held.split("$6\r\npermit\r\n$16\r\n").nth(1).unwrap().split("\r\n").next().unwrap().to_owned();
    assert!(ask(address, &[&check]).await.contains("$7\r\nallowed\r\n:0\r\n"));
    let end = |name| [name, "held", "KEY", "k", "PERMIT", &permit];
    assert_eq!(
        ask(address, &[&end("TG.RENEW"), &end("TG.RELEASE"), &end("TG.RELEASE")]).await,
        "*2\r\n$7\r\nrenewed\r\n:1\r\n*2\r\n$8\r\nreleased\r\n:1\r\n*2\r\n$8\r\nreleased\r\n:0\r\n"
    );
    assert!(ask(address, &[&check]).await.contains("$7\r\nallowed\r\n:1\r\n"));
}

#[tokio::test]
async fn wrong_questions_are_errors() {
    let (_gate, address) = serve("").await;
    for (words, reply) in [
        (&["TG.CHECK"][..], "-ERR wrong number of arguments for 'tg.check' command\r\n"),
        (&["TG.CHECK", "lgoin"], "-ERR unknown action \"lgoin\"; did you mean \"login\"?\r\n"),
        (&["TG.CHECK", "login"], "-ERR `ip` is missing: the limit `login` counts by it\r\n"),
        (&["TG.CHECK", ""], "-ERR `action` is missing (or the `method` and `path` that find one)\r\n"),
        (&["TG.CHECK", "login", "IP"], "-ERR `IP` has no value\r\n"),
        (&["TG.CHECK", "login", "HEADER", "x"], "-ERR `HEADER` has no value\r\n"),
        (&["TG.CHECK", "login", "IPP", "203.0.113.7"], "-ERR unknown field `ipp`; did you mean `ip`?\r\n"),
        (&["TG.CHECK", "login", "IP", "203.0.113"], "-ERR an `ip` is an IPv4 or IPv6 address without a port\r\n"),
        (&["TG.CHECK", "login", "COST", "-1"], "-ERR a cost is a whole number from 0 to 1099511627776 (2^40)\r\n"),
        (&["TG.CHECK", "login", "KEY", "a", "KEY", "a"], "-ERR `key` is there twice\r\n"),
        (&["TG.RELEASE", "held", "KEY", "k"], "-ERR `permit` is missing: the check that was allowed gave one\r\n"),
    ] {
        let found = ask(address, &[words]).await;
        assert!(found.starts_with(reply) && found.ends_with("\r\n"), "{words:?}: {found}");
    }
    let not_utf8 = until_closed(address, b"*2\r\n$8\r\nTG.CHECK\r\n$1\r\n\xff\r\n*1\r\n$4\r\nQUIT\r\n").await;
    assert_eq!(not_utf8, "-ERR an argument isn't UTF-8\r\n+OK\r\n");
}

#[tokio::test]
async fn broken_requests_close_the_connection() {
    let (gate, address) = serve("[inbound.timeouts]\nheader = \"300ms\"\n").await;
    for (bytes, reply) in [
        (
            &b"*1\r\n$4\r\nPING\r\n*x\r\n*1\r\n$4\r\nPING\r\n"[..],
            "+PONG\r\n-ERR Protocol error: invalid multibulk length\r\n",
        ),
        (b"*1000000000\r\n", "-ERR Protocol error: a request has at most 256 arguments\r\n"),
        (b"*1\r\n$536870912\r\n", "-ERR Protocol error: a request has at most 16384 bytes\r\n"),
        (b"*1\r\n*1\r\n", "-ERR Protocol error: expected '$', got '*'\r\n"),
        // The lines of a web page's request aren't commands.
        (
            b"POST / HTTP/1.1\r\nhost: a\r\n\r\nTG.RESET login IP 203.0.113.7\r\n",
            "-ERR unknown command 'POST', with args beginning with: '/' 'HTTP/1.1' \r\n",
        ),
        // A half request, then silence.
        (b"*1\r\n$4\r\nPI", ""),
        (b"PING", ""),
        (b"\x16\x03\x01\x02\x00\n", "-ERR unknown command '\\x16\\x03\\x01\\x02\\x00', with args beginning with: \r\n"),
    ] {
        assert_eq!(until_closed(address, bytes).await, reply, "{}", bytes.escape_ascii());
    }
    // A byte now and then doesn't extend the time of a request.
    let mut stream = TcpStream::connect(address).await.unwrap();
    let dripping = async {
        for byte in request(&["ECHO", &"a".repeat(100)]) {
            if stream.write_all(&[byte]).await.is_err() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        false
    };
    assert!(tokio::time::timeout(PATIENCE, dripping).await.unwrap(), "the connection ends in between");
    // A client that still sends gets its reply.
    let flood = [&b"*x\r\n"[..], &[b'a'; 500_000]].concat();
    assert_eq!(until_closed(address, &flood).await, "-ERR Protocol error: invalid multibulk length\r\n");
    // Between requests, a connection may rest.
    let mut stream = TcpStream::connect(address).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    stream.write_all(b"PING\r\n").await.unwrap();
    let mut reply = [0; 7];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut reply)).await.unwrap().unwrap();
    drop(gate);
}

#[tokio::test]
async fn long_pipelines_are_answered_in_order() {
    let (_gate, address) = serve("").await;
    let requests: Vec<[String; 2]> = (0..10_000).map(|number| ["ECHO".to_owned(), format!("{number:0>100}")]).collect();
    let bytes: Vec<u8> = requests.iter().flat_map(|[name, text]| request(&[name, text])).collect();
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let writing = tokio::spawn(async move {
        writer.write_all(&bytes).await.unwrap();
        writer.write_all(&request(&["QUIT"])).await.unwrap();
        writer
    });
    let mut received = String::new();
    tokio::time::timeout(PATIENCE, reader.read_to_string(&mut received)).await.unwrap().unwrap();
    writing.await.unwrap();
    let expected: String = requests.iter().map(|[_, text]| format!("$100\r\n{text}\r\n")).collect();
    assert!(received == expected + "+OK\r\n", "{} bytes", received.len());
}

#[tokio::test]
async fn clients_that_read_no_replies_are_disconnected() {
    let (lines, _guard) = capture("json");
    let (_gate, address) = serve("[inbound]\ntimeouts = { body = \"1s\" }\n").await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let pipeline = request(&["ECHO", &"x".repeat(1000)]).repeat(20_000);
    let written = tokio::time::timeout(PATIENCE, stream.write_all(&pipeline)).await.expect("an end in time");
    assert!(written.is_err());
    assert!(lines.text().contains("reads no replies"), "{}", lines.text());
}

#[tokio::test]
async fn a_password_is_asked_for() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let more = format!("{FILE}[resp]\nlisten = \"{address}\"\ntoken = \"env:PASSWORD\"\n");
    let env = |name: &str| (name == "PASSWORD").then(|| "correct horse".to_owned());
    let _gate = try_start(&policy(nobody(), &more), env).unwrap();
    let check = ["TG.CHECK", "login", "IP", "203.0.113.7"];
    let denied = "-NOAUTH Authentication required.\r\n";
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    assert_eq!(ask(address, &[&check, &["PING"]]).await, denied.repeat(2));
    assert_eq!(ask(address, &[&["AUTH", "battery"], &check]).await, format!("{wrong}{denied}"));
    assert_eq!(
        ask(address, &[&["AUTH", "correct horse"], &["PING"], &["RESET"], &["PING"]]).await,
        format!("+OK\r\n+PONG\r\n+RESET\r\n{denied}")
    );
    assert!(ask(address, &[&["HELLO", "3"]]).await.starts_with("-NOAUTH HELLO must be called"));
    assert_eq!(ask(address, &[&["HELLO", "3", "AUTH", "default", "x"]]).await, wrong);
    let hello = ask(address, &[&["HELLO", "3", "AUTH", "default", "correct horse"], &["PING"]]).await;
    assert!(hello.starts_with("%7\r\n") && hello.ends_with("+PONG\r\n"), "{hello}");
    // Many guesses end the connection.
    let guesses: Vec<&[&str]> = vec![&["AUTH", "guess"]; 100];
    let bytes: Vec<u8> = guesses.iter().flat_map(|words| request(words)).collect();
    let replies = until_closed(address, &bytes).await;
    assert!(replies.matches("-WRONGPASS").count() < 50, "{replies}");
}

#[tokio::test]
async fn draining_answers_what_has_arrived() {
    let (mut gate, address) = serve("").await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&request(&["PING"])).await.unwrap();
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).await.unwrap();
    let stopped = gate.stop();
    stream.write_all(&request(&["PING"])).await.unwrap();
    let mut rest = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(rest, b"+PONG\r\n");
    assert_eq!(stopped.await.unwrap().cut_off, 0);
}
