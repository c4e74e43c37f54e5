//! TPC-C, revision 5.11: a wholesale supplier with warehouses, five transactions, standard mix.
//!
//! Differences from the specification, and the reasons:
//! - There are no think times and no screens. A thread runs transactions one after the other, each
//!   as one of the terminals of its warehouses, and only returns the data that it reads.
//! - An engine need not support rollback, nor isolation beyond single operations. So a new order
//!   looks up its items *before* it writes anything, and ends there if one is unknown (1 %).
//!   Changes of a record are one atomic operation each. A transaction writes a row before any row
//!   that refers to it, the NEW-ORDER row last.
//! - If the engine does not isolate transactions, deliveries of a district claim new orders one by
//!   one in the order of their numbers, under a lock of the workload ([`Claims`]).
//! - Deliveries run at once, without a queue. Stock level and order status read without isolation
//!   from concurrent transactions if the engine gives none.
//! - A transaction that loses against another one runs again with the same input.
//!
//! The specification's consistency conditions (clause 3.3.2) hold whenever no transaction runs, and
//! [`check`](Work::check) tests them by reading all tables.

mod check;
mod claims;
mod field;
mod input;
mod keys;
mod layout;
mod load;
mod random;
mod rows;
mod size;
mod terminal;
#[cfg(test)]
mod tests;
mod transaction;

use anyhow::Result;

pub use claims::Claims;
pub use size::{Scale, Tpcc};

use super::{Measured, Plan, Work, drive};
use crate::engine::Engine;
use keys::TABLES;
use terminal::{Counts, Terminal};

impl Work for Tpcc {
    fn tables(&self) -> Vec<String> {
        TABLES.map(str::to_owned).to_vec()
    }

    fn bytes(&self) -> u64 {
        use layout::*;
        let (customers, items) = (u64::from(self.scale.customers), u64::from(self.scale.items));
        let customer = customer::BYTES + 9 + 41 + history::BYTES + 10;
        // Orders have ten lines on average.
        let order = order::BYTES + 9 + 13 + 10 * (order_line::BYTES + 10);
        let district = (customer + order) as u64 * customers + 9 * (customers * 3 / 10);
        let warehouse = 10 * district + (stock::BYTES + 8) as u64 * items;
        u64::from(self.warehouses) * warehouse + (item::BYTES + 4) as u64 * items
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        load::load(self, engine)
    }

    /// An operation is a transaction of any kind. `counts` has their number by kind (`new_order`
    /// includes those rolled back), `rolled_back` new orders, `skipped` deliveries of districts
    /// without a new order, and `conflicts`: attempts that lost against another transaction.
    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        let claims = Claims::new(self, &mut *engine.session()?)?;
        let counts: Vec<Counts> = (0..plan.threads).map(|_| Counts::default()).collect();
        let mut measured = drive(engine, plan, |thread| {
            let homes = self.homes(thread, plan.threads);
            let mut terminal = Terminal::new(self, homes, thread, &claims, &counts[thread]);
            Box::new(move |session, random| terminal.transaction(session, random).map(|()| 1))
        })?;
        for (name, count) in counts.iter().flat_map(Counts::named) {
            *measured.counts.entry(name.to_owned()).or_default() += count;
        }
        Ok(measured)
    }

    /// Conditions 1 to 10 and 12 of clause 3.3.2.
    fn check(&self, engine: &dyn Engine) -> Result<Vec<String>> {
        check::check(self, &mut *engine.session()?)
    }
}
