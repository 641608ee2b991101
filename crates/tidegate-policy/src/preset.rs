//! Presets: ready-made limits for actions that most services have.

use std::fmt;

/// A ready-made limit and ban, chosen with `preset = "login"`. Settings beside it in the file override it, and
/// `ban = "none"` removes the ban. An owner of an IPv6 /48 has the addresses of 65,536 clients;
/// `ipv6_network = "preset"` limits all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// `login`: 5 per 60 s, then banned for 600 s.
    Login,
    /// `otp_request`: 3 per 120 s, then banned for 900 s.
    OtpRequest,
    /// `password_reset`: 2 per 300 s, then banned for 1200 s.
    PasswordReset,
    /// `register`: 5 per 60 s, then banned for 300 s.
    Register,
    /// `api_call`: 5 per 60 s, then banned for 300 s.
    ApiCall,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 5] = [Self::Login, Self::OtpRequest, Self::PasswordReset, Self::Register, Self::ApiCall];

    /// The name, the limit, the limit of each IPv6 /48, and the ban.
    fn words(self) -> [&'static str; 4] {
        match self {
            Self::Login => ["login", "5 per 60s", "50 per 60s", "600s"],
            Self::OtpRequest => ["otp_request", "3 per 120s", "30 per 120s", "900s"],
            Self::PasswordReset => ["password_reset", "2 per 300s", "20 per 300s", "1200s"],
            Self::Register => ["register", "5 per 60s", "50 per 60s", "300s"],
            Self::ApiCall => ["api_call", "5 per 60s", "50 per 60s", "300s"],
        }
    }

    /// The preset's name in a policy.
    pub fn as_str(self) -> &'static str {
        self.words()[0]
    }

    /// Its limit in the words of a policy.
    pub fn limit(self) -> &'static str {
        self.words()[1]
    }

    /// Ten times its limit: the limit of each IPv6 /48 with `ipv6_network = "preset"`, without a ban.
    pub fn network_limit(self) -> &'static str {
        self.words()[2]
    }

    /// Its ban in the words of a policy.
    pub fn ban(self) -> &'static str {
        self.words()[3]
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
