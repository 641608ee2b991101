//! Listening sockets: TCP, and unix sockets with their files.

use std::fs::{self, TryLockError};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, lchown};
use std::os::unix::net as std_unix;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, ready};

use nix::unistd::{Group, User};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use tidegate_policy::{ListenAddress, ListenConfig, UNIX_PEER, UnixSocketConfig};
use tidegate_store::files;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::stream::ClientStream;

/// The maximum number of connections that wait to be accepted, of which the system may allow fewer. Beyond it clients try
/// again after a second, which a flood of connections would make them do.
const BACKLOG: i32 = 4096;

/// A listening socket.
#[derive(Debug)]
pub(crate) enum ListenSocket {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a unix socket. Dropping it removes the file, unless another process has replaced it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// The device and the number of the file.
    id: (u64, u64),
}

/// A listening socket outside the runtime, for the connections that wait at its end.
pub(crate) enum StdSocket {
    Tcp(std::net::TcpListener),
    Unix(std_unix::UnixListener, #[expect(dead_code, reason = "removes the file when it is dropped")] SocketFile),
}

/// A connection, and the address of its peer.
pub(crate) type Accepted = (ClientStream, SocketAddr);

/// The address of a peer of a unix socket.
const UNIX_PEER_ADDRESS: SocketAddr = SocketAddr::new(UNIX_PEER, 0);

impl ListenSocket {
    pub(crate) fn bind(address: &ListenAddress, config: &ListenConfig) -> io::Result<Self> {
        match address {
            ListenAddress::Tcp(address) => {
                // Without IPv4 if another address of the list has the same port there.
                let has_ipv4 = config.tcp().any(|other| other.is_ipv4() && other.port() == address.port());
                bind_tcp(*address, address.port() != 0 && has_ipv4).map(Self::Tcp)
            }
            ListenAddress::Unix(path) => {
                let (listener, file) = bind_unix(path, &config.unix)?;
                Ok(Self::Unix(UnixListener::from_std(listener)?, file))
            }
        }
    }

    /// The address; for TCP the one that the system has chosen.
    pub(crate) fn address(&self) -> io::Result<ListenAddress> {
        match self {
            Self::Tcp(socket) => socket.local_addr().map(ListenAddress::Tcp),
            Self::Unix(_, file) => Ok(ListenAddress::Unix(file.path.clone())),
        }
    }

    pub(crate) fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        Poll::Ready(Ok(match self {
            Self::Tcp(socket) => {
                let (stream, address) = ready!(socket.poll_accept(cx))?;
                (ClientStream::Tcp(stream), address)
            }
            Self::Unix(socket, _) => (ClientStream::Unix(ready!(socket.poll_accept(cx))?.0), UNIX_PEER_ADDRESS),
        }))
    }

    /// Takes the socket out of the runtime, and lets no more than one further connection wait.
    pub(crate) fn into_std(self) -> io::Result<StdSocket> {
        let socket = match self {
            Self::Tcp(socket) => StdSocket::Tcp(socket.into_std()?),
            Self::Unix(socket, file) => StdSocket::Unix(socket.into_std()?, file),
        };
        // If this fails, a few more connections may be reset.
        let _ = match &socket {
            StdSocket::Tcp(socket) => SockRef::from(socket).listen(0),
            StdSocket::Unix(socket, _) => SockRef::from(socket).listen(0),
        };
        Ok(socket)
    }
}

impl StdSocket {
    /// Accepts a connection that waits already.
    pub(crate) fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Tcp(socket) => {
                let (stream, address) = socket.accept()?;
                stream.set_nonblocking(true)?;
                Ok((ClientStream::Tcp(TcpStream::from_std(stream)?), address))
            }
            Self::Unix(socket, _) => {
                let (stream, _) = socket.accept()?;
                stream.set_nonblocking(true)?;
                Ok((ClientStream::Unix(UnixStream::from_std(stream)?), UNIX_PEER_ADDRESS))
            }
        }
    }
}

fn bind_tcp(address: SocketAddr, only_ipv6: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // A restarted gate can reuse its port while old connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    // The default is a setting of the system.
    if address.is_ipv6() {
        socket.set_only_v6(only_ipv6)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Binds a unix socket. A file that a dead process has left is replaced.
fn bind_unix(path: &Path, config: &UnixSocketConfig) -> io::Result<(std_unix::UnixListener, SocketFile)> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let address = SockAddr::unix(path)?;
    let _lock = lock_folder(path)?;
    if let Err(error) = socket.bind(&address) {
        if error.kind() != ErrorKind::AddrInUse {
            return Err(error);
        }
        remove_stale(path)?;
        socket.bind(&address)?;
    }
    let metadata = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) };
    let owner = config.owner.as_deref().map(user_id).transpose()?;
    let group = config.group.as_deref().map(group_id).transpose()?;
    // A process that gives the file away may not change its mode afterwards.
    fs::set_permissions(path, fs::Permissions::from_mode(config.mode))?;
    if owner.is_some() || group.is_some() {
        lchown(path, owner, group)?;
    }
    // Only now can clients connect, so none does with other permissions.
    socket.listen(BACKLOG)?;
    Ok((socket.into(), file))
}

