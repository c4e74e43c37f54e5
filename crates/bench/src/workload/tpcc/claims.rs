//! Which new order a district delivers next.
//!
//! Orders get ascending numbers, but their NEW-ORDER rows may be written out of order, because a
//! number is taken by an atomic update without any lock. If a delivery took the lowest row that it
//! sees, it could overtake an order that is still being written, and the numbers of the rows would
//! have a gap (condition 3 of clause 3.3.2.3). Each taken number will become a row, so the next
//! order to deliver is always the last delivered one plus 1. Deliveries claim it under a lock for
//! each district, and skip the district while its row does not exist yet.
//!
//! Where the engine isolates transactions, a number and its row appear together. Then a delivery
//! takes the lowest row, without a lock.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};

use super::keys::{self, DistrictKey, NEW_ORDER};
use super::layout::district;
use super::load;
use super::size::Tpcc;
use crate::engine::{Access, Direction, Session};

/// The next order to deliver in each district.
#[derive(Debug)]
pub struct Claims {
    next: Vec<Mutex<u32>>,
}

impl Claims {
    /// Reads them while no transactions run.
    ///
    /// # Errors
    /// Errors of the engine, and a district that is missing.
    pub fn new(tpcc: &Tpcc, session: &mut dyn Session) -> Result<Claims> {
        session.begin(Access::Read)?;
        let next: Result<Vec<_>> = load::districts(tpcc.warehouses)
            .map(|district| {
                if let Some(order) = oldest(session, district, 0)? {
                    return Ok(Mutex::new(order));
                }
                let mut next = 0;
                let read = &mut |record: &[u8]| next = district::NEXT_O_ID.get_u32(record);
                if !session.get(keys::DISTRICT, &keys::district(district), read)? {
                    bail!("{district:?} is missing: was this engine loaded with that many?");
                }
                Ok(Mutex::new(next))
            })
            .collect();
        session.commit()?;
        Ok(Claims { next: next? })
    }

    /// Removes the oldest new order of a district from its table. Returns its number, or `None` if
    /// there is none or its row does not exist yet.
    ///
    /// # Errors
    /// Errors of the engine, [`Conflict`](crate::engine::Conflict) among them, and a row that
    /// vanishes between being seen and being removed.
    pub fn claim(&self, district: DistrictKey, session: &mut dyn Session) -> Result<Option<u32>> {
        if session.isolates() {
            let Some(order) = oldest(session, district, 0)? else { return Ok(None) };
            if !session.remove(NEW_ORDER, &keys::order(district, order))? {
                bail!("new order {order} of {district:?} vanished within a transaction");
            }
            return Ok(Some(order));
        }
        let index = (district.warehouse as usize - 1) * 10 + usize::from(district.number) - 1;
        let mut next = self.next[index].lock().unwrap_or_else(PoisonError::into_inner);
        match oldest(session, district, *next)? {
            Some(order) if order == *next => {}
            _ => return Ok(None),
        }
        if !session.remove(NEW_ORDER, &keys::order(district, *next))? {
            bail!("another thread removed new order {next} of {district:?}");
        }
        let claimed = *next;
        *next += 1;
        Ok(Some(claimed))
    }
}

/// The first new order of a district from a number on.
fn oldest(session: &mut dyn Session, district: DistrictKey, from: u32) -> Result<Option<u32>> {
    let mut found = None;
    session.scan(NEW_ORDER, &keys::order(district, from), Direction::Forward, &mut |key, _| {
        found = (keys::district_of(key) == district)
            .then(|| keys::number_at(key, keys::DISTRICT_KEY_BYTES));
        false
    })?;
    Ok(found)
}
