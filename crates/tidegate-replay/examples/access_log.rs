//! Writes an access log in the combined format, to measure `tidegate replay`: `access_log [LINES [SEED]]`. The same
//! seed gives the same bytes.
//!
//! A hundred thousand clients make a thousand requests per second in total. A few of them call often, as in real logs.
//! One in five hundred floods the log-in.

use std::io::{self, BufWriter, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rand::{RngExt as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;

const CLIENTS: f64 = 100_000.0;
const REQUESTS_PER_SECOND: u64 = 1000;
const PATHS: [&str; 6] =
    ["/", "/search/shoes?q=red+boots", "/img/logo.png", "/product/4711", "/api/v1/cart", "/export"];
const AGENTS: [&str; 3] =
    ["Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0", "curl/8.5.0", "Googlebot/2.1"];

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |word: &String| {
        word.parse::<u64>().map_err(|_| io::Error::other(format!("{word} is no number: access_log [LINES [SEED]]")))
    };
    let lines = arguments.first().map(number).transpose()?.unwrap_or(1000);
    let seed = arguments.get(1).map(number).transpose()?.unwrap_or(1);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut out = BufWriter::new(io::stdout().lock());
    for line in 0..lines {
        let second = line / REQUESTS_PER_SECOND;
        let client = (random.random::<f64>().powi(4) * CLIENTS) as u32;
        let ip: IpAddr = match client % 5 {
            0 => Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(client) << 64 | u128::from(random.random::<u16>()))
                .into(),
            _ => Ipv4Addr::from_bits(0x0b00_0000 + client * 7).into(),
        };
        let is_flooding = client % 500 == 7 && random.random_bool(0.7);
        let (method, path) =
            if is_flooding { ("POST", "/login") } else { ("GET", PATHS[random.random_range(0..PATHS.len())]) };
        let (day, rest) = (1 + second / 86_400, second % 86_400);
        let agent = AGENTS[client as usize % AGENTS.len()];
        writeln!(
            out,
            "{ip} - - [{day:02}/Nov/2026:{:02}:{:02}:{:02} +0000] \"{method} {path} HTTP/1.1\" 200 {} \"-\" \"{agent}\"",
            rest / 3600,
            rest / 60 % 60,
            rest % 60,
            random.random_range(100..20_000_u32),
        )?;
    }
    out.flush()
}
