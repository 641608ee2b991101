//! State that outlives the process.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tempfile::TempDir;
use tidegate::clock::TokioClock;
use tidegate::outbound::{CallError, CallErrorKind, CallOptions, Outbound, Provider, Snapshot, SnapshotError};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::Memory;
use tidegate::{Clock as _, Span, Time};

use crate::common::{Answers, GOOD, Log, policy, spawn, throttled_for, within};

const HOUR: Span = Span::from_secs(3600);

fn utc(text: &str) -> Time {
    Time::from_micros(u64::try_from(text.parse::<Timestamp>().unwrap().as_microsecond()).unwrap())
}

/// Consecutive processes with the same policy and file, but without their memory and keys.
struct Host {
    policy: Policy,
    folder: TempDir,
}

impl Host {
    fn new(policy: Policy) -> Self {
        Self { policy, folder: tempfile::tempdir().unwrap() }
    }

    /// A host with OMDb's free tier in this zone.
    fn omdb(zone: &str) -> Self {
        Self::new(load(&format!(
            "[outbound.provider.omdb]\npreset = \"omdb-free\"\ncredentials = \"env:OMDB_KEY\"\n\
             credential_limit = \"1000 per day in {zone}\"\n"
        )))
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("outbound.json")
    }

    fn try_start(&self, now: Time) -> Result<Process, SnapshotError> {
        let outbound = Outbound::in_memory(&self.policy, TokioClock::at(now)).unwrap();
        let snapshot = Snapshot::restore(&outbound, self.path())?;
        Ok(Process { outbound, snapshot })
    }

    fn start(&self, now: Time) -> Process {
        self.try_start(now).unwrap()
    }
}

struct Process {
    outbound: Outbound<Memory, TokioClock>,
    snapshot: Snapshot<Memory, TokioClock>,
}

impl Process {
    fn api(&self) -> &Provider<Memory, TokioClock> {
        &self.outbound.providers()[0]
    }

    async fn call(&self) -> Result<u32, CallError<u32>> {
        let mut upstream = Answers::of(self.api(), &[GOOD], &Log::default(), 0);
        self.api().call(CallOptions::default(), &mut upstream).await.map(|done| done.value)
    }

    /// Makes calls that must all pass.
    async fn spend(&self, calls: u32) {
        for call in 1..=calls {
            self.call().await.unwrap_or_else(|error| panic!("call {call} of {calls}: {error}"));
        }
    }

    /// Makes calls until one is refused for a spent quota. Returns the number of admitted calls, and the time of the
    /// reset.
    async fn exhaust(&self) -> (u32, Time) {
        for passed in 0..2_000 {
            match self.call().await {
                Ok(_) => {}
                Err(CallError { kind: CallErrorKind::QuotaSpent { resets_at: Some(resets_at), .. }, .. }) => {
                    return (passed, resets_at);
                }
                Err(error) => panic!("{error}"),
            }
        }
        panic!("nothing refuses")
    }

    /// Ends the process in an orderly way.
    fn stop(self) -> Time {
        self.snapshot.save().unwrap();
        self.api().clock().now()
    }
}

