//! Runs a list of steps one after the other, each with a progress line and its time. While a step
//! runs that leaves processors idle, others may use them ([`Step::meanwhile`]).
//!
//! If a step fails, this module shows the important part of its output, and keeps all of it in a
//! file; on demand it shows the whole output of every step. It sums the results of libtest over all
//! steps. A step that fails without a failed test (a lint, a compile error, a test binary killed by
//! a signal) counts as one failure, so that the closing line never claims a false success. The end
//! names all failures once more, for readers who see only that.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use crate::excerpt;
use crate::workspace::Outcome;

/// Named work of one step.
pub struct Step {
    name: &'static str,
    action: Action,
    /// What runs while it runs, one after the other.
    meanwhile: Vec<(&'static str, Command)>,
}

enum Action {
    Program(Command),
    Function(Box<dyn FnOnce() -> Outcome>),
}

impl Step {
    /// A step that runs a program and succeeds when that does.
    pub fn program(name: &'static str, command: Command) -> Self {
        Self { name, action: Action::Program(command), meanwhile: Vec::new() }
    }

    /// A step that calls a function of this program.
    pub fn function(name: &'static str, work: impl FnOnce() -> Outcome + 'static) -> Self {
        Self { name, action: Action::Function(Box::new(work)), meanwhile: Vec::new() }
    }

    /// Adds a step that runs a program while this one runs, with what this one leaves idle of the
    /// processors.
    pub fn meanwhile(mut self, name: &'static str, command: &Command) -> Self {
        self.meanwhile.push((name, idle(command)));
        self
    }
}

/// The same command, which runs only where no other program wants to.
fn idle(command: &Command) -> Command {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        idle.current_dir(folder);
    }
    idle
}

/// Tests counted over all steps.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Tally {
    passed: u64,
    failed: u64,
}

/// A step that has ended.
struct Done {
    ok: bool,
    lines: Vec<String>,
    seconds: f64,
}

/// What is known of the steps so far.
struct Report<'a> {
    count: usize,
    begun: usize,
    verbose: bool,
    kept: &'a Path,
    tally: Tally,
    failures: Vec<&'static str>,
    reasons: Vec<String>,
}

/// Runs all steps, even after one has failed, and prints `N passed, N failed` as the last line.
/// Keeps the output of failed steps in the folder.
///
/// # Errors
/// Names the steps that failed.
pub fn run(steps: Vec<Step>, verbose: bool, kept: &Path) -> Outcome {
    let count = steps.iter().map(|step| 1 + step.meanwhile.len()).sum();
    let (tally, failures, reasons) = (Tally::default(), Vec::new(), Vec::new());
    let mut report = Report { count, begun: 0, verbose, kept, tally, failures, reasons };
    let start = Instant::now();
    for Step { name, action, meanwhile } in steps {
        report.begin(name)?;
        let (done, others) = thread::scope(|scope| {
            let perform_quietly =
                |(name, command)| (name, timed(|| perform(Action::Program(command), false)));
            let others =
                scope.spawn(move || meanwhile.into_iter().map(perform_quietly).collect::<Vec<_>>());
            (timed(|| perform(action, verbose)), others.join())
        });
        report.end(name, &done);
        for (name, done) in others.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            report.begin(name)?;
            report.end(name, &done);
        }
    }
    for reason in &report.reasons {
        println!("{reason}");
    }
    let (seconds, failures) = (start.elapsed().as_secs_f64(), report.failures);
    println!("{} of {count} steps ok, {seconds:.1} s", count - failures.len());
    // The error goes to standard error first, because the tally must be the last line of standard
    // output.
    let outcome = if failures.is_empty() { Ok(()) } else { Err(failures.join(", ")) };
    println!("{} passed, {} failed", report.tally.passed, report.tally.failed);
    outcome.map_err(|names| format!("failed: {names}"))
}

impl Report<'_> {
    fn begin(&mut self, name: &str) -> Outcome {
        self.begun += 1;
        print!("[{}/{}] {name:<24}", self.begun, self.count);
        if self.verbose {
            println!();
        }
        std::io::stdout().flush().map_err(|error| error.to_string())
    }

    fn end(&mut self, name: &'static str, done: &Done) {
        let Done { ok, ref lines, seconds } = *done;
        if !ok && !self.verbose {
            show(name, lines, self.kept);
        }
        println!("{} {seconds:7.1} s", if ok { "ok    " } else { "FAILED" });
        if !self.verbose {
            for line in lines.iter().filter(|line| line.starts_with(excerpt::LONGEST)) {
                println!("    {line}");
            }
        }
        let counted = count_tests(lines);
        self.tally.passed += counted.passed;
        self.tally.failed += counted.failed;
        if !ok {
            self.failures.push(name);
            self.tally.failed += u64::from(counted.failed == 0);
            self.reasons.extend(excerpt::causes(lines).map(|line| format!("{name}: {line}")));
        }
    }
}

fn timed(perform: impl FnOnce() -> (bool, Vec<String>)) -> Done {
    let start = Instant::now();
    let (ok, lines) = perform();
    Done { ok, lines, seconds: start.elapsed().as_secs_f64() }
}

