//! Requests to the listeners of a running gate.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use http::uri::Authority;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tidegate_policy::{ListenAddress, ListenConfig, Policy, Secret, SecretSource};
use tidegate_server::tls_connector;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::policy::{self, failure, invalid_input, print, print_error, print_json};
use crate::{CliOutcome, CommandResult, GateArgs};

/// The hint if a gate requires a token and the command line has none.
const TOKEN_HELP: &str =
    "--token-env NAME says which environment variable holds it, -c FILE which policy knows where it is";

/// The timeout of a gate's response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause in a stream of events. The gate sends a comment every ten seconds.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The maximum size of a response. The state of a hundred providers has some hundred kilobytes.
const MAX_ANSWER: usize = 16 << 20;

/// The pauses before another connection for a stream that has ended. Each is twice as long as the last.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_RECONNECT_PAUSE: Duration = Duration::from_secs(10);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The reason that there is no stream.
enum StreamError {
    Unreachable(Box<dyn Error + Send + Sync>),
    Refused(StatusCode, String),
}

/// A listener of a gate that answers by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    Api,
    Admin,
}

impl ListenerKind {
    /// Its section in the policy, and its name for people.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Api => ("api", "decision API"),
            Self::Admin => ("admin", "admin listener"),
        }
    }

    /// Its address, and the name and the place of its token. Of several tokens, the first that may change something.
    fn settings(self, policy: &Policy) -> (&ListenConfig, Option<(String, SecretSource)>) {
        let (section, _) = self.names();
        let (listen, token, named) = match self {
            Self::Api => (&policy.api().listen, &policy.api().token, &[][..]),
            Self::Admin => (&policy.admin().listen, &policy.admin().token, &*policy.admin().tokens),
        };
        let token = token.as_ref().map(|source| (format!("{section}.token"), source.clone()));
        let named = named.iter().min_by_key(|token| token.read_only);
        (
            listen,
            token.or_else(|| named.map(|token| (format!("{section}.tokens.{}", token.name), token.source.clone()))),
        )
    }
}

/// The address of a listener.
pub(crate) enum GateAddress {
    Tcp(Authority),
    Tls(Authority, TlsConnector),
    Unix(PathBuf),
}

impl GateAddress {
    /// Parses `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`. `ca` is the file of trusted certificates.
    fn parse(url: &str, ca: Option<&Path>) -> Result<Self, CliOutcome> {
        if let Some(path) = url.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let parsed: Uri = url.parse().map_err(|error| invalid_input(format!("--url {url}: {error}")))?;
        match (parsed.scheme_str(), parsed.authority()) {
            (Some("http"), Some(authority)) => Ok(Self::Tcp(authority.clone())),
            (Some("https"), Some(authority)) => {
                let connector = tls_connector(ca).map_err(|error| invalid_input(error.to_string()))?;
                Ok(Self::Tls(authority.clone(), connector))
            }
            _ => Err(invalid_input(format!(
                "--url {url} isn't of the form http://HOST:PORT, https://HOST:PORT or unix:PATH"
            ))),
        }
    }

    /// The value of `Host`.
    fn host(&self) -> &str {
        match self {
            Self::Tcp(authority) | Self::Tls(authority, _) => authority.as_str(),
            Self::Unix(_) => "localhost",
        }
    }
}

/// The client of one listener of a running gate.
pub(crate) struct GateClient<'a> {
    arguments: &'a GateArgs,
    kind: ListenerKind,
    url: String,
    address: GateAddress,
    token: Option<Secret>,
}

impl<'a> GateClient<'a> {
    /// Takes the URL and the token from the command line, and otherwise from the policy. Prints errors to standard error.
    pub(crate) fn new(arguments: &'a GateArgs, kind: ListenerKind) -> Result<Self, CliOutcome> {
        Self::with_token_if(true, arguments, kind)
    }

    /// A client for requests that need no token. Reads no policy if the command line has the URL.
    pub(crate) fn without_token(arguments: &'a GateArgs, kind: ListenerKind) -> Result<Self, CliOutcome> {
        Self::with_token_if(false, arguments, kind)
    }

    fn with_token_if(needs_token: bool, arguments: &'a GateArgs, kind: ListenerKind) -> Result<Self, CliOutcome> {
        let (url, in_policy) = match (&arguments.url, &arguments.config) {
            (Some(url), config) if config.is_none() || !needs_token => (url.clone(), None),
            (url, config) => {
                let environment = policy::environment(arguments.env_prefix.as_deref());
                let (policy, _) = policy::load(config.as_deref(), environment).inspect_err(|_| {
                    policy::print_error(
                        "help: the policy only tells where the gate is; without it, name the gate with --url \
                         http://HOST:PORT, and its token with --token-env NAME\n",
                    );
                })?;
                let (listen, token) = kind.settings(&policy);
                (url.clone().map_or_else(|| local_url(kind, listen), Ok)?, token)
            }
        };
        let in_arguments = arguments.token_env.as_ref();
        let source = in_arguments.map(|name| ("--token-env".to_owned(), SecretSource::Env(name.clone()))).or(in_policy);
        let resolve = |(from, source): (String, SecretSource)| {
            let token = source.resolve(|name| std::env::var(name).ok());
            token.map_err(|error| invalid_input(format!("{from}: {error}")))
        };
        let token = source.filter(|_| needs_token).map(resolve).transpose()?;
        let address = GateAddress::parse(&url, arguments.ca.as_deref())?;
        Ok(Self { arguments, kind, url, address, token })
    }

