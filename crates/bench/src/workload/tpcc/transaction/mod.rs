//! The five transactions (TPC-C 5.11, clauses 2.4 to 2.8), one file each, all methods of
//! [`ThreadState`].

mod customer;
mod delivery;
mod new_order;
mod order_status;
mod payment;
mod stock_level;

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

use super::claims::Claims;
use super::keys::TABLES;

/// How a transaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Done.
    Committed,
    /// Rolled back before it wrote anything, because an item was unknown.
    RolledBack,
    /// Done, except for so many districts without a new order.
    Skipped(u64),
}

/// Buffers that a thread reuses from one transaction to the next.
#[derive(Debug)]
pub struct ThreadState<'a> {
    /// The thread's number among those that write history, from 1.
    pub number: u16,
    /// Rows of history it has written.
    pub payments: u64,
    claims: &'a Claims,
    /// Numbers of customers of one name.
    namesakes: Vec<u32>,
    /// Items that were ordered last.
    items: Vec<u32>,
    /// Keys of their stock.
    stock_keys: Vec<[u8; 8]>,
}

impl<'a> ThreadState<'a> {
    /// With memory for the usual sizes.
    pub fn new(number: u16, claims: &'a Claims) -> Self {
        ThreadState {
            number,
            payments: 0,
            claims,
            namesakes: Vec::with_capacity(16),
            items: Vec::with_capacity(300),
            stock_keys: Vec::with_capacity(300),
        }
    }
}

/// Fails if a row that must be there was not found.
#[inline]
fn must(found: bool, table: usize, key: &[u8]) -> Result<()> {
    if found {
        return Ok(());
    }
    bail!("no row {key:02x?} in table {}", TABLES[table])
}

/// Microseconds since 1970.
#[inline]
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_micros() as u64)
}
