//! The dashboard in a real browser, used with the keyboard alone.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::Span;
use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::browser::{BrowserWindow, ENTER, TAB};
use tidegate_testkit::servers::packages::installed_packages;
use tidegate_testkit::servers::{require_program, skip_test};
use tokio::runtime::Handle;

use crate::common::{Echo, HELLO, Running, nobody, policy, try_start};

const FILE: &str = r#"
    [inbound.action.login]
    match = { path = "/login" }
    limit = "2 per 30m"
    penalty = { base = "10m", cap = "1h" }
    [admin]
    tokens = { ops = "env:OPS" }
"#;
const PAGES: [&str; 7] = ["/", "/who", "/providers", "/fleet", "/policy", "/try", "/events"];
const FOCUSED: &str = "return document.activeElement.textContent.trim()";
/// True if the focus can be seen, or has come to the end of the page.
const IS_MARKED: &str = "const focused = document.activeElement;
    return focused === document.body || getComputedStyle(focused).outlineStyle === 'solid'";
/// The number of seconds that the first blocked client must wait, as the page shows it.
const SECONDS_LEFT: &str =
    "const [, minutes, seconds] = /(\\d+)m(?: (\\d+)s)?/.exec(document.querySelector('td .left').textContent);
    return Number(minutes) * 60 + Number(seconds ?? 0)";

/// Moves the focus to an element with this text. Every element on the way must show that it has the focus.
fn tab_to(window: &BrowserWindow, text: &str) {
    for _ in 0..30 {
        window.press(TAB);
        let focused = window.run(FOCUSED);
        assert_eq!(window.run(IS_MARKED), true, "{focused}");
        if focused == text {
            return;
        }
    }
    panic!("no way to {text}: {}", window.run("return document.body.innerHTML"));
}

fn login_status(gate: SocketAddr) -> u16 {
    HttpClient::connect(gate.port()).unwrap().request(get_request("/login")).status
}

/// Calls until it is stopped.
fn start_load(gate: SocketAddr) -> (Arc<AtomicBool>, thread::JoinHandle<()>) {
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_over);
    let calling = thread::spawn(move || {
        let mut client = HttpClient::connect(gate.port()).unwrap();
        while !stop.load(Ordering::Relaxed) {
            client.request(get_request("/page"));
            thread::sleep(Duration::from_millis(10));
        }
    });
    (is_over, calling)
}

fn sign_in(window: &BrowserWindow, admin: &str) {
    window.load(admin);
    window.wait_until("return location.pathname === '/sign-in' && document.activeElement.id === 'token'");
    window.press("ops-s3cret");
    window.press(ENTER);
    window.wait_until("return document.title === 'Now · Tidegate'");
}

fn numbers_move_under_load(window: &BrowserWindow, gate: SocketAddr) {
    let (is_over, calling) = start_load(gate);
    window.wait_until("return parseFloat(document.querySelector('#admitted .value').textContent) > 1");
    window.wait_until("return document.querySelector('#chart .plot .admitted').getAttribute('points').length > 20");
    is_over.store(true, Ordering::Relaxed);
    calling.join().unwrap();
    window.wait_until("return document.querySelector('#admitted .value').textContent === '0'");
}

fn a_blocked_client_is_unblocked(window: &BrowserWindow, gate: SocketAddr) {
    assert_eq!([(); 4].map(|()| login_status(gate)), [200, 200, 429, 429]);
    tab_to(window, "Who");
    window.press(ENTER);
    window.wait_until("return document.querySelector('td .badge')?.textContent === 'Blocked'");
    let before = window.run(SECONDS_LEFT).as_u64().unwrap();
    assert!((500..=600).contains(&before), "{before}");
    tab_to(window, "Unblock");
    thread::sleep(Duration::from_secs(3));
    let after = window.run(SECONDS_LEFT).as_u64().unwrap();
    assert!(after < before, "{after} of {before} s");
    assert_eq!(window.run(FOCUSED), "Unblock", "the focus stays while the page is updated");
    window.press(ENTER);
    window.wait_until("return document.getElementById('message').textContent.includes('127.0.0.1 starts again')");
    window.wait_until("return document.querySelector('td .badge').textContent === 'Free'");
    assert_eq!(login_status(gate), 200);
}

fn the_colours_are_remembered(window: &BrowserWindow, admin: &str) {
    let ground = || window.run("return getComputedStyle(document.body).backgroundColor");
    let light = ground();
    window.load(admin);
    tab_to(window, "Dark");
    window.press(ENTER);
    let dark = ground();
    assert_ne!(light, dark);
    window.load(admin);
    assert_eq!(ground(), dark);
    tab_to(window, "Light");
    window.press(ENTER);
    assert_eq!(ground(), light);
}

