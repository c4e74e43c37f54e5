//! Runs a test in its own process, to test properties of the whole process: its memory, its system
//! calls.
//!
//! The test starts its own program a second time and has it run that test alone. No other test runs
//! in that process, so the test disturbs no other.

use std::process::{Command, Output};

/// The name of the test that the process was started for.
const TEST: &str = "VELLUM_TEST_ALONE";

/// Runs a test of this program, given by its full name with modules, in its own process, and
/// returns how that ended. Returns `None` in that process, where the test goes on.
///
/// # Panics
/// If the program cannot be started again.
pub fn run(test: &str) -> Option<Output> {
    if std::env::var_os(TEST).is_some_and(|name| name == test) {
        return None;
    }
    let program = std::env::current_exe().expect("no path to this program");
    let mut child = Command::new(program);
    child.args([test, "--exact", "--include-ignored", "--nocapture"]).env(TEST, test);
    Some(child.output().expect("this program does not start again"))
}

/// Whether this is a test's own process. If it is not, the test has passed in its own process.
///
/// # Panics
/// If the test failed in its own process, or there is none of that name.
#[track_caller]
pub fn entered(test: &str) -> bool {
    let Some(output) = run(test) else { return true };
    assert_passed(test, &output);
    false
}

#[track_caller]
pub(crate) fn assert_passed(test: &str, output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{test} does not pass in a process of its own: {output:?}");
    // The output may say that the test was skipped.
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "does not pass in a process of its own")]
    fn a_failure_there_is_one_here() {
        if entered("own_process::tests::a_failure_there_is_one_here") {
            panic!("another reason than the one above");
        }
    }

    #[test]
    #[should_panic(expected = "does not pass in a process of its own")]
    fn a_name_that_no_test_has_is_a_failure() {
        entered("own_process::tests::nobody");
    }

    #[test]
    fn it_is_another_process_with_no_other_test() {
        let test = "own_process::tests::it_is_another_process_with_no_other_test";
        if let Some(output) = run(test) {
            let text = String::from_utf8_lossy(&output.stdout);
            let own = format!("process {}", std::process::id());
            assert!(output.status.success() && text.contains("running 1 test"), "{output:?}");
            assert!(text.contains("process ") && !text.contains(&own), "{text}");
            return;
        }
        println!("process {}.", std::process::id());
    }
}
