//! The server behind the gate: connections to it, kept for the next request.
//!
//! *Why here:* a general client resolves a URL for each request, keys its pool by host and hands every response back
//! through a task of its own. The gate has one upstream, so a stack of idle connections under one lock does; the
//! newest is used first, and the oldest leave after four seconds, before the servers that close idle connections
//! soonest do it themselves.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::body::Upload;
use crate::watch::{Watch, lock};

/// How long an idle connection is kept: Node.js, the most hurried of common servers, closes after 5 s.
const KEPT: Duration = Duration::from_secs(4);
/// In how many steps an idle connection ages.
const AGES: u32 = 4;

/// The server behind the gate.
pub(crate) struct Upstream {
    host: String,
    port: u16,
    connect: Duration,
    cap: usize,
    http: http1::Builder,
    idle: Mutex<Idle>,
    filled: Notify,
}

#[derive(Default)]
struct Idle {
    age: u32,
    stack: Vec<(u32, SendRequest<Upload>)>,
}

/// Why the upstream gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("can't connect to the upstream: {0}")]
    Connect(#[source] io::Error),
    #[error("connecting to the upstream takes too long")]
    ConnectTimeout,
    #[error("the upstream broke off: {0}")]
    Broken(#[source] hyper::Error),
    #[error("the upstream switched protocols unasked")]
    Switched,
    #[error("no progress in time")]
    Overdue,
}

impl Upstream {
    pub(crate) fn new(host: &str, port: u16, connect: Duration, cap: usize) -> Arc<Self> {
        let http = http1::Builder::new();
        Arc::new(Self {
            host: host.to_owned(),
            port,
            connect,
            cap,
            http,
            idle: Mutex::default(),
            filled: Notify::new(),
        })
    }

    /// Sends a request and waits for the head of the answer, as long as the connection's watch has patience.
    ///
    /// A kept connection may turn out to be closed; as long as nothing was sent, the request goes to another one.
    pub(crate) async fn send(
        self: &Arc<Self>,
        mut request: Request<Upload>,
        watch: &Watch,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        loop {
            let (mut sender, kept) = match self.take() {
                Some(sender) => (sender, true),
                None => (self.connect().await?, false),
            };
            let mut sending = pin!(sender.try_send_request(request));
            let sent = poll_fn(|cx| match watch.is_overdue() {
                true => Poll::Ready(None),
                false => sending.as_mut().poll(cx).map(Some),
            });
            match sent.await.ok_or(Failure::Overdue)? {
                Ok(response) => {
                    return Ok((response, Lease { sender, upstream: Arc::clone(self) }));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if kept => request = unsent,
                    _ => return Err(Failure::Broken(error.into_error())),
                },
            }
        }
    }

    fn take(&self) -> Option<SendRequest<Upload>> {
        let mut idle = lock(&self.idle);
        while let Some((_, sender)) = idle.stack.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    fn keep(&self, sender: SendRequest<Upload>) {
        let mut idle = lock(&self.idle);
        if idle.stack.len() < self.cap {
            let age = idle.age;
            idle.stack.push((age, sender));
            if idle.stack.len() == 1 {
                self.filled.notify_one();
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Upload>, Failure> {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let stream = match tokio::time::timeout(self.connect, connecting).await {
            Ok(connected) => connected.map_err(Failure::Connect)?,
            Err(_) => return Err(Failure::ConnectTimeout),
        };
        stream.set_nodelay(true).map_err(Failure::Connect)?;
        let (sender, connection) = self.http.handshake(TokioIo::new(stream)).await.map_err(Failure::Broken)?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to the upstream ended");
            }
        });
        Ok(sender)
    }

    /// Lets go of connections that nobody wanted for a while; runs for ever.
    pub(crate) async fn age(&self) {
        loop {
            while lock(&self.idle).stack.is_empty() {
                self.filled.notified().await;
            }
            tokio::time::sleep(KEPT / AGES).await;
            let mut idle = lock(&self.idle);
            idle.age = idle.age.wrapping_add(1);
            let age = idle.age;
            idle.stack.retain(|(since, sender)| age.wrapping_sub(*since) < AGES && !sender.is_closed());
        }
    }
}

/// A connection in use.
pub(crate) struct Lease {
    sender: SendRequest<Upload>,
    upstream: Arc<Upstream>,
}

impl Lease {
    /// Keeps the connection for the next request. For one whose last message hasn't quite ended on the wire, a task
    /// waits; under load that is rare.
    pub(crate) fn give_back(self) {
        let Self { mut sender, upstream } = self;
        if sender.is_ready() {
            upstream.keep(sender);
        } else if !sender.is_closed() {
            tokio::spawn(async move {
                if sender.ready().await.is_ok() {
                    upstream.keep(sender);
                }
            });
        }
    }
}
