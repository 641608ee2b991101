//! Providers for [`PolicyBuilder`](super::PolicyBuilder).

use super::{IntoStrings, toml_strings, toml_value};

/// An API that is called: its address, its limits and its credentials.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ProviderSpec {
    pub(super) entries: Vec<(String, String)>,
}

impl ProviderSpec {
    /// An API with this root URL, such as `"https://api.example.com/v1"`.
    pub fn new(base_url: &str) -> Self {
        Self::default().set("base_url", base_url)
    }

    /// An API made from a preset: `"tmdb"`; see [`preset_names`](crate::outbound::preset_names).
    pub fn preset(name: &str) -> Self {
        Self::default().set("preset", name)
    }

    /// The limit on all calls: `"40 per 10s"`, or several quantities that must all allow a call. See
    /// [`Quantity`](crate::Quantity).
    pub fn limit(self, limit: impl IntoStrings) -> Self {
        self.with_entry("limit", toml_strings(limit))
    }

    /// The limit on the calls of each credential: `["40 per 10s", "5 in flight"]`.
    pub fn credential_limit(self, limit: impl IntoStrings) -> Self {
        self.with_entry("credential_limit", toml_strings(limit))
    }

    /// The sources of its credentials, such as `"env:API_TOKEN"`.
    pub fn credentials(self, places: impl IntoStrings) -> Self {
        self.with_entry("credentials", toml_strings(places))
    }

    /// The place of the credential in a request, such as `"bearer"` or `"query:api_key"`. A preset sets it by itself.
    pub fn auth(self, auth: &str) -> Self {
        self.set("auth", auth)
    }

    /// Sets any other setting by its path below the provider, such as `("retry.max_attempts", 5)`.
    pub fn set(self, path: &str, value: impl ToString) -> Self {
        let value = toml_value(&format!("outbound.provider.*.{path}"), value);
        self.with_entry(path, value)
    }

    fn with_entry(mut self, path: &str, value: String) -> Self {
        self.entries.push((path.to_owned(), value));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use proptest::prelude::*;

    #[test]
    fn the_provider_builder_equals_the_same_file() {
        let built = Policy::builder()
            .setting("outbound.cache_bytes", "1MiB")
            .provider("tmdb", ProviderSpec::preset("tmdb").credentials(["env:A", "env:B"]))
            .provider(
                "my.api",
                ProviderSpec::new("https://api.example.com/v1")
                    .auth("query:key")
                    .credentials("file:/run/key")
                    .limit(["10/s", "8 in flight"])
                    .credential_limit("1000 per calendar day")
                    .set("retry.max_attempts", 5)
                    .set("sequential", false)
                    .set("budget.ratio", 0.1)
                    .set("background.hours", "22:00-06:00 in UTC"),
            );
        let text = built.to_toml();
        let built = built.build().unwrap();
        let loaded = Policy::load(crate::PolicySources::new().file("x", text)).unwrap();
        assert_eq!(format!("{built:?}"), format!("{loaded:?}"));
        let outbound = built.outbound().unwrap();
        assert_eq!((outbound.cache_bytes, outbound.providers().len()), (1 << 20, 2));
        assert!(outbound.describe().contains("at most 8 at the same time (all calls)"), "{}", outbound.describe());
    }

    proptest! {
        #[test]
        fn arbitrary_provider_settings_never_panic(index in any::<prop::sample::Index>(), value in "\\PC{0,40}", known in "[-0-9a-z:/{} .%]{0,40}") {
            let paths: Vec<&str> = crate::settings::all()
                .filter_map(|setting| setting.path().strip_prefix("outbound.provider.*."))
                .filter(|path| !path.contains('#'))
                .collect();
            for value in [value, known] {
                let provider = ProviderSpec::preset("tvdb").credentials("env:A").set(paths[index.index(paths.len())], &value);
                let _ = Policy::builder().provider("x", provider).build();
            }
        }
    }
}
