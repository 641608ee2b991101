//! Settings of providers from variables with a custom prefix.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_core::{Balance, LimitKind, Span};
use tidegate_policy::outbound::{OutboundConfig, ProviderConfig};
use tidegate_policy::{KeySeed, Policy, PolicySources};

const ONE: &str = "[outbound.provider.pixiv]\nbase_url = \"https://www.pixiv.net/ajax\"\nauth = \"bearer\"\n";

fn load(file: &str, prefix: &str, env: &[(&str, &str)]) -> Result<OutboundConfig, String> {
    let sources = PolicySources::new().file("test.toml", file).env_prefix(prefix).env(env.iter().copied());
    let policy = Policy::load(sources).map_err(|errors| errors.to_string())?;
    Ok(policy.outbound().unwrap().clone())
}

fn sources(provider: &ProviderConfig) -> Vec<String> {
    provider.credentials.iter().map(ToString::to_string).collect()
}

#[test]
fn every_prefixed_variable_sets_its_value() {
    let env = [
        ("PIXIVFE_API_MAX_RETRIES", "4"),
        ("PIXIVFE_API_BASE_TIMEOUT", "1.5s"),
        ("PIXIVFE_API_MAX_BACKOFF_TIME", "1m30s"),
        ("PIXIVFE_TOKEN", "hunter2, hunter3 ,hunter4"),
        ("PIXIVFE_TOKEN_LOAD_BALANCING", "least-recently-used"),
        ("PIXIVFE_TOKEN_MAX_RETRIES", "7"),
        ("PIXIVFE_MAX_RETRIES", "6"),
        ("PIXIVFE_BASE_TIMEOUT", "250ms"),
        ("PIXIVFE_TOKEN_MAX_BACKOFF_TIME", "16s"),
        ("PIXIVFE_PORT", "8282"),
        ("OTHER_API_MAX_RETRIES", "9"),
    ];
    let outbound = load(ONE, "PIXIVFE", &env).unwrap();
    let pixiv = outbound.find("pixiv").unwrap();
    assert_eq!(sources(pixiv), ["env:PIXIVFE_TOKEN[1]", "env:PIXIVFE_TOKEN[2]", "env:PIXIVFE_TOKEN[3]"]);
    let resolved = pixiv.credentials[1]
        .resolve(|name| env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()));
    assert_eq!(resolved.unwrap().expose(), "hunter3");
    assert_eq!(pixiv.balance, Balance::LeastRecentlyUsed);
    let rules = pixiv.rules(&KeySeed::new([1; 16]));
    let retry = rules.lane_rules[0].retry;
    assert_eq!((retry.max_attempts, retry.max_token_retries), (5, 7));
    assert_eq!((retry.backoff.base, retry.backoff.cap), (Span::from_millis(1500), Span::from_secs(90)));
    let LimitKind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
        panic!("no cool-down")
    };
    assert_eq!((cooldown.base, cooldown.cap), (Span::from_millis(250), Span::from_secs(16)));
    assert!(!format!("{outbound:?}").contains("hunter") && !outbound.describe().contains("hunter"));
}

#[test]
fn unset_variables_change_nothing() {
    let file = format!("{ONE}credentials = \"env:A\"\n");
    let plain = load(&file, "PIXIVFE", &[("PIXIVFE_API_MAX_RETRIES", "")]).unwrap();
    let with_defaults = load(
        &file,
        "PIXIVFE",
        &[
            ("PIXIVFE_API_BASE_TIMEOUT", "500ms"),
            ("PIXIVFE_API_MAX_BACKOFF_TIME", "8s"),
            ("PIXIVFE_TOKEN_LOAD_BALANCING", "round-robin"),
            ("PIXIVFE_MAX_RETRIES", "5"),
            ("PIXIVFE_BASE_TIMEOUT", "1s"),
            ("PIXIVFE_MAX_BACKOFF_TIME", "32s"),
        ],
    );
    assert_eq!(format!("{plain:?}"), format!("{:?}", with_defaults.unwrap()));
    assert_eq!(sources(&plain.providers()[0]), ["env:A"]);
}

