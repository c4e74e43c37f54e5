//! The verdict on a run: the results of the tests, and the complaints of the kernel.

use std::time::{Duration, Instant};

use crate::guest::Notes;

/// Lines of the kernel's messages that are shown from its first complaint on.
const CONTEXT: usize = 60;

/// Programs that are named with their times.
const LONGEST: usize = 8;

/// Words in the kernel's messages that never belong to a sound run.
const TROUBLE: &[&str] = &[
    "BUG:",
    "BUG ",
    "WARNING:",
    "Oops",
    "Kernel panic",
    "general protection fault",
    "UBSAN:",
    "ODEBUG:",
    "pagealloc: ",
    "unreferenced object",
    "Bad page state",
    "bad page map",
    "bad pmd ",
    "bad pud ",
    "bad p4d ",
    "bad pgd ",
    "Bad rss-counter",
    "non-zero pgtables_bytes",
    "possible circular locking",
    "inconsistent lock state",
    "suspicious RCU usage",
    "lock inversion dependency",
    "blocked for more than",
    "blocked in I/O wait for more than",
    "workqueue lockup",
    "detected stalls",
    "self-detected stall",
];

/// The results of a run so far.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Passed tests of all programs. A program that succeeded and names no tests counts as one.
    pub passed: u64,
    /// Failed tests. A program that failed and names no failed test counts as one.
    pub failed: u64,
    /// The failures, in words.
    pub troubles: Vec<String>,
    /// What the programs have noted.
    pub notes: Notes,
    /// The time of each program that has ended.
    times: Vec<(Duration, String)>,
    running: Option<Program>,
    ending: Ending,
}

/// The end of the run, if it has ended.
#[derive(Debug, Default, PartialEq, Eq)]
enum Ending {
    #[default]
    NotYet,
    /// The guest has completed its work.
    Done,
    /// The lab has killed the machine, as planned.
    Killed,
}

#[derive(Debug)]
struct Program {
    name: String,
    start: Instant,
    failed: u64,
    /// It has printed the results of its tests.
    has_tests: bool,
}

impl Verdict {
    /// Handles a line of the guest; true if it says that a program begins or has ended.
    pub fn line(&mut self, line: &str) -> bool {
        let line = line.trim_end();
        if let Some(words) = line.strip_prefix("lab: ") {
            self.told(words);
            return words.starts_with("begin ") || words.starts_with("end ");
        }
        if let Some(counts) = line.strip_prefix("test result: ") {
            let (passed, failed) = (count(counts, "passed"), count(counts, "failed"));
            self.passed += passed;
            self.failed += failed;
            if let Some(program) = &mut self.running {
                program.failed += failed;
                program.has_tests = true;
            }
        }
        false
    }

    fn told(&mut self, words: &str) {
        let mut parts = words.splitn(3, ' ');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("begin"), Some(name), _) => {
                let (name, start) = (name.to_owned(), Instant::now());
                self.running = Some(Program { name, start, failed: 0, has_tests: false });
            }
            (Some("end"), Some(name), Some(status)) => {
                let program = self.running.take();
                if let Some(program) = &program {
                    self.times.push((program.start.elapsed(), program.name.clone()));
                }
                let (failed, has_tests) =
                    program.map_or((0, false), |program| (program.failed, program.has_tests));
                match status {
                    "0" => self.passed += u64::from(!has_tests),
                    _ if failed == 0 => self.fail(format!("{name} ended with status {status}")),
                    _ => {}
                }
            }
            (Some("failed"), ..) => self.fail(words.to_owned()),
            (Some("done"), ..) => self.ending = Ending::Done,
            (Some("note"), Some(name), Some(value)) => {
                self.notes.insert(name.to_owned(), value.to_owned());
            }
            _ => {}
        }
    }

    /// What runs takes longer than the limit, and the lab does not wait for it any more.
    pub fn hung(&mut self, limit: Duration) {
        let name = self.running.as_ref().map_or("the machine", |program| &program.name);
        let seconds = limit.as_secs();
        self.fail(format!("{name}: nothing new for {seconds} s; --patience may be longer"));
    }

    /// The lab kills the machine now, during its work, as planned.
    pub fn killed(&mut self) {
        self.ending = Ending::Killed;
    }

    /// Whether the lab has killed the machine.
    pub fn was_killed(&self) -> bool {
        self.ending == Ending::Killed
    }

    /// The machine is off. `messages` has all messages of its kernel.
    pub fn end(&mut self, messages: &str) {
        let program = self.running.take();
        match (&self.ending, program) {
            (Ending::Killed, _) | (Ending::Done, None) => {}
            (_, Some(program)) => {
                self.fail(format!("the machine ended while {} ran", program.name));
            }
            (_, None) => self.fail("the machine ended before its work".to_owned()),
        }
        for line in messages.lines().filter(|line| is_trouble(line)) {
            self.fail(format!("the kernel said: {}", line.trim_end()));
        }
    }

    /// Adds the results of another run.
    pub fn add(&mut self, other: Verdict) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.troubles.extend(other.troubles);
        self.times.extend(other.times);
        self.notes.extend(other.notes);
    }

    /// The programs that took longest, and how long, as a list in words.
    pub fn longest(&self) -> String {
        let mut times = self.times.clone();
        times.sort_by(|a, b| b.cmp(a));
        let word = |(time, name): &(Duration, String)| format!("{name} {} s", time.as_secs());
        times.iter().take(LONGEST).map(word).collect::<Vec<_>>().join(", ")
    }

    /// Counts a failure that is not a test's.
    pub fn fail(&mut self, what: String) {
        self.failed += 1;
        self.troubles.push(what);
    }
}

