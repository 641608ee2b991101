//! Measures calls with their own rate over HTTP, against throttlecrab's server.

use tidegate_testkit::servers::free_port;

use super::server::{BenchServer, TempFolder};
use super::wrk::{WrkClient, WrkRequest};
use super::{CLIENT_CORE, CONNECTIONS, PROXY_CORE, THROTTLECRAB, compare, measure_pair, start_throttlecrab};
use crate::options::Options;
use crate::programs::{ProgramError, tidegate_program};
use crate::rows::BenchRow;
use crate::subjects::OURS;

const QUESTION: &str = r#"{"key":"user:1234567890","max_burst":1000000,"count_per_period":100000000,"period":60}"#;

/// Measures the row, if the options select it.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    measure_pair(options, on_row, "gate/throttle-http", |rows| run(options, rows));
}

fn run(options: &Options, rows: [&mut BenchRow; 2]) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let load = WrkRequest::Post { path: "/throttle", body: QUESTION };
    let client = WrkClient::new(&folder, CLIENT_CORE, CONNECTIONS, load)?;
    let mut servers = Vec::new();
    if options.wants_subject(OURS) {
        servers.push((OURS, start_tidegate(&folder)));
    }
    if options.wants_subject(THROTTLECRAB) {
        servers.push((THROTTLECRAB, start_throttlecrab("http")));
    }
    let seconds = if options.quick { 1 } else { 3 };
    compare(options, servers, rows, |_, server| client.run(server.port, seconds))
}

fn start_tidegate(folder: &TempFolder) -> Result<BenchServer, ProgramError> {
    let port = free_port();
    let policy = format!(
        "[api]\nlisten = \"127.0.0.1:{port}\"\ncompat = [\"throttlecrab\"]\n[admin]\nlisten = \"off\"\n\
         [log]\nlevel = \"error\"\n"
    );
    let file = folder.write("tidegate.toml", &policy)?;
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    BenchServer::start(PROXY_CORE, OURS, &tidegate_program()?, &arguments, port)
}