/// Removes the file of a socket on which no process listens.
fn remove_stale(path: &Path) -> io::Result<()> {
    let in_the_way = |what: &str| io::Error::new(ErrorKind::AddrInUse, what.to_owned());
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(in_the_way("the file isn't a socket"));
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        // It would block if too many connections wait to be accepted.
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Err(in_the_way("a process listens on it")),
    }
}

/// Locks the folder of a socket's file, so that no other gate takes or removes the file meanwhile.
fn lock_folder(path: &Path) -> io::Result<fs::File> {
    files::lock_folder(path).map_err(|error| match error {
        TryLockError::Error(error) => error,
        TryLockError::WouldBlock => io::Error::new(ErrorKind::WouldBlock, "another process has locked its folder"),
    })
}

fn user_id(name: &str) -> io::Result<u32> {
    let unknown = || io::Error::new(ErrorKind::NotFound, format!("there is no user `{name}`"));
    name.parse().or_else(|_| Ok(User::from_name(name)?.ok_or_else(unknown)?.uid.as_raw()))
}

fn group_id(name: &str) -> io::Result<u32> {
    let unknown = || io::Error::new(ErrorKind::NotFound, format!("there is no group `{name}`"));
    name.parse().or_else(|_| Ok(Group::from_name(name)?.ok_or_else(unknown)?.gid.as_raw()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Without the lock, or if the directory allows no change any more, the next start replaces the file.
        let Ok(_lock) = lock_folder(&self.path) else { return };
        let present = fs::symlink_metadata(&self.path);
        if present.is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};

    use tidegate_policy::{Policy, PolicySources};

    use super::*;

    fn config(text: &str) -> ListenConfig {
        Policy::load(PolicySources::new().file("t", text)).unwrap().api().listen.clone()
    }

    #[tokio::test]
    async fn a_stale_socket_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.sock");
        let config = config(&format!("[api]\nlisten = \"unix:{}\"\nunix = {{ mode = \"0600\" }}\n", path.display()));
        let bind = || ListenSocket::bind(&config.addresses[0], &config);
        drop(StdUnixListener::bind(&path).unwrap());
        let live = bind().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        StdUnixStream::connect(&path).unwrap();
        let error = bind().unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::AddrInUse, "a process listens on it"));
        drop(live);
        assert!(!path.exists());
        fs::write(&path, "text").unwrap();
        assert_eq!(bind().unwrap_err().to_string(), "the file isn't a socket");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }

    #[tokio::test]
    async fn of_simultaneous_starts_one_succeeds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.sock");
        let (path, unix) = (&path, &config("").unix);
        for _ in 0..50 {
            drop(StdUnixListener::bind(path).unwrap());
            let start = &std::sync::Barrier::new(4);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let bind = || {
                    start.wait();
                    bind_unix(path, unix)
                };
                let threads = [(); 4].map(|()| scope.spawn(bind));
                threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect()
            });
            assert_eq!(bound.len(), 1);
            StdUnixStream::connect(path).unwrap();
        }
    }

    #[tokio::test]
    async fn a_live_socket_with_full_backlog_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.sock");
        let live = StdUnixListener::bind(&path).unwrap();
        SockRef::from(&live).listen(0).unwrap();
        let _waiting = StdUnixStream::connect(&path).unwrap();
        let error = bind_unix(&path, &config("").unix).unwrap_err();
        assert_eq!(error.to_string(), "a process listens on it");
    }

    #[tokio::test]
    async fn a_replaced_socket_file_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gate.sock");
        let config = config(&format!("[api]\nlisten = \"unix:{}\"\n", path.display()));
        let old = ListenSocket::bind(&config.addresses[0], &config).unwrap();
        fs::remove_file(&path).unwrap();
        let new = ListenSocket::bind(&config.addresses[0], &config).unwrap();
        drop(old);
        StdUnixStream::connect(&path).unwrap();
        drop(new);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn owner_and_group_are_found_by_name() {
        assert_eq!((user_id("root").unwrap(), group_id("0").unwrap()), (0, 0));
        assert_eq!(user_id("no-such-user").unwrap_err().to_string(), "there is no user `no-such-user`");
        assert_eq!(group_id("no-such-group").unwrap_err().to_string(), "there is no group `no-such-group`");
    }

    #[tokio::test]
    async fn both_families_share_a_port() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = config(&format!("[api]\nlisten = [\"0.0.0.0:{port}\", \"[::]:{port}\"]\ntoken = \"env:A\"\n"));
        let sockets: Vec<_> = config.addresses.iter().map(|it| ListenSocket::bind(it, &config).unwrap()).collect();
        for address in [format!("127.0.0.1:{port}"), format!("[::1]:{port}")] {
            std::net::TcpStream::connect(&address).unwrap();
        }
        assert_eq!(sockets.len(), 2);
    }

    #[tokio::test]
    async fn ipv6_alone_takes_both_families() {
        let config = config("[api]\nlisten = \"[::]:0\"\ntoken = \"env:A\"\n");
        let ListenSocket::Tcp(socket) = ListenSocket::bind(&config.addresses[0], &config).unwrap() else { panic!() };
        assert!(!SockRef::from(&socket).only_v6().unwrap());
    }
}
