//! Delivery (clause 2.7): the oldest new order of every district of a warehouse.

use anyhow::Result;

use super::{Ended, ThreadState, must, now};
use crate::engine::{Access, Session};
use crate::workload::tpcc::input::Delivery;
use crate::workload::tpcc::keys::{self, DistrictKey};
use crate::workload::tpcc::layout::{customer, order, order_line};

impl ThreadState<'_> {
    /// Delivers, all districts in one transaction.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows.
    pub fn delivery(&mut self, input: &Delivery, session: &mut dyn Session) -> Result<Ended> {
        let mut skipped = 0;
        session.begin(Access::Write)?;
        for district in 1..=10 {
            let district = DistrictKey { warehouse: input.warehouse, number: district };
            match self.claims.claim(district, session)? {
                Some(order) => deliver(district, order, input.carrier, session)?,
                None => skipped += 1,
            }
        }
        session.commit()?;
        Ok(if skipped == 0 { Ended::Committed } else { Ended::Skipped(skipped) })
    }
}

fn deliver(
    district: DistrictKey,
    number: u32,
    carrier: u8,
    session: &mut dyn Session,
) -> Result<()> {
    let key = keys::order(district, number);
    let (mut buyer, mut lines) = (0, 0);
    let found = session.update(keys::ORDER, &key, &mut |record| {
        buyer = order::C_ID.get_u32(record);
        lines = order::OL_CNT.get(record) as u8;
        order::CARRIER_ID.set(record, carrier);
    })?;
    must(found, keys::ORDER, &key)?;
    let (date, mut sum) = (now(), 0);
    for line in 1..=lines {
        let key = keys::order_line(district, number, line);
        let mut amount = 0;
        let found = session.update(keys::ORDER_LINE, &key, &mut |record| {
            amount = order_line::AMOUNT.get(record);
            order_line::DELIVERY_D.set(record, date);
        })?;
        must(found, keys::ORDER_LINE, &key)?;
        sum += amount;
    }
    let key = keys::customer(district, buyer);
    let found = session.update(keys::CUSTOMER, &key, &mut |record| {
        customer::BALANCE.add(record, sum);
        customer::DELIVERY_CNT.add(record, 1_u8);
    })?;
    must(found, keys::CUSTOMER, &key)
}
