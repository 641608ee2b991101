//! Runs the commands of the README, of the tour and of other pages in order, and compares what they print. `…` stands for anything.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use tidegate_testkit::servers;

const README: &str = include_str!("../../../README.md");
const TOUR: &str = include_str!("../../../docs/tour.md");
/// Pages with a policy of their own, and commands to a gate that runs it.
const PAGES: [&str; 3] = [
    include_str!("../../../docs/from-limitador.md"),
    include_str!("../../../docs/from-redis-cell.md"),
    include_str!("../../../docs/from-throttlecrab.md"),
];
const END: &str = "-- end of the output --";

struct Step {
    command: String,
    expected: Vec<String>,
}

/// The commands of all `console` blocks, with the output that the page shows.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        match (inside, line) {
            (false, "```console") => inside = true,
            (true, "```") => inside = false,
            (true, line) => {
                if let Some(command) = line.strip_prefix("$ ") {
                    steps.push(Step { command: command.to_owned(), expected: Vec::new() });
                } else {
                    let step = steps.last_mut().expect("a block begins with a command");
                    match line.strip_prefix("> ").or_else(|| line.strip_prefix('>')) {
                        Some(more) if step.expected.is_empty() => step.command += &format!("\n{more}"),
                        _ => step.expected.push(line.trim_end().to_owned()),
                    }
                }
            }
            _ => {}
        }
    }
    steps
}

fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('…') else { return pattern == text };
    let Some(rest) = text.strip_prefix(head) else { return false };
    rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(tail, &rest[at..]))
}

#[test]
fn the_readme_setup_is_two_commands() {
    let block = README.split("```console setup\n").nth(1).and_then(|rest| rest.split("```").next());
    assert_eq!(block, Some("$ cargo run --profile quick -- demo\n$ ./test\n"));
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    assert!(root.join("test").is_file());
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    assert!(manifest.contains(r#"default-members = ["crates/tidegate-cli"]"#), "`cargo run` runs the command");
}

#[test]
fn the_tours_policy_is_valid() {
    let toml = TOUR.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a policy");
    let folder = servers::ScratchDir::new();
    let file = folder.write("tidegate.toml", toml);
    let check = Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("check").arg(file).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
}

#[test]
fn env_example_equals_the_env_command() {
    let printed = Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("env").output().unwrap();
    let listed = include_str!("../../../.env.example");
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), listed, ".env.example is what `tidegate env` prints");
}

#[test]
fn the_readme_has_at_most_200_lines() {
    assert!(README.lines().count() <= 200);
}

#[test]
fn the_readmes_commands_print_its_output() {
    run_page(README, &[]);
}

#[test]
fn the_tours_commands_print_its_output() {
    run_page(TOUR, &["replay.svg", "responsive.svg"]);
}

/// The files of a page: the blocks that begin with a comment of one name.
fn files(page: &str) -> Vec<(&str, &str)> {
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| Some(block.split_once('\n')?.1));
    let named = blocks.filter_map(|text| Some((text.lines().next()?.strip_prefix("# ")?, text)));
    named.filter(|(name, _)| name.contains('.') && !name.contains(' ')).collect()
}

#[test]
fn the_pages_commands_print_their_output() {
    if ["bash", "curl", "redis-cli"].into_iter().any(|program| servers::require_program(program).is_none()) {
        return;
    }
    let mut wrong = Vec::new();
    for page in PAGES {
        let ports = ["6379", "8080", "8081", "8085"].map(|port| (port, servers::free_port().to_string()));
        let swap = |text: &str| {
            ports.iter().fold(text.to_owned(), |text, (ours, free)| {
                text.replace(&format!(":{ours}"), &format!(":{free}"))
                    .replace(&format!("-p {ours}"), &format!("-p {free}"))
            })
        };
        let folder = servers::ScratchDir::new();
        let listens =
            files(page).iter().flat_map(|(_, text)| text.lines()).find_map(|line| line.strip_prefix("listen = "));
        let (_, first) = listens.and_then(|listen| listen.trim_matches('"').rsplit_once(':')).expect("an address");
        let port = swap(&format!(":{first}")).trim_start_matches(':').parse().unwrap();
        let path = folder.path().to_owned();
        for (name, text) in files(page) {
            folder.write(name, &swap(text));
        }
        let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        serve.args(["serve", "--config", "tidegate.toml"]).current_dir(&path).env("TIDEGATE__ADMIN__LISTEN", "off");
        if !page.contains("[api]") {
            serve.env("TIDEGATE__API__LISTEN", "off");
        }
        let _gate = servers::ChildProcess::start(serve, folder, port);
        for step in steps(page).iter().filter(|step| !step.command.starts_with("tidegate serve")) {
            let command = swap(&step.command).replace("redis-cli", "redis-cli --no-raw");
            let printed = Command::new("bash").args(["-c", &command]).current_dir(&path).output().unwrap().stdout;
            let printed = String::from_utf8_lossy(&printed).trim_end().to_owned();
            if printed != step.expected.join("\n") {
                wrong.push(format!("$ {}\n{printed}\n-- instead of --\n{}", step.command, step.expected.join("\n")));
            }
        }
    }
    assert!(wrong.is_empty(), "the pages say otherwise:\n\n{}", wrong.join("\n\n"));
}

