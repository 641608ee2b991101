//! Tokens from logins: one login at a time for each credential.

mod error;
mod token_slot;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderValue, Request, Response, Uri};
use serde_json::Value;
use tidegate_core::retry::TransportFault;
use tidegate_core::{Class, Span, Time};
use tidegate_policy::Secret;
use tidegate_policy::outbound::{Login, ProviderConfig};
use tidegate_policy::verdict::Classified;

pub use self::error::LoginError;
use self::token_slot::TokenSlot;
pub(crate) use self::token_slot::{LoginFailure, LoginToken};
use super::{CredentialError, Credentials, Target, TargetError};

/// The longest login reply that is read, in bytes.
pub(super) const MAX_LOGIN_REPLY: usize = 256 << 10;
/// The longest accepted token, in bytes: headers hold no more.
const MAX_TOKEN: usize = 16 << 10;

/// The reply to a login.
pub(super) type LoginReply = Result<Response<Bytes>, TransportFault>;

/// The login tokens of a provider's credentials.
///
/// A token is valid for its `lifetime`, counted from before its login was sent. From `refresh_before` its end, the
/// first call that needs it logs in again, and other calls continue with the old token. Without a valid token, all
/// calls wait for one login, and all share its failure.
pub(crate) struct Logins {
    login: Login,
    request: Request<()>,
    target: Target,
    secrets: Credentials,
    token_slots: Box<[TokenSlot]>,
}

impl Logins {
    /// Returns the logins of a provider; `None` if it has none. `env` looks up an environment variable.
    ///
    /// # Errors
    /// A secret of the body can't be resolved, or the login's path can't be appended to the base URL.
    pub(crate) fn from_provider(
        provider: &ProviderConfig,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, CredentialError> {
        let Some(login) = provider.login.clone() else { return Ok(None) };
        Self::new(login, Target::from_provider(provider), provider.credentials.len(), env).map(Some)
    }

    /// Returns logins for this many credentials, at least 1. Their tokens are sent to `target`.
    pub(crate) fn new(
        login: Login,
        target: Target,
        credentials: usize,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let sources: Vec<_> = login.secrets.iter().map(|(_, source)| source.clone()).collect();
        let secrets = Credentials::resolve(&sources, None, env)?;
        let unusable = |why| CredentialError::Unusable { origin: format!("login at {}", login.path), reason: why };
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = http::Method::POST;
        parts.uri = login.path.parse::<Uri>().map_err(|_| unusable(TargetError::MalformedUrl))?;
        parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        parts.headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        target.without_credential().prepare_request(&mut parts, None).map_err(unusable)?;
        let token_slots = (0..credentials.max(1)).map(|_| TokenSlot::default()).collect();
        let request = Request::from_parts(parts, ());
        Ok(Self { login, request, target, secrets, token_slots })
    }

    /// Returns the token of a credential, by a login if there is no valid one. `send` sends the login's request.
    ///
    /// # Errors
    /// The reason for no token. For five seconds after a failed login, or as long as the provider asks, there is no other
    /// login, and calls get its failure.
    ///
    /// # Panics
    /// If there is no credential with this index.
    pub(crate) async fn token<F: Future<Output = LoginReply>>(
        &self,
        credential: usize,
        secret: &Secret,
        now: Time,
        send: impl FnOnce(Request<Secret>) -> F,
    ) -> Result<LoginToken, LoginFailure> {
        self.token_slots[credential].token(secret, now, self.log_in(secret, now, send)).await
    }

    /// Returns the token that replaces a rejected one: by a login, unless another call has already renewed it.
    ///
    /// # Errors
    /// As for [`token`](Self::token). [`LoginError::TokenRejected`] for five seconds after a token was replaced, if the
    /// new one is rejected too.
    pub(crate) async fn renew<F: Future<Output = LoginReply>>(
        &self,
        credential: usize,
        rejected: &LoginToken,
        secret: &Secret,
        now: Time,
        send: impl FnOnce(Request<Secret>) -> F,
    ) -> Result<LoginToken, LoginFailure> {
        self.token_slots[credential].renew(rejected, now, self.log_in(secret, now, send)).await
    }

    async fn log_in<F: Future<Output = LoginReply>>(
        &self,
        secret: &Secret,
        now: Time,
        send: impl FnOnce(Request<Secret>) -> F,
    ) -> Result<LoginToken, LoginError> {
        let Self { login, request, secrets, .. } = self;
        let mut named_secrets = Vec::with_capacity(secrets.len());
        for (index, (name, _)) in login.secrets.iter().enumerate() {
            let secret = secrets.current(index, now).await;
            named_secrets.extend(secret.map(|secret| (name.clone(), Secret::clone(&secret))));
        }
        let request = request.clone().map(|()| login.fill_body(secret, &named_secrets));
        let response = send(request).await.map_err(LoginError::NoReply)?;
        let token = self.parse_token(&response, now)?;
        let [lifetime, refresh_before] = [login.lifetime, login.refresh_before].map(Span::from_duration);
        Ok(LoginToken {
            secret: Arc::new(token),
            credential: secret.clone(),
            login_number: 0,
            replaced_at: None,
            refresh_at: now + (lifetime - refresh_before),
            expires_at: now + lifetime,
        })
    }

    fn parse_token(&self, response: &Response<Bytes>, now: Time) -> Result<Secret, LoginError> {
        let Self { login, target, .. } = self;
        let status = response.status();
        if !status.is_success() {
            let verdict = Classified::of_head(status, response.headers(), now).verdict;
            let class = if verdict.class == Class::Success { Class::Permanent } else { verdict.class };
            return Err(LoginError::Refused { status, class, retry_after: verdict.wait });
        }
        if response.body().len() > MAX_LOGIN_REPLY {
            return Err(LoginError::NotJson);
        }
        let json = serde_json::from_slice::<Value>(response.body()).map_err(|_| LoginError::NotJson)?;
        let token = json.pointer(&login.pointer).and_then(Value::as_str);
        let token = token.filter(|token| !token.is_empty() && token.len() <= MAX_TOKEN);
        let token = token.ok_or_else(|| LoginError::NoToken { pointer: login.pointer.clone() })?;
        let token = Secret::new(token);
        target.check_credential(&token).map_err(LoginError::UnusableToken)?;
        Ok(token)
    }
}

impl fmt::Debug for Logins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logins").field("path", &self.login.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use tidegate_policy::SecretSource;
    use tidegate_policy::outbound::{Auth, BaseUrl};

