//! `vellum trees`: the names of the trees in a store.

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::Output;

/// List the names of the trees in a store
#[derive(clap::Args)]
#[command(after_help = "Example:\n  vellum trees notes.vellum\n\n'vellum stat' says more of each.")]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read.
pub fn run(arguments: &Arguments) -> Outcome {
    arguments.store.read(Need::Pages, |store| {
        let mut output = Output::new();
        for name in store.trees().at(&arguments.store.path)? {
            output.line(&name)?;
        }
        output.finish()
    })
}
