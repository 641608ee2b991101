//! Files that are broken, or something else.

use std::error::Error;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Limit, LimitKind, Limits, Span, Verb, Window};
use tidegate_store::{FileError, FileStore, FlushMode, Journal};
use tidegate_testkit::fixtures;
use tidegate_testkit::random::{self, RandomSource};

use crate::common::{Place, one};

fn limits() -> Arc<Limits> {
    Arc::new(Limits::with_limit(Limit::new(LimitKind::Window(Window::new(50, Span::from_secs(3600), 64).unwrap()))))
}

/// A file with a past, as a crash leaves it and as a closing does.
fn files() -> [Vec<u8>; 2] {
    let place = Place::quick();
    let store = place.store(&limits(), FlushMode::Within(Duration::from_secs(3600)), fixtures::test_time(0));
    for round in 0..5 {
        for client in 0..2_000 {
            one(&store, Verb::Take, 0, fixtures::client_key(client), fixtures::test_time(round));
        }
        store.journal().flush().unwrap();
    }
    let crashed = fs::read(place.path()).unwrap();
    drop(store);
    [crashed, fs::read(place.path()).unwrap()]
}

fn tear(bytes: &mut Vec<u8>, random: &mut RandomSource) {
    let at = |random: &mut RandomSource, len: usize| {
        // Half of the time in the first page, where the file says what it is.
        let len = if random.chance(50) { len.min(4096) } else { len };
        random.below(len as u64) as usize
    };
    match random.below(4) {
        0 => {
            let len = at(random, bytes.len());
            bytes.truncate(len);
        }
        1 => {
            for _ in 0..random.between(1, 8) {
                let at = at(random, bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
        }
        2 => {
            let page = at(random, bytes.len()) / 4096 * 4096;
            bytes[page..].iter_mut().take(4096).for_each(|byte| *byte = 0);
        }
        _ => {
            let at = at(random, bytes.len());
            let value = random.next_u64() as u8;
            bytes[at..].iter_mut().take(512).for_each(|byte| *byte = value);
        }
    }
}

/// Whatever became of the file, it opens or there is an error that says what to do; it never ends the process.
#[test]
fn damaged_files_open_or_give_an_error() {
    let files = files();
    let mut random = RandomSource::from_seed(random::run_seed());
    let (mut opened, mut refused) = (0, 0);
    for round in 0..random::case_count(120, 5_000) {
        let mut bytes = random.pick(&[0, 1].map(|file| &files[file])).clone();
        tear(&mut bytes, &mut random);
        let place = Place::quick();
        fs::write(place.path(), &bytes).unwrap();
        let used = catch_unwind(AssertUnwindSafe(|| -> Result<(), Box<dyn Error>> {
            let journal = Journal::open(place.path(), FlushMode::Always)?;
            let store = FileStore::new(limits(), 1 << 20, &journal, fixtures::test_time(10))?;
            for client in 0..50 {
                one(&store, Verb::Take, 0, fixtures::client_key(client), fixtures::test_time(10));
            }
            Ok(journal.flush()?)
        }));
        match used.unwrap_or_else(|_| panic!("round {round} panicked")) {
            Ok(()) => opened += 1,
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("state.redb"), "{error}");
            }
        }
    }
    assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused");
}

#[test]
fn foreign_files_are_left_unchanged() {
    let place = Place::quick();
    for text in ["something else, and long enough to be anything", "x"] {
        fs::write(place.path(), text).unwrap();
        let error = Journal::open(place.path(), FlushMode::default()).unwrap_err();
        assert!(matches!(error, FileError::NotAStore { .. }), "{error}");
        assert_eq!(fs::read_to_string(place.path()).unwrap(), text);
    }
    fs::remove_file(place.path()).unwrap();
    drop(redb::Database::create(place.path()).unwrap());
    let error = Journal::open(place.path(), FlushMode::default()).unwrap_err();
    assert!(matches!(error, FileError::NotAStore { .. }), "{error}");
    let missing = place.path().with_file_name("no folder").join("state");
    let error = Journal::open(&missing, FlushMode::default()).unwrap_err();
    assert!(matches!(error, FileError::Io { .. }), "{error}");
}

