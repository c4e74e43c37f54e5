//! Stock level (clause 2.8): the items with low stock among those of a district's last orders.

use std::hint::black_box;

use anyhow::{Result, bail};

use super::{Ended, ThreadState, must};
use crate::engine::{Access, Direction, Session};
use crate::workload::tpcc::input::StockLevel;
use crate::workload::tpcc::keys;
use crate::workload::tpcc::layout::{district, order_line, stock};

/// The number of last orders.
const ORDERS: u32 = 20;

impl ThreadState<'_> {
    /// Runs the transaction.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows.
    pub fn stock_level(&mut self, input: &StockLevel, session: &mut dyn Session) -> Result<Ended> {
        session.begin(Access::Read)?;
        self.ordered_last(input, session)?;
        let warehouse = input.district.warehouse;
        self.stock_keys.clear();
        self.stock_keys.extend(self.items.iter().map(|item| keys::stock(warehouse, *item)));
        let references: Vec<&[u8]> = self.stock_keys.iter().map(|key| &key[..]).collect();
        let (mut short, mut missing) = (0, None);
        session.multi_get(keys::STOCK, &references, &mut |index, record| match record {
            Some(record) => short += u32::from(stock::QUANTITY.get(record) < input.threshold),
            None => missing = Some(index),
        })?;
        if let Some(index) = missing {
            bail!("no row {:02x?} in table stock", references[index]);
        }
        session.commit()?;
        black_box(short);
        Ok(Ended::Committed)
    }

    /// Collects the items of the last orders, each once, in `items`.
    fn ordered_last(&mut self, input: &StockLevel, session: &mut dyn Session) -> Result<()> {
        let key = keys::district(input.district);
        let mut next = 0;
        let found = session.get(keys::DISTRICT, &key, &mut |record| {
            next = district::NEXT_O_ID.get_u32(record);
        })?;
        must(found, keys::DISTRICT, &key)?;
        let items = &mut self.items;
        items.clear();
        let first = keys::order_line(input.district, next.saturating_sub(ORDERS), 0);
        let end = keys::order_line(input.district, next, 0);
        session.scan(keys::ORDER_LINE, &first, Direction::Forward, &mut |line, record| {
            let is_one = line < &end[..];
            if is_one {
                items.push(order_line::I_ID.get_u32(record));
            }
            is_one
        })?;
        items.sort_unstable();
        items.dedup();
        Ok(())
    }
}
