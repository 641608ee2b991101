//! Errors of broken scenarios tell the mistake, its place and the likely intent.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_policy::ErrorLocation;
use tidegate_sim::Scenario;

/// A valid scenario.
const GOOD: &str = "\
title = \"good\"
[service]
latency = \"10ms\"
[load.all]
rate = \"5/s\"
";

/// Returns the line and column of the first mistake, and the whole text as a reader sees it.
#[track_caller]
fn first_error(text: &str) -> (usize, usize, String) {
    let errors = Scenario::read("s.toml", text.as_bytes()).unwrap_err();
    let error = errors.iter().next().unwrap();
    let ErrorLocation::File { name, line, column } = error.location() else { panic!("{error}") };
    assert_eq!(name, "s.toml");
    (*line, *column, errors.to_string())
}

#[test]
fn mistakes_are_reported_with_position_and_suggestion() {
    assert!(Scenario::read("s.toml", GOOD.as_bytes()).is_ok());
    let cases = [
        ("[servise]\n", (6, 2), "did you mean `service`?"),
        ("[network]\ndelays = \"1ms\"\n", (7, 1), "did you mean `delay`?"),
        ("[network]\ndelay = 5\n", (7, 9), "exponential"),
        ("[network]\ndelay = {}\n", (7, 9), "is no delay"),
        ("[network]\ndelay = { exponental = \"1ms\" }\n", (7, 11), "did you mean `exponential`?"),
        ("[network]\ndelay = { normal = \"1ms\" }\n", (7, 9), "deviation"),
        ("[network]\ndelay = { uniform = [\"5ms\", \"1ms\"] }\n", (7, 21), "shorter duration to a longer"),
        ("[network]\nloss = \"120%\"\n", (7, 8), "is no piece of it"),
        ("[network]\nloss = [\"1%\", \"2%\"]\n", (7, 9), "says no end"),
        ("[network]\nloss = [\"1% until 5s\", \"2% until 5s\", \"0%\"]\n", (7, 24), "ends before it begins"),
        ("[network]\nloss = \"0% to 5%\"\n", (7, 8), "is no piece of it"),
        ("[network]\npartitions = \"5s to 4s\"\n", (7, 14), "is no stretch of time"),
        ("[store]\nlatency = \"1ms\"\n", (7, 1), "shared = true"),
        ("[load.none]\n", (6, 1), "its calls are described not at all, or more than once"),
        ("[load.both]\nrate = \"1/s\"\ncalls = 3\n", (6, 1), "its calls are described not at all, or more than once"),
        ("[load.mad]\nthink = \"0s\"\n", (6, 1), "never pause and never end"),
        ("[load.mad]\nthink = { uniform = [\"0s\", \"0s\"] }\n", (6, 1), "never pause and never end"),
        ("[load.mad]\nthink = { exponential = \"0s\" }\n", (6, 1), "never pause and never end"),
        ("[load.back]\ntrace = [\"2s\", \"1s\"]\n", (7, 9), "isn't in order"),
        ("[load.x]\nrate = \"1/s\"\nlane = \"usr\"\n", (8, 8), "did you mean `user`?"),
        ("[load.x]\nrate = \"1/s\"\nclients = 0\n", (8, 11), "out of range"),
        ("[load.x]\nrate = \"1/s\"\nclock_steps = \"at 5s sideways 1s\"\n", (8, 15), "is no step"),
        ("[strategy.x]\nattemps = 3\n", (7, 1), "did you mean `attempts`?"),
        ("[strategy.x]\nclient = \"tidgate\"\n", (7, 10), "did you mean `tidegate`?"),
        ("[strategy.x]\nbackoff = { jitter = \"ful\" }\n", (7, 22), "did you mean `full`?"),
        ("[strategy.x]\nbudget = { ratio = 2 }\n", (7, 20), "a share from 0 to 1"),
        ("[strategy.x]\npace = { by = \"responsive\", upp = 2 }\n", (4, 7), "did you mean `up`?"),
        ("[strategy.x]\npace = \"adaptive\"\n", (7, 8), "a plain client has no such `pace`"),
        ("[strategy.x]\npace = \"responsive\"\n", (4, 7), "one call after the other"),
        ("[strategy.x]\npace = \"responsive\"\nbackoff = {}\n", (8, 1), "said twice"),
        ("[case.x]\nservice.workers = 0\n", (7, 19), "out of range"),
        ("[case.x]\nservice.workers = [\"20 until 5s\", \"0\"]\n", (7, 35), "a number from 1 to 1000000"),
        ("[case.x]\nservice.workers = \"1.5\"\n", (7, 19), "a number from 1 to 1000000"),
        ("[case.x]\nservice.pauses = \"5s\"\n", (7, 18), "needs a period and a length"),
        ("[case.x]\nservice.pauses = { evry = \"5s\", for = \"1s\" }\n", (7, 20), "did you mean `every`?"),
        ("[case.x]\nservice.pauses = { every = \"5s\", for = \"5s\" }\n", (7, 40), "no time for work"),
        ("[network]\ndelay = { pareto = \"1ms\", shape = 0 }\n", (7, 35), "out of range"),
        ("[network]\ndelay = { pareto = \"1ms\", cap = \"1s\" }\n", (7, 9), "is no delay"),
        ("[strategy.x]\ncontrol = \"vegs\"\n", (7, 11), "did you mean `vegas`?"),
        ("[strategy.x]\ncontrol = \"vegas\"\nqueue = 0\n", (8, 9), "out of range"),
        ("[strategy.x]\nin_flight = 5\ncontrol = \"vegas\"\n", (7, 1), "said twice"),
        ("[case.x]\nservice.spacing = \"5/s\"\n", (7, 19), "20ms"),
        ("[strategy]\n", (6, 1), "has 0 sections"),
        ("[case.x]\nlod.all.rate = \"3/s\"\n", (7, 1), "did you mean `load`?"),
        ("[case.x]\nload.all.rate = 3\n", (7, 17), "40/s"),
        ("[case.x]\nservice.limit = \"8 in flight\"\n", (7, 17), "`workers` and `queue`"),
        ("[case.x]\nservice.limit = [\"5/s\", \"2000000 per 1h\"]\n", (7, 25), "at most 1048576 calls"),
        ("[check]\nshare = 0\n", (7, 9), "a share from 0.001 to 1"),
        ("[outbound.provider.api]\nlimt = \"5/s\"\n", (7, 1), "did you mean `limit`?"),
        ("[inbound.action.default]\nlimit = \"5 per 60\"\n", (7, 16), "has no unit"),
        ("[inbound.action.default]\nkey = [\"header:x\"]\nlimit = \"5/s\"\n", (4, 7), "the gate can't decide"),
    ];
    let mut wrong = String::new();
    for (more, place, words) in cases {
        let (line, column, message) = first_error(&format!("{GOOD}{more}"));
        if (line, column) != place || !message.contains(words) {
            wrong.push_str(&format!("{more}{line}:{column}, not {place:?}, or without {words:?}\n{message}\n\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn top_level_settings_are_validated_strictly() {
    let cases = [
        ("titel = \"x\"\n", (1, 1), "did you mean `title`?"),
        ("measure = \"last 10s\"\n", (1, 11), "10s to 20s"),
        ("measure = \"10s to 70s\"\n", (1, 11), "and the run to 1m"),
        ("measure = [\"1s to 2s\", \"3s to 4s\"]\n", (1, 11), "not one stretch"),
        ("duration = 60\n", (1, 12), "did you mean \"60s\" or \"60ms\"?"),
        ("duration = \"3000d\"\n", (1, 12), "longer than a year"),
        ("starts_at = \"yesterday\"\n", (1, 13), "a moment such as"),
        ("trials = 0\n", (1, 10), "out of range"),
        ("seed = -1\n", (1, 8), "out of range"),
    ];
    for (first, place, words) in cases {
        let (line, column, message) = first_error(&format!("{first}{GOOD}"));
        assert_eq!((line, column), place, "{first}\n{message}");
        assert!(message.contains(words), "{first}\n{message}");
    }
}

#[test]
fn missing_settings_are_reported() {
    assert!(first_error("title = \"x\"\n").2.contains("the scenario has no load"));
    let unlimited = format!("{GOOD}[strategy.x]\nattempts = \"unlimited\"\n");
    assert!(first_error(&unlimited).2.contains("may take no time"));
    for delay in ["{ exponential = \"0s\" }", "{ normal = \"0s\", deviation = \"0s\" }"] {
        assert!(
            first_error(&format!("{unlimited}[network]\ndelay = {delay}\n")).2.contains("may take no time"),
            "{delay}"
        );
    }
    assert!(Scenario::read("s", format!("{unlimited}[network]\ndelay = \"1ms\"\n").as_bytes()).is_ok());
    let no_provider = format!("{GOOD}[strategy.x]\nclient = \"tidegate\"\n");
    assert!(first_error(&no_provider).2.contains("the provider that it calls is missing"));
    let wrong = format!(
        "{GOOD}[strategy.x]\nclient = \"tidegate\"\nprovider = \"tmbd\"\n[outbound.provider.tmdb]\nlimit = \"5/s\"\n"
    );
    assert!(first_error(&wrong).2.contains("did you mean `tmdb`?"));
    let hedges = format!("{GOOD}[outbound.provider.x]\nlimit = \"5/s\"\nhedge_after = \"1s\"\n");
    assert!(first_error(&hedges).2.contains("can't be simulated"));
}

#[test]
fn invalid_utf8_and_toml_are_reported() {
    assert!(first_error("title = \"x\n").2.contains("isn't closed"));
    let errors = Scenario::read("s.toml", b"title = \"\xff\"").unwrap_err();
    assert!(errors.to_string().contains("isn't UTF-8"), "{errors}");
}

#[test]
fn several_mistakes_are_each_reported_once() {
    let text = format!("{GOOD}lane = \"usr\"\nclients = 0\n[strategy.a]\n[strategy.b]\n[case.c]\n[case.d]\n");
    let errors = Scenario::read("s.toml", text.as_bytes()).unwrap_err();
    assert_eq!(errors.count(), 2, "{errors}");
    let text = format!("{GOOD}[client]\nbackoff = {{ jiter = \"full\" }}\nbudget = {{ rato = 1 }}\n");
    let errors = Scenario::read("s.toml", text.as_bytes()).unwrap_err();
    assert_eq!(errors.count(), 2, "{errors}");
}
