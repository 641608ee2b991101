//! Guards against a bug of rustc before 1.96.1 (rust-lang/rust#158206). In optimised code, the result of a comparison
//! with a constant may be lost as a number if it is also branched on. Delete this file when `rust-version` is 1.96.1 or
//! later.

use std::collections::HashSet;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

mod sources;

const MENDED: (u32, u32, u32) = (1, 96, 1);

fn version(text: &str) -> (u32, u32, u32) {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok());
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

struct Counter(usize);

impl Counter {
    fn begins(&mut self) -> bool {
        let begins = self.0 == 0;
        self.0 += usize::from(begins);
        begins
    }
}

#[inline(never)]
fn branch(counter: &mut Counter) -> u32 {
    if counter.begins() { 1 } else { 2 }
}

#[test]
fn fixed_compilers_lose_no_count() {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let told = Command::new(rustc).arg("--version").output().expect("rustc can be run");
    let told = String::from_utf8_lossy(&told.stdout).trim().to_owned();
    let mut counter = Counter(black_box(0));
    let seen = (branch(&mut counter), branch(&mut counter), counter.0);
    let is_faulty = seen != (1, 2, 1);
    let optimised = if cfg!(debug_assertions) { "not optimised" } else { "optimised" };
    println!("{told}, {optimised}: {}", if is_faulty { "has the fault" } else { "does not show the fault" });
    assert!(!is_faulty || version(&told) < MENDED || told.contains("nightly"), "{told} counts {seen:?}");
}

#[test]
fn no_comparison_is_both_number_and_branch() {
    assert!(version(env!("CARGO_PKG_RUST_VERSION")) < MENDED, "no supported compiler has the fault: delete this file");
    let mut files = sources::rust_files();
    let own = Path::new(file!()).file_name();
    files.retain(|file| file.file_name() != own);
    let found: Vec<String> = files
        .iter()
        .flat_map(|file| {
            let text = fs::read_to_string(file).unwrap();
            // In a test such a sum is harmless unless a branch depends on the truth value.
            let sums = !file.components().any(|part| part.as_os_str() == "tests");
            suspicious(&text, sums).into_iter().map(|line| format!("{}:{line}", file.display())).collect::<Vec<_>>()
        })
        .collect();
    assert!(
        found.is_empty(),
        "rustc before 1.96.1 may lose these numbers; write `if … {{ n += 1 }}`:\n{}",
        found.join("\n")
    );
}

#[test]
fn the_suspicious_pattern_is_detected() {
    for text in [
        "let b = self.n == 0;\nself.n += usize::from(b);",
        "fn told(failed: bool) {\nself.up += u64::from(failed);",
        "n += u64::from(op.verb == Verb::Take);",
        "n -= u32::from(!passed());",
        "let b = matches!(x, X::A);\nlet next = at + usize::from(b);",
        "let b = x != 3;\nlet n = b as usize;",
        "n += (x == 3) as u8;",
        "n += u8::from(matches!(x, X::A));",
        "let b = x == 3 && y();\nn = n + u64::from(b);",
        "Ok(Written { any }) => {\nn = n + u64::from(any);\nif any && m {",
        "if !had { return }\nout = i64::from(had) + 1;",
    ] {
        assert!(!suspicious(text, true).is_empty(), "{text}");
    }
    for text in [
        "n += u128::from(cost);",
        "n += usize::from(black_box(allowed));",
        "let cost = spec.cost;\nn = u64::from(cost);",
        "let n = u64::from(a <= 4);",
        "fn a() {\nlet b = x == 3;\n}\nfn b(b: u8) {\nlet n = b as usize;",
        "if x == 3 { n += 1 }",
        "fn a() {\nif b { 1 }\n}\nfn b(b: u8) {\nlet n = usize::from(b) + 1;",
        "// n += u64::from(a == b)",
    ] {
        assert_eq!(suspicious(text, true), Vec::<String>::new(), "{text}");
    }
}

