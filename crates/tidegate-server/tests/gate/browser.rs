//! The API in a real browser that shows a foreign page.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;

use tidegate_testkit::servers::{chromium_dom, require_program};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::common::{Peer, get, json, nobody, once, post, start, status};

const ABOUT: &str = r#"{"action":"login","ip":"203.0.113.7"}"#;
const EXPLAIN: &str = "/v1/explain?action=login&ip=203.0.113.7";
/// A name of the page's own that resolves to loopback.
const REBOUND: &str = "rebound.example";

/// A page that tries to reset and to read by each of the API's names, and then shows the results.
const PAGE: &str = r#"<!doctype html><title>page</title><img src="/hold"><pre></pre><script>
const names = ["127.0.0.1", "localhost", "rebound.example"], told = [];
const about = '{"action":"login","ip":"203.0.113.7"}', explain = "/v1/explain?action=login&ip=203.0.113.7";
const ended = (frame) => new Promise((resolve) => { frame.onload = resolve; document.body.append(frame); });
const asked = async (how, url, options) => {
    try {
        const answer = await fetch(url, options);
        told.push(how + " " + answer.type + " " + answer.status + " " + await answer.text());
    } catch (error) { told.push(how + " " + error); }
};
const post = (more) => ({ method: "POST", body: about, ...more });
const json = { headers: { "content-type": "application/json" } };
const tries = async (api) => {
    await asked("text", api + "/v1/reset", post());
    await asked("json", api + "/v1/reset", post(json));
    await asked("token", api + "/v1/reset", post({ headers: { "x-tidegate-token": "x" } }));
    await asked("no-cors", api + "/v1/reset", post({ mode: "no-cors" }));
    await asked("keepalive", api + "/v1/reset", post({ mode: "no-cors", keepalive: true, referrerPolicy: "no-referrer" }));
    await asked("read", api + explain);
    await asked("read opaquely", api + explain, { mode: "no-cors" });
    navigator.sendBeacon(api + "/v1/reset", about);
    const form = document.createElement("form");
    form.action = api + "/v1/reset";
    form.method = "POST";
    form.enctype = "text/plain";
    form.innerHTML = '<input name=\'{"action":"login","ip":"203.0.113.7","key":"\' value=\'"}\'>';
    const target = document.createElement("iframe");
    target.name = form.target = "form" + api;
    const sent = ended(target).then(() => new Promise((resolve) => { target.onload = resolve; form.submit(); }));
    document.body.append(form);
    await sent;
    const sandboxed = document.createElement("iframe");
    sandboxed.sandbox = "allow-scripts";
    sandboxed.srcdoc = `<script>fetch("${api}/v1/reset", { method: "POST", body: '${about}', mode: "no-cors" })
        .finally(() => parent.postMessage("done", "*"))<\/script>`;
    const done = new Promise((resolve) => { onmessage = resolve; });
    document.body.append(sandboxed);
    await done;
};
(async () => {
    for (const name of names) await tries("http://" + name + ":API");
    document.querySelector("pre").textContent = told.join("\n");
    await fetch("/done");
})();
</script>"#;

/// Serves the page on a port of this address. The page keeps loading until it requests `/done`.
async fn page(address: &str, api: u16) -> SocketAddr {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let done = Arc::new(Notify::new());
    tokio::spawn(async move {
        loop {
            let mut peer = Peer::over(listener.accept().await.unwrap().0);
            let done = Arc::clone(&done);
            tokio::spawn(async move {
                while let Some(asked) = peer.try_message().await {
                    let mut body = String::new();
                    match asked.split(' ').nth(1).unwrap() {
                        "/" => body = PAGE.replace("API", &api.to_string()),
                        "/hold" => done.notified().await,
                        "/done" => done.notify_one(),
                        _ => {}
                    }
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html";
                    peer.send(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
                }
            });
        }
    });
    address
}

/// Returns the page that a browser shows at a URL. `None` if there is no browser.
async fn browse(url: String) -> Option<String> {
    tokio::task::spawn_blocking(move || chromium_dom(&url, REBOUND)).await.unwrap()
}

fn curl(arguments: &[&str]) -> Option<String> {
    let output = Command::new(require_program("curl")?).arg("-sS").args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_pages_cannot_reset_but_curl_can() {
    let gate = start(nobody(), "[inbound.action.login]\nlimit = \"5 per 60s\"\n").await;
    for _ in 0..3 {
        assert_eq!(status(&once(gate.api, post("/v1/check", ABOUT)).await), 200);
    }
    let port = gate.api.port();
    let (near, far) = (page("127.0.0.1", port).await, page("127.0.0.2", port).await);
    for page in [format!("http://{near}/"), format!("http://{far}/"), format!("http://{REBOUND}:{}/", near.port())] {
        let Some(shown) = browse(page.clone()).await else { return };
        assert_eq!(shown.matches("TypeError: Failed to fetch").count(), 3 * 4, "{page}: {shown}");
        assert_eq!(shown.matches("opaque 0").count(), 3 * 3, "{page}: {shown}");
        assert!(!shown.contains("\"used\""), "{page}: {shown}");
        assert_eq!(json(&once(gate.api, get(EXPLAIN)).await)["limits"][0]["used"], 3, "{page}: {shown}");
    }
    // For the browser a rebound page has the API's own origin, and so has a page that the user opens.
    let rebound = browse(format!("http://{REBOUND}:{port}{EXPLAIN}")).await.unwrap_or_default();
    assert!(rebound.contains("api.hosts names others") && !rebound.contains("\"used\""), "{rebound}");
    let own = browse(format!("http://127.0.0.1:{port}{EXPLAIN}")).await.unwrap_or_default();
    assert!(own.contains("\"used\":3"), "{own}");

    let url = |path: &str| format!("http://127.0.0.1:{port}{path}");
    let read = tokio::task::spawn_blocking({
        let (explain, reset) = (url(EXPLAIN), url("/v1/reset"));
        move || Some((curl(&[&explain])?, curl(&["-d", ABOUT, &reset])?, curl(&[&explain])?))
    });
    let Some((before, reset, after)) = read.await.unwrap() else { return };
    assert!(before.contains("\"used\":3") && after.contains("\"used\":0"), "{before}{after}");
    assert!(reset.starts_with("{\"reset\":true"), "{reset}");
}