#[test]
fn a_newer_format_is_rejected() {
    let place = Place::quick();
    drop(place.journal(FlushMode::default()));
    let database = redb::Database::open(place.path()).unwrap();
    let write = database.begin_write().unwrap();
    let about = redb::TableDefinition::<&str, &[u8]>::new("tidegate");
    write.open_table(about).unwrap().insert("format", 2_u32.to_le_bytes().as_slice()).unwrap();
    write.commit().unwrap();
    drop(database);
    let error = Journal::open(place.path(), FlushMode::default()).unwrap_err();
    assert!(matches!(error, FileError::NewerFormat { found: 2, .. }), "{error}");
}

/// An unfinished file does no harm.
#[test]
fn interrupted_creation_starts_again() {
    let place = Place::quick();
    fs::write(place.path().with_extension("redb.new"), [0; 5_000]).unwrap();
    fs::write(place.path(), "").unwrap();
    let store = place.store(&limits(), FlushMode::default(), fixtures::test_time(0));
    one(&store, Verb::Take, 0, fixtures::client_key(1), fixtures::test_time(0));
    drop(store);
    let store = place.store(&limits(), FlushMode::default(), fixtures::test_time(0));
    assert_eq!(one(&store, Verb::Peek, 0, fixtures::client_key(1), fixtures::test_time(0)).used, 1);
}

/// The seed is a secret.
#[cfg(unix)]
#[test]
fn store_files_are_private_to_their_owner() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    drop(place.journal(FlushMode::default()));
    let mode = || fs::metadata(place.path()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    // Written by an earlier version, or copied by hand.
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o644)).unwrap();
    drop(place.journal(FlushMode::default()));
    assert_eq!(mode(), 0o600);
}

/// Nothing but a regular file is taken, and the error says what is there.
#[cfg(unix)]
#[test]
fn non_regular_files_are_left_unchanged() {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixListener;
    let place = Place::new();
    let beside = |name: &str| place.path().with_file_name(name);
    assert!(std::process::Command::new("mkfifo").arg(beside("fifo")).status().unwrap().success());
    let _socket = UnixListener::bind(beside("socket")).unwrap();
    fs::create_dir(beside("folder")).unwrap();
    std::os::unix::fs::symlink("fifo", beside("link")).unwrap();
    for (name, what) in [("fifo", "a FIFO"), ("socket", "a socket"), ("folder", "a directory"), ("link", "a FIFO")] {
        let error = Journal::open(&beside(name), FlushMode::default()).unwrap_err();
        assert!(matches!(error, FileError::Io { .. }) && error.to_string().contains(what), "{error}");
    }
    let kind = |name: &str| fs::symlink_metadata(beside(name)).unwrap().file_type();
    assert!(
        kind("fifo").is_fifo() && kind("socket").is_socket() && kind("folder").is_dir() && kind("link").is_symlink()
    );
    assert_eq!(fs::read_dir(place.path().parent().unwrap()).unwrap().count(), 4);
}

/// A link that a stranger put beside the store's name leads nowhere; one at its name leads to the store.
#[cfg(unix)]
#[test]
fn only_links_at_the_store_path_are_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = Place::new();
    let beside = |name: &str| place.path().with_file_name(name);
    fs::write(beside("precious"), "precious").unwrap();
    symlink("precious", beside("state.redb.new")).unwrap();
    drop(place.journal(FlushMode::default()));
    assert_eq!(fs::read_to_string(beside("precious")).unwrap(), "precious");

    fs::create_dir(beside("disk")).unwrap();
    symlink("disk/store", beside("link")).unwrap();
    for used in 0..2 {
        let journal = Journal::open(&beside("link"), FlushMode::default()).unwrap();
        let store = FileStore::new(limits(), 1 << 20, &journal, fixtures::test_time(0)).unwrap();
        assert_eq!(one(&store, Verb::Peek, 0, fixtures::client_key(1), fixtures::test_time(0)).used, used);
        one(&store, Verb::Take, 0, fixtures::client_key(1), fixtures::test_time(0));
    }
    assert!(fs::symlink_metadata(beside("link")).unwrap().is_symlink());
    assert_eq!(fs::metadata(beside("disk/store")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(beside("disk")).unwrap().count(), 1, "nothing is left beside it");
}
