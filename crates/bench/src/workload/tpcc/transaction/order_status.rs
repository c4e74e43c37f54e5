//! Order status (clause 2.6): a customer's balance and last order.

use std::hint::black_box;

use anyhow::{Result, bail};

use super::{Ended, ThreadState, must};
use crate::engine::{Access, Direction, Session};
use crate::workload::tpcc::input::OrderStatus;
use crate::workload::tpcc::keys::{self, DistrictKey};
use crate::workload::tpcc::layout::{customer, order, order_line};

impl ThreadState<'_> {
    /// Runs the transaction.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows.
    pub fn order_status(
        &mut self,
        input: &OrderStatus,
        session: &mut dyn Session,
    ) -> Result<Ended> {
        session.begin(Access::Read)?;
        let number = self.customer_id(input.district, &input.customer, session)?;
        let key = keys::customer(input.district, number);
        let found = session.get(keys::CUSTOMER, &key, &mut |record| {
            use customer::*;
            black_box((BALANCE.get(record), FIRST.copy(record), MIDDLE.copy(record)));
            black_box(LAST.copy(record));
        })?;
        must(found, keys::CUSTOMER, &key)?;
        let order = last_order(input.district, number, session)?;
        show_order(input.district, order, session)?;
        session.commit()?;
        Ok(Ended::Committed)
    }
}

/// The largest number of a customer's orders; every customer has one.
fn last_order(district: DistrictKey, customer: u32, session: &mut dyn Session) -> Result<u32> {
    let last = keys::customer_order(district, customer, u32::MAX);
    let mut number = None;
    session.scan(keys::CUSTOMER_ORDER, &last, Direction::Backward, &mut |key, _| {
        if key.starts_with(&last[..9]) {
            number = Some(keys::number_at(key, 9));
        }
        false
    })?;
    match number {
        Some(number) => Ok(number),
        None => bail!("customer {customer} of {district:?} has no orders"),
    }
}

fn show_order(district: DistrictKey, number: u32, session: &mut dyn Session) -> Result<()> {
    let key = keys::order(district, number);
    let found = session.get(keys::ORDER, &key, &mut |record| {
        black_box((order::ENTRY_D.get(record), order::CARRIER_ID.get(record)));
    })?;
    must(found, keys::ORDER, &key)?;
    session.scan(keys::ORDER_LINE, &key, Direction::Forward, &mut |line, record| {
        use order_line::*;
        if !line.starts_with(&key) {
            return false;
        }
        black_box((I_ID.get(record), SUPPLY_W_ID.get(record), QUANTITY.get(record)));
        black_box((AMOUNT.get(record), DELIVERY_D.get(record)));
        true
    })
}
