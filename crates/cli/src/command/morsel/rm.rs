//! `vellum morsel rm`: has the daemon forget files.

use std::path::PathBuf;

use vellum_morsel::Client;

use super::{failed_at, open};
use crate::error::{Failure, Outcome};

const HELP: &str = "\
Programs that have the file keep it; its memory is given back when the last of them ends. Whoever
may read a file may have it forgotten.";

/// Have the daemon forget files
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

pub fn run(client: &Client, arguments: &Arguments) -> Outcome {
    for path in &arguments.files {
        let forgotten = client.remove(&open(path)?).map_err(failed_at(path))?;
        if forgotten == 0 {
            let name = path.display();
            return Err(Failure::message(format!("{name}: the daemon does not have it")));
        }
    }
    Ok(())
}
