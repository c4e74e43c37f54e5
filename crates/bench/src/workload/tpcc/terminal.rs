//! Terminals: the work of one thread, transaction after transaction.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};

use super::claims::Claims;
use super::input::{Delivery, Kind, NewOrder, OrderStatus, Payment, StockLevel};
use super::keys::{self, HISTORY};
use super::size::Tpcc;
use super::transaction::{Ended, ThreadState};
use crate::engine::{Conflict, Direction, Session};
use crate::workload::values::Random;

/// The terminals of a thread's warehouses.
#[derive(Debug)]
pub struct Terminal<'a> {
    tpcc: &'a Tpcc,
    homes: Vec<u32>,
    /// First finds the end of its history.
    begun: bool,
    state: ThreadState<'a>,
    counts: &'a Counts,
}

impl<'a> Terminal<'a> {
    /// The terminals of `homes`, which has at least one.
    pub fn new(
        tpcc: &'a Tpcc,
        homes: Vec<u32>,
        thread: usize,
        claims: &'a Claims,
        counts: &'a Counts,
    ) -> Self {
        let state = ThreadState::new(thread as u16 + 1, claims);
        Terminal { tpcc, homes, begun: false, state, counts }
    }

    /// Runs a transaction of the mix.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows; names the kind.
    pub fn transaction(&mut self, session: &mut dyn Session, random: &mut Random) -> Result<()> {
        if !self.begun {
            self.state.payments = payments_of(self.state.number, session)?;
            self.begun = true;
        }
        let kind = Kind::choose(random);
        let ended = self.run(kind, session, random).with_context(|| format!("in {kind:?}"))?;
        self.counts.kinds[kind as usize].fetch_add(1, Ordering::Relaxed);
        match ended {
            Ended::Committed => {}
            Ended::RolledBack => {
                self.counts.rolled_back.fetch_add(1, Ordering::Relaxed);
            }
            Ended::Skipped(districts) => {
                self.counts.skipped.fetch_add(districts, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn run(&mut self, kind: Kind, session: &mut dyn Session, random: &mut Random) -> Result<Ended> {
        let home = self.homes[random.below(self.homes.len() as u64) as usize];
        match kind {
            Kind::NewOrder => {
                let input = NewOrder::new(self.tpcc, home, random);
                self.until_it_wins(session, |state, session| state.new_order(&input, session))
            }
            Kind::Payment => {
                let input = Payment::new(self.tpcc, home, random);
                self.until_it_wins(session, |state, session| state.payment(&input, session))
            }
            Kind::OrderStatus => {
                let input = OrderStatus::new(self.tpcc, home, random);
                self.until_it_wins(session, |state, session| state.order_status(&input, session))
            }
            Kind::Delivery => {
                let input = Delivery::new(home, random);
                self.until_it_wins(session, |state, session| state.delivery(&input, session))
            }
            Kind::StockLevel => {
                let input = StockLevel::new(home, random);
                self.until_it_wins(session, |state, session| state.stock_level(&input, session))
            }
        }
    }

    /// Runs a transaction, and runs it again with the same input while another one is first.
    fn until_it_wins(
        &mut self,
        session: &mut dyn Session,
        mut run: impl FnMut(&mut ThreadState<'a>, &mut dyn Session) -> Result<Ended>,
    ) -> Result<Ended> {
        loop {
            match run(&mut self.state, session) {
                Err(error) if error.is::<Conflict>() => {
                    self.counts.conflicts.fetch_add(1, Ordering::Relaxed);
                }
                ended => return ended,
            }
        }
    }
}

/// The number of history rows that a terminal has written, in this run and earlier ones.
fn payments_of(terminal: u16, session: &mut dyn Session) -> Result<u64> {
    let mut next = 0;
    let last = keys::history(terminal, u64::MAX);
    session.scan(HISTORY, &last, Direction::Backward, &mut |key, _| {
        if key.starts_with(&terminal.to_be_bytes()) {
            let number = key.last_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            next = number + 1;
        }
        false
    })?;
    Ok(next)
}

/// Counts of one thread.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counts {
    kinds: [AtomicU64; 5],
    rolled_back: AtomicU64,
    skipped: AtomicU64,
    conflicts: AtomicU64,
}

impl Counts {
    /// All with their names.
    pub fn named(&self) -> [(&'static str, u64); 8] {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let kind = |kind: Kind| count(&self.kinds[kind as usize]);
        [
            ("new_order", kind(Kind::NewOrder)),
            ("payment", kind(Kind::Payment)),
            ("order_status", kind(Kind::OrderStatus)),
            ("delivery", kind(Kind::Delivery)),
            ("stock_level", kind(Kind::StockLevel)),
            ("rolled_back", count(&self.rolled_back)),
            ("skipped", count(&self.skipped)),
            ("conflicts", count(&self.conflicts)),
        ]
    }
}