/// Tries the limit on logins, of which three were admitted and two refused.
fn a_limit_is_tried(window: &BrowserWindow, admin: &str) {
    window.load(&format!("{admin}/policy"));
    tab_to(window, "Try other terms of login");
    window.press(ENTER);
    window.wait_until("return location.pathname === '/try' && document.getElementById('limit').value === 'login'");
    window.run("document.getElementById('terms').value = ''; document.getElementById('terms').focus()");
    window.press("1 per 30m");
    window.press(TAB);
    window.press(ENTER);
    window.wait_until("return document.activeElement.id === 'result'");
    let result = window.run("return document.getElementById('result').textContent");
    assert_eq!(result, "login would have refused 80.0 % of requests, 1 of 1 client");
    let refused =
        "return [...document.querySelectorAll('#trial tbody tr')].map((row) => row.cells[1].textContent).join()";
    assert_eq!(window.run(refused), "3,4");
    let lines = window.run("return document.querySelector('pre').textContent");
    assert_eq!(lines, "[inbound.action.login]\nlimit = \"1 per 30m\"\n");
    window.set_width(390);
    let wide = window.run("return document.documentElement.scrollWidth - innerWidth");
    assert!(wide.as_i64().unwrap() <= 0, "{wide}");
    window.set_width(1280);
}

fn pages_fit_a_phone(window: &BrowserWindow, admin: &str) {
    window.set_width(390);
    for page in PAGES {
        window.load(&format!("{admin}{page}"));
        let wide = window.run("return document.documentElement.scrollWidth - innerWidth");
        assert!(wide.as_i64().unwrap() <= 0, "{page}: {wide}");
    }
    window.set_width(1280);
}

fn a_failed_reload_shows_its_error(window: &BrowserWindow, admin: &str) {
    window.load(&format!("{admin}/policy"));
    tab_to(window, "Reload");
    window.press(ENTER);
    window.wait_until("return document.getElementById('message').textContent.includes('did you mean `limit`')");
    window.wait_until("return document.getElementById('reloads').textContent.includes('The last reload has failed')");
}

fn open_pages_follow_a_reload(window: &BrowserWindow, admin: &str, reload: impl Fn(&str)) {
    const ACTIONS: &str = "return [...document.querySelectorAll('#action option')].map((it) => it.value).join()";
    let choose =
        "const list = document.getElementById('action'); list.value = 'login'; list.form.ip.value = '192.0.2.9'";
    let chosen = "const list = document.getElementById('action'); return list.value + ' ' + list.form.ip.value";
    window.load(&format!("{admin}/who"));
    assert_eq!(window.run(ACTIONS), ",login");
    window.run(choose);
    reload(&format!("[inbound.action.another]\nlimit = \"1 per 60s\"\n{FILE}"));
    window.wait_until(&ACTIONS.replace("join()", "includes('another')"));
    assert_eq!(window.run(chosen), "login 192.0.2.9", "what the operator has entered stays");
    reload(&FILE.replace("\"env:OPS\"", "{ secret = \"env:OPS\", read_only = true }"));
    window.wait_until("return document.getElementById('action') === null");
    window.wait_until("return document.getElementById('caller').textContent.includes('read only')");
    window.load(&format!("{admin}/policy"));
    reload(FILE);
    window.wait_until("return document.querySelector('#reload button')?.textContent === 'Reload'");
    // As after another tab has signed out and in again.
    let csrf = "document.querySelector('meta[name=csrf]').content";
    window.run(&format!("{csrf} = 'old'"));
    window.wait_until(&format!("return {csrf} !== 'old'"));
}

fn many_pages_share_the_connections(window: &BrowserWindow, admin: &str) {
    // A browser has six connections to a host.
    for _ in 0..8 {
        window.open_tab();
        window.load(&format!("{admin}/events"));
        window.wait_until("return document.querySelector('#events li') !== null");
    }
}

