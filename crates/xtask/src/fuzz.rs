//! `cargo xtask fuzz`: the fuzz targets, each for a while.

use std::path::Path;
use std::process::Command;

use crate::packages;
use crate::workspace::Outcome;

/// Runs the targets in `fuzz/`, or only the one named, `seconds` each.
///
/// # Errors
/// When cargo-fuzz or the nightly toolchain is missing (with the command that installs it), or when
/// a target finds something; cargo-fuzz then prints how to replay the input.
pub fn run(root: &Path, seconds: u32, only: Option<&str>) -> Outcome {
    let folder = root.join("fuzz");
    let targets = targets(&folder)?;
    let chosen: Vec<&String> =
        targets.iter().filter(|name| only.is_none_or(|only| only == name.as_str())).collect();
    if chosen.is_empty() {
        return Err(format!("no such fuzz target; there are: {}", targets.join(", ")));
    }
    check_tools()?;
    for target in chosen {
        println!("fuzzing {target} for {seconds} s");
        let status = Command::new("cargo")
            .args(["+nightly", "fuzz", "run", target, "--"])
            .arg(format!("-max_total_time={seconds}"))
            // An input that takes so long runs in a circle.
            .arg("-timeout=60")
            .current_dir(root)
            .status()
            .map_err(|error| format!("cargo does not run: {error}"))?;
        if !status.success() {
            return Err(format!("{target}: {status}"));
        }
    }
    Ok(())
}

fn targets(folder: &Path) -> Outcome<Vec<String>> {
    let listing = std::fs::read_dir(folder.join("fuzz_targets"))
        .map_err(|error| format!("there are no fuzz targets in fuzz/fuzz_targets: {error}"))?;
    let mut names: Vec<String> = listing
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".rs").map(str::to_owned))
        .collect();
    names.sort();
    Ok(names)
}

fn check_tools() -> Outcome {
    if !packages::succeeds(Command::new("cargo").args(["+nightly", "--version"])) {
        return Err("fuzzing needs a nightly compiler; run: rustup toolchain add nightly".into());
    }
    if !packages::succeeds(Command::new("cargo").args(["+nightly", "fuzz", "--version"])) {
        return Err("fuzzing needs cargo-fuzz; run: cargo install cargo-fuzz --locked".into());
    }
    Ok(())
}
