//! `vellum aquila`.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{ok, text};

#[test]
fn the_doctor_says_what_works() {
    let said = text(&["aquila", "doctor"]);
    assert!(said.contains("kernel: works (mmap: "), "{said}");
    let value: Value = serde_json::from_slice(&ok(&["aquila", "doctor", "--json"])).unwrap();
    let backends = value["backends"].as_array().unwrap();
    assert_eq!(backends.len(), 4);
    let best = backends.iter().find(|backend| backend["works"] == true).unwrap();
    assert_eq!(&value["best"], best);
    let backend = best["backend"].as_str().unwrap();
    assert!(said.contains(&format!("programs get: {backend}")), "{said}");
    // Ring 0 is no backend, and so never what programs get.
    let works = value["ring_0"]["works"].as_bool().unwrap();
    let expected = if works { "ring 0: works (" } else { "ring 0: does not work (" };
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("; no cache uses it yet"), "{said}");
    assert!(!value["ring_0"]["about"].as_str().unwrap().is_empty());
}