    const NOW: Time = Time::from_secs(1_767_225_600);
    const PLANTED: &str = "pl4nted-s3cr3t";
    const HOUR: Duration = Duration::from_secs(3_600);

    fn logins() -> Logins {
        let mut login = Login::new("/login", r#"{"apikey":"{credential}","pin":"{pin}"}"#, 24 * HOUR);
        login.refresh_before = 2 * HOUR;
        login.pointer = "/data/token".to_owned();
        login.secrets = vec![("pin".to_owned(), SecretSource::Env("PIN".to_owned()))];
        let base = BaseUrl::new(true, http::uri::Authority::from_static("api4.example"), "/v4");
        let target = Target::new(Some(base), Auth::Bearer, Some(HeaderValue::from_static("App/1.0")));
        Logins::new(login, target, 2, |_| Some("12\"34".to_owned())).unwrap()
    }

    /// A server that counts logins and names its tokens by them.
    #[derive(Default)]
    struct Server {
        logins: AtomicUsize,
        at_once: AtomicUsize,
        most_at_once: AtomicUsize,
    }

    impl Server {
        fn logins(&self) -> usize {
            self.logins.load(Ordering::SeqCst)
        }

        async fn answer(&self, status: u16) -> Result<Response<Bytes>, TransportFault> {
            let number = self.logins.fetch_add(1, Ordering::SeqCst) + 1;
            let at_once = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_at_once.fetch_max(at_once, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.at_once.fetch_sub(1, Ordering::SeqCst);
            let body = format!(r#"{{"data":{{"token":"{PLANTED}-{number}"}}}}"#);
            Ok(Response::builder().status(status).body(Bytes::from(body)).unwrap())
        }
    }

    async fn token(logins: &Logins, server: &Server, now: Time, status: u16) -> Result<LoginToken, LoginFailure> {
        logins.token(0, &Secret::new("key"), now, |_| server.answer(status)).await
    }

    fn hours(hours: u64) -> Span {
        Span::from_secs(3_600 * hours)
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_calls_share_one_login() {
        let (logins, server) = (logins(), Server::default());
        // No token, a token that expires soon, an expired token.
        for (round, now) in [(1, NOW), (2, NOW + hours(23)), (3, NOW + hours(72))] {
            let calls = (0..20).map(|_| token(&logins, &server, now, 200));
            let tokens = futures_util::future::join_all(calls).await;
            assert_eq!(server.logins(), round, "at {now:?}");
            assert!(tokens.iter().all(Result::is_ok));
            let last = token(&logins, &server, now, 200).await.unwrap();
            assert_eq!(last.secret.expose(), format!("{PLANTED}-{round}"));
        }
        assert_eq!(server.most_at_once.load(Ordering::SeqCst), 1);
        assert_eq!(server.logins(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn each_credential_has_its_own_token() {
        let (logins, server) = (logins(), Server::default());
        for (key, number) in [("key", 1), ("key", 1), ("other", 2), ("other", 2)] {
            let token = logins.token(0, &Secret::new(key), NOW, |_| server.answer(200)).await.unwrap();
            assert_eq!(token.secret.expose(), format!("{PLANTED}-{number}"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_is_renewed_before_it_expires() {
        let (logins, server) = (logins(), Server::default());
        for (at, count) in [(hours(0), 1), (hours(22) - Span::from_micros(1), 1), (hours(22), 2), (hours(43), 2)] {
            token(&logins, &server, NOW + at, 200).await.unwrap();
            assert_eq!(server.logins(), count, "{at}");
        }
        // The renewal fails, and is tried again only after a pause. The token stays valid meanwhile.
        for (after, count) in [(0, 3), (4, 3), (5, 4)] {
            let still = token(&logins, &server, NOW + hours(45) + Span::from_secs(after), 503).await.unwrap();
            assert_eq!((still.login_number, server.logins()), (2, count));
        }
        let refused = token(&logins, &server, NOW + hours(46), 503).await.unwrap_err();
        assert!(matches!(refused.error, LoginError::Refused { .. }), "it has ended");
    }

    #[tokio::test(start_paused = true)]
    #[expect(clippy::disallowed_methods, reason = "tokio's paused time is this test's clock")]
    async fn a_slow_early_renewal_delays_calls_little() {
        let (logins, server) = (logins(), Server::default());
        token(&logins, &server, NOW, 200).await.unwrap();
        let (began, late) = (tokio::time::Instant::now(), NOW + hours(23));
        let sent = AtomicUsize::new(0);
        let hangs = |_| {
            sent.fetch_add(1, Ordering::SeqCst);
            std::future::pending()
        };
        for (after, elapsed) in [(0, 5), (4, 5), (5, 10)] {
            let key = Secret::new("key");
            let still = logins.token(0, &key, late + Span::from_secs(after), hangs).await.unwrap();
            assert_eq!((still.login_number, began.elapsed().as_secs()), (1, elapsed), "after {after} s");
        }
        assert_eq!(sent.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_rejections_cause_one_login() {
        let (logins, server) = (logins(), Server::default());
        let old = token(&logins, &server, NOW, 200).await.unwrap();
        let key = Secret::new("key");
        let renew = || logins.renew(0, &old, &key, NOW, |_| server.answer(200));
        let renewed = futures_util::future::join_all((0..20).map(|_| renew())).await;
        assert!(renewed.iter().all(|token| token.as_ref().unwrap().login_number == 2));
        assert_eq!(server.logins(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_rejected_new_token_is_not_renewed_immediately() {
        let (logins, server) = (logins(), Server::default());
        let key = Secret::new("key");
        let renew = async |rejected: &LoginToken, after| {
            logins.renew(0, rejected, &key, NOW + Span::from_secs(after), |_| server.answer(200)).await
        };
        let first = token(&logins, &server, NOW, 200).await.unwrap();
        renew(&first, 1).await.unwrap();
        let second = token(&logins, &server, NOW + Span::from_secs(1), 200).await.unwrap();
        for after in [1, 5] {
            assert_eq!(renew(&second, after).await.unwrap_err().error, LoginError::TokenRejected);
            assert_eq!(renew(&first, after).await.unwrap().login_number, 2, "who still had the first gets the second");
        }
        assert_eq!(server.logins(), 2);
        assert_eq!(renew(&second, 6).await.unwrap().login_number, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn all_waiting_calls_share_a_login_failure() {
        let (logins, server) = (logins(), Server::default());
        let calls = (0..20).map(|_| token(&logins, &server, NOW, 401));
        for failed in futures_util::future::join_all(calls).await {
            assert_eq!(
                failed.unwrap_err().error,
                LoginError::Refused { status: StatusCode::UNAUTHORIZED, class: Class::Auth, retry_after: None }
            );
        }
        assert_eq!(server.logins(), 1);
        token(&logins, &server, NOW + Span::from_secs(4), 200).await.unwrap_err();
        assert_eq!(server.logins(), 1);
        token(&logins, &server, NOW + Span::from_secs(5), 200).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn no_login_is_sent_before_its_time() {
        for (asked, quiet) in [(None, 5), (Some("1"), 5), (Some("9"), 9)] {
            let logins = logins();
            let sent = AtomicUsize::new(0);
            let throttles = |_| {
                sent.fetch_add(1, Ordering::SeqCst);
                let mut reply = Response::builder().status(429);
                reply = asked.into_iter().fold(reply, |reply, asked| reply.header("retry-after", asked));
                std::future::ready(Ok(reply.body(Bytes::new()).unwrap()))
            };
            for (after, logins_sent) in [(0, 1), (quiet - 1, 1), (quiet, 2)] {
                let now = NOW + Span::from_secs(after);
                let failure = logins.token(0, &Secret::new("key"), now, throttles).await.unwrap_err();
                assert_eq!(sent.load(Ordering::SeqCst), logins_sent, "{asked:?} after {after} s");
                let wait = if logins_sent == 1 { quiet - after } else { quiet };
                assert_eq!(failure.attempt_report(now).verdict.wait, Some(Span::from_secs(wait)));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_call_replaces_a_cancelled_login() {
        let (logins, server) = (logins(), Server::default());
        let gone = tokio::time::timeout(Duration::from_millis(10), token(&logins, &server, NOW, 200)).await;
        assert!(gone.is_err());
        assert_eq!(token(&logins, &server, NOW, 200).await.unwrap().secret.expose(), format!("{PLANTED}-2"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_login_request_follows_the_policy() {
        let logins = logins();
        let sent = Mutex::new(None);
        let reply = Response::new(Bytes::from(r#"{"data":{"token":"t"}}"#));
        let send = |request: Request<Secret>| {
            *sent.lock() = Some(request);
            std::future::ready(Ok(reply))
        };
        logins.token(1, &Secret::new(r#"a"b\c"#), NOW, send).await.unwrap();
        let request = sent.into_inner().unwrap();
        assert_eq!(
            (request.method().as_str(), request.uri().to_string().as_str()),
            ("POST", "https://api4.example/v4/login")
        );
        assert_eq!(request.headers()["content-type"], "application/json");
        assert_eq!(request.headers()["user-agent"], "App/1.0");
        assert_eq!(request.body().expose(), r#"{"apikey":"a\"b\\c","pin":"12\"34"}"#);
        assert!(!format!("{request:?}").contains("12"), "{request:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn login_errors_contain_no_secret() {
        let planted = format!("{PLANTED}\\nx");
        for (status, body, class) in [
            (200, format!("{PLANTED} is no JSON"), Class::Permanent),
            (200, format!(r#"{{"token":"{PLANTED}"}}"#), Class::Permanent),
            (200, format!(r#"{{"data":{{"token":["{PLANTED}"]}}}}"#), Class::Permanent),
            (200, format!(r#"{{"data":{{"token":"{planted}"}}}}"#), Class::Permanent),
            (302, PLANTED.to_owned(), Class::Permanent),
            (401, PLANTED.to_owned(), Class::Auth),
            (403, PLANTED.to_owned(), Class::Throttled),
            (429, PLANTED.to_owned(), Class::Throttled),
            (503, PLANTED.to_owned(), Class::Unavailable),
        ] {
            let logins = logins();
            let reply = Response::builder().status(status).header("retry-after", "7").body(Bytes::from(body)).unwrap();
            let failed = logins.token(0, &Secret::new(PLANTED), NOW, |_| std::future::ready(Ok(reply))).await;
            let failure = failed.unwrap_err();
            let error = &failure.error;
            let text = format!("{error} {failure:?} {logins:?} {:?}", logins.login);
            assert!(!text.contains(PLANTED), "{text}");
            let report = failure.attempt_report(NOW + Span::from_secs(1));
            assert_eq!((report.verdict.class, report.is_repeatable), (class, true), "{error}");
            let wait = class.is_retryable().then_some(Span::from_secs(6));
            assert_eq!(
                (report.verdict.wait, report.verdict.rejects_credential),
                (wait, class == Class::Auth),
                "{error}"
            );
        }
        let token = token(&logins(), &Server::default(), NOW, 200).await.unwrap();
        assert!(!format!("{token:?}").contains(PLANTED));
    }
}
