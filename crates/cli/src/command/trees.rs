//! `vellum trees`: the names of the trees in a store.

use serde_json::Value;

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::Output;

/// List the names of the trees in a store
#[derive(clap::Args)]
#[command(after_help = "Example:\n  vellum trees notes.vellum\n\n'vellum stat --full' says more.")]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Machine-readable output: an array of names
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read.
pub fn run(arguments: &Arguments) -> Outcome {
    arguments.store.read(Need::Pages, |store| {
        let names = store.trees().at(&arguments.store.path)?;
        let mut output = Output::new();
        if arguments.json {
            output.line(&Value::from(names).to_string())?;
            return output.finish();
        }
        for name in names {
            output.line(&name)?;
        }
        output.finish()
    })
}
