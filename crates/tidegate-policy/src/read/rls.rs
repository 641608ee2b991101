//! `[rls]`: Envoy's rate limit service, and the limits of its files.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use tidegate_core::{CountMode, Sharing};

use super::actions::{LimitGroup, MAX_ACTIONS, ParsedAction, ParsedPenalty};
use super::forms::{Custom, FLAG, Maybe, OrWord, SECRET, Words};
use super::listen::{LISTENER_OR_OFF, LISTENING};
use super::server::{CONNECTIONS, PER_CLIENT, TOKEN};
use super::{DocumentReader, all_or_none};
use crate::document::{TextRange, TomlNode, TomlTable};
use crate::environment::fold_member_name;
use crate::error::{Note, quoted};
use crate::key::{KeyPart, OnMissing};
use crate::listen::{Http2Mode, ListenAddress};
use crate::ratelimit_yaml::{LimitTable, RatelimitConfig, list_files, read_files};
use crate::read_regular_file;
use crate::secret::SecretSource;
use crate::sections::{ApiConfig, CompatibleServer, RlsAlgorithm, RlsConfig, WatchedFiles};
use crate::settings::SettingType::Strings;
use crate::settings::key::{Below, read_keys, setting_keys};

/// The domain whose descriptors are questions to the policy.
const POLICY_DOMAIN: &str = "tidegate";
/// The most items of `files`.
const MAX_FILES: usize = 1000;
const ALGORITHMS: [(&str, RlsAlgorithm); 2] = [("strict", RlsAlgorithm::Strict), ("fixed", RlsAlgorithm::Fixed)];
const FILES: Custom<Vec<PathBuf>> =
    Custom(Strings, "the path of a file or a directory, or a list of them", |reader, node, key| {
        let count = node.items().len();
        if count > MAX_FILES {
            return reader.too_many(node, key, count, MAX_FILES);
        }
        all_or_none(node.items().iter().map(|item| reader.yaml_path(item, key)))
    });

setting_keys! {
    /// The keys of `[rls]`.
    RLS: RlsKeys {
        listen: Vec<ListenAddress> = "127.0.0.1:8084", LISTENER_OR_OFF,
            "the addresses of Envoy's rate limit service over gRPC, or off; without [rls] it is off. HTTP/2 is always taken here, also without TLS",
            Below::Beside(&LISTENING);
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        connections_per_client: Option<usize> = "512", OrWord("off", CONNECTIONS),
            PER_CLIENT;
        files: Vec<PathBuf> = "", FILES,
            "limits in the YAML of Envoy's ratelimit service: files, and directories whose .yaml and .yml files are read";
        merge_domains: bool = "false", FLAG, "true if several files may have one domain";
        algorithm: RlsAlgorithm = "strict", Words(&ALGORITHMS),
            "the count of a limit of these files: in each window of its length, or in each unit of the clock as the original does (fixed)";
    }
}

