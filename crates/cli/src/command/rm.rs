//! `vellum rm`: removes a key, or a whole tree.

use std::ffi::OsString;

use crate::error::{AtStore, Failure, Outcome};
use crate::options::{Need, StoreArguments, TreeArguments};
use crate::{interrupt, key_text};

const HELP: &str = "\
Examples:
  vellum rm notes.vellum greeting
  vellum rm notes.vellum --tree old --all      the tree with everything in it

If the key does not exist, the command fails (exit code 1).";

/// Remove a key, or a whole tree
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The key
    #[arg(required_unless_present = "all")]
    key: Option<OsString>,

    #[command(flatten)]
    tree: TreeArguments,

    /// The key is in hexadecimal
    #[arg(long)]
    hex: bool,

    /// Remove the tree named with --tree, with everything in it
    #[arg(long, requires = "tree", conflicts_with = "key")]
    all: bool,
}

/// Runs the command.
///
/// # Errors
/// When the key or the tree is not there, or the store fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    arguments.store.write(Need::Pages, |store| {
        interrupt::check()?;
        let tree = arguments.tree.find(store, path)?;
        let Some(key) = &arguments.key else {
            let name = tree.name().to_string();
            drop(tree);
            return store.drop_tree(&name).at(path);
        };
        let key = key_text::from_argument(key, arguments.hex)?;
        if tree.remove(&key).at(path)? {
            return Ok(());
        }
        let (store, key) = (path.display(), key_text::printable(&key));
        Err(Failure::message(format!("{store}: there is no '{key}' in tree '{}'", tree.name())))
    })
}