fn load(text: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Days on which the clocks change, and one without a change: zone, beginning, end and hours.
const DAYS: [(&str, &str, &str, u64); 5] = [
    ("America/New_York", "2026-03-08T05:00:00Z", "2026-03-09T04:00:00Z", 23),
    ("America/New_York", "2026-11-01T04:00:00Z", "2026-11-02T05:00:00Z", 25),
    ("Europe/Berlin", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", 23),
    ("Europe/Berlin", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", 25),
    ("UTC", "2026-06-01T00:00:00Z", "2026-06-02T00:00:00Z", 24),
];

#[tokio::test(start_paused = true)]
async fn a_daily_quota_is_exact_across_restarts() {
    for (zone, begins, ends, hours) in DAYS {
        let (begins, midnight) = (utc(begins), utc(ends));
        assert_eq!(midnight.since(begins), HOUR.times(hours), "{zone}");
        let host = Host::omdb(zone);
        let mut now = begins;
        for restart in 0..3 {
            let process = host.start(now);
            process.spend(300).await;
            tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
            assert_eq!(process.stop(), now + HOUR.times(2), "{zone}, restart {restart}");
            now = now + HOUR.times(7);
        }
        let process = host.start(now);
        assert_eq!(process.exhaust().await, (100, midnight), "{zone}: the 1,001st waits for that midnight");
        process.stop();
        let process = host.start(midnight - Span::from_secs(60));
        assert_eq!(process.exhaust().await, (0, midnight), "{zone}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(process.exhaust().await.0, 1_000, "{zone}: from midnight on there are a thousand more");
        process.stop();
        assert_eq!(host.start(midnight + HOUR).exhaust().await.0, 0, "{zone}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_finished_period_is_not_restored() {
    let host = Host::omdb("UTC");
    let process = host.start(utc("2026-06-01T20:00:00Z"));
    assert_eq!(process.exhaust().await.0, 1_000);
    process.stop();
    assert_eq!(host.start(utc("2026-06-02T00:00:00Z")).exhaust().await.0, 1_000);
}

#[tokio::test(start_paused = true)]
async fn a_killed_process_loses_only_its_last_second() {
    let host = Host::omdb("UTC");
    let now = utc("2026-06-01T20:00:00Z");
    let process = host.start(now);
    let (outbound, snapshot) = (process.outbound.clone(), Arc::new(process.snapshot));
    let saves = Arc::clone(&snapshot);
    let saver = tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            saves.save().unwrap();
        }
    });
    for _ in 0..307 {
        let api = &outbound.providers()[0];
        api.call(CallOptions::default(), &mut Answers::of(api, &[GOOD], &Log::default(), 0)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    saver.abort();
    let _ = saver.await;
    drop((outbound, snapshot));
    let (left, _) = host.start(now + Span::from_secs(31)).exhaust().await;
    assert!((693..=703).contains(&left), "307 of 1,000 were spent, the last 10 of them within a second: {left}");
    assert!(left > 693, "it was killed between two saves");
}

#[tokio::test(start_paused = true)]
async fn a_clock_set_back_grants_no_quota_twice() {
    let noon = utc("2026-06-10T12:00:00Z");
    for back in [Span::from_secs(1), HOUR, HOUR.times(13), HOUR.times(36), HOUR.times(24 * 10), HOUR.times(24 * 365)] {
        let host = Host::omdb("UTC");
        let process = host.start(noon);
        assert_eq!(process.exhaust().await.0, 1_000);
        process.stop();
        for restart in 0..3 {
            let process = host.start(noon - back + Span::from_secs(restart));
            assert_eq!(process.exhaust().await.0, 0, "{back} back, restart {restart}");
            process.stop();
        }
        // The clock is corrected, for example by a time server that is reached late.
        let process = host.start(noon + Span::from_secs(10));
        assert_eq!(process.exhaust().await.0, 0, "{back} back and forth again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_corrected_fast_clock_grants_no_quota_twice() {
    let noon = utc("2026-06-10T12:00:00Z");
    for ahead in [HOUR.times(13), HOUR.times(24 * 5), HOUR.times(24 * 365)] {
        let host = Host::omdb("UTC");
        let process = host.start(noon);
        assert_eq!(process.exhaust().await.0, 1_000);
        process.stop();
        let process = host.start(noon + ahead);
        process.spend(3).await;
        process.stop();
        let process = host.start(noon + Span::from_secs(60));
        assert_eq!(process.exhaust().await.0, 0, "{ahead} ahead");
        process.stop();
        // The wrong time locks out no caller later.
        let process = host.start(noon + HOUR.times(24 * 3));
        assert_eq!(process.exhaust().await.0, 1_000, "{ahead} ahead");
    }
}

const TWO: &str = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\nlimit = \"100/s\"";

/// Throttles the first credential for ten minutes.
async fn throttle(process: &Process) {
    let mut upstream = Answers::of(process.api(), &[throttled_for(600), GOOD], &Log::default(), 0);
    process.api().call(CallOptions::default(), &mut upstream).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn restored_cool_downs_end_at_their_time() {
    let host = Host::new(policy("limit = \"1 per 1s\"\nretry = { max_attempts = 1 }"));
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    let mut upstream = Answers::of(process.api(), &[throttled_for(600)], &Log::default(), 0);
    process.api().call(CallOptions::default(), &mut upstream).await.unwrap_err();
    process.stop();

    let process = host.start(now + Span::from_secs(200));
    // No call has met it yet.
    for report in [process.api().local_report(), process.api().report().await] {
        let states = report.credential_states;
        assert_eq!((states.usable, states.cooling, states.throttled), (0, 1, 1));
    }
    let error = process.call().await.unwrap_err();
    assert!(
        matches!(error.kind, CallErrorKind::CoolingDown { earliest: Some(at) } if at == now + Span::from_secs(600)),
        "{error:?}"
    );
    let log = Log::default();
    let calls: Vec<_> = (0..30)
        .map(|name| {
            let upstream = Answers::of(process.api(), &[GOOD], &log, name);
            spawn(process.api(), within(Duration::from_secs(600)), upstream)
        })
        .collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let starts: Vec<_> = log.lock().unwrap().iter().map(|(at, ..)| *at).collect();
    assert_eq!(starts[0], now + Span::from_secs(600));
    assert!(starts.windows(2).all(|two| two[1] > two[0]), "each at a moment of its own: {starts:?}");
    process.stop();
    assert_eq!(host.start(now + Span::from_secs(700)).call().await.unwrap(), 1, "it is over");
}

#[tokio::test(start_paused = true)]
async fn the_longest_pause_of_a_rule_is_restored() {
    let now = utc("2026-06-10T12:00:00Z");
    let rule = "rule = [{ when = { status = 402 }, is = \"quota\", max_pause = \"31d\" }]\n";
    for (rule, until) in [("", now + HOUR.times(25)), (rule, now + HOUR.times(120))] {
        let host = Host::new(policy(&format!("{rule}retry = {{ max_attempts = 1 }}")));
        let process = host.start(now);
        let mut upstream = Answers::of(process.api(), &[throttled_for(5 * 86_400)], &Log::default(), 0);
        process.api().call(CallOptions::default(), &mut upstream).await.unwrap_err();
        process.stop();
        let error = host.start(now + HOUR).call().await.unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::CoolingDown { earliest: Some(at) } if at == until), "{error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cool_down_follows_its_reordered_credential() {
    let host = Host::new(policy(TWO));
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    throttle(&process).await;
    process.stop();
    let reordered = TWO.replace("[\"env:A\", \"env:B\"]", "[\"env:C\", \"env:B\", \"env:A\"]");
    let host = Host { policy: policy(&reordered), folder: host.folder };
    let process = host.start(now + Span::from_secs(10));
    let log = Log::default();
    for _ in 0..6 {
        let mut upstream = Answers::of(process.api(), &[GOOD], &log, 0);
        process.api().call(CallOptions::default(), &mut upstream).await.unwrap();
    }
    let used: Vec<_> = log.lock().unwrap().iter().map(|(.., credential)| *credential).collect();
    assert_eq!(used, [0, 1, 0, 1, 0, 1], "A, now the third, rests");
}

#[tokio::test(start_paused = true)]
async fn a_fast_clocks_cool_down_keeps_its_remainder() {
    let host = Host::new(policy("retry = { max_attempts = 1 }"));
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now + HOUR.times(24 * 365));
    let mut upstream = Answers::of(process.api(), &[throttled_for(600)], &Log::default(), 0);
    process.api().call(CallOptions::default(), &mut upstream).await.unwrap_err();
    process.stop();
    let error = host.start(now).call().await.unwrap_err();
    let left = error.retry_after().unwrap();
    assert_eq!(left.as_secs_ceil(), 600, "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn windows_are_not_restored() {
    let host = Host::new(policy("limit = \"1 per 1h\""));
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    process.spend(1).await;
    process.call().await.unwrap_err();
    process.stop();
    host.start(now + Span::from_secs(1)).spend(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_temporarily_removed_quota_stays_spent() {
    let host = Host::omdb("UTC");
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    assert_eq!(process.exhaust().await.0, 1_000);
    process.stop();
    let other = Host { policy: policy("limit = \"10 per calendar day\""), folder: host.folder };
    let process = other.start(now + HOUR);
    process.spend(10).await;
    process.stop();
    let host = Host { policy: host.policy, folder: other.folder };
    assert_eq!(host.start(now + HOUR.times(2)).exhaust().await.0, 0);
}

#[tokio::test(start_paused = true)]
async fn only_shared_quotas_survive_exchanged_credentials() {
    let now = utc("2026-06-10T12:00:00Z");
    for (limit, left) in [("limit", 0), ("credential_limit", 1_000)] {
        let with = |names: &str| {
            policy(&format!(
                "auth = \"bearer\"\ncredentials = [{names}]\n{limit} = \"1000 per calendar day\"\nadaptive = \"off\""
            ))
        };
        let host = Host::new(with("\"env:A\""));
        let process = host.start(now);
        assert_eq!(process.exhaust().await.0, 1_000);
        process.stop();
        let host = Host { policy: with("\"env:B\""), folder: host.folder };
        assert_eq!(host.start(now + HOUR).exhaust().await.0, left, "{limit}");
        // A second credential next to the first.
        let host = Host { policy: with("\"env:A\", \"env:B\""), folder: host.folder };
        let process = host.start(now + HOUR.times(2));
        let mut passed = 0;
        while process.call().await.is_ok() {
            passed += 1;
        }
        assert_eq!(passed, left, "{limit}: A has nothing left, and B all that it is given");
    }
}

#[tokio::test(start_paused = true)]
async fn snapshots_are_written_only_after_changes() {
    let host = Host::omdb("UTC");
    let process = host.start(utc("2026-06-10T12:00:00Z"));
    assert!(!process.snapshot.save().unwrap(), "nothing was spent");
    process.spend(2).await;
    assert!(process.snapshot.save().unwrap());
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!process.snapshot.save().unwrap(), "time alone changes nothing");
    let found: serde_json::Value = serde_json::from_slice(&fs::read(host.path()).unwrap()).unwrap();
    assert_eq!(
        found,
        serde_json::json!({
            "tidegate_outbound": 1,
            "saved_at": 1_781_092_800_000_000_u64,
            "records": [{
                "whose": { "provider": "omdb", "limit": "omdb.credential", "credential": "env:OMDB_KEY" },
                "state": {
                    "quota": { "used": 2, "began": 1_781_049_600_000_000_u64, "ends": 1_781_136_000_000_000_u64 },
                },
            }],
        })
    );
}

#[tokio::test(start_paused = true)]
async fn invalid_snapshots_are_reported_and_left_unchanged() {
    let now = utc("2026-06-10T12:00:00Z");
    let good = {
        let host = Host::omdb("UTC");
        let process = host.start(now);
        process.spend(5).await;
        process.stop();
        fs::read_to_string(host.path()).unwrap()
    };
    let check = |content: &str, expected: fn(&SnapshotError) -> bool| {
        let host = Host::omdb("UTC");
        fs::write(host.path(), content).unwrap();
        let error = host.try_start(now).err().unwrap_or_else(|| panic!("{content:?} was taken"));
        assert!(expected(&error), "{content:?}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        assert_eq!(fs::read_to_string(host.path()).unwrap(), content);
        error.to_string()
    };
    for cut in [0, 1, good.len() / 2, good.len() - 3] {
        check(&good[..cut], |error| matches!(error, SnapshotError::Broken { .. }));
    }
    let wrong = good.replace("\"used\": 5", "\"used\": \"hunter2\"");
    let told = check(&wrong, |error| matches!(error, SnapshotError::Broken { line: 13, .. }));
    assert!(told.contains("line 13") && told.contains("outbound.json"), "{told}");
    check(&good.replace("\"used\"", "\"hunter2\""), |error| matches!(error, SnapshotError::Broken { .. }));
    check("hunter2 = 1\n", |error| matches!(error, SnapshotError::Broken { line: 1, column: 1, .. }));
    for foreign in ["{\"password\": \"hunter2\"}", "[\"hunter2\"]", "{\"tidegate_outbound\": \"hunter2\"}", "5"] {
        check(foreign, |error| matches!(error, SnapshotError::Foreign { .. }));
    }
    let newer = good.replace("\"tidegate_outbound\": 1", "\"tidegate_outbound\": 2");
    check(&newer, |error| matches!(error, SnapshotError::Newer { found: 2, .. }));
}

#[tokio::test(start_paused = true)]
async fn unusable_snapshot_files_are_reported_at_startup() {
    let host = Host::omdb("UTC");
    let now = utc("2026-06-10T12:00:00Z");
    fs::create_dir(host.path()).unwrap();
    assert!(matches!(host.try_start(now), Err(SnapshotError::Unreadable { .. })));
    fs::remove_dir(host.path()).unwrap();
    let outbound = Outbound::in_memory(&host.policy, TokioClock::at(now)).unwrap();
    let nowhere = Snapshot::restore(&outbound, host.folder.path().join("nowhere/outbound.json"));
    assert!(matches!(nowhere, Err(SnapshotError::Unwritable { .. })));
    let first = host.start(now);
    assert!(matches!(host.try_start(now), Err(SnapshotError::InUse { .. })));
    drop(first);
    host.start(now);
}

/// A crash during the replacement leaves the old file, and the half-written file is never read.
#[tokio::test(start_paused = true)]
async fn a_partly_written_snapshot_is_not_read() {
    let host = Host::omdb("UTC");
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    process.spend(400).await;
    process.stop();
    fs::write(Path::new(&format!("{}.new", host.path().display())), "{ \"tidegate_outb").unwrap();
    let process = host.start(now);
    assert_eq!(process.exhaust().await.0, 600);
    process.stop();
    assert_eq!(host.start(now).exhaust().await.0, 0);
}

/// Foreign links next to the snapshot aren't followed. A link at the snapshot's path is followed.
#[cfg(unix)]
#[tokio::test(start_paused = true)]
async fn only_links_at_the_snapshot_path_are_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let host = Host::omdb("UTC");
    let at = |name: &str| host.folder.path().join(name);
    let now = utc("2026-06-10T12:00:00Z");
    fs::write(at("precious"), "precious").unwrap();
    symlink("precious", at("outbound.json.new")).unwrap();
    host.start(now).stop();
    symlink("precious", at("other.json.lock")).unwrap();
    let outbound = Outbound::in_memory(&host.policy, TokioClock::at(now)).unwrap();
    let refused = Snapshot::restore(&outbound, at("other.json")).unwrap_err();
    assert!(refused.to_string().contains("a symbolic link"), "{refused}");
    assert_eq!(fs::read_to_string(at("precious")).unwrap(), "precious");

    fs::create_dir(at("disk")).unwrap();
    fs::remove_file(host.path()).unwrap();
    symlink("disk/state", host.path()).unwrap();
    let process = host.start(now);
    process.spend(400).await;
    process.stop();
    assert_eq!(host.start(now).exhaust().await.0, 600);
    assert!(fs::symlink_metadata(host.path()).unwrap().is_symlink());
    let mode = |name: &str| fs::symlink_metadata(at(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("disk/state"), mode("disk/state.lock")), (0o600, 0o600));
}

/// A file that others could read is private after the next write. A path that isn't a regular file is left unchanged.
#[cfg(unix)]
#[tokio::test(start_paused = true)]
async fn only_private_regular_files_are_written() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    let host = Host::omdb("UTC");
    let now = utc("2026-06-10T12:00:00Z");
    host.start(now).stop();
    fs::set_permissions(host.path(), fs::Permissions::from_mode(0o644)).unwrap();
    host.start(now).stop();
    assert_eq!(fs::metadata(host.path()).unwrap().permissions().mode() & 0o777, 0o600);
    fs::remove_file(host.path()).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(host.path()).status().unwrap().success());
    let Err(refused) = host.try_start(now) else { panic!("a FIFO was taken") };
    assert!(refused.to_string().contains("a FIFO"), "{refused}");
    assert!(fs::symlink_metadata(host.path()).unwrap().file_type().is_fifo());
}

#[tokio::test(start_paused = true)]
async fn the_adaptive_limit_continues_after_a_restart() {
    let host = Host::new(policy("limit = \"unlimited\"\nadaptive = { max = 100 }\n"));
    let limit = |process: &Process| process.api().inspect(|state, _| state.adaptive_limit.as_ref().unwrap().limit());
    let now = utc("2026-06-10T12:00:00Z");
    let process = host.start(now);
    assert_eq!(limit(&process), 20);
    let answers = |name| Answers::of(process.api(), &[GOOD], &Log::default(), name).after(Duration::from_millis(100));
    let calls: Vec<_> =
        (0..1_000).map(|name| spawn(process.api(), within(Duration::from_secs(60)), answers(name))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(limit(&process), 100);
    let ended = process.stop();
    assert_eq!(limit(&host.start(ended)), 100);
    // A policy that allows less.
    let host = Host { policy: policy("limit = \"unlimited\"\nadaptive = { max = 50 }\n"), ..host };
    assert_eq!(limit(&host.start(ended)), 50);
}
