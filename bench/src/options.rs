//! What the command line asks for.

/// Which part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchSuite {
    /// Decisions in process.
    Decision,
    /// Calls to others, in process.
    Outbound,
    /// Requests through the gate.
    Gate,
    /// Stores whose state outlives the process.
    Stores,
    /// Worlds on a virtual clock.
    Simulate,
    /// Everything.
    All,
}

/// A parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which rows.
    pub suite: BenchSuite,
    /// Fail where a target is missed.
    pub check: bool,
    /// Fewer and shorter rounds: to see that it runs, not to quote.
    pub quick: bool,
    /// Only rows whose name holds one of these; all if empty.
    pub filters: Vec<String>,
    /// Only subjects whose name holds one of these; all if empty. For profiling: a row of one subject has no ratio.
    pub subjects: Vec<String>,
}

/// Printed by `--help`, and after a mistake.
pub const USAGE: &str = "\
usage: bench [decision|outbound|gate|stores|simulate|all] [--check] [--quick] [--filter TEXT]... [--subject TEXT]...

  decision   decisions in process, against governor, throttlecrab, limitador and backon
  outbound   calls to others in process, against recloser, failsafe and tower-resilience
  gate       requests through the gate, against nginx and bare hyper programs
  stores     stores whose state outlives the process, against memory or the least that a server could be asked
  simulate   the laboratory: worlds on a virtual clock, access logs
  all        all of them (default)
  --check    exit with 1 and name each row that misses its target
  --quick    fewer and shorter rounds; the figures are not for quoting
  --filter   only rows whose name holds TEXT; several are alternatives
  --subject  only subjects whose name holds TEXT: to look at one of them with a profiler";

impl Options {
    /// Reads arguments, without the program's name.
    ///
    /// # Errors
    ///
    /// What is wrong, for a person; the empty text when help is asked for.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut options =
            Self { suite: BenchSuite::All, check: false, quick: false, filters: Vec::new(), subjects: Vec::new() };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "decision" => options.suite = BenchSuite::Decision,
                "outbound" => options.suite = BenchSuite::Outbound,
                "gate" => options.suite = BenchSuite::Gate,
                "stores" => options.suite = BenchSuite::Stores,
                "simulate" => options.suite = BenchSuite::Simulate,
                "all" => options.suite = BenchSuite::All,
                "--check" => options.check = true,
                "--quick" => options.quick = true,
                "--filter" => options.filters.push(arguments.next().ok_or("--filter needs a text")?),
                "--subject" => options.subjects.push(arguments.next().ok_or("--subject needs a text")?),
                "--help" | "-h" => return Err(String::new()),
                other => return Err(format!("unknown argument '{other}'")),
            }
        }
        Ok(options)
    }

    /// Whether a row of this name is asked for.
    pub fn wants(&self, row: &str) -> bool {
        let part = match self.suite {
            BenchSuite::Decision => row.starts_with("decision/"),
            BenchSuite::Outbound => row.starts_with("outbound/"),
            BenchSuite::Gate => row.starts_with("gate/"),
            BenchSuite::Stores => row.starts_with("stores/"),
            BenchSuite::Simulate => row.starts_with("simulate/"),
            BenchSuite::All => true,
        };
        part && (self.filters.is_empty() || self.filters.iter().any(|filter| row.contains(filter.as_str())))
    }

    /// Whether a subject of this name is asked for.
    pub fn wants_subject(&self, subject: &str) -> bool {
        let mut texts = self.subjects.iter();
        self.subjects.is_empty() || texts.any(|text| subject.contains(text.as_str()))
    }

    /// Rounds of a timed row.
    pub fn rounds(&self) -> usize {
        if self.quick { 3 } else { 11 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_in_any_order() {
        let options = parse("--check decision --filter T1 --filter hot").expect("it is valid");
        assert!(options.check && !options.quick && options.suite == BenchSuite::Decision);
        assert!(options.wants("decision/one/allow/T1") && options.wants("decision/10k/hot/allow/T2"));
        assert!(!options.wants("decision/one/allow/T2") && !options.wants("gate/hot"));
        assert!(options.wants_subject("governor"));
    }

    #[test]
    fn subjects_can_be_chosen() {
        let options = parse("--subject crab --subject gov").expect("it is valid");
        assert!(options.wants_subject("governor") && options.wants_subject("throttlecrab"));
        assert!(!options.wants_subject("limitador"));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(parse("--chekc"), Err("unknown argument '--chekc'".to_owned()));
        assert_eq!(parse("--filter"), Err("--filter needs a text".to_owned()));
    }
}