fn use_dashboard(window: &BrowserWindow, gate: SocketAddr, admin: &str) {
    sign_in(window, admin);
    numbers_move_under_load(window, gate);
    window.press(TAB);
    assert_eq!(window.run(FOCUSED), "Skip to content");
    a_blocked_client_is_unblocked(window, gate);
    a_limit_is_tried(window, admin);
    the_colours_are_remembered(window, admin);
    pages_fit_a_phone(window, admin);
    window.load(&format!("{admin}/events"));
    window.wait_until("return document.querySelector('#events li').textContent.includes('127.0.0.1 is blocked')");
    a_failed_reload_shows_its_error(window, admin);
    tab_to(window, "Sign out");
    window.press(ENTER);
    window.wait_until("return location.pathname === '/sign-in'");
    window.load(admin);
    window.wait_until("return location.pathname === '/sign-in'");

    let errors = window.console_errors();
    assert!(errors.iter().all(|line| line.contains("/v1/reload") && line.contains("422")), "{errors:?}");
    let urls = window.requested_urls();
    assert!(urls.len() > 20 && urls.iter().all(|url| url.starts_with(&format!("{admin}/"))), "{urls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn open_pages_share_connections_and_follow_reloads() {
    let gate: Running = try_start(&policy(nobody(), FILE), |_| Some("ops-s3cret".to_owned())).unwrap();
    let used = tokio::task::spawn_blocking(move || {
        let Some(window) = BrowserWindow::open() else { return };
        let admin = format!("http://{}", gate.admin);
        let reload = |text: &str| {
            text.clone_into(&mut gate.file.lock().unwrap());
            Handle::current().block_on(gate.reload.reload()).unwrap();
        };
        sign_in(&window, &admin);
        reload(FILE);
        many_pages_share_the_connections(&window, &admin);
        open_pages_follow_a_reload(&window, &admin, reload);
    });
    used.await.unwrap();
}

/// Starts a gate with this policy and a clock that runs, and uses its dashboard in a browser, if there is one.
async fn with_dashboard(rest: &str, use_it: impl FnOnce(&BrowserWindow, SocketAddr, &str) + Send + 'static) {
    let upstream = Echo::start(HELLO).await;
    let gate: Running = try_start(&policy(upstream.address, rest), |_| Some("ops-s3cret".to_owned())).unwrap();
    let (inbound, admin) = (gate.inbound, format!("http://{}", gate.admin));
    "[inbound.action.login]\nlmit = \"1 per 60s\"\n".clone_into(&mut gate.file.lock().unwrap());
    let clock = gate.clock.clone();
    let ticking = tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            clock.advance(Span::from_millis(100));
        }
    });
    let used = tokio::task::spawn_blocking(move || {
        let Some(window) = BrowserWindow::open() else { return };
        use_it(&window, inbound, &admin);
    });
    used.await.unwrap();
    ticking.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_works_without_a_mouse() {
    with_dashboard(FILE, use_dashboard).await;
}

/// The script of axe-core. `None` if it can't be installed.
fn axe_script() -> Option<String> {
    let (npm, sources) = (require_program("npm")?, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gate/axe"));
    let install = |folder: &Path| {
        for file in ["package.json", "package-lock.json"] {
            fs::copy(Path::new(sources).join(file), folder.join(file)).unwrap();
        }
        // This compares the package with the checksum in the lock file.
        let arguments = ["60", &npm.to_string_lossy(), "ci", "--no-audit", "--no-fund", "--ignore-scripts"];
        Command::new("timeout").args(arguments).current_dir(folder).status().is_ok_and(|status| status.success())
    };
    let (folders, list) = (Path::new(env!("CARGO_TARGET_TMPDIR")), Path::new(sources).join("package-lock.json"));
    let packages = installed_packages(folders, "axe", &list, &npm, install);
    if packages.is_none() {
        skip_test("axe-core can't be installed");
    }
    Some(fs::read_to_string(packages?.join("node_modules/axe-core/axe.min.js")).unwrap())
}

/// The violations of accessibility rules on the page.
fn violations(window: &BrowserWindow, axe: &str) -> String {
    let script = "return axe.run().then(({ violations, passes }) => passes.length + ' rules passed\\n' + violations
        .map(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html} ${node.failureSummary}\\n`).join('')).join(''))";
    let found = window.run(&format!("{axe};{script}"));
    let (passed, violations) = found.as_str().unwrap().split_once('\n').unwrap();
    let passed: u32 = passed.split(' ').next().unwrap().parse().unwrap();
    assert!(passed > 10, "{passed} rules apply");
    violations.to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_keeps_the_accessibility_rules() {
    let Some(axe) = tokio::task::spawn_blocking(axe_script).await.unwrap() else { return };
    let provider = "[outbound.provider.api]\nbase_url = \"http://127.0.0.1:9\"\nlimit = \"5 per 60s\"\n";
    let alert = "[alert.ops]\non = [\"blocked\"]\nlog = true\n";
    with_dashboard(&format!("{FILE}{provider}{alert}"), move |window, gate, admin| {
        window.load(&format!("{admin}/sign-in"));
        let views = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)];
        let check = |page: &str| {
            for (colours, width) in views {
                window.set_preferred_colours(colours);
                window.set_width(width);
                window.load(&format!("{admin}{page}"));
                assert_eq!(violations(window, &axe), "", "{page} in {colours}, {width} pixels wide");
            }
        };
        check("/sign-in");
        sign_in(window, admin);
        assert_eq!([(); 4].map(|()| login_status(gate)), [200, 200, 429, 429]);
        PAGES.iter().for_each(|page| check(page));
        window.run("document.body.append(document.createElement('img'))");
        assert!(violations(window, &axe).starts_with("image-alt: <img>"), "a planted fault is found");
    })
    .await;
}