#[test]
fn provider_variables_override_general_variables() {
    let env = [
        ("PIXIVFE_TOKEN", "hunter2"),
        ("PIXIVFE_API_BASE_TIMEOUT", "3s"),
        ("PIXIVFE_API_MAX_BACKOFF_TIME", "30s"),
        ("TIDEGATE__OUTBOUND__PROVIDER__PIXIV__RETRY__BASE", "2s"),
    ];
    let outbound = load(ONE, "PIXIVFE", &env).unwrap();
    let rules = outbound.providers()[0].rules(&KeySeed::new([1; 16]));
    assert_eq!(rules.lane_rules[0].retry.backoff.base, Span::from_secs(2));
    assert_eq!(sources(&outbound.providers()[0]), ["env:PIXIVFE_TOKEN"]);
}

#[test]
fn tokens_go_to_providers_without_credentials() {
    let tokens = [("APP_TOKEN", "hunter2")];
    let open = "[outbound.provider.open]\nlimit = \"1/s\"\n";
    let tmdb = "[outbound.provider.tmdb]\npreset = \"tmdb\"\n";
    let outbound = load(&format!("{ONE}{open}"), "APP", &tokens).unwrap();
    assert_eq!((outbound.providers()[0].credentials.len(), outbound.providers()[1].credentials.len()), (1, 0));
    let outbound = load(&format!("{ONE}credentials = \"env:A\"\n{tmdb}"), "APP", &tokens).unwrap();
    assert_eq!(sources(outbound.find("tmdb").unwrap()), ["env:APP_TOKEN"]);
    assert_eq!(sources(outbound.find("pixiv").unwrap()), ["env:A"]);
    let told = load(&format!("{ONE}{tmdb}"), "APP", &tokens).unwrap_err();
    assert!(told.contains("APP_TOKEN could be for any of pixiv, tmdb"), "{told}");
    let told = load(open, "APP", &tokens).unwrap_err();
    assert!(told.contains("no provider takes any"), "{told}");
}

#[test]
fn tidegate_itself_may_be_the_prefix() {
    let outbound = load(ONE, "TIDEGATE", &[("TIDEGATE_TOKEN", "hunter2")]).unwrap();
    assert_eq!(sources(&outbound.providers()[0]), ["env:TIDEGATE_TOKEN"]);
}

#[test]
fn errors_name_the_variable_without_secrets() {
    for (prefix, name, value, expected) in [
        ("APP", "APP_API_MAX_RETRIES", "-1", "`-1` is no number of retries"),
        ("APP", "APP_API_MAX_RETRIES", "100", "expected a whole number from 0 to 99"),
        ("APP", "APP_API_BASE_TIMEOUT", "500", "the number 500 has no unit"),
        ("APP", "APP_API_BASE_TIMEOUT", "20s", "the longest wait, 8 s, is shorter than the first, 20 s"),
        ("APP", "APP_TOKEN", "hunter2,,hunter3", "has an empty item"),
        ("APP", "APP_TOKEN_LOAD_BALANCING", "roundrobin", "did you mean `round-robin`?"),
        ("APP", "APP_MAX_RETRIES", "many", "`max_token_retries` is the string `many`"),
        ("", "--env-prefix", "", "can't be what names of variables begin with"),
        ("A-B", "--env-prefix", "", "can't be what names of variables begin with"),
    ] {
        let file = if name == "APP_TOKEN" { ONE.to_owned() } else { format!("{ONE}credentials = \"env:A\"\n") };
        let told = load(&file, prefix, &[(name, value)]).unwrap_err();
        assert!(told.contains(expected) && told.contains(&format!("environment variable {name}")), "{told}");
        assert!(!told.contains("hunter"), "{told}");
    }
    let sources = PolicySources::new().env([("APP_TOKEN", "hunter2")]).env_prefix("APP");
    assert!(!format!("{sources:?}").contains("hunter2"));
}
