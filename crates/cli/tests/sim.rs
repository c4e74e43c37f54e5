//! The simulator as a command.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]
#![cfg(feature = "sim")]

mod support;

use support::{fails, run, text};

fn json(arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&text(arguments)).unwrap()
}

#[test]
fn seeds_run_and_one_of_them_again() {
    let many = json(&["sim", "--seeds", "3", "--from", "5", "--json"]);
    assert_eq!((&many["seeds"], many["failures"].as_array().unwrap().len()), (&3.into(), 0));
    assert!(many["crashes"].as_u64().unwrap() > 3, "{many}");
    let one = json(&["sim", "--seed", "6", "--json", "--story"]);
    assert!(one["story"].as_array().unwrap().len() > 10, "{one}");
    assert!(text(&["sim", "--seed", "6"]).contains("nothing is wrong"));
}

#[test]
fn a_planted_bug_is_found_and_replayed() {
    let bug = ["--plant", "late-values"];
    let found = json(&[&["sim", "--seeds", "50", "--json"], &bug[..]].concat());
    let failure = &found["failures"][0];
    let replay = failure["replay"].as_str().unwrap();
    let words: Vec<_> = replay.split(' ').skip(1).collect();
    let again = text(&words);
    assert!(again.contains(failure["what"].as_str().unwrap()), "{again}: {failure}");
    assert!(text(&["sim", "--plants"]).contains("late-values"));
}

#[test]
fn what_fails_is_said() {
    assert!(fails(&["sim", "--plant", "none"]).contains("--plants"));
    assert!(fails(&["sim", "--workload", "none"]).contains("'mixed' and 'shop'"));
    let missed = fails(&["sim", "--plant", "lost-version", "--seeds", "0"]);
    assert!(missed.contains("0 seeds have not found"), "{missed}");
    assert_eq!(run(&["sim", "--seed", "x"]).status.code(), Some(2));
}
