//! `tidegate retry` with real commands.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tidegate::Clock as _;
use tidegate::clock::SystemClock;
use tidegate_testkit::servers::{ScratchDir, require_program};

/// Resets ignored signals, which are inherited: INT and QUIT from a shell with background jobs, HUP from `nohup`.
fn retry(folder: &ScratchDir, words: &[&str]) -> Command {
    let mut command = Command::new("env");
    command
        .args(["--default-signal", env!("CARGO_BIN_EXE_tidegate"), "retry"])
        .args(words)
        .current_dir(folder.path())
        .stdin(Stdio::null());
    command
}

/// Runs the command and returns its status, standard output and standard error.
fn run(folder: &ScratchDir, words: &[&str]) -> (i32, String, String) {
    output_parts(retry(folder, words).output().unwrap())
}

fn output_parts(Output { status, stdout, stderr }: Output) -> (i32, String, String) {
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A command that counts its runs in a file. Its body has the number as `$n`.
fn counting(body: &str) -> String {
    format!("n=$(($(cat runs 2>/dev/null || echo 0) + 1)); echo $n > runs; {body}")
}

fn runs(folder: &ScratchDir) -> u32 {
    std::fs::read_to_string(folder.path().join("runs")).unwrap().trim().parse().unwrap()
}

#[test]
fn retry_repeats_until_success_and_reports_waits() {
    let folder = ScratchDir::new();
    let body = counting("echo out $n; echo err $n >&2; [ $n = 3 ] || exit 7");
    let (status, out, err) = run(&folder, &["--base", "10ms", "--jitter", "none", "--", "sh", "-c", &body]);
    assert_eq!((status, out.as_str()), (0, "out 1\nout 2\nout 3\n"));
    let expected = "err 1\ntidegate retry: attempt 1 of 5 ended with status 7; trying again in 0.010 s\n\
                    err 2\ntidegate retry: attempt 2 of 5 ended with status 7; trying again in 0.020 s\nerr 3\n";
    assert_eq!(err, expected);
    let folder = ScratchDir::new();
    let (status, _, err) = run(&folder, &["-q", "--base", "1ms", "--", "sh", "-c", &counting("[ $n = 3 ] || exit 7")]);
    assert_eq!((status, err.as_str(), runs(&folder)), (0, "", 3));
}

#[test]
fn retry_exits_with_the_commands_status() {
    let folder = ScratchDir::new();
    let (status, _, err) =
        run(&folder, &["--attempts", "3", "--base", "1ms", "--", "sh", "-c", &counting("exit $((40 + n))")]);
    assert_eq!((status, runs(&folder)), (43, 3));
    assert!(err.ends_with("attempt 3 of 3 ended with status 43; that was the last of --attempts\n"), "{err}");
    let (status, _, err) = run(&folder, &["--attempts", "1", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(status, 137);
    assert!(err.contains("was ended by signal 9"), "{err}");
    std::fs::write(folder.path().join("plain"), "no program").unwrap();
    std::fs::set_permissions(folder.path().join("plain"), std::fs::Permissions::from_mode(0o644)).unwrap();
    for (words, expected) in [
        (&["--", "./missing"][..], 127),
        (&["--", "no-such-command-anywhere"], 127),
        (&["--", "./plain"], 126),
        (&["--", "/"], 126),
        (&[], 125),
        (&["--attempts", "0", "--", "true"], 125),
        (&["--base", "soon", "--", "true"], 125),
        (&["--throttled-output", "(", "--", "true"], 125),
        (&["--no-such-flag", "--", "true"], 125),
        (&["--help"], 0),
    ] {
        let (status, _, err) = run(&folder, words);
        assert_eq!(status, expected, "{words:?}: {err}");
    }
}

#[test]
fn exit_statuses_and_output_decide_the_class() {
    let flags = ["--base", "1ms", "--cap", "2ms", "--attempts", "3"];
    let outputs = ["--throttled-output", "slow down", "--permanent-output", "^no such"];
    for (more, body, expected_runs, told) in [
        (&[][..], "exit 2", 1, "status 2 (permanent); not retried, because --permanent-exit is 2,126,127,141\n"),
        (&[], "exit 75", 3, "status 75 (throttled)"),
        (&["--permanent-exit", "4,5"], "exit 5", 1, "(permanent); not retried, because --permanent-exit is 4,5\n"),
        (&["--permanent-exit", "4,5"], "exit 2", 3, "status 2;"),
        (&["--throttled-exit", "9"], "exit 9", 3, "(throttled)"),
        (
            &outputs,
            "echo no such thing; exit 1",
            1,
            "(permanent); not retried, because its output matches --permanent-output\n",
        ),
        // Its status is 128 and the number of SIGPIPE.
        (&[], "kill -PIPE $$", 1, "signal 13, status 141 (permanent); not retried, because --permanent-exit is "),
        (&outputs, "echo no such thing >&2; exit 1", 1, "(permanent)"),
        (&outputs, "printf 'please slow down'; exit 1", 3, "(throttled)"),
        (&outputs, "echo there is no such thing; exit 1", 3, "status 1;"),
        (&outputs, "echo no such thing", 1, ""),
    ] {
        let folder = ScratchDir::new();
        let body = counting(body);
        let words = [&flags[..], more, &["--", "sh", "-c", &body]].concat();
        let (_, _, err) = run(&folder, &words);
        assert_eq!(runs(&folder), expected_runs, "{words:?}: {err}");
        assert!(err.contains(told), "{words:?}: {err}");
    }
}

#[test]
fn curls_exit_codes_and_messages_decide() {
    let flags = ["--curl", "--base", "1ms", "--cap", "2ms", "--attempts", "3"];
    let http = |status: u16| format!("echo 'curl: (22) The requested URL returned error: {status}' >&2; exit 22");
    for (more, body, expected_runs, told) in [
        (&[][..], "exit 7".to_owned(), 3, "status 7;"),
        (
            &[],
            "exit 3".to_owned(),
            1,
            "status 3 (permanent); not retried because of --curl; --throttled-exit 3 changes that\n",
        ),
        (&[], http(404), 1, "status 22 (permanent); not retried because of --curl"),
        (&[], http(401), 1, "status 22 (auth); not retried because of --curl"),
        (&[], http(501), 1, "(permanent)"),
        (&[], http(408), 3, "status 22;"),
        (&[], http(429), 3, "(throttled)"),
        (&[], format!("echo retry-after: 0; {}", http(404)), 1, "status 22 (permanent)"),
        (&[], http(503), 3, "status 22;"),
        (&[], "exit 22".to_owned(), 3, "status 22;"),
        (&["--throttled-exit", "22"], http(404), 3, "(throttled)"),
        (&["--permanent-exit", "7"], "exit 7".to_owned(), 1, "not retried, because --permanent-exit is 7\n"),
        (&["--permanent-output", "503"], http(503), 1, "matches --permanent-output"),
        (&["--throttled-output", "404"], http(404), 3, "(throttled)"),
    ] {
        let folder = ScratchDir::new();
        let body = counting(&body);
        let words = [&flags[..], more, &["--", "sh", "-c", &body]].concat();
        let (_, _, err) = run(&folder, &words);
        assert_eq!(runs(&folder), expected_runs, "{words:?}: {err}");
        assert!(err.contains(told), "{words:?}: {err}");
    }
}

/// A server for curl, and its URL. `None` if curl is missing.
fn listen_for_curl() -> Option<(TcpListener, String)> {
    require_program("curl")?;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    Some((listener, url))
}

/// The command that presents a reservation.
fn presenting(url: &str) -> String {
    format!("curl -fsS -D /dev/stderr -H \"Tidegate-Reservation: $TIDEGATE_RESERVATION\" {url}")
}

/// Answers the next request with this status, these header lines and a body of `yes`. Returns the lines of its head.
fn answer(listener: &TcpListener, status: &str, headers: &str) -> Vec<String> {
    let (mut connection, _) = listener.accept().unwrap();
    let lines = BufReader::new(&connection).lines().map(Result::unwrap);
    let head = lines.take_while(|line| !line.is_empty()).collect();
    write!(connection, "HTTP/1.1 {status}\r\n{headers}content-length: 3\r\nconnection: close\r\n\r\nyes").unwrap();
    head
}

#[test]
fn curls_headers_give_the_wait() {
    let Some((listener, url)) = listen_for_curl() else { return };
    std::thread::spawn(move || {
        for reply in ["429 Too Many Requests", "200 OK", "503 Service Unavailable", "200 OK"] {
            answer(&listener, reply, "retry-after: 0.3\r\n");
        }
    });
    let folder = ScratchDir::new();
    for shows_headers in [&["-D", "/dev/stderr"][..], &["-i"]] {
        let words = [&["--curl", "--base", "1ms", "--", "curl", "-fsS", &url][..], shows_headers].concat();
        let (status, out, err) = run(&folder, &words);
        assert!(status == 0 && out.ends_with("yes"), "{status} {out} {err}");
        assert_eq!(told_waits(&err), ["0.300 s"], "{err}");
    }
}

/// The reservation's instant counts, and not the back-off.
#[test]
fn a_reservation_is_presented_at_its_instant() {
    let Some((listener, url)) = listen_for_curl() else { return };
    let server = std::thread::spawn(move || {
        let millis = || SystemClock::new().now().as_micros() / 1000;
        let at = millis() + 700;
        let refusal = format!("retry-after: 1\r\ntidegate-reservation: rabc;at={at}\r\n");
        let heads =
            [answer(&listener, "429 Too Many Requests", &refusal), answer(&listener, "200 OK", "retry-after: 1\r\n")];
        let late = millis().saturating_sub(at);
        let is_ours = |line: &String| line.to_ascii_lowercase().starts_with("tidegate-");
        let [first, second] = heads.map(|head| head.into_iter().filter(is_ours).collect::<Vec<_>>());
        (first, second, late)
    });
    let words = ["--curl", "--base", "9s", "--jitter", "none", "--", "sh", "-c", &presenting(&url)];
    let (status, out, err) = run(&ScratchDir::new(), &words);
    assert_eq!((status, out.as_str()), (0, "yes"), "{err}");
    let (first, second, late) = server.join().unwrap();
    assert_eq!((first, second), (vec![], vec!["Tidegate-Reservation: rabc".to_owned()]));
    assert!(late < 2_000, "{late} ms late: {err}");
}

/// The first one is trusted. After that, the back-off applies.
#[test]
fn reservations_that_admit_nothing_are_backed_off_from() {
    let Some((listener, url)) = listen_for_curl() else { return };
    let server = std::thread::spawn(move || {
        let refusal = "retry-after: 1\r\ntidegate-reservation: rabc;at=1;wait=1\r\n";
        let answers =
            ["429 Too Many Requests", "429 Too Many Requests", "429 Too Many Requests", "503 Unwell", "200 OK"];
        answers.map(|status| answer(&listener, status, refusal)).map(|head| head.concat().contains("rabc"))
    });
    let words =
        ["--curl", "--base", "200ms", "--cap", "400ms", "--jitter", "none", "--", "sh", "-c", &presenting(&url)];
    let (status, _, err) = run(&ScratchDir::new(), &words);
    assert_eq!((status, server.join().unwrap()), (0, [false, true, true, true, false]), "{err}");
    // `Retry-After` counts beside a 503.
    assert_eq!(told_waits(&err)[1..], ["0.200 s", "0.400 s", "1.000 s"], "{err}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long a program waits is measured")]
fn waits_grow_and_requested_waits_are_minimums() {
    let folder = ScratchDir::new();
    let began = Instant::now();
    let words = ["--base", "100ms", "--cap", "250ms", "--jitter", "none", "--attempts", "4", "--", "false"];
    let (status, _, err) = run(&folder, &words);
    let took = began.elapsed();
    // 100, 200 and 250 ms.
    assert_eq!(status, 1);
    assert!(took >= Duration::from_millis(550) && took < Duration::from_millis(2500), "{took:?}\n{err}");
    assert_eq!(told_waits(&err), ["0.100 s", "0.200 s", "0.250 s"], "{err}");

    let asks = counting("echo retry-after: 0.4 >&2; exit 1");
    let words =
        ["--base", "1ms", "--attempts", "2", "--retry-after-output", "retry-after: (.*)", "--", "sh", "-c", &asks];
    let began = Instant::now();
    let (_, _, err) = run(&folder, &words);
    assert!(began.elapsed() >= Duration::from_millis(400), "{err}");
    assert!(err.contains("(throttled); trying again in 0.4"), "{err}");

    let words =
        ["--retry-after-output", "after (.*)", "--max-retry-after", "1m", "--", "sh", "-c", "echo after 1h; exit 1"];
    let (_, _, err) = run(&folder, &words);
    assert!(err.ends_with("it asks for a wait of 3600.000 s, longer than --max-retry-after\n"), "{err}");
    let words = ["--deadline", "300ms", "--base", "2s", "--jitter", "none", "--", "false"];
    let (status, _, err) = run(&folder, &words);
    assert_eq!(status, 1);
    assert!(err.ends_with("the next would start after --deadline\n"), "{err}");
}

#[test]
fn a_deadline_alone_bounds_no_number_of_attempts() {
    let flags = ["--deadline", "1m", "--base", "1ms", "--cap", "2ms"];
    for (more, expected_runs, told) in [
        (&[][..], 8, "attempt 7 ended with status 1; trying again"),
        (&["--attempts", "2"], 2, "attempt 2 of 2 ended with status 1; that was the last of --attempts\n"),
    ] {
        let folder = ScratchDir::new();
        let body = counting("[ $n = 8 ]");
        let words = [&flags[..], more, &["--", "sh", "-c", &body]].concat();
        let (_, _, err) = run(&folder, &words);
        assert_eq!(runs(&folder), expected_runs, "{err}");
        assert!(err.contains(told), "{err}");
    }
}

/// Each example is run with commands of the same names, which fail at first as the real ones do.
#[test]
fn the_examples_of_the_page_are_retried() {
    let page = include_str!("../../../docs/retry.md");
    let blocks = page.split("```sh\n").skip(1).filter_map(|block| block.split_once("```"));
    let examples: Vec<&str> = blocks.flat_map(|(block, _)| block.lines()).collect();
    assert_eq!(examples.len(), 4, "{examples:?}");
    for example in examples {
        let folder = ScratchDir::new();
        let failures = [
            ("curl", "echo 'curl: (22) The requested URL returned error: 503' >&2; exit 22"),
            ("sync", "echo 'rate limit: retry after 0'; exit 1"),
            ("pg_isready", "echo 'db:5432 - no response'; exit 2"),
        ];
        for (name, failure) in failures {
            let program = folder.path().join(name);
            std::fs::write(&program, format!("#!/bin/sh\n{}\n", counting(&format!("[ $n = 2 ] && exit 0; {failure}"))))
                .unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let tidegate = std::path::Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
        let path = format!("{}:{}:{}", folder.path().display(), tidegate.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command.args(["-c", example]).env("PATH", path).current_dir(folder.path()).stdin(Stdio::null());
        let (status, _, err) = output_parts(command.output().unwrap());
        assert_eq!((status, runs(&folder)), (0, 2), "{example}: {err}");
    }
}

/// The waits in the messages of `retry`.
fn told_waits(err: &str) -> Vec<&str> {
    err.lines().filter_map(|line| line.split_once("trying again in ")).map(|(_, wait)| wait).collect()
}

#[test]
fn growth_and_additive_jitter_shape_the_waits() {
    let folder = ScratchDir::new();
    for (flags, expected) in [
        (["--growth", "exponential", "--jitter", "none"], ["0.010 s", "0.020 s", "0.040 s", "0.050 s"]),
        (["--growth", "linear", "--jitter", "none"], ["0.010 s", "0.020 s", "0.030 s", "0.040 s"]),
        (["--growth", "fibonacci", "--jitter", "none"], ["0.010 s", "0.010 s", "0.020 s", "0.030 s"]),
        (["--growth", "constant", "--jitter", "none"], ["0.010 s", "0.010 s", "0.010 s", "0.010 s"]),
    ] {
        let (_, _, err) = run(&folder, &[&["--base", "10ms", "--cap", "50ms"], &flags[..], &["--", "false"]].concat());
        assert_eq!(told_waits(&err), expected, "{flags:?}");
    }
    // Google's jitter never shortens a wait, and is truncated with it.
    let words = ["--base", "20ms", "--cap", "20ms", "--attempts", "3", "--jitter", "additive", "--", "false"];
    let (_, _, err) = run(&folder, &words);
    assert_eq!(told_waits(&err), ["0.020 s", "0.020 s"]);
    // Up to a second is added, so hardly any of five waits stays below the cap.
    let words = ["--base", "1ms", "--cap", "60ms", "--attempts", "6", "--jitter", "additive", "--", "false"];
    let (_, _, err) = run(&folder, &words);
    assert!(told_waits(&err).contains(&"0.060 s"), "{err}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long a program takes is measured")]
fn an_attempt_beyond_its_timeout_is_ended() {
    let folder = ScratchDir::new();
    let began = Instant::now();
    let body = counting("exec sleep 30");
    let (status, _, err) =
        run(&folder, &["--timeout", "200ms", "--attempts", "2", "--base", "1ms", "--", "sh", "-c", &body]);
    assert_eq!((status, runs(&folder)), (124, 2));
    assert!(began.elapsed() < Duration::from_secs(10), "{err}");
    assert!(err.contains("attempt 1 of 2 took too long; trying again"), "{err}");
    // A command that ignores TERM is killed.
    let body = counting("trap '' TERM; while :; do sleep 1; done");
    let (status, _, _) = run(&folder, &["--timeout", "200ms", "--attempts", "1", "--", "sh", "-c", &body]);
    assert_eq!(status, 124);
}

/// A pipeline that isn't ended would run beside the next attempt.
#[test]
fn a_timed_out_attempts_child_processes_are_ended() {
    let folder = ScratchDir::new();
    let inner = "trap 'touch told; exit' TERM; touch ready; while :; do sleep 0.05; done";
    let body = format!("bash -c \"{inner}\" | cat");
    let (status, _, _) = run(&folder, &["--timeout", "500ms", "--attempts", "1", "--", "sh", "-c", &body]);
    assert_eq!(status, 124);
    appears(&folder, "told");

    let folder = ScratchDir::new();
    let child = retry(&folder, &["--timeout", "1m", "--", "sh", "-c", &body]).spawn().unwrap();
    appears(&folder, "ready");
    signal(&child, "TERM");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    appears(&folder, "told");
}

#[test]
fn output_is_streamed_while_patterns_are_searched() {
    let folder = ScratchDir::new();
    let body = "printf 'half a line'; read _";
    let mut child = retry(&folder, &["--throttled-output", "x", "--", "sh", "-c", body])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut half = [0; 11];
    child.stdout.take().unwrap().read_exact(&mut half).unwrap();
    assert_eq!(&half, b"half a line");
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    assert!(child.wait().unwrap().success());
    // A process that is left behind and keeps the output open isn't waited for.
    let (status, out, _) = run(&folder, &["--throttled-output", "x", "--", "sh", "-c", "sleep 20 & echo done"]);
    assert_eq!((status, out.as_str()), (0, "done\n"));
}

#[test]
fn a_slow_reader_receives_the_whole_output() {
    const LENGTH: usize = 300_000;
    let folder = ScratchDir::new();
    folder.write("long", &"x".repeat(LENGTH));
    let mut child =
        retry(&folder, &["--throttled-output", "y", "--", "cat", "long"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(2_500));
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    assert_eq!((out.len(), child.wait().unwrap().code()), (LENGTH, Some(0)));
    // A signal ends it if the output has no reader.
    let words = ["--throttled-output", "y", "--", "sh", "-c", "touch ready; cat long; exit 0"];
    let mut child = retry(&folder, &words).stdout(Stdio::piped()).spawn().unwrap();
    appears(&folder, "ready");
    std::thread::sleep(Duration::from_millis(100));
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long a program takes is measured")]
fn printed_output_counts_despite_an_open_pipe() {
    let began = Instant::now();
    let patterns = ["--permanent-output", "^no such", "--retry-after-output", "^after (.*)", "--base", "1ms"];
    for (print, told) in [
        ("echo no such thing", "not retried, because its output matches --permanent-output"),
        ("printf 'no such thing'", "not retried, because its output matches --permanent-output"),
        ("echo after 1h >&2", "it asks for a wait of 3600.000 s, longer than --max-retry-after"),
    ] {
        let folder = ScratchDir::new();
        let body = counting(&format!("sleep 20 & {print}; exit 1"));
        let (status, _, err) = run(&folder, &[&patterns[..], &["--", "sh", "-c", &body]].concat());
        assert_eq!((status, runs(&folder)), (1, 1), "{print}: {err}");
        assert!(err.contains(told), "{print}: {err}");
    }
    assert!(began.elapsed() < Duration::from_secs(15), "it isn't waited for");
}

#[test]
fn stdin_goes_to_the_first_or_all_attempts() {
    let body = counting("cat > in$n; [ $n = 2 ]");
    let read =
        |folder: &ScratchDir| [1, 2].map(|n| std::fs::read_to_string(folder.path().join(format!("in{n}"))).unwrap());
    let piped = |folder: &ScratchDir, words: &[&str]| {
        let mut child = retry(folder, words).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"some words").unwrap();
        output_parts(child.wait_with_output().unwrap())
    };
    let folder = ScratchDir::new();
    let (status, _, err) = piped(&folder, &["--base", "1ms", "--", "sh", "-c", &body]);
    assert_eq!((status, read(&folder)), (0, ["some words".to_owned(), String::new()]));
    assert!(err.contains("standard input went to the first attempt"), "{err}");

    let folder = ScratchDir::new();
    let (status, _, err) = piped(&folder, &["--keep-stdin", "--base", "1ms", "--", "sh", "-c", &body]);
    assert_eq!((status, read(&folder)), (0, ["some words".to_owned(), "some words".to_owned()]));
    assert!(!err.contains("standard input"), "{err}");

    let folder = ScratchDir::new();
    let file = std::fs::File::open(folder.write("words", "some words")).unwrap();
    let output = retry(&folder, &["--base", "1ms", "--", "sh", "-c", &body]).stdin(file).output().unwrap();
    assert_eq!((output_parts(output).0, read(&folder)), (0, ["some words".to_owned(), "some words".to_owned()]));
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap().success());
}

/// Waits until a file exists.
fn appears(folder: &ScratchDir, name: &str) {
    for _ in 0..2000 {
        if folder.path().join(name).exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{name} doesn't appear");
}

#[test]
fn signals_are_forwarded_and_end_the_retries() {
    for (name, number) in [("INT", 2), ("TERM", 15), ("HUP", 1), ("QUIT", 3)] {
        let folder = ScratchDir::new();
        let body =
            counting(&format!("trap 'echo got > got; exit 9' {name}; touch ready; while :; do sleep 0.05; done"));
        let child =
            retry(&folder, &["--base", "1ms", "--", "bash", "-c", &body]).stderr(Stdio::piped()).spawn().unwrap();
        appears(&folder, "ready");
        signal(&child, name);
        let (status, _, _) = output_parts(child.wait_with_output().unwrap());
        assert_eq!((status, runs(&folder)), (9, 1), "{name}");
        assert!(folder.path().join("got").exists());

        let folder = ScratchDir::new();
        let body = counting("touch ready; exec sleep 30");
        let child = retry(&folder, &["--", "sh", "-c", &body]).stderr(Stdio::piped()).spawn().unwrap();
        appears(&folder, "ready");
        std::thread::sleep(Duration::from_millis(100));
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), None, "it tells the status and doesn't die of it");
        assert_eq!((output_parts(output).0, runs(&folder)), (128 + number, 1), "{name}");
    }
    for name in ["USR1", "USR2", "WINCH"] {
        let folder = ScratchDir::new();
        let body = counting(&format!(
            "trap 'echo got > got' {name}; touch ready; until [ -e got ]; do sleep 0.05; done; exit 3"
        ));
        let words = ["--attempts", "2", "--base", "1ms", "--", "bash", "-c", &body];
        let child = retry(&folder, &words).stderr(Stdio::piped()).spawn().unwrap();
        appears(&folder, "ready");
        signal(&child, name);
        assert_eq!((output_parts(child.wait_with_output().unwrap()).0, runs(&folder)), (3, 2), "{name} doesn't end it");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long a program takes is measured")]
fn a_signal_ends_a_wait() {
    let folder = ScratchDir::new();
    let body = counting("touch ready; exit 3");
    let mut command = retry(&folder, &["--base", "60s", "--cap", "60s", "--jitter", "none", "--", "sh", "-c", &body]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    appears(&folder, "ready");
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    signal(&child, "TERM");
    let (status, _, _) = output_parts(child.wait_with_output().unwrap());
    assert_eq!((status, runs(&folder)), (143, 1));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_signal_ends_reading_stdin() {
    let folder = ScratchDir::new();
    let mut command = retry(&folder, &["--keep-stdin", "--", "cat"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(b"some words").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, "TERM");
    let mut waits = 0..200;
    while child.try_wait().unwrap().is_none() && waits.next().is_some() {
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().signal(), Some(15), "it goes on reading");
}

/// A shell that ignores a signal makes its commands ignore it.
#[test]
fn an_ignored_signal_stays_ignored() {
    let folder = ScratchDir::new();
    let tidegate = env!("CARGO_BIN_EXE_tidegate");
    let script = format!("trap '' HUP; exec {tidegate} retry -- sh -c 'touch ready; sleep 1; exit 0'");
    let child = Command::new("sh").args(["-c", &script]).current_dir(folder.path()).process_group(0).spawn().unwrap();
    appears(&folder, "ready");
    signal(&child, "HUP");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}
