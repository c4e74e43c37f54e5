//! `vellum morsel rm`: has the daemon forget files.

use std::path::PathBuf;

use vellum_morsel::Client;

use super::files::{each_file, of_file, open};
use crate::error::{Failure, Outcome};

const HELP: &str = "\
Programs that have the file keep it; its memory is freed when the last of them ends. A user who may
read a file may make the daemon forget it.";

/// Make the daemon forget files
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

pub fn run(client: &Client, arguments: &Arguments) -> Outcome {
    each_file(&arguments.files, |path| {
        let file = match open(path) {
            Ok(file) => file,
            Err(failure) => return Ok(Err(failure)),
        };
        let missing = || format!("{}: the daemon does not have it", path.display());
        Ok(match of_file(path, client.remove(&file))? {
            Ok(0) => Err(Failure::message(missing())),
            forgotten => forgotten.map(drop),
        })
    })
}