    /// Sends a request and prints the response, either described in words or as JSON. `help` is a hint about the field
    /// that the gate calls wrong.
    pub(crate) fn ask(
        &self,
        method: Method,
        target: &str,
        body: String,
        describe: impl FnOnce(&str) -> Option<(String, CliOutcome)>,
        help: impl FnOnce(&str) -> Option<String>,
    ) -> CommandResult {
        let request = self.request(method, target, body)?;
        let sending = exchange(&self.address, request);
        let answer = runtime()?.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, sending).await });
        let no_answer = |_| failure(format!("{} did not answer within {ANSWER_TIMEOUT:?}", self.url));
        let response = answer.map_err(no_answer)?.map_err(|error| self.unreachable(&*error))?;
        let text = String::from_utf8_lossy(response.body());
        if !response.status().is_success() {
            return Err(self.print_refusal(response.status(), &text, help));
        }
        match describe(&text) {
            Some((_, outcome)) if self.arguments.json => Ok(print_json(&text).and(outcome)),
            Some((words, outcome)) => Ok(print(&words).and(outcome)),
            None => {
                let (url, (_, name)) = (&self.url, self.kind.names());
                Err(failure(format!("{url} answers, but it is no {name} of this version of Tidegate")))
            }
        }
    }

    /// Reads a stream of server-sent events. `print_data` gets the data of each event, and ends the command if it returns
    /// an outcome. After a stream has ended, continues with the next one from the last event.
    pub(crate) fn follow(
        &self,
        target: &str,
        mut print_data: impl FnMut(&str) -> Result<(), CliOutcome>,
    ) -> CommandResult {
        runtime()?.block_on(async {
            let (mut last_id, mut was_open) = (None, false);
            let mut opened = self.open_stream(target, None).await;
            let mut pause = SHORTEST_PAUSE;
            loop {
                let reason = match opened {
                    Ok(body) => {
                        (pause, was_open) = (SHORTEST_PAUSE, true);
                        self.read_stream(body, &mut last_id, &mut print_data).await?
                    }
                    Err(StreamError::Unreachable(error)) if !was_open => return Err(self.unreachable(&*error)),
                    Err(StreamError::Unreachable(error)) => format!("no gate answers at {}: {error}", self.url),
                    Err(StreamError::Refused(status, _)) if was_open && status.is_server_error() => {
                        format!("{} answers {status}", self.url)
                    }
                    Err(StreamError::Refused(status, text)) => return Err(self.print_refusal(status, &text, |_| None)),
                };
                print_error(&format!("{reason}; connecting again in {} s\n", pause.as_secs()));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_RECONNECT_PAUSE);
                opened = self.open_stream(target, last_id.as_deref()).await;
            }
        })
    }

    async fn open_stream(&self, target: &str, last_id: Option<&str>) -> Result<Incoming, StreamError> {
        let request = self.request(Method::GET, target, String::new());
        let mut request = request.map_err(|_| StreamError::Unreachable("the request is invalid".into()))?;
        if let Some(id) = last_id.and_then(|id| HeaderValue::from_str(id).ok()) {
            request.headers_mut().insert(LAST_EVENT_ID, id);
        }
        let opening = tokio::time::timeout(ANSWER_TIMEOUT, open(&self.address, request)).await;
        let no_answer = |_| StreamError::Unreachable(format!("there is none within {ANSWER_TIMEOUT:?}").into());
        let (parts, body) = opening.map_err(no_answer)?.map_err(StreamError::Unreachable)?.into_parts();
        if parts.status.is_success() {
            return Ok(body);
        }
        let text = Limited::new(body, MAX_ANSWER).collect().await.map(|text| text.to_bytes());
        Err(StreamError::Refused(parts.status, String::from_utf8_lossy(&text.unwrap_or_default()).into_owned()))
    }

    /// Reads a stream until it ends, and returns the reason.
    async fn read_stream(
        &self,
        mut body: Incoming,
        last_id: &mut Option<String>,
        print_data: &mut impl FnMut(&str) -> Result<(), CliOutcome>,
    ) -> Result<String, CliOutcome> {
        let url = &self.url;
        let mut unread = String::new();
        loop {
            let data = match tokio::time::timeout(LONGEST_PAUSE, body.frame()).await {
                Err(_) => return Ok(format!("{url} has sent nothing for {LONGEST_PAUSE:?}")),
                Ok(None) => return Ok(format!("{url} has ended the stream")),
                Ok(Some(Err(error))) => return Ok(format!("{url} broke off: {error}")),
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            };
            unread.push_str(&String::from_utf8_lossy(&data));
            while let Some((event, rest)) = unread.split_once("\n\n") {
                let field = |name| event.lines().find_map(|line| line.strip_prefix(name));
                if let Some(data) = field("data: ") {
                    print_data(data)?;
                }
                *last_id = field("id: ").map(str::to_owned).or(last_id.take());
                unread = rest.to_owned();
            }
            if unread.len() > MAX_ANSWER {
                return Err(failure(format!("{url} sends an event without an end")));
            }
        }
    }

    fn request(&self, method: Method, target: &str, body: String) -> Result<Request<Full<Bytes>>, CliOutcome> {
        let mut request = Request::builder().method(method).uri(target).header(HOST, self.address.host());
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.expose()));
        }
        request.body(Full::from(body)).map_err(invalid_input)
    }

    fn unreachable(&self, error: &(dyn Error + Send + Sync)) -> CliOutcome {
        let url = &self.url;
        let text = error.to_string();
        // The library's name for a certificate that may sign others, which `openssl req -x509` makes by default.
        if text.contains("CaUsedAsEndEntity") {
            return failure(format!(
                "the certificate of {url} is one of an authority (CA:TRUE), which no server may show"
            ));
        }
        failure(format!("no gate answers at {url}: {text}\nIs it running? `tidegate serve` starts one."))
    }

    fn print_refusal(&self, status: StatusCode, text: &str, help: impl FnOnce(&str) -> Option<String>) -> CliOutcome {
        if self.arguments.json {
            print_json(text);
        } else {
            let body: Value = serde_json::from_str(text).unwrap_or_default();
            let default_message = || format!("{} answered {status}", self.url);
            let message = ["message", "status"].iter().find_map(|field| body[field].as_str());
            let message = message.map_or_else(default_message, str::to_owned);
            print_error(&format!("error: {}\n", message.trim_start_matches("error: ")));
            if let Some(help) = body["field"].as_str().and_then(help) {
                print_error(&format!("{help}\n"));
            }
            if status == StatusCode::UNAUTHORIZED {
                print_error(&format!("{TOKEN_HELP}\n"));
            }
        }
        match status {
            StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED => CliOutcome::InvalidInput,
            _ => CliOutcome::Failed,
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, CliOutcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| failure(format!("can't start: {error}")))
}

