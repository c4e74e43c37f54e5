//! The important part of a failed step's output: without the tests that passed and the programs
//! that succeeded. If the rest is long, only its beginning and its end.
//!
//! The report of a failed run should fit on a screen, and into the limits of services that store
//! it.

/// Begins lines that name the programs of a step that took longest: they are shown even if the step
/// succeeds.
pub const LONGEST: &str = "longest: ";

/// Lines that are shown from the beginning.
const FIRST: usize = 10;

/// Lines that are shown from the end.
const LAST: usize = 30;

/// Lines of the summary at the end for each failed step.
const CAUSES: usize = 15;

/// The output without the successes, shortened in the middle.
pub fn of(lines: &[String]) -> Vec<&str> {
    let rest = without_successes(lines);
    let hidden = rest.len().saturating_sub(FIRST + LAST);
    if hidden == 0 {
        return rest;
    }
    let mut shown = rest[..FIRST].to_vec();
    shown.push("...");
    shown.extend(&rest[rest.len() - LAST..]);
    shown
}

/// Drops the output of each program whose tests passed, and lines that only announce a start.
fn without_successes(lines: &[String]) -> Vec<&str> {
    let mut rest: Vec<&str> = Vec::new();
    // The index in the rest at which the tests without a result so far begin.
    let mut begin = None;
    for line in lines {
        let words = line.trim();
        if words.is_empty() || is_success(words) {
            continue;
        }
        if is_beginning(words) {
            begin = Some(rest.len());
        } else if words.starts_with("test result: ok.") {
            rest.truncate(begin.take().unwrap_or(rest.len()));
        } else {
            rest.push(line);
        }
    }
    rest
}

/// Libtest's first line: `running 12 tests`.
fn is_beginning(words: &str) -> bool {
    let number = words.strip_prefix("running ").and_then(|rest| rest.split(' ').next());
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// A test that passed or was ignored, a program that begins or succeeds, progress of cargo.
fn is_success(words: &str) -> bool {
    let is_one_of = |beginnings: &[&str]| beginnings.iter().any(|it| words.starts_with(it));
    let is_test = words.starts_with("test ") && !words.starts_with("test result");
    (is_test && (words.ends_with("... ok") || words.contains("... ignored")))
        || (words.starts_with("lab: end ") && words.ends_with(" 0"))
        || is_one_of(&["lab: begin ", "lab: running ", "lab: ready", "lab: done"])
        || is_one_of(&["Compiling ", "Running ", "Doc-tests ", "Finished ", "Downloading "])
        || words.starts_with(LONGEST)
        || is_one_of(&["Downloaded ", "Executable ", "left out: ", "begins: ", "succeeded after "])
}

/// The first lines that name failures: tests, panics with their messages, complaints of a kernel,
/// errors.
pub fn causes(lines: &[String]) -> impl Iterator<Item = &str> {
    let rest = without_successes(lines);
    let mut named = Vec::new();
    let mut follows_panic = false;
    for line in rest.into_iter().map(str::trim) {
        let is_panic = line.contains(" panicked at ");
        let names = is_panic
            || (line.starts_with("test ") && line.ends_with("FAILED"))
            || line.starts_with("failed: ")
            || line.starts_with("error: ");
        if names || follows_panic {
            named.push(line);
        }
        follows_panic = is_panic;
    }
    named.into_iter().take(CAUSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn successes_are_left_out() {
        let lines = owned(&[
            "   Compiling something v1.0.0",
            "kernel 6.1: 6.1.0-56-amd64, 2 processors",
            "    lab: running 6.1.0-56-amd64 on 2 processors",
            "    lab: begin vm/surface",
            "    running 3 tests",
            "    test good ... ok",
            "    test later ... ignored, needs a filter",
            "    in a child: panicked at kernel/tests/src/child.rs:1:1:",
            "    on purpose",
            "",
            "    test result: ok. 3 passed; 0 failed; 0 ignored",
            "    lab: end vm/surface 0",
            "    lab: begin vm/other",
            "    running 2 tests",
            "    test good ... ok",
            "    test bad ... FAILED",
            "    thread 'bad' (7) panicked at tests/a.rs:3:5:",
            "    assertion failed: false",
            "    test result: FAILED. 1 passed; 1 failed; 0 ignored",
            "    lab: end vm/other 101",
            "    lab: begin vm/silent",
            "    running 1 tests",
            "failed: the machine ended while vm/silent ran",
        ]);
        let expected: Vec<&str> =
            [1, 15, 16, 17, 18, 19, 22].map(|index: usize| lines[index].as_str()).into();
        assert_eq!(of(&lines), expected);
        let named: Vec<&str> = causes(&lines).collect();
        let expected = [15, 16, 17, 22].map(|index: usize| lines[index].trim());
        assert_eq!(named, expected);
    }

    #[test]
    fn long_output_is_shortened_in_the_middle() {
        let lines: Vec<String> = (0..10_000).map(|number| format!("line {number}")).collect();
        let shown = of(&lines);
        assert_eq!(shown.len(), FIRST + 1 + LAST);
        assert_eq!((shown[0], shown[FIRST], shown[FIRST + LAST]), ("line 0", "...", "line 9999"));
        assert_eq!(of(&lines[..FIRST + LAST]).len(), FIRST + LAST);
    }

    #[test]
    fn a_result_without_a_beginning_drops_nothing() {
        let lines = owned(&["error: cannot", "test result: ok. 3 passed; 0 failed"]);
        assert_eq!(of(&lines), ["error: cannot"]);
    }
}
