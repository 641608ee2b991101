//! Redis servers for one test: one server, a cluster of three masters, or a master and replica with a sentinel.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use super::{ChildProcess, MAX_POLLS, POLL_INTERVAL, ScratchDir, free_port, require_program};

/// The number of slots of a cluster.
const SLOT_COUNT: u16 = 16_384;
/// The longest wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The options of a server.
#[derive(Clone, Debug, Default)]
pub struct RedisServerOptions {
    /// True if it writes every change to a file, so that its data survive a restart. Otherwise they are lost. Default
    /// false.
    pub durable: bool,
    /// Further arguments of its command line, such as `--requirepass`, `secret`.
    pub arguments: Vec<String>,
}

/// A server in its own directory. Both are removed with this value.
#[derive(Debug)]
pub struct RedisServer {
    program: PathBuf,
    options: RedisServerOptions,
    port: u16,
    child: Option<Child>,
    scratch: ScratchDir,
}

impl RedisServer {
    /// Starts a server that keeps nothing on disk. `None` if `redis-server` isn't installed.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn start() -> Option<Self> {
        Self::start_with(RedisServerOptions::default())
    }

    /// Starts a server with these options. `None` if `redis-server` isn't installed.
    ///
    /// # Panics
    /// If it doesn't start. The message has the server's output.
    pub fn start_with(options: RedisServerOptions) -> Option<Self> {
        let program = require_program("redis-server")?;
        let mut server = Self { program, options, port: free_port(), child: None, scratch: ScratchDir::new() };
        server.launch();
        Some(server)
    }

    fn launch(&mut self) {
        let durable = if self.options.durable { "yes" } else { "no" };
        let port = self.port.to_string();
        let output = || std::fs::File::create(self.scratch.path().join("output")).expect("a file for the output");
        let mut command = Command::new(&self.program);
        command
            .args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", durable])
            .args(["--appendfsync", "always", "--dir"])
            .arg(self.scratch.path())
            .args(&self.options.arguments)
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(Stdio::null());
        self.child = Some(command.spawn().expect("redis-server starts"));
        for _ in 0..MAX_POLLS {
            // With a password the reply is an error, which also shows that the server is up and has loaded its data.
            if let Ok(answer) = self.try_command(&["PING"])
                && !answer.starts_with("-LOADING")
            {
                return;
            }
            sleep(POLL_INTERVAL);
        }
        let output = std::fs::read_to_string(self.scratch.path().join("output")).unwrap_or_default();
        panic!("redis-server doesn't answer on {port}: {output}");
    }

    /// Returns its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns its address, `redis://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns its directory.
    pub fn directory(&self) -> &ScratchDir {
        &self.scratch
    }

    fn try_command(&self, words: &[&str]) -> std::io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        stream.write_all(command.as_bytes())?;
        let mut reader = BufReader::new(stream);
        let mut first = String::new();
        reader.read_line(&mut first)?;
        if let Some(length) = first.strip_prefix('$').and_then(|length| length.trim_end().parse::<usize>().ok()) {
            let mut text = vec![0; length + 2];
            reader.read_exact(&mut text)?;
            return Ok(String::from_utf8_lossy(&text[..length]).into_owned());
        }
        Ok(first.trim_end().to_owned())
    }

    /// Returns its reply to a command: a status with its sign, or a text.
    ///
    /// # Panics
    /// If it doesn't reply.
    pub fn command(&self, words: &[&str]) -> String {
        self.try_command(words).expect("redis-server answers")
    }

    /// Returns the number of its keys.
    ///
    /// # Panics
    /// If it doesn't reply with a number.
    pub fn key_count(&self) -> u64 {
        let answer = self.command(&["DBSIZE"]);
        answer.strip_prefix(':').and_then(|count| count.parse().ok()).expect("a number of keys")
    }

    /// Returns the number of scripts that it has run.
    ///
    /// # Panics
    /// If it doesn't reply.
    pub fn script_count(&self) -> u64 {
        let stats = self.command(&["INFO", "commandstats"]);
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum()
    }

    /// Ends it with SIGKILL, without a clean shutdown.
    ///
    /// # Panics
    /// If it can't be ended.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("our own child can be killed");
            child.wait().expect("our own child can be waited for");
        }
    }

    /// Starts it again on the same port, with its written data if it is durable.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn restart(&mut self) {
        self.kill();
        self.launch();
    }

    /// Suspends it without closing anything: it accepts connections and never replies.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn freeze(&self) {
        self.send_signal("STOP");
    }

    /// Resumes it.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn thaw(&self) {
        self.send_signal("CONT");
    }

    fn send_signal(&self, name: &str) {
        let id = self.child.as_ref().expect("it is running").id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &id]).status();
        assert!(status.is_ok_and(|status| status.success()), "SIG{name} can't be sent to {id}");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Three masters that share the slots, without replicas. If one is lost, the others still serve their slots.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts a cluster. `None` if `redis-server` isn't installed.
    ///
    /// # Panics
    /// If its nodes don't find each other.
    pub fn start() -> Option<Self> {
        let words =
            ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"];
        let setup =
            RedisServerOptions { arguments: words.map(str::to_owned).to_vec(), ..RedisServerOptions::default() };
        let nodes: Vec<_> = (0..3)
            .map(|_| {
                // The nodes communicate on a separate port, by default 10,000 higher.
                let mut setup = setup.clone();
                setup.arguments.extend(["--cluster-port".to_owned(), free_port().to_string()]);
                RedisServer::start_with(setup)
            })
            .collect::<Option<_>>()?;
        let cluster = Self { nodes };
        for (place, node) in (0..).zip(&cluster.nodes) {
            let (first, last) =
                (SLOT_COUNT / 3 * place, if place == 2 { SLOT_COUNT - 1 } else { SLOT_COUNT / 3 * (place + 1) - 1 });
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(place + 1).to_string()]);
        }
        let (head, rest) = cluster.nodes.split_first().expect("three nodes");
        for node in rest {
            let bus = node.options.arguments.last().expect("the port of its own");
            head.command(&["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string(), bus]);
        }
        for _ in 0..MAX_POLLS {
            let knows_all = |node: &RedisServer| {
                let info = node.command(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_ok:16384")
                    && info.contains("cluster_known_nodes:3")
            };
            if cluster.nodes.iter().all(knows_all) {
                return Some(cluster);
            }
            sleep(POLL_INTERVAL);
        }
        panic!("the nodes of the cluster don't know each other");
    }

    /// Returns its address, `redis-cluster://…` with all nodes.
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// Returns its masters in the order of their slots, a third each.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// Returns one of its masters.
    ///
    /// # Panics
    /// If there are fewer masters.
    pub fn node_mut(&mut self, place: usize) -> &mut RedisServer {
        &mut self.nodes[place]
    }

    /// Moves a slot with all its keys, one by one, as an operator's tool does.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let (from, to) = (&self.nodes[from], &self.nodes[to]);
        let slot = slot.to_string();
        let id = |node: &RedisServer| node.command(&["CLUSTER", "MYID"]);
        let set = |node: &RedisServer, words: &[&str]| {
            let answer = node.command(&[&["CLUSTER", "SETSLOT", &slot], words].concat());
            assert_eq!(answer, "+OK", "{words:?}");
        };
        set(to, &["IMPORTING", &id(from)]);
        set(from, &["MIGRATING", &id(to)]);
        let port = to.port.to_string();
        loop {
            let names = from.keys_in_slot(&slot);
            if names.is_empty() {
                break;
            }
            for name in names {
                from.command(&["MIGRATE", "127.0.0.1", &port, &name, "0", "5000"]);
            }
        }
        for node in [to, from] {
            set(node, &["NODE", &id(to)]);
        }
    }
}

