//! Two processes and one server.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tidegate_core::{Time, Verb};
use tidegate_store::{RemoteStore as _, TimeSource};

use super::{Kind, an_hour, batch, options, patiently, plan, runtime, used};

/// The environment variables of a child process: its server and its task.
const URL: &str = "TIDEGATE_TEST_URL";
const TASK: &str = "TIDEGATE_TEST_TASK";

fn start(url: &str, task: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture", "--quiet"])
        .env(URL, url)
        .env(TASK, task)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The number that a child tells after a word.
fn told(child: &mut Child, word: &str) -> u64 {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let line =
        lines.map_while(Result::ok).find_map(|line| line.split_once(word).map(|(_, rest)| rest.trim().to_owned()));
    line.expect("a child's report").parse().unwrap()
}

/// The work of the other process.
pub(crate) fn child<K: Kind>() {
    let url = std::env::var(URL).expect("started by another test");
    match std::env::var(TASK).as_deref() {
        Ok("hammer") => hammer::<K>(&url),
        Ok("count") => {
            let admitted = runtime().block_on(count::<K>(&url));
            println!("admitted {admitted}");
        }
        task => panic!("no such task: {task:?}"),
    }
}

/// 64 tasks, 100 calls each, of one key.
async fn count<K: Kind>(url: &str) -> u64 {
    let store = Arc::new(K::open(plan(vec![an_hour(100)]), &options(url, "p_", TimeSource::Store)).unwrap());
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let mut admitted = 0;
                for _ in 0..100 {
                    let outcomes = store.apply(&batch(Verb::Take, &[(0, 1)]), Time::ZERO).await.unwrap();
                    admitted += u64::from(!outcomes.refuses());
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.unwrap();
    }
    admitted
}

pub(crate) fn counts_with_another_process<K: Kind>() {
    let Some(server) = K::server() else { return };
    let mut child = start(server.url(), "count");
    let admitted = runtime().block_on(count::<K>(server.url()));
    let there = told(&mut child, "admitted ");
    assert!(child.wait().unwrap().success());
    assert_eq!(admitted + there, 100, "{admitted} here, {there} there");
}

/// Calls under three limits at once for as long as the process lives. Tells the first that passed.
fn hammer<K: Kind>(url: &str) {
    runtime().block_on(async {
        let limits = plan(vec![an_hour(1_000_000), an_hour(1_000_000), an_hour(1_000_000)]);
        let store = Arc::new(K::open(limits, &options(url, "k_", TimeSource::Store)).unwrap());
        let tasks: Vec<_> = (0..16)
            .map(|_| {
                let store = Arc::clone(&store);
                tokio::spawn(async move {
                    for _ in 0..1_000_000 {
                        let asked = store.apply(&batch(Verb::Take, &[(0, 1), (1, 2), (2, 3)]), Time::ZERO).await;
                        println!("passed {}", u64::from(!asked.unwrap().refuses()));
                        std::io::stdout().flush().unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// Wherever a client is killed: all three limits were charged the same, or, where the store can't say that, none was
/// charged less than what the client was told; and others go on at once.
pub(crate) fn survives_a_killed_client<K: Kind>() {
    let Some(server) = K::server() else { return };
    let limits = plan(vec![an_hour(1_000_000), an_hour(1_000_000), an_hour(1_000_000)]);
    let places = [(0, 1), (1, 2), (2, 3)];
    let store = K::open(limits, &options(server.url(), "k_", TimeSource::Store)).unwrap();
    let (runtime, mut before) = (runtime(), 0);
    for round in 0..6 {
        let mut child = start(server.url(), "hammer");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let wanted = 40 + 37 * round;
        let mut passed = lines.by_ref().map_while(Result::ok).filter(|line| line.contains("passed 1"));
        let mut told = passed.by_ref().take(wanted).count() as u64;
        child.kill().unwrap();
        child.wait().unwrap();
        told += passed.count() as u64;
        runtime.block_on(async {
            // What the client left locked may refuse others for a moment.
            let take = batch(Verb::Take, &places);
            let outcomes = match K::HALF_TAKEN {
                true => patiently(&store, &take, Time::ZERO).await,
                false => store.apply(&take, Time::ZERO).await.unwrap(),
            };
            assert!(!outcomes.refuses());
            let used = used(&store, &places).await;
            assert!(used.iter().all(|used| *used > before + told), "{used:?}, told {told} after {before}");
            assert!(K::HALF_TAKEN || used.iter().all(|one| *one == used[0]), "{used:?}");
            before = *used.iter().min().unwrap();
        });
    }
}
