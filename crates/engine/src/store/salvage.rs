//! The trees of a damaged store: those that the catalog names, and those whose names are lost.
//!
//! Each page of a tree has the tree's number. So if the catalog is damaged, the pages of the file
//! tell which trees it does not name, and where a salvage of them begins.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use vellum_pool::PageRef;

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::check::CheckProgress;
use crate::store::core::StoreCore;
use crate::store::orphans::Orphans;
use crate::tree::{CATALOG, TreeRef, TreeState, VisitSalvaged};

/// The trees that [`Store::salvage_trees`] finds.
#[derive(Debug)]
#[non_exhaustive]
pub struct SalvagedTrees {
    /// The trees that the catalog names, sorted, and then those whose names are lost.
    pub trees: Vec<SalvagedTree>,
    /// The damage of the catalog. Without any, no name is lost.
    pub damage: Vec<Error>,
}

/// A tree of a damaged store.
#[derive(Debug)]
pub struct SalvagedTree {
    core: Arc<StoreCore>,
    state: TreeState,
    is_lost: bool,
}

impl SalvagedTree {
    /// The tree's name. If that is lost, a name with the tree's number, such as `lost-17`.
    pub fn name(&self) -> Arc<str> {
        self.state.name()
    }

    /// Whether the name is lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Visits the readable entries of the tree in order, and the damage between them, as
    /// [`Tree::salvage`](crate::Tree::salvage), with values of any length.
    pub fn salvage_entries(&self, visit: VisitSalvaged<'_>) {
        let tree = TreeRef { pages: &self.core.pages, state: &self.state };
        match self.core.pages.check_open() {
            Err(error) => drop(visit(Err(error))),
            Ok(()) => tree.salvage_entries(self.core.orphans.as_ref(), self.is_lost, visit),
        }
    }
}

impl StoreCore {
    /// The trees that the catalog names, as far as it can be read, and its damage. Without
    /// `orphans` it skips what is below damaged nodes of the catalog.
    pub(crate) fn salvage_catalog(
        &self,
        orphans: Option<&Orphans>,
    ) -> (Vec<TreeState>, Vec<Error>) {
        let (mut named, mut damage) = (Vec::new(), Vec::new());
        self.catalog().salvage(orphans, &mut |found| {
            match found.and_then(|(name, entry)| self.decode_tree(name, entry)) {
                Ok(tree) => named.push(tree),
                Err(error) => damage.push(error),
            }
            true
        });
        (named, damage)
    }
}

impl Store {
    /// The trees of a store that is open for salvage. If the catalog is damaged, they include those
    /// that it does not name, with names like `lost-17`. In a store that was not closed, such a
    /// tree may be one that was dropped.
    ///
    /// Reads all nodes above the leaves. If one of them or the catalog is damaged, it reads all
    /// pages of the file.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed); [`BadOption`](Error::BadOption), if the store is not open for
    /// salvage; [`Cancelled`](Error::Cancelled), if `progress` has ended it.
    pub fn salvage_trees(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> ControlFlow<()>,
    ) -> Result<SalvagedTrees> {
        self.core.pages.check_open()?;
        let orphans = self.core.orphans.as_ref();
        let orphans = orphans.ok_or_else(|| {
            Error::BadOption("the store is not open for salvage: see Options::salvage".into())
        })?;
        let pages_total = self.core.pages.pool.file_pages();
        let mut tell = |pages_done| match progress(CheckProgress { pages_done, pages_total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled),
        };
        // A scan that a salvage began could not tell its progress.
        let mut scan_for = |tree: TreeRef<'_>, nodes: &mut u64| {
            let is_damaged = tree.has_damaged_inner(&mut || {
                *nodes += 1;
                tell(*nodes)
            })?;
            if is_damaged { orphans.find(&mut tell) } else { Ok(()) }
        };
        let mut nodes = 0;
        scan_for(self.core.catalog(), &mut nodes)?;
        let (named, damage) = self.core.salvage_catalog(Some(orphans));
        for state in &named {
            scan_for(TreeRef { pages: &self.core.pages, state }, &mut nodes)?;
        }
        let mut names: HashSet<_> = named.iter().map(TreeState::name).collect();
        let known: HashSet<u32> = named.iter().map(|tree| tree.id).chain([0, CATALOG]).collect();
        let tree = |state, is_lost| SalvagedTree { core: self.core.clone(), state, is_lost };
        let mut trees: Vec<_> = named.into_iter().map(|state| tree(state, false)).collect();
        if !damage.is_empty() {
            orphans.find(&mut tell)?;
            for number in orphans.trees()?.iter().filter(|number| !known.contains(number)) {
                let mut name = format!("lost-{number}");
                while !names.insert(name.as_str().into()) {
                    name.push('+');
                }
                trees.push(tree(TreeState::new(*number, &name, PageRef::new(0, 1)), true));
            }
        }
        self.core.pages.check_open()?;
        Ok(SalvagedTrees { trees, damage })
    }

    /// Whether the store, which is open for salvage, was not closed and had a log: its log may have
    /// what the file does not have, and an opening for another purpose recovers it.
    pub fn needs_recovery(&self) -> bool {
        let header = self.core.pages.header();
        self.core.salvage && !header.clean && header.log.identity != 0
    }
}
