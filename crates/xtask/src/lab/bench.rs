//! `make lab BENCH=NAME`: the release binary's measurements in a guest, with the module.

use std::path::Path;

use super::{NEWEST, Options, finish, lab, programs};
use crate::Outcome;

/// How long an experiment may take, in seconds, in an emulator.
const PATIENCE: &str = "3600";

/// Runs `vellum bench NAME --quick --no-progress` and what else is asked for.
///
/// # Errors
/// When the build fails or the experiment does.
pub fn run(root: &Path, options: &Options, name: &str) -> Outcome {
    let path = programs::release(root)?;
    let kernels = match &options.kernels[..] {
        [] => vec![NEWEST.to_owned()],
        named => named.to_vec(),
    };
    let mut command = lab(root, options, &kernels);
    if let Some(model) = model(&options.arguments) {
        command.arg("--file").arg(format!("model={model}"));
    }
    command.args(["run", "--patience", PATIENCE]);
    command.arg(format!("vellum={} {}", path.display(), words(name, &options.arguments)));
    finish(command)
}

/// Where the guest has the model.
const MODEL: &str = "/tests/model";

/// The file that an argument names, which the guest needs, too.
fn model(arguments: &[String]) -> Option<&str> {
    let at = arguments.iter().position(|argument| argument == "--model")?;
    arguments.get(at + 1).map(String::as_str)
}

/// What `vellum` is told.
fn words(name: &str, arguments: &[String]) -> String {
    let mut words = format!("bench {name} --quick --no-progress");
    if !arguments.iter().any(|argument| argument.starts_with("--dir")) {
        // Its files are on the guest's disk, not in the memory that `/tmp` is.
        words.push_str(" --dir /mnt/bench");
    }
    let model = model(arguments);
    for argument in arguments {
        words.push(' ');
        words.push_str(if Some(&argument[..]) == model { MODEL } else { argument });
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_passed_on_behind_the_name() {
        let given = ["--engines".to_owned(), "vellum".to_owned()];
        let expected = "bench tpcc --quick --no-progress --dir /mnt/bench --engines vellum";
        assert_eq!(words("tpcc", &given), expected);
        let given = ["--model".to_owned(), "/home/model".to_owned()];
        let expected = "bench tpcc --quick --no-progress --dir /mnt/bench --model /tests/model";
        assert_eq!(words("tpcc", &given), expected);
        let given = ["--dir=/pmem".to_owned()];
        assert_eq!(words("tpcc", &given), "bench tpcc --quick --no-progress --dir=/pmem");
    }
}
