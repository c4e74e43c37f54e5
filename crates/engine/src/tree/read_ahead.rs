//! Keeping the leaves that a scan comes to next on their way.
//!
//! A scan that has gone from one leaf to its neighbour is likely to go on. From its second leaf on
//! the next ones are read ahead: half as many as it has come through, and as many once these are
//! [`ReadAhead::LONG`]. So a short range reads little in vain, and a long one soon keeps the device
//! busy. What is ahead is bounded ([`ReadAhead::LEAVES`], [`ReadAhead::FRAMES`], an eighth of the
//! pool).
//!
//! The numbers of the leaves come from their parents, which are read ahead as well. Leaves that
//! were loaded in bulk lie one behind the other in the file, and are read together.

use std::collections::VecDeque;

use vellum_pool::{OptimisticGuard, PageRef};

use super::Access;
use super::descend::{ParentOfLeaves, Reached, Step};

/// Where a scan goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// The number of the child that comes after this one; none behind the first.
    fn beside(self, index: usize) -> Option<usize> {
        match self {
            Direction::Forward => Some(index + 1),
            Direction::Backward => index.checked_sub(1),
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct ReadAhead<'a> {
    /// The most leaves to be ahead; 0 if nothing is to be read ahead.
    most: usize,
    /// Leaves in a row that the scan has come to, the first not counted.
    steps: usize,
    /// The leaves to be ahead now.
    window: usize,
    direction: Direction,
    /// The leaves behind the one that the scan is in, the next one first.
    leaves: VecDeque<PageRef>,
    /// So many of them were started, or were there.
    started: usize,
    /// Whose children come behind `leaves`, and the number of the next one.
    parent: Option<(OptimisticGuard<'a>, Option<usize>)>,
    /// A buffer for the keys of descents, and one for pages.
    key: Vec<u8>,
    missing: Vec<PageRef>,
}

impl<'a> ReadAhead<'a> {
    /// The most leaves that are ahead, however large the pool.
    pub(crate) const LEAVES: usize = 1024;
    /// Leaves in a row that make a scan a long one.
    const LONG: usize = 32;
    /// The most frames that they have together: 4 MiB.
    const FRAMES: u32 = 1024;

    /// As much as suits the pool.
    pub(crate) fn new(access: Access<'a>) -> ReadAhead<'a> {
        let mut ahead = ReadAhead {
            most: 0,
            steps: 0,
            window: 0,
            direction: Direction::Forward,
            leaves: VecDeque::new(),
            started: 0,
            parent: None,
            key: Vec::new(),
            missing: Vec::new(),
        };
        ahead.limit(access, ReadAhead::LEAVES);
        ahead
    }

    /// At most so many leaves; 0 for none.
    pub(crate) fn limit(&mut self, access: Access<'a>, leaves: usize) {
        let frames = access.core.page_frames;
        let share = access.core.pool.capacity() / 8 / u64::from(frames);
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        self.most = leaves.min(share).min((ReadAhead::FRAMES / frames) as usize);
    }

    /// The scan begins anew.
    pub(crate) fn restart(&mut self) {
        (self.steps, self.window) = (0, 0);
        self.forget();
    }

    fn forget(&mut self) {
        self.leaves.clear();
        self.started = 0;
        self.parent = None;
    }

    /// The scan has gone to the next leaf, `reached`.
    pub(crate) fn step(&mut self, access: Access<'a>, direction: Direction, reached: Reached<'a>) {
        if self.most == 0 {
            return;
        }
        if direction != self.direction {
            self.direction = direction;
            self.restart();
        }
        if self.leaves.pop_front() == Some(reached.node.page()) {
            self.started = self.started.saturating_sub(1);
        } else {
            // The first step, or the tree has changed.
            self.forget();
            self.parent = reached.parent.map(|(parent, index)| (parent, direction.beside(index)));
        }
        self.steps += 1;
        if self.started <= self.window / 2 {
            let wanted = if self.steps < ReadAhead::LONG { self.steps / 2 } else { self.steps };
            self.window = wanted.max(2).min(self.most);
            self.collect(access);
            self.start(access);
        }
    }

    /// Finds out which leaves come next, as far as that can be had without waiting. What changes
    /// meanwhile is found again by the scan's own steps, and so are errors.
    fn collect(&mut self, access: Access<'a>) {
        loop {
            if self.take_children(access).is_err() {
                self.parent = None;
            }
            let is_enough = self.leaves.len() >= self.window;
            if is_enough || !matches!(self.next_parent(access), Ok(true)) {
                return;
            }
        }
    }

    /// Adds the next children of the parent.
    fn take_children(&mut self, access: Access<'a>) -> Step<()> {
        let Some((parent, mut next)) = self.parent else { return Ok(()) };
        let before = self.leaves.len();
        let leaves = &mut self.leaves;
        let read = access.read(parent, |node| {
            let count = node.count()?;
            while let Some(index) = next
                && leaves.len() < self.window
            {
                if index > count {
                    next = None;
                    break;
                }
                leaves.push_back(access.page(node.child(index)?));
                next = self.direction.beside(index);
            }
            Ok(())
        });
        let read = read.and_then(|()| Ok(parent.validate()?));
        if read.is_err() {
            leaves.truncate(before);
        }
        self.parent = Some((parent, next));
        read
    }

    /// Goes to the parent beside this one. False if there is none, or if it is not in memory; then
    /// it is on its way, and the next call may find it.
    fn next_parent(&mut self, access: Access<'a>) -> Step<bool> {
        let Some((parent, None)) = self.parent else { return Ok(false) };
        let (direction, key) = (self.direction, &mut self.key);
        let is_last = access.read(parent, |node| match direction {
            Direction::Forward => Ok(!node.upper_into(key)?),
            Direction::Backward => Ok(!node.lower_into(key)?),
        })?;
        parent.validate()?;
        if is_last {
            return Ok(false);
        }
        if direction == Direction::Forward {
            // The smallest key above the fence.
            key.push(0);
        }
        match access.parent_of_leaves(key)? {
            ParentOfLeaves::Resident { parent, last, above } => {
                let first = if direction == Direction::Forward { 0 } else { last };
                self.parent = Some((parent, Some(first)));
                self.start_parents(access, above, self.window / (last + 1))?;
                Ok(true)
            }
            ParentOfLeaves::Missing { page, above } => {
                access.core.pool.bring_in(&[page]);
                self.start_parents(access, above, 0)?;
                Ok(false)
            }
        }
    }

    /// Starts the parents that come next, one and `more`: to wait for each of them when its turn
    /// comes would let the device run dry.
    fn start_parents(
        &mut self,
        access: Access<'a>,
        above: Option<(OptimisticGuard<'a>, usize)>,
        more: usize,
    ) -> Step<()> {
        let Some((above, index)) = above else { return Ok(()) };
        let (direction, pool) = (self.direction, &access.core.pool);
        let mut missing = Vec::new();
        access.read(above, |node| {
            let count = node.count()?;
            let next = std::iter::successors(direction.beside(index), |at| direction.beside(*at));
            for at in next.take_while(|at| *at <= count).take(1 + more) {
                missing.push(access.page(node.child(at)?));
            }
            Ok(())
        })?;
        above.validate()?;
        missing.retain(|page| !pool.is_resident(*page));
        pool.bring_in(&missing);
        Ok(())
    }

    /// Starts the leaves of the window that are not in memory.
    fn start(&mut self, access: Access<'a>) {
        let pool = &access.core.pool;
        let ahead = self.window.min(self.leaves.len());
        let new = self.leaves.range(self.started.min(ahead)..ahead);
        self.missing.extend(new.filter(|page| !pool.is_resident(**page)));
        self.started = ahead;
        if !self.missing.is_empty() {
            pool.bring_in(&self.missing);
            self.missing.clear();
        }
    }
}