/// The URL of a listener of a gate on this machine: its first address.
fn local_url(kind: ListenerKind, listen: &ListenConfig) -> Result<String, CliOutcome> {
    let (section, name) = kind.names();
    // Unix sockets never use TLS.
    let plain = listen.addresses.iter().find(|address| listen.tls.is_none() || address.tcp().is_none());
    if plain.is_none() && !listen.is_off() {
        let help =
            "the gate speaks TLS there: --url https://NAME:PORT says by which name, or give it a unix socket, too";
        return Err(invalid_input(format!("{section}.listen has no plain address; {help}")));
    }
    let address = match plain {
        None => {
            let off = format!("the policy turns the gate's {name} off, with {section}.listen = \"off\"");
            return Err(invalid_input(off));
        }
        Some(ListenAddress::Tcp(address)) => address,
        Some(unix @ ListenAddress::Unix(_)) => return Ok(unix.to_string()),
    };
    if address.port() == 0 {
        return Err(invalid_input(format!(
            "the policy leaves the port of {section}.listen to the system; --url http://HOST:PORT says which it is"
        )));
    }
    let ip = match address.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    if listen.proxy_protocol.iter().any(|network| network.contains(&ip)) {
        return Err(invalid_input(format!(
            "{section}.proxy_protocol makes the gate expect a header of the PROXY protocol there, also from this machine; leave \
             {ip} out of it, or give the listener a unix socket, too, and name that with --url unix:PATH"
        )));
    }
    Ok(format!("http://{}", SocketAddr::new(ip, address.port())))
}

/// Sends one request over a connection of its own, and reads the response.
///
/// # Errors
/// The server can't be reached, or its response is too long or isn't HTTP.
pub(crate) async fn exchange(
    address: &GateAddress,
    request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, Box<dyn Error + Send + Sync>> {
    let (parts, body) = open(address, request).await?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
    Ok(Response::from_parts(parts, body))
}

/// Sends one request over a connection of its own.
async fn open(
    address: &GateAddress,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Box<dyn Error + Send + Sync>> {
    match address {
        GateAddress::Tcp(authority) => send(connect(authority, 80).await?, request).await,
        GateAddress::Tls(authority, connector) => {
            let name = host(authority).to_owned().try_into()?;
            send(connector.connect(name, connect(authority, 443).await?).await?, request).await
        }
        GateAddress::Unix(path) => send(UnixStream::connect(path).await?, request).await,
    }
}

async fn connect(authority: &Authority, default_port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect((host(authority), authority.port_u16().unwrap_or(default_port))).await
}

/// The name or the address of a host, which has no brackets.
fn host(authority: &Authority) -> &str {
    authority.host().trim_matches(['[', ']'])
}

async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Box<dyn Error + Send + Sync>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}