/// Runs a page's commands, and compares the pictures that they draw with those that the page shows.
fn run_page(page: &str, pictures: &[&str]) {
    if ["bash", "caddy", "curl"].into_iter().any(|program| servers::require_program(program).is_none()) {
        return;
    }
    // The page's ports may be in use here. Each is replaced by a free one in commands, and back in output.
    let ports = ["3000", "8080", "8081", "8082", "8083"].map(|port| (port, servers::free_port().to_string()));
    let swap = |text: &str, inward: bool| {
        ports.iter().fold(text.to_owned(), |text, (ours, free)| {
            let (from, to) = if inward { (*ours, free.as_str()) } else { (free.as_str(), *ours) };
            text.replace(&format!(":{from}"), &format!(":{to}"))
        })
    };

    let folder = servers::ScratchDir::new();
    let bin = std::path::Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
    let mut shell = Command::new("bash")
        .current_dir(folder.path())
        .env("PATH", format!("{}:{}:/usr/sbin", bin.display(), std::env::var("PATH").unwrap()))
        .env("HOME", folder.path())
        .env("TIDEGATE__API__LISTEN", swap("127.0.0.1:8082", true))
        .env("TIDEGATE__ADMIN__LISTEN", swap("127.0.0.1:8083", true))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let group = shell.id();
    let mut stdin = shell.stdin.take().unwrap();
    let mut stdout = BufReader::new(shell.stdout.take().unwrap()).lines();
    let mut wrong = Vec::new();
    for step in steps(page) {
        // The upstream is set for the built-in policy only: a policy of the page must have its own.
        let command = step.command.replace("tidegate serve", "TIDEGATE__INBOUND__LISTEN=127.0.0.1:8080 tidegate serve");
        let built_in = "TIDEGATE__INBOUND__UPSTREAM=http://127.0.0.1:3000 tidegate serve >";
        let command = swap(&command.replace("tidegate serve >", built_in), true);
        // A group would keep running, with its output open, after a command in the background. The command's standard
        // input is not the shell's, because the next commands come from there.
        let grouped = if command.ends_with('&') { command } else { format!("{{ {command}\n}} 2>&1 < /dev/null") };
        write!(stdin, "{grouped}\necho\necho '{END}'\n").unwrap();
        let printed = stdout.by_ref().map(Result::unwrap).take_while(|line| line != END);
        let printed = printed.map(|line| swap(line.trim_end(), false)).collect::<Vec<_>>().join("\n");
        let (printed, expected) = (printed.trim_end(), step.expected.join("\n"));
        if !matches(&expected, printed) {
            wrong.push(format!("$ {}\n{printed}\n-- instead of --\n{expected}", step.command));
        }
    }
    for picture in pictures {
        let shown = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures").join(picture);
        let made = std::fs::read(folder.path().join(picture)).ok();
        if made.is_none() || made != std::fs::read(&shown).ok() {
            wrong.push(format!("{picture} isn't what its command makes: {}", shown.display()));
        }
    }
    drop(stdin);
    let _ = Command::new("kill").args(["--", &format!("-{group}")]).status();
    let _ = shell.wait();
    assert!(wrong.is_empty(), "the page says otherwise:\n\n{}", wrong.join("\n\n"));
}