fn perform(action: Action, verbose: bool) -> (bool, Vec<String>) {
    match action {
        Action::Program(command) => match program(command, verbose) {
            Ok(result) => result,
            Err(reason) => (false, vec![reason]),
        },
        Action::Function(work) => match work() {
            Ok(()) => (true, Vec::new()),
            Err(reason) => (false, vec![reason]),
        },
    }
}

/// The important part of a failed step's output, and the file that has all of it.
fn show(name: &str, lines: &[String], kept: &Path) {
    println!();
    for line in excerpt::of(lines) {
        println!("    {line}");
    }
    let file = kept.join(format!("{}.txt", name.replace(' ', "-")));
    let written = fs::create_dir_all(kept).and_then(|()| fs::write(&file, lines.join("\n")));
    match written {
        Ok(()) => println!("    all of it: {}", file.display()),
        Err(error) => println!("    all of it could not be kept, {}: {error}", file.display()),
    }
}

/// Runs a program; returns its success and its lines.
fn program(command: Command, verbose: bool) -> Outcome<(bool, Vec<String>)> {
    let mut lines = Vec::new();
    let is_success = pipe(command, |line| {
        if verbose {
            println!("    {line}");
        }
        lines.push(line);
    })?;
    Ok((is_success, lines))
}

/// Runs a program with both of its output streams in one pipe, and hands on each line as it comes;
/// true if it succeeds.
///
/// # Errors
/// If it does not start.
pub fn pipe(mut command: Command, mut each_line: impl FnMut(String)) -> Outcome<bool> {
    let describe = |error: std::io::Error| format!("the program does not start: {error}");
    let (reader, writer) = std::io::pipe().map_err(describe)?;
    command.stdin(Stdio::null());
    command.stdout(writer.try_clone().map_err(describe)?).stderr(writer);
    let mut child = command.spawn().map_err(describe)?;
    // The command owns the writing ends of the pipe. While it exists, the pipe does not end.
    drop(command);
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        each_line(String::from_utf8_lossy(&line).into_owned());
    }
    Ok(child.wait().map_err(describe)?.success())
}

/// Sums libtest's closing lines: `test result: ok. 12 passed; 0 failed; 1 ignored; ...`.
fn count_tests(lines: &[String]) -> Tally {
    let mut sum = Tally::default();
    for line in lines {
        let Some(result) = line.trim_start().strip_prefix("test result: ") else {
            continue;
        };
        for part in result.split(&['.', ';'][..]) {
            let mut words = part.split_whitespace();
            let number = words.next().and_then(|word| word.parse::<u64>().ok());
            match (number, words.next()) {
                (Some(number), Some("passed")) => sum.passed += number,
                (Some(number), Some("failed")) => sum.failed += number,
                _ => {}
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn results_of_several_test_binaries_are_summed() {
        let lines = [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out",
            "the test result: ok. 99 passed",
        ];
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_string()).collect();
        assert_eq!(count_tests(&lines), Tally { passed: 13, failed: 2 });
    }

    #[test]
    fn both_streams_are_kept() {
        let (ok, mut lines) = program(shell("echo out; echo err >&2"), false).unwrap();
        lines.sort();
        assert!(ok);
        assert_eq!(lines, ["err", "out"]);
    }

    #[test]
    fn a_failing_program_fails_its_step() {
        assert!(!program(shell("exit 3"), false).unwrap().0);
        assert!(!program(shell("kill -9 $$"), false).unwrap().0);
        assert!(program(Command::new("a-program-that-nobody-has"), false).is_err());
    }

    #[test]
    fn a_step_that_runs_meanwhile_is_the_same_at_idle_priority() {
        let mut command = shell("test $A = a && test -z \"$HOME\" && pwd && chrt --pid $$");
        command.env("A", "a").env_remove("HOME").current_dir("/usr");
        let (ok, lines) = program(idle(&command), false).unwrap();
        assert!(ok, "{lines:?}");
        assert!(lines[0] == "/usr" && lines[1].ends_with("SCHED_IDLE"), "{lines:?}");
    }

    #[test]
    fn one_failed_step_fails_the_run() {
        let steps = |broken: bool| {
            vec![
                Step::program("good", shell("true")).meanwhile("idle", &shell("exit 0")),
                Step::function("function", move || if broken { Err("no".into()) } else { Ok(()) }),
            ]
        };
        let kept = std::env::temp_dir().join(format!("vellum-steps-{}", std::process::id()));
        assert!(run(steps(false), false, &kept).is_ok());
        assert!(!kept.exists());
        assert_eq!(run(steps(true), false, &kept), Err("failed: function".into()));
        assert_eq!(fs::read_to_string(kept.join("function.txt")).unwrap(), "no");
        let idle = Step::program("good", shell("true")).meanwhile("idle", &shell("exit 1"));
        assert_eq!(run(vec![idle], false, &kept), Err("failed: idle".into()));
        fs::remove_dir_all(kept).unwrap();
    }
}
