//! Runs a list of steps one after the other, each with a progress line and its time.
//!
//! The output of a step is shown only when it fails, or for all of them on demand. The results of
//! libtest are summed over all steps. A step that fails without a failed test (a lint, a compile
//! error, a test binary killed by a signal) counts as one failure, so that the closing line never
//! claims a success that was not. What failed is named once more at the end, for those who see no
//! more than that.

use std::io::{BufRead, BufReader, PipeReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::Outcome;

/// Lines that are shown from each end of a failed step's output.
const SHOWN_LINES: usize = 200;

/// Lines at the end that say what failed in one step.
const SHOWN_CAUSES: usize = 15;

/// Named work of one step.
pub struct Step {
    name: &'static str,
    action: Action,
}

enum Action {
    Program(Command),
    Function(Box<dyn FnOnce() -> Outcome>),
}

impl Step {
    /// A step that runs a program and succeeds when that does.
    pub fn program(name: &'static str, command: Command) -> Self {
        Self { name, action: Action::Program(command) }
    }

    /// A step inside this process.
    pub fn function(name: &'static str, work: impl FnOnce() -> Outcome + 'static) -> Self {
        Self { name, action: Action::Function(Box::new(work)) }
    }
}

/// Tests counted over all steps.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Tally {
    passed: u64,
    failed: u64,
}

/// Runs all steps, also after one has failed, and prints `N passed, N failed` as the last line.
///
/// # Errors
/// Names the steps that failed.
pub fn run(steps: Vec<Step>, verbose: bool) -> Outcome {
    let count = steps.len();
    let mut tally = Tally::default();
    let mut failures = Vec::new();
    let mut reasons = Vec::new();
    let start = Instant::now();
    for (index, step) in steps.into_iter().enumerate() {
        print!("[{}/{count}] {:<24}", index + 1, step.name);
        if verbose {
            println!();
        }
        std::io::stdout().flush().map_err(|error| error.to_string())?;
        let begin = Instant::now();
        let (ok, lines) = perform(step.action, verbose);
        let seconds = begin.elapsed().as_secs_f64();
        println!("{} {seconds:7.1} s", if ok { "ok    " } else { "FAILED" });
        let counted = count_tests(&lines);
        tally.passed += counted.passed;
        tally.failed += counted.failed;
        if !ok {
            failures.push(step.name);
            tally.failed += u64::from(counted.failed == 0);
            reasons.extend(causes(&lines).map(|line| format!("{}: {line}", step.name)));
        }
    }
    for reason in reasons {
        println!("{reason}");
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{} of {count} steps ok, {seconds:.1} s", count - failures.len());
    // The error goes to the other stream first: the tally is the last line of this one.
    let outcome = if failures.is_empty() { Ok(()) } else { Err(failures.join(", ")) };
    println!("{} passed, {} failed", tally.passed, tally.failed);
    outcome.map_err(|names| format!("failed: {names}"))
}

fn perform(action: Action, verbose: bool) -> (bool, Vec<String>) {
    let (ok, lines) = match action {
        Action::Program(command) => match program(command, verbose) {
            Ok(result) => result,
            Err(reason) => (false, vec![reason]),
        },
        Action::Function(work) => match work() {
            Ok(()) => (true, Vec::new()),
            Err(reason) => (false, vec![reason]),
        },
    };
    if !ok && !verbose {
        println!();
        for line in excerpt(&lines) {
            println!("    {line}");
        }
    }
    (ok, lines)
}

/// What is worth showing of a failed step: all but the tests that passed, and of very much output
/// the beginning and the end.
fn excerpt(lines: &[String]) -> Vec<String> {
    let passed =
        |line: &&String| line.trim_start().starts_with("test ") && line.ends_with("... ok");
    let rest: Vec<&String> = lines.iter().filter(|line| !passed(line)).collect();
    let hidden = rest.len().saturating_sub(2 * SHOWN_LINES);
    let (head, tail) = match hidden {
        0 => (&rest[..], &rest[..0]),
        _ => (&rest[..SHOWN_LINES], &rest[rest.len() - SHOWN_LINES..]),
    };
    let mut shown: Vec<String> = head.iter().map(|line| (*line).clone()).collect();
    if hidden > 0 {
        shown.push(format!("... {hidden} lines left out; -v shows all ..."));
    }
    shown.extend(tail.iter().map(|line| (*line).clone()));
    shown
}

/// The lines that name what failed, the first of them if there are many: tests, panics with their
/// messages, complaints of a kernel, errors.
fn causes(lines: &[String]) -> impl Iterator<Item = &str> {
    let names = |line: &str| {
        (line.starts_with("test ") && line.ends_with("FAILED"))
            || line.contains(" panicked at ")
            || line.starts_with("failed: ")
            || line.starts_with("error: ")
    };
    let trimmed = || lines.iter().map(|line| line.trim());
    let before = std::iter::once("").chain(trimmed());
    let named = trimmed().zip(before).filter(move |(line, before)| {
        names(line) || (before.contains(" panicked at ") && !line.is_empty())
    });
    named.map(|(line, _)| line).take(SHOWN_CAUSES)
}

/// Runs a program with both of its output streams in one pipe; returns its success and its lines.
fn program(mut command: Command, verbose: bool) -> Outcome<(bool, Vec<String>)> {
    let describe = |error: std::io::Error| format!("the step does not start: {error}");
    let (reader, writer) = std::io::pipe().map_err(describe)?;
    command.stdin(Stdio::null());
    command.stdout(writer.try_clone().map_err(describe)?).stderr(writer);
    let mut child = command.spawn().map_err(describe)?;
    // The command owns the writing ends; while it lives the pipe would never end.
    drop(command);
    let lines = read_lines(reader, verbose);
    let status = child.wait().map_err(describe)?;
    Ok((status.success(), lines))
}

fn read_lines(reader: PipeReader, echo: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned();
        if echo {
            println!("    {line}");
        }
        lines.push(line);
    }
    lines
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
    fn failures_are_shown_without_what_passed() {
        let line = |number: usize| match number % 2 {
            0 => format!("test number{number} ... ok"),
            _ => format!("test number{number} ... FAILED"),
        };
        let few: Vec<String> = (0..10).map(line).collect();
        assert_eq!(excerpt(&few).len(), 5);
        let many: Vec<String> = (0..10_000).map(line).collect();
        let shown = excerpt(&many);
        assert_eq!(shown.len(), 2 * SHOWN_LINES + 1);
        assert_eq!(shown[SHOWN_LINES], "... 4600 lines left out; -v shows all ...");
        assert_eq!(shown[2 * SHOWN_LINES], line(9999));
    }

    #[test]
    fn what_failed_is_named() {
        let lines = [
            "    running 2 tests",
            "    test good ... ok",
            "    test bad ... FAILED",
            "    ---- bad stdout ----",
            "    thread 'bad' (7) panicked at tests/a.rs:3:5:",
            "    assertion failed: false",
            "    note: run with `RUST_BACKTRACE=1` to display a backtrace",
            "failed: the kernel said: [    1.0] BUG: here",
        ];
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_string()).collect();
        let named: Vec<&str> = causes(&lines).collect();
        let expected = [2, 4, 5, 7].map(|index: usize| lines[index].trim());
        assert_eq!(named, expected);
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
    fn one_failed_step_fails_the_run() {
        let steps = |broken: bool| {
            vec![
                Step::program("good", shell("true")),
                Step::function("function", move || if broken { Err("no".into()) } else { Ok(()) }),
            ]
        };
        assert!(run(steps(false), false).is_ok());
        assert_eq!(run(steps(true), false), Err("failed: function".into()));
    }
}
