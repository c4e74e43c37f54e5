//! `vellum rename`: gives a tree another name.

use crate::error::{AtStore, Outcome};
use crate::interrupt;
use crate::options::{Need, StoreArguments, TreeArguments};

const HELP: &str = "\
Examples:
  vellum rename notes.vellum drafts archive

If another tree has the name, the command fails (exit code 1), and both trees stay as they are.";

/// Give a tree another name
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The tree
    #[arg(value_name = "TREE")]
    old: String,

    /// Its new name
    #[arg(value_name = "NAME")]
    new: String,
}

/// Runs the command.
///
/// # Errors
/// When the tree is not there, another one has the name, or the store fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    arguments.store.write(Need::Pages, |store| {
        interrupt::check()?;
        let tree = TreeArguments { tree: Some(arguments.old.clone()) };
        let tree = tree.find(store, path)?;
        store.rename_tree(&tree.name(), &arguments.new).at(path)
    })
}
