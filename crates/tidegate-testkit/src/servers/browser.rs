//! A headless Chromium, driven over the WebDriver protocol.

use std::process::Command;
use std::thread::sleep;

use serde_json::{Value, json};

use super::{ChildProcess, MAX_POLLS, POLL_INTERVAL, ScratchDir, free_port, require_program};
use crate::http_client::HttpClient;

/// The key that moves the focus, in WebDriver's encoding.
pub const TAB: &str = "\u{e004}";
/// The key that activates the focused element.
pub const ENTER: &str = "\u{e007}";

/// A window of a browser, which is closed with this value.
#[derive(Debug)]
pub struct BrowserWindow {
    port: u16,
    session: String,
    _driver: ChildProcess,
}

impl BrowserWindow {
    /// Opens a window. `None` if Chromium or its driver isn't installed.
    ///
    /// # Panics
    /// If the browser doesn't start.
    pub fn open() -> Option<Self> {
        let (driver, chromium) = (require_program("chromedriver")?, require_program("chromium")?);
        let (scratch, port) = (ScratchDir::new(), free_port());
        let mut command = Command::new(driver);
        command.arg(format!("--port={port}")).env("HOME", scratch.path()).env("TMPDIR", scratch.path());
        let driver = ChildProcess::start(command, scratch, port);
        // Root can't create its sandbox, and the pages are trusted.
        let arguments =
            ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"];
        let options = json!({ "binary": chromium, "args": arguments });
        let logs = json!({ "browser": "ALL", "performance": "ALL" });
        let mut wanted = json!({ "browserName": "chrome", "goog:loggingPrefs": logs, "goog:chromeOptions": options });
        wanted["timeouts"] = json!({ "pageLoad": 20_000 });
        let mut window = Self { port, session: String::new(), _driver: driver };
        let created = window.send("POST", "/session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        created["sessionId"].as_str().expect("a session").clone_into(&mut window.session);
        Some(window)
    }

    /// Loads a page.
    ///
    /// # Panics
    /// If it can't be loaded.
    pub fn load(&self, url: &str) {
        self.command("url", &json!({ "url": url }));
    }

    /// Opens a tab in front of the others, and uses it from then on.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn open_tab(&self) {
        let tab = self.command("window/new", &json!({ "type": "tab" }));
        self.command("window", &json!({ "handle": tab["handle"] }));
    }

    /// Runs a function body in the page and returns its result.
    ///
    /// # Panics
    /// If it throws.
    pub fn run(&self, script: &str) -> Value {
        self.command("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Runs a function body until its result is true.
    ///
    /// # Panics
    /// If it doesn't become true in time. The message has the text of the page.
    pub fn wait_until(&self, script: &str) {
        for _ in 0..MAX_POLLS * 3 {
            if self.run(script) == true {
                return;
            }
            sleep(POLL_INTERVAL);
        }
        panic!("this isn't true: {script}\n{}", self.run("return location + '\\n' + document.body.innerText"));
    }

    /// Types text, or presses a special key.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn press(&self, keys: &str) {
        let key = |kind: &str, key: char| json!({ "type": kind, "value": key });
        let presses: Vec<Value> = keys.chars().flat_map(|it| [key("keyDown", it), key("keyUp", it)]).collect();
        self.command("actions", &json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": presses }] }));
    }

    /// Gives the page the width of a phone, or another one.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn set_width(&self, width: u32) {
        let size = json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600 });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": size });
        self.command("goog/cdp/execute", &command);
    }

    /// Has the page believe that its reader prefers `dark` or `light` colours.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn set_preferred_colours(&self, colours: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": colours }] });
        self.command("goog/cdp/execute", &json!({ "cmd": "Emulation.setEmulatedMedia", "params": features }));
    }

    /// The warnings and errors on the console since the last call.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn console_errors(&self) -> Vec<String> {
        let lines = self.log("browser");
        lines.iter().filter(|line| line["level"] != "DEBUG" && line["level"] != "INFO").map(Value::to_string).collect()
    }

    /// The addresses that the browser has asked for since the last call.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn requested_urls(&self) -> Vec<String> {
        let lines = self.log("performance");
        let events = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line["message"].as_str()?).ok());
        let events = events.filter(|event| event["message"]["method"] == "Network.requestWillBeSent");
        events.filter_map(|event| Some(event["message"]["params"]["request"]["url"].as_str()?.to_owned())).collect()
    }

    fn log(&self, kind: &str) -> Vec<Value> {
        self.command("se/log", &json!({ "type": kind })).as_array().cloned().unwrap_or_default()
    }

    fn command(&self, name: &str, body: &Value) -> Value {
        self.send("POST", &format!("/session/{}/{name}", self.session), body)
    }

    fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        let mut client = HttpClient::connect(self.port).expect("a driver that listens");
        let response = client.request(self.request(method, path, body));
        assert_eq!(response.status, 200, "{path} {body}: {}", response.body);
        let mut answer: Value = serde_json::from_str(&response.body).expect("JSON of the driver");
        answer["value"].take()
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> String {
        let (body, port) = (body.to_string(), self.port);
        let head = format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json");
        format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }
}

impl Drop for BrowserWindow {
    fn drop(&mut self) {
        // Otherwise the browser would outlive its driver, also after a test that has failed.
        let end = self.request("DELETE", &format!("/session/{}", self.session), &json!({}));
        HttpClient::connect(self.port).and_then(|mut client| client.try_first_request(&end));
    }
}
