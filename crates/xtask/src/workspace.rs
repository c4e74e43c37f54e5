//! The repository, its build folder, and the result of a chore.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The result of a chore: success, or one line that says what is wrong and what to do.
pub type Outcome<T = ()> = Result<T, String>;

/// The top folder of the repository, wherever the command is called from.
pub fn root() -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder.ancestors().nth(2).unwrap_or(crate_folder).to_path_buf()
}

/// The folder of cargo's builds.
pub fn target(root: &Path) -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR");
    chosen.map_or_else(|| root.join("target"), |folder| root.join(folder))
}

/// The cargo that runs this program, in the top folder.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}