const NUMBERS: [&str; 13] =
    ["u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128", "isize", "f64"];

/// Returns the lines that convert a named comparison, or a truth value that the function branches on, to a number. With
/// `sums`, also returns those that add any truth value to a number.
fn suspicious(text: &str, sums: bool) -> Vec<String> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut branches = HashSet::new();
    let (mut truths, mut comparisons) = (HashSet::new(), HashSet::new());
    for (index, &line) in lines.iter().enumerate().filter(|(_, line)| !line.starts_with("//")) {
        let begins = |line: &str| line.contains("fn ");
        if index == 0 || begins(line) {
            truths.clear();
            comparisons.clear();
            let end =
                lines.iter().skip(index + 1).position(|line| begins(line)).map_or(lines.len(), |more| index + 1 + more);
            branches = lines[index..end].iter().flat_map(|line| branched_on(line)).collect();
        }
        let parameters = line.match_indices(": bool").map(|(at, _)| &line[..at]);
        truths.extend(parameters.filter_map(|before| before.rsplit(|c: char| !is_name(c)).next()));
        if let Some((name, value)) = line.strip_prefix("let ").and_then(|binding| binding.split_once(" = "))
            && compares(value)
        {
            comparisons.insert(name.trim_start_matches("mut ").split(':').next().unwrap_or(name));
        }
        let adds = sums && [" += ", " -= "].iter().any(|sign| line.contains(sign));
        let is_lost = |value: &str| {
            comparisons.contains(value)
                || branches.contains(value)
                || adds && (compares(value) || truths.contains(value))
        };
        if numbers_from(line).any(is_lost) {
            found.push(format!("{}: {line}", index + 1));
        }
    }
    found
}

/// Returns the names that a line branches on directly.
fn branched_on(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("if ").filter_map(|(at, word)| {
        let condition = line[at + word.len()..].trim_start_matches('!');
        let name = &condition[..condition.find(|c: char| !is_name(c)).unwrap_or(condition.len())];
        let rest = condition[name.len()..].trim_start();
        (!name.is_empty() && ["{", "&&", "||"].iter().any(|word| rest.starts_with(word))).then_some(name)
    })
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns true if the whole value is a comparison, not only a part within parentheses or a block.
fn compares(value: &str) -> bool {
    let operators = [" == ", " != ", " < ", " > ", " <= ", " >= "];
    let is_outside = |at: usize| {
        let depth: i32 = value[..at].chars().map(|c| i32::from(c == '(') - i32::from(c == ')')).sum();
        depth == 0
    };
    let mut signs = operators.iter().flat_map(|sign| value.match_indices(sign));
    let is_block = ["if ", "match ", "{", "|", "\""].iter().any(|word| value.starts_with(word)) || value.ends_with('{');
    !is_block && (value.starts_with('!') || value.starts_with("matches!(") || signs.any(|(at, _)| is_outside(at)))
}

/// Returns the parts of the line that are converted to numbers: the arguments of `u64::from(…)`, and the text before
/// `as u64`.
fn numbers_from(line: &str) -> impl Iterator<Item = &str> {
    NUMBERS.iter().flat_map(move |number| {
        let from = line
            .match_indices(&format!("{number}::from("))
            .map(|(at, call)| inside(&line[at + call.len()..]))
            .collect::<Vec<_>>();
        let casts = line.match_indices(&format!(" as {number}")).map(|(at, _)| before(&line[..at])).collect::<Vec<_>>();
        from.into_iter().chain(casts)
    })
}

/// Returns the text up to the closing parenthesis.
fn inside(text: &str) -> &str {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..at];
        }
    }
    text
}

/// Returns the name at the end, or the content of the parentheses there.
fn before(text: &str) -> &str {
    if !text.ends_with(')') {
        return text.rsplit(|c: char| !is_name(c)).next().unwrap_or(text);
    }
    let mut depth = 0;
    for (at, c) in text.char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[at + 1..text.len() - 1];
        }
    }
    text
}
