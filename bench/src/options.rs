//! The command line.

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchSuite {
    /// Decisions in process.
    Decision,
    /// Outbound calls in process.
    Outbound,
    /// Requests through the gate.
    Gate,
    /// Stores with state that outlives the process.
    Stores,
    /// Simulations on a virtual clock, and replays of access logs.
    Simulate,
    /// All parts.
    All,
}

/// A parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The part to run. Default all.
    pub suite: BenchSuite,
    /// True to fail if a target is missed. Default false.
    pub check: bool,
    /// True for fewer and shorter rounds, which only show that the benchmark runs. Default false.
    pub quick: bool,
    /// Texts of which a row's name must contain one; all rows if empty.
    pub filters: Vec<String>,
    /// Texts of which a subject's name must contain one; all subjects if empty. For profiling: a row with one subject
    /// has no ratio.
    pub subjects: Vec<String>,
}

/// The text of `--help`, also printed after a mistake.
pub const USAGE: &str = "\
usage: bench [decision|outbound|gate|stores|simulate|all] [--check] [--quick] [--filter TEXT]... [--subject TEXT]...

  decision   decisions in process, against governor, throttlecrab, limitador and backon
  outbound   calls to others in process, against recloser, failsafe and tower-resilience
  gate       requests through the gate, against nginx and bare hyper programs
  stores     stores whose state outlives the process, against memory or the least that a server could be asked
  simulate   simulations on a virtual clock, and access logs
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
    /// A message for the user; the empty text if help is asked for.
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

    /// Returns true if a row of this name is selected.
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

    /// Returns true if a subject of this name is selected.
    pub fn wants_subject(&self, subject: &str) -> bool {
        let mut texts = self.subjects.iter();
        self.subjects.is_empty() || texts.any(|text| subject.contains(text.as_str()))
    }

    /// Returns the number of rounds of a timed row: 11, or 3 if `quick` is set.
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
    fn arguments_are_accepted_in_any_order() {
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
    fn invalid_arguments_are_reported() {
        assert_eq!(parse("--chekc"), Err("unknown argument '--chekc'".to_owned()));
        assert_eq!(parse("--filter"), Err("--filter needs a text".to_owned()));
    }
}
