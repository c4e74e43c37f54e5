//! The trees of a damaged store: those that the catalog names, and those whose names are lost.
//!
//! Each page of a tree has the tree's number. So if the catalog is damaged, the pages of the file
//! tell which trees it does not name, and where a salvage of them begins.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use vellum_pool::{PageRef, SharedGuard};

use crate::error::{Error, Result};
use crate::node::Node;
use crate::page;
use crate::store::Store;
use crate::store::check::CheckProgress;
use crate::store::core::StoreCore;
use crate::store::free_map::FileMap;
use crate::store::header::{HEADER_PAGES, HeaderPage};
use crate::store::open;
use crate::tree::{CATALOG, Part, TreeRef, TreeState, VisitReaders};

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
    /// What is left of a tree whose name is lost.
    parts: Option<Vec<Part>>,
}

impl SalvagedTree {
    /// The tree's name. If that is lost, a name with the tree's number, such as `lost-17`.
    pub fn name(&self) -> Arc<str> {
        self.state.name()
    }

    /// Whether the name is lost.
    pub fn is_lost(&self) -> bool {
        self.parts.is_some()
    }

    /// Visits the readable entries of the tree in order, and the damage between them, as
    /// [`Tree::salvage_readers`](crate::Tree::salvage_readers).
    pub fn salvage_readers(&self, visit: VisitReaders<'_>) {
        let tree = TreeRef { pages: &self.core.pages, state: &self.state };
        match (self.core.pages.check_open(), &self.parts) {
            (Err(error), _) => drop(visit(Err(error))),
            (Ok(()), None) => tree.salvage_readers(visit),
            (Ok(()), Some(parts)) => tree.salvage_parts(parts, visit),
        }
    }
}

impl StoreCore {
    /// The trees that the catalog names, as far as it can be read, and its damage.
    pub(crate) fn salvage_catalog(&self) -> (Vec<TreeState>, Vec<Error>) {
        let (mut named, mut damage) = (Vec::new(), Vec::new());
        self.catalog().salvage(&mut |found| {
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
    /// The trees of a store that is open for salvage. If the catalog is damaged, reads all pages of
    /// the file to find the trees that it does not name; they get names like `lost-17`. In a store
    /// that was not closed, such a tree may be one that was dropped.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed); [`Cancelled`](Error::Cancelled), if `progress` has ended it.
    pub fn salvage_trees(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> ControlFlow<()>,
    ) -> Result<SalvagedTrees> {
        self.core.pages.check_open()?;
        let (named, damage) = self.core.salvage_catalog();
        let mut names: HashSet<_> = named.iter().map(TreeState::name).collect();
        let mut lost = BTreeMap::new();
        if !damage.is_empty() {
            let known = named.iter().map(|tree| tree.id).chain([0, CATALOG]).collect();
            lost = self.lost_parts(&known, progress)?;
        }
        let tree = |state, parts| SalvagedTree { core: self.core.clone(), state, parts };
        let mut trees: Vec<_> = named.into_iter().map(|state| tree(state, None)).collect();
        for (number, parts) in lost {
            let mut name = format!("lost-{number}");
            while !names.insert(name.as_str().into()) {
                name.push('+');
            }
            let root = parts.first().map_or(PageRef::new(0, 1), |part| part.page);
            trees.push(tree(TreeState::new(number, &name, root), Some(parts)));
        }
        Ok(SalvagedTrees { trees, damage })
    }

    /// Whether the store, which is open for salvage, was not closed and had a log: its log may have
    /// what the file does not have, and an opening for another purpose recovers it.
    pub fn needs_recovery(&self) -> bool {
        let header = self.core.pages.header();
        self.core.salvage && !header.clean && header.log.identity != 0
    }

    /// By the numbers of their trees, the nodes of unknown trees to which no other node of unknown
    /// trees refers, each sorted for a salvage.
    fn lost_parts(
        &self,
        known: &HashSet<u32>,
        progress: &mut dyn FnMut(CheckProgress) -> ControlFlow<()>,
    ) -> Result<BTreeMap<u32, Vec<Part>>> {
        let pages = &self.core.pages;
        let (unit, pages_total) = (u64::from(pages.page_frames), pages.pool.file_pages());
        // The length of every page is a multiple of that of nodes.
        let count = (pages_total.saturating_sub(HEADER_PAGES) / unit) as usize;
        let places = || (HEADER_PAGES..).step_by(unit as usize).take(count).enumerate();
        let place_of = |page: u64| {
            let at = page.checked_sub(HEADER_PAGES).filter(|at| at.is_multiple_of(unit))?;
            usize::try_from(at / unit).ok()
        };
        let (mut is_node, mut has_parent) = (vec![false; count], vec![false; count]);
        let map = self.sure_free_map();
        for (at, page) in places() {
            let state = CheckProgress { pages_done: page, pages_total };
            if progress(state).is_break() {
                return Err(Error::Cancelled);
            }
            let is_free = |map: &FileMap| map.space.has_free(page, unit);
            if map.as_ref().is_some_and(is_free) {
                continue;
            }
            let Some((node, tree)) = self.node_at(page) else { continue };
            if known.contains(&tree) {
                continue;
            }
            is_node[at] = true;
            for child in children(&node) {
                let child = place_of(child).and_then(|at| has_parent.get_mut(at));
                child.into_iter().for_each(|has_parent| *has_parent = true);
            }
        }
        let mut parts = BTreeMap::<u32, Vec<Part>>::new();
        for (_, page) in places().filter(|(at, _)| is_node[*at] && !has_parent[*at]) {
            if let Some((node, tree)) = self.node_at(page) {
                parts.entry(tree).or_default().push(Part::of(node.page(), &node)?);
            }
        }
        for parts in parts.values_mut() {
            // Of two that begin with the same key, the higher one has more.
            parts.sort_by(|a, b| (&a.lower, Reverse(a.level)).cmp(&(&b.lower, Reverse(b.level))));
        }
        pages.check_open()?;
        Ok(parts)
    }

    /// The free map, if that is sure. Free pages may be nodes of dropped trees.
    fn sure_free_map(&self) -> Option<FileMap> {
        let (device, header) = (&self.core.pages.device, self.core.pages.header());
        let headers = open::header_pages(device, HEADER_PAGES).ok()?;
        let are_sound = headers.iter().all(|page| matches!(page, HeaderPage::Valid(_)));
        let is_sure = are_sound && header.clean && header.listed == 0;
        is_sure.then(|| open::read_free_map(device, &header).ok()).flatten()
    }

    /// The sound node of a tree at a page, with the tree's number.
    fn node_at(&self, page: u64) -> Option<(SharedGuard<'_>, u32)> {
        let pages = &self.core.pages;
        let node = pages.pool.fix_shared(PageRef::new(page, pages.page_frames)).ok()?;
        let tree = page::tree(&node);
        page::is_node(&node).then_some((node, tree))
    }
}

/// The pages to which a node refers.
fn children(node: &[u8]) -> Vec<u64> {
    let node = Node::new(node);
    match (node.level(), node.count()) {
        (Ok(1..), Ok(count)) => (0..=count).filter_map(|at| node.child(at).ok()).collect(),
        _ => Vec::new(),
    }
}