impl DocumentReader<'_> {
    /// Reads `[rls]`; `None` inside if there is none.
    pub(super) fn rls(&mut self, root: &TomlTable) -> Option<Option<RlsConfig>> {
        let Some(table) = self.section(Some(root), "rls", "rls") else { return Some(None) };
        let named = ("rls", "the rate limit service");
        let (listen, token) = self.listen_and_token(Some(table), named, &RLS.listen, &RLS.token, false);
        read_keys!(self, table, RLS: connections_per_client, files, merge_domains, algorithm);
        let (connections_per_client, files, merge_domains) = (connections_per_client?, files?, merge_domains?);
        let (limits, watched) = match table.node("files") {
            Some(node) if !files.is_empty() => {
                let (limits, watched) = self.yaml_limits(node.at, &files, merge_domains)?;
                (Some(limits), watched)
            }
            _ => Default::default(),
        };
        let mut listen = listen?;
        if let Some(node) = table.node("http2").filter(|_| listen.http2 == Http2Mode::Never) {
            return self.error(node.at, "gRPC needs HTTP/2", "`tls` or `always`, which are the same here").none();
        }
        listen.http2 = Http2Mode::Always;
        let (token, algorithm) = (token?, algorithm?);
        Some(Some(RlsConfig {
            listen,
            token,
            connections_per_client,
            files,
            merge_domains,
            algorithm,
            limits,
            watched,
        }))
    }

    fn yaml_path(&mut self, node: &TomlNode, key: &str) -> Option<PathBuf> {
        const EXPECTED: &str = "the path of a file or a directory, such as \"ratelimit.yaml\"";
        let path = self.string(node, key, EXPECTED)?;
        if path.is_empty() || path.contains(char::is_control) {
            return self.error(node.at, format!("`{key}`: {} is no path", quoted(path)), EXPECTED).none();
        }
        Some(PathBuf::from(path))
    }

    /// Reads the limits of files and directories. Returns them with the state of each before it was read.
    fn yaml_limits(
        &mut self,
        at: TextRange,
        paths: &[PathBuf],
        merge_domains: bool,
    ) -> Option<(Arc<LimitTable>, WatchedFiles)> {
        let folders = paths.iter().filter(|path| path.is_dir());
        let state = |path: &PathBuf| Some((path.clone(), fs::metadata(path).ok()?));
        let mut watched: WatchedFiles = folders.filter_map(state).collect();
        let files = list_files(paths).and_then(|files| {
            watched.extend(files.iter().filter_map(state));
            read_files(files, read_regular_file)
        });
        let files = match files {
            Ok(files) => files,
            Err(error) => return self.error(at, error.to_string(), "files that can be read").none(),
        };
        let files = files.into_iter().map(|(path, body)| (path.to_string_lossy().into_owned(), body));
        let config = match RatelimitConfig::read(files, merge_domains) {
            Ok(config) => config,
            Err(errors) => {
                self.errors.append(&errors);
                return None;
            }
        };
        self.notes.extend_from_slice(config.notes());
        let limits = LimitTable::new(&config);
        if limits.has_domain(POLICY_DOMAIN) {
            let message =
                format!("the files have the domain `{POLICY_DOMAIN}`, whose descriptors ask the policy's actions");
            return self.error(at, message, "another name of the domain").none();
        }
        Some((Arc::new(limits), watched))
    }

    /// Notes that limitador's paths have no limits to ask.
    pub(super) fn note_missing_limits(&mut self, root: &TomlTable, api: &ApiConfig, rls: Option<&RlsConfig>) {
        let table = rls.and_then(|rls| rls.limits.as_ref());
        if api.compat.contains(&CompatibleServer::Limitador)
            && !table.is_some_and(|table| table.has_namespaces())
            && let Some(node) = root.table("api").and_then(|api| api.node("compat"))
        {
            let message =
                "the paths of limitador admit everything, because no file of `rls.files` has limits in its YAML";
            self.notes.push(Note::new(self.texts, node.at, message));
        }
    }

    /// The limits of the files as actions. They follow these others. One of those with the name of a limit replaces it, so
    /// that descriptors can have everything that actions have. No call of either kind meets `inbound.global`, because
    /// descriptors don't give a client's address.
    pub(super) fn yaml_actions(
        &mut self,
        root: &TomlTable,
        rls: &RlsConfig,
        others: &mut [ParsedAction],
    ) -> Option<Vec<ParsedAction>> {
        let Some(table) = &rls.limits else { return Some(Vec::new()) };
        let at = root.table("rls").and_then(|table| table.node("files")).map_or(self.full_range, |node| node.at);
        if others.len() + table.limits().len() > MAX_ACTIONS {
            let message =
                format!("the files have {} limits, and the policy {} actions", table.limits().len(), others.len());
            return self.error(at, message, format!("at most {MAX_ACTIONS} in all")).none();
        }
        let mut names: HashMap<String, &mut ParsedAction> =
            others.iter_mut().map(|action| (action.folded_name.clone(), action)).collect();
        let sharing = Sharing { on_outage: self.on_outage, lease: None };
        let new_limits = table.limits().iter().filter_map(|found| {
            let folded_name = fold_member_name(&found.action);
            if let Some(action) = names.get_mut(&folded_name) {
                action.meets_global = false;
                return self.check_replacing(action, &found.action).is_none().then_some(None);
            }
            let group = LimitGroup {
                name: None,
                key: vec![KeyPart::Key],
                key_at: None,
                missing: OnMissing::default(),
                quantities: vec![(rls.algorithm.quantity(found.limit.amount), at)],
                penalty: ParsedPenalty::None,
                count: CountMode::Admitted,
                sharing,
                shadow: found.shadow_mode,
                reservations: None,
            };
            Some(Some(ParsedAction {
                name: found.action.clone(),
                folded_name,
                name_at: at,
                matcher: None,
                cost: 1,
                cost_at: None,
                shadow: found.shadow_mode,
                groups: vec![group],
                meets_global: false,
            }))
        });
        all_or_none(new_limits)
    }

    /// Checks an action that replaces a limit of the files with this name: it counts by what the descriptors say.
    fn check_replacing(&mut self, action: &ParsedAction, name: &str) -> Option<()> {
        if action.name != name {
            let message = format!("the files have the limit {}, and variables can't tell the two apart", quoted(name));
            return self.error(action.name_at, message, format!("{} or another name", quoted(name))).none();
        }
        if let Some((_, at)) = &action.matcher {
            let message = format!(
                "the action {} replaces a limit of the files, which only descriptors ask, not paths or methods",
                quoted(name)
            );
            return self.error(*at, message, "an action without `match`").none();
        }
        let mut quantities = action.groups.iter().flat_map(|group| &group.quantities);
        if let Some((_, at)) = quantities.find(|(quantity, _)| quantity.is_in_flight()) {
            let message = format!(
                "the action {} replaces a limit of the files, whose callers don't tell the end of a call",
                quoted(name)
            );
            return self.error(*at, message, "a window, a rate or a quota").none();
        }
        let other_key = action.groups.iter().find(|group| !matches!(&*group.key, [] | [KeyPart::Key]));
        if let Some(group) = other_key {
            let message =
                format!("the action {} replaces a limit of the files, whose descriptors give only a key", quoted(name));
            return self.error(group.key_at.unwrap_or(action.name_at), message, "key = \"key\"").none();
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use tidegate_testkit::servers::ScratchDir;

    use crate::{Policy, PolicySources};

    const YAML: &str = "domain: edge\ndescriptors:\n- key: user\n  rate_limit: {unit: minute, requests_per_unit: 60}\n\
                        \x20 descriptors:\n  - {key: path, value: /login, rate_limit: {unit: hour, requests_per_unit: 0}}\n\
                        - {key: staff, shadow_mode: true, rate_limit: {unit: week, requests_per_unit: 7}}\n\
                        - {key: robot, rate_limit: {unlimited: true}}\n";
    const GLOBAL: &str = "[inbound.global]\nlimit = \"9 per 1s\"\n";

    fn load(folder: &ScratchDir, section: &str, rest: &str) -> Result<Policy, String> {
        let section = section.replace("DIR", &folder.path().display().to_string());
        let sources = PolicySources::new().file("test.toml", format!("[rls]\n{section}\n{rest}"));
        Policy::load(sources).map_err(|errors| {
            let lines = errors.iter().map(|error| format!("{}: {}", error.location(), error.message()));
            lines.collect::<Vec<_>>().join("\n").replace(&folder.path().display().to_string(), "DIR")
        })
    }

    /// The actions of a policy, each with its limits in words.
    fn actions(policy: &Policy) -> Vec<(String, Vec<String>)> {
        let plan = policy.plan();
        let described = |id| format!("{} ({})", plan.limit_info(id).quantity(), plan.limit_info(id).name());
        let actions = plan.actions().map(|(_, action)| {
            let shadow = if action.is_shadow() { " in shadow" } else { "" };
            let limits = action.op_template.steps.iter().map(|step| described(step.limit));
            (format!("{}{shadow}", action.name()), limits.collect())
        });
        actions.collect()
    }

    #[test]
    fn limits_of_files_are_actions_without_global() {
        let folder = ScratchDir::new();
        folder.write("edge.yaml", YAML);
        let own = "[inbound.action.login]\nlimit = \"5 per 60s\"\n";
        let one = |action: &str, limit: &str| (action.to_owned(), vec![limit.to_owned()]);
        for (section, weekly) in [
            ("files = [\"DIR/edge.yaml\"]", "7 per 7d (edge.staff)"),
            ("files = \"DIR/\"\nalgorithm = \"fixed\"", "7 per calendar week (edge.staff)"),
        ] {
            let policy = load(&folder, section, &format!("{GLOBAL}{own}")).unwrap();
            let found = actions(&policy);
            let is_fixed = section.contains("fixed");
            let (minute, hour) = if is_fixed { ("calendar minute", "calendar hour") } else { ("60s", "1h") };
            let login = vec!["5 per 60s (login)".to_owned(), "9 per 1s (global)".to_owned()];
            assert_eq!(found[0], ("login".to_owned(), login));
            assert_eq!(found[1], one("edge.user", &format!("60 per {minute} (edge.user)")));
            let below = "edge.user.path_login";
            assert_eq!(found[2], one(below, &format!("0 per {hour} ({below})")));
            assert_eq!(found[3], one("edge.staff in shadow", weekly));
            assert_eq!((&found[4], found.len()), (&("edge.robot".to_owned(), Vec::new()), 5));
            let watched: Vec<_> = policy.rls().unwrap().watched_files().map(|(path, _)| path.file_name()).collect();
            assert_eq!(watched.len(), if is_fixed { 2 } else { 1 }, "{watched:?}");
        }
    }

    #[test]
    fn actions_replace_limits_of_files() {
        let folder = ScratchDir::new();
        folder.write("edge.yaml", YAML);
        let own = "[inbound.action.\"edge.user\"]\nkey = \"key\"\nlimit = [\"5/s burst 9\", \"70 per calendar day\"]\n\
            penalty = { base = \"2s\", cap = \"1h\" }\n[inbound.action.\"edge.robot\"]\nkey = \"key\"\nlimit = \"8 per 1s\"\n";
        let found = actions(&load(&folder, "files = \"DIR/edge.yaml\"", own).unwrap());
        let names: Vec<_> = found.iter().map(|(name, limits)| (name.as_str(), limits.len())).collect();
        assert_eq!(
            names,
            [("edge.user", 2), ("edge.robot", 1), ("edge.user.path_login", 1), ("edge.staff in shadow", 1)]
        );
    }

    #[test]
    fn faults_of_files_are_the_policys() {
        let folder = ScratchDir::new();
        folder.write("edge.yaml", YAML);
        folder.write("bad.yaml", "domain: b\ndescriptors:\n- {key: a, rate_limt: {}}\n");
        folder.write("own.yaml", "domain: tidegate\n");
        folder.write("text.txt", "");
        let error = |section: &str, rest: &str| load(&folder, section, rest).expect_err("an error");
        assert_eq!(
            error("files = [\"DIR/edge.yaml\", \"DIR/bad.yaml\"]\nlisten = 7", ""),
            "DIR/bad.yaml:3:12: unknown name `rate_limt`\ntest.toml:3:10: `listen` is only the number 7"
        );
        assert_eq!(
            error("files = \"DIR/own.yaml\"", ""),
            "test.toml:2:9: the files have the domain `tidegate`, whose descriptors ask the policy's actions"
        );
        assert!(
            error("files = \"DIR/none.yaml\"", "").starts_with("test.toml:2:9: can't read DIR/none.yaml: No such file")
        );
        assert!(error("files = \"/dev/zero\"", "").ends_with("can't read /dev/zero: it isn't a regular file"));
        assert_eq!(
            error("files = [\"DIR/edge.yaml\", \"DIR/edge.yaml\"]", "").split(", first").next(),
            Some("DIR/edge.yaml:1:9: the domain `edge` stands twice")
        );
        let clash = "[inbound.action.\"edge-user\"]\nlimit = \"5 per 60s\"\n";
        assert_eq!(
            error("files = \"DIR/edge.yaml\"", clash),
            "test.toml:3:17: the files have the limit `edge.user`, and variables can't tell the two apart"
        );
        let wrong_key = "[inbound.action.\"edge.user\"]\nlimit = \"5 per 60s\"\n";
        assert_eq!(
            error("files = \"DIR/edge.yaml\"", wrong_key),
            "test.toml:3:17: the action `edge.user` replaces a limit of the files, whose descriptors give only a key"
        );
        let in_flight = "[inbound.action.\"edge.user\"]\nkey = \"key\"\nlimit = \"5 in flight\"\n";
        assert_eq!(
            error("files = \"DIR/edge.yaml\"", in_flight),
            "test.toml:5:9: the action `edge.user` replaces a limit of the files, whose callers don't tell the end of a call"
        );
        let many = (0..4096).map(|n| format!("- {{key: k{n}, rate_limit: {{unit: day, requests_per_unit: 1}}}}\n"));
        folder.write("many.yaml", &format!("domain: m\ndescriptors:\n{}", many.collect::<String>()));
        assert_eq!(
            error("files = \"DIR/many.yaml\"", ""),
            "test.toml:2:9: the files have 4096 limits, and the policy 0 actions"
        );
    }

    #[test]
    fn limitador_without_its_limits_is_noted() {
        let folder = ScratchDir::new();
        folder.write("edge.yaml", YAML);
        folder.write("limits.yaml", "- {namespace: a, max_value: 1, seconds: 1, conditions: [], variables: []}");
        let notes = |file: &str, rest: &str| {
            let policy = load(&folder, &format!("files = \"DIR/{file}\""), rest).unwrap();
            policy.notes().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let compat = "[api]\ncompat = \"limitador\"\n";
        assert!(notes("edge.yaml", compat)[0].contains("the paths of limitador admit everything"));
        assert_eq!(notes("edge.yaml", ""), [""; 0]);
        if cfg!(feature = "limitador") {
            assert_eq!(notes("limits.yaml", compat), [""; 0]);
        }
    }

    #[test]
    fn limits_of_files_keep_their_ids() {
        let folder = ScratchDir::new();
        folder.write("edge.yaml", YAML);
        let section = "files = \"DIR/edge.yaml\"";
        let policy = load(&folder, section, GLOBAL).unwrap();
        let id = |policy: &Policy, name: &str| {
            policy.plan().active_limits().map(|(id, _)| id).find(|id| policy.plan().limit_info(*id).name() == name)
        };
        // Another limit's terms leave them as they are, though the files may be gone.
        std::fs::remove_file(folder.path().join("edge.yaml")).unwrap();
        let edited = policy.with_limit_terms(id(&policy, "global").unwrap(), "3 per 60s").unwrap().policy;
        assert_eq!(id(&edited, "edge.staff"), id(&policy, "edge.staff"));
        folder.write("edge.yaml", &YAML.replace("key: user", "key: tenant"));
        let text = format!("[rls]\n{section}\n{GLOBAL}").replace("DIR", &folder.path().display().to_string());
        let next = policy.load_next(PolicySources::new().file("test.toml", text)).unwrap();
        assert_eq!(id(&next, "edge.staff"), id(&policy, "edge.staff"));
        assert_eq!((id(&next, "edge.user"), id(&next, "edge.tenant").is_some()), (None, true));
        // Without the section, its listener and its limits stay until a restart.
        let next = policy.load_next(PolicySources::new().file("test.toml", GLOBAL)).unwrap();
        assert_eq!((id(&next, "edge.user"), next.restart_needed()), (id(&policy, "edge.user"), &["rls"][..]));
    }
}
