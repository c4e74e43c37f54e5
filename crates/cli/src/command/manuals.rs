//! Writes manual pages and completions for shells from the definitions of the commands.

use std::fs;
use std::path::{Path, PathBuf};

use clap_complete::Shell;

use crate::error::{Doing, Outcome};

/// Write manual pages and completions, as `make install` does
#[derive(clap::Args)]
pub struct Arguments {
    /// The folder 'share' of the place where the program is installed
    share: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// When a file cannot be written.
pub fn run(arguments: &Arguments, program: &clap::Command) -> Outcome {
    let make = |name: &str| {
        let folder = arguments.share.join(name);
        fs::create_dir_all(&folder).doing(|| format!("creating {}", folder.display()))?;
        Ok(folder)
    };
    let pages = make("man/man1")?;
    let failed = |folder: &Path| format!("writing to {}", folder.display());
    clap_mangen::generate_to(program.clone(), &pages).doing(|| failed(&pages))?;
    for (shell, folder, name) in [
        (Shell::Bash, "bash-completion/completions", "vellum"),
        (Shell::Zsh, "zsh/site-functions", "_vellum"),
        (Shell::Fish, "fish/vendor_completions.d", "vellum.fish"),
    ] {
        let folder = make(folder)?;
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut program.clone(), "vellum", &mut text);
        fs::write(folder.join(name), text).doing(|| failed(&folder))?;
    }
    Ok(())
}