impl RedisServer {
    /// Returns the names of up to 100 keys in a slot.
    fn keys_in_slot(&self, slot: &str) -> Vec<String> {
        let read = || {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
            stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
            stream.write_all(format!("CLUSTER GETKEYSINSLOT {slot} 100\r\n").as_bytes())?;
            let mut lines = BufReader::new(stream).lines();
            let count = lines.next().transpose()?.and_then(|line| line.strip_prefix('*')?.parse::<usize>().ok());
            let rest = lines.take(2 * count.unwrap_or(0)).collect::<std::io::Result<Vec<_>>>()?;
            Ok::<_, std::io::Error>(rest.into_iter().skip(1).step_by(2).collect())
        };
        read().expect("redis-server tells its keys")
    }
}

/// A master, its replica, and a single sentinel that decides when the replica replaces the master.
#[derive(Debug)]
pub struct RedisSentinelGroup {
    /// The first master.
    pub master: RedisServer,
    /// The replica, which replaces the master.
    pub replica: RedisServer,
    _sentinel: ChildProcess,
    sentinel_port: u16,
}

impl RedisSentinelGroup {
    /// Starts them. The replica takes over `down_after` after the master's last reply, plus the time of the election.
    /// `None` if `redis-server` isn't installed.
    ///
    /// # Panics
    /// If they don't find each other.
    pub fn start(down_after: Duration) -> Option<Self> {
        let master = RedisServer::start()?;
        let words = vec!["--replicaof".to_owned(), "127.0.0.1".to_owned(), master.port.to_string()];
        let replica =
            RedisServer::start_with(RedisServerOptions { arguments: words, ..RedisServerOptions::default() })?;
        let (scratch, port) = (ScratchDir::new(), free_port());
        let config = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor gate 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds gate {}\nsentinel failover-timeout gate 2000\n",
            master.port,
            down_after.as_millis()
        );
        let config = scratch.write("sentinel.conf", &config);
        let mut command = Command::new(require_program("redis-server")?);
        command.arg(config).arg("--sentinel");
        let sentinel = ChildProcess::start(command, scratch, port);
        for _ in 0..MAX_POLLS {
            if replica.command(&["INFO", "replication"]).contains("master_link_status:up")
                && sentinel.read_file("sentinel.conf").contains("known-replica")
            {
                return Some(Self { master, replica, _sentinel: sentinel, sentinel_port: port });
            }
            sleep(POLL_INTERVAL);
        }
        panic!("the sentinel doesn't find the replica: {}", sentinel.read_file("sentinel.conf"));
    }

    /// Returns its address, `redis-sentinel://127.0.0.1:PORT/gate`.
    pub fn url(&self) -> String {
        format!("redis-sentinel://127.0.0.1:{}/gate", self.sentinel_port)
    }

    /// Returns true if the replica is the master now. A replica that is being promoted may close the connection.
    pub fn is_failed_over(&self) -> bool {
        self.replica.try_command(&["INFO", "replication"]).is_ok_and(|role| role.contains("role:master"))
    }
}
