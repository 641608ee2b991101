//! The output and the exit status of `tidegate import`.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::process::{Command, Output};

use tidegate_testkit::servers::ScratchDir;

const LIMITS: &str = "domain: shop\ndescriptors:\n- key: user\n  rate_limit: {unit: minute, requests_per_unit: 60}\n";

/// The status, standard output and standard error of a command.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_tidegate")).args(arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn the_printed_policy_passes_the_check() {
    let scratch = ScratchDir::new();
    let file = scratch.write("limits.yaml", LIMITS);
    let (status, policy, err) = run(&["import", "ratelimit", file.to_str().unwrap()]);
    assert_eq!((status, err.as_str()), (0, ""));
    let made = scratch.write("made.toml", &policy);
    let (status, out, err) = run(&["check", "--no-env", made.to_str().unwrap()]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.contains("shop.user: by name, through the decision API\n  at most 60 in any 60 s (by key)\n"), "{out}");
}

#[test]
fn limits_of_limitador_are_printed_as_a_policy() {
    let scratch = ScratchDir::new();
    let limit = "- {namespace: shop, max_value: 5, seconds: 60, name: reads, conditions: [\"descriptors[0].a == 'b'\"], \
                 variables: [\"descriptors[0]['user_id']\"]}\n";
    let file = scratch.write("limits.yaml", limit);
    let (status, policy, err) = run(&["import", "limitador", file.to_str().unwrap()]);
    assert_eq!((status, err.as_str()), (0, ""));
    let made = "# It applies if descriptors[0].a == 'b'.\n[inbound.action.\"shop.reads\"]\n\
                key = \"key\"  # descriptors[0]['user_id']\nlimit = \"5 per 60s\"\n";
    assert!(policy.ends_with(made), "{policy}");
    let wrong = scratch.write("wrong.yaml", &limit.replace("== 'b'", "=="));
    let (status, _, err) = run(&["import", "limitador", wrong.to_str().unwrap()]);
    assert!(status == 2 && err.contains("wrong.yaml:1:74") && err.contains("is no expression"), "{err}");
}

#[test]
fn a_directory_is_one_configuration() {
    let scratch = ScratchDir::new();
    for (name, text) in [
        ("b.yaml", LIMITS),
        ("a.yml", "domain: other\n"),
        ("notes.txt", "not a limit"),
        (".hidden.yaml", "not a limit"),
    ] {
        scratch.write(name, text);
    }
    let folder = scratch.path().to_str().unwrap();
    let (status, policy, err) = run(&["import", "ratelimit", folder]);
    assert_eq!((status, err.as_str()), (0, ""));
    let domains: Vec<&str> = policy.lines().filter(|line| line.starts_with("# The domain")).collect();
    assert_eq!(domains, ["# The domain other.", "# The domain shop."]);

    scratch.write("a.yml", "domain: shop\n");
    let (status, _, err) = run(&["import", "ratelimit", folder]);
    assert!(status == 2 && err.contains("the domain `shop` stands twice") && err.contains("--merge-domains"), "{err}");
    assert_eq!(run(&["import", "ratelimit", "--merge-domains", folder]).0, 0);
}

#[test]
fn mistakes_have_their_place_and_a_suggestion() {
    let scratch = ScratchDir::new();
    let file = scratch.write("limits.yaml", &LIMITS.replace("rate_limit", "ratelimit"));
    let name = file.to_str().unwrap();
    let (status, out, err) = run(&["import", "ratelimit", name]);
    assert_eq!((status, out.as_str()), (2, ""));
    assert!(err.contains(&format!("--> {name}:4:3")) && err.contains("did you mean `rate_limit`?"), "{err}");
}

#[test]
fn settings_without_effect_are_noted() {
    let scratch = ScratchDir::new();
    let file = scratch.write("limits.yaml", &format!("{LIMITS}  unit: day\n"));
    let (status, _, err) = run(&["import", "ratelimit", file.to_str().unwrap()]);
    assert!(status == 0 && err.contains("limits.yaml:5:3: `unit` has no effect in a descriptor"), "{err}");
}

#[test]
fn missing_files_are_reported() {
    let scratch = ScratchDir::new();
    let folder = scratch.path().to_str().unwrap();
    let (status, _, err) = run(&["import", "ratelimit", folder]);
    assert!(status == 1 && err.contains("no file in it ends with .yaml or .yml"), "{err}");
    let (status, _, err) = run(&["import", "ratelimit", &format!("{folder}/none.yaml")]);
    assert!(status == 1 && err.contains("can't read"), "{err}");
}
