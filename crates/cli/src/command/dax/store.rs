//! `vellum dax store`: has the kernel find files' tables after a restart.

use std::path::PathBuf;

use crate::error::{Failure, Outcome};
use crate::output::Output;
use crate::size::show;

const HELP: &str = "\
Writes down where the blocks of each file are, in the folder .vellum-tables of its file system. When
the kernel makes the file's table next, after a restart or when it has forgotten the table, it finds
this, and asks the file system once for each piece of the file. It believes nothing of what is
stored: if the file has changed, it refuses it. Store the file again then. What is stored of a file
that was removed takes its space until a file gets the same inode number and is stored.

Files of less than 32 KiB have no use of it (the module's parameter dax_stored_kib). Only root may
run the command.";

/// Store the tables of files, for the next start of the machine
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,

    /// Remove what is stored of the files
    #[arg(long)]
    forget: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let mut output = Output::new();
    for path in &arguments.files {
        let shown = path.display();
        let said = |error: &dyn std::fmt::Display| Failure::message(format!("{shown}: {error}"));
        let file = vellum_dax::open_file(path).map_err(|error| said(&error))?;
        let line = if arguments.forget {
            match vellum_dax::forget_table(&file).map_err(|error| said(&error))? {
                true => "forgotten".to_owned(),
                false => "nothing was stored".to_owned(),
            }
        } else {
            let stored = vellum_dax::store_table(&file).map_err(|error| said(&error))?;
            format!("{} pages in {} runs, {}", stored.pages, stored.runs, show(stored.bytes))
        };
        output.line(&format!("{shown}: {line}"))?;
    }
    output.finish()
}