fn is_trouble(line: &str) -> bool {
    TROUBLE.iter().any(|words| line.contains(words))
}

/// The kernel's messages from its first complaint on, for readers that see only these.
pub fn first_trouble(messages: &str) -> impl Iterator<Item = &str> {
    messages.lines().skip_while(|line| !is_trouble(line)).take(CONTEXT)
}

/// The number before `what` in a line such as `ok. 12 passed; 0 failed; ...`.
fn count(line: &str, what: &str) -> u64 {
    let parts = line.split(['.', ';']).map(str::trim);
    let mut numbers = parts.filter_map(|part| part.strip_suffix(what)?.trim().parse().ok());
    numbers.next().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(lines: &[&str], messages: &str) -> Verdict {
        let mut verdict = Verdict::default();
        for line in lines {
            verdict.line(line);
        }
        verdict.end(messages);
        verdict
    }

    const RESULT: &str = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured";

    #[test]
    fn tests_are_counted() {
        let lines = ["lab: begin vm", RESULT, "lab: end vm 0", "lab: done\r"];
        let verdict = verdict(&lines, "[    0.1] Linux version 6.1\n");
        assert_eq!((verdict.passed, verdict.failed), (12, 0), "{verdict:?}");
        assert!(verdict.troubles.is_empty());
    }

    #[test]
    fn the_last_note_of_each_name_counts() {
        let lines = ["lab: note a 1", "lab: note b one two\r", "lab: note a 2", "lab: done"];
        let notes = Vec::from_iter(verdict(&lines, "").notes);
        let note = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(notes, [note("a", "2"), note("b", "one two")]);
    }

    #[test]
    fn the_longest_programs_are_named() {
        let mut verdict = verdict(&["lab: begin short", "lab: end short 0", "lab: done"], "");
        let mut other = Verdict::default();
        other.times.push((Duration::from_millis(2500), "long".to_owned()));
        verdict.add(other);
        assert_eq!(verdict.longest(), "long 2 s, short 0 s");
    }

    #[test]
    fn a_program_without_tests_is_one() {
        let lines = ["lab: begin plain", "hello", "lab: end plain 0", "lab: done"];
        assert_eq!((verdict(&lines, "").passed, verdict(&lines, "").failed), (1, 0));
        let none = "test result: ok. 0 passed; 0 failed; 3 ignored";
        let lines = ["lab: begin vm", none, "lab: end vm 0", "lab: done"];
        assert_eq!(verdict(&lines, "").passed, 0);
    }

    #[test]
    fn failures_count_once() {
        let failed = "test result: FAILED. 10 passed; 2 failed; 0 ignored";
        let lines = ["lab: begin vm", failed, "lab: end vm 101", "lab: done"];
        assert_eq!(verdict(&lines, "").failed, 2);
        let lines = ["lab: begin vm", "lab: end vm 139", "lab: done"];
        let killed = verdict(&lines, "");
        assert_eq!((killed.failed, killed.troubles.len()), (1, 1));
        assert_eq!(verdict(&["lab: failed to load brd", "lab: done"], "").failed, 1);
    }

    #[test]
    fn a_machine_that_ends_early_has_failed() {
        assert_eq!(verdict(&["lab: begin vm", RESULT], "").failed, 1);
        assert_eq!(verdict(&[], "").failed, 1);
    }

    #[test]
    fn a_complaint_of_the_kernel_is_a_failure() {
        for words in ["BUG: kernel NULL pointer dereference", "WARNING: CPU: 1 PID: 1 at mm/"] {
            let verdict = verdict(&["lab: done"], &format!("[    1.0] {words}\n"));
            assert_eq!(verdict.failed, 1, "{words}");
            assert!(verdict.troubles[0].contains(words));
        }
    }
}
