//! New order (clause 2.4): 5 to 15 items, the backbone of the workload.

use std::array;
use std::hint::black_box;

use anyhow::Result;

use super::{Ended, ThreadState, must, now};
use crate::engine::{Access, Session};
use crate::workload::tpcc::input::{LINES, Line, NewOrder};
use crate::workload::tpcc::keys::{self, DistrictKey};
use crate::workload::tpcc::layout::{
    DIST_INFO, NOT_DELIVERED, customer, district, item, order, order_line, stock, warehouse,
};
use crate::workload::tpcc::random::is_original;

/// The fields of an item that an order line needs.
#[derive(Clone, Copy, Debug, Default)]
struct Item {
    price: i64,
    original: bool,
}

impl ThreadState<'_> {
    /// Enters an order. Looks up all items before it writes anything, so that an order with an
    /// unknown item leaves no trace.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows.
    pub fn new_order(&mut self, input: &NewOrder, session: &mut dyn Session) -> Result<Ended> {
        let (district, lines) = (input.district, input.lines());
        session.begin(Access::Write)?;
        let Some(items) = items(lines, session)? else {
            session.commit()?;
            return Ok(Ended::RolledBack);
        };
        let warehouse_tax = warehouse_tax(district.warehouse, session)?;
        let (number, district_tax) = take_number(district, session)?;
        let discount = discount(district, input.customer, session)?;
        let mut sum = 0;
        for (index, (line, item)) in lines.iter().zip(items).enumerate() {
            let amount = i64::from(line.quantity) * item.price;
            let (info, generic) = take_from_stock(line, district, session)?;
            black_box(if generic && item.original { b'B' } else { b'G' });
            let record = order_line_record(line, amount, &info);
            let key = keys::order_line(district, number, index as u8 + 1);
            session.put(keys::ORDER_LINE, &key, &record)?;
            sum += amount;
        }
        let record = order_record(input);
        session.put(keys::ORDER, &keys::order(district, number), &record)?;
        let key = keys::customer_order(district, input.customer, number);
        session.put(keys::CUSTOMER_ORDER, &key, &[])?;
        session.put(keys::NEW_ORDER, &keys::order(district, number), &[])?;
        session.commit()?;
        let taxed = sum * (10_000 + warehouse_tax + district_tax) as i64 / 10_000;
        black_box(taxed * (10_000 - discount) as i64 / 10_000);
        Ok(Ended::Committed)
    }
}

/// The items of all lines; `None` if one of them is unknown.
fn items(lines: &[Line], session: &mut dyn Session) -> Result<Option<[Item; LINES]>> {
    let keys: [[u8; 4]; LINES] =
        array::from_fn(|index| keys::item(lines.get(index).map_or(0, |line| line.item)));
    let references: [&[u8]; LINES] = array::from_fn(|index| &keys[index][..]);
    let mut items = [Item::default(); LINES];
    let mut known = true;
    session.multi_get(
        keys::ITEM,
        &references[..lines.len()],
        &mut |index, record| match record {
            Some(record) => {
                black_box(item::NAME.copy(record));
                let original = is_original(item::DATA.get(record));
                items[index] = Item { price: item::PRICE.get(record), original };
            }
            None => known = false,
        },
    )?;
    Ok(known.then_some(items))
}

fn warehouse_tax(number: u32, session: &mut dyn Session) -> Result<u64> {
    let key = keys::warehouse(number);
    let mut tax = 0;
    let found = session.get(keys::WAREHOUSE, &key, &mut |record| {
        tax = warehouse::TAX.get(record);
    })?;
    must(found, keys::WAREHOUSE, &key)?;
    Ok(tax)
}

/// Takes the district's next order number. Returns it with the district's tax.
fn take_number(district: DistrictKey, session: &mut dyn Session) -> Result<(u32, u64)> {
    let key = keys::district(district);
    let (mut number, mut tax) = (0, 0);
    let found = session.update(keys::DISTRICT, &key, &mut |record| {
        number = district::NEXT_O_ID.get_u32(record);
        tax = district::TAX.get(record);
        district::NEXT_O_ID.set(record, number + 1);
    })?;
    must(found, keys::DISTRICT, &key)?;
    Ok((number, tax))
}

fn discount(district: DistrictKey, number: u32, session: &mut dyn Session) -> Result<u64> {
    let key = keys::customer(district, number);
    let mut discount = 0;
    let found = session.get(keys::CUSTOMER, &key, &mut |record| {
        discount = customer::DISCOUNT.get(record);
        black_box((customer::LAST.copy(record), customer::CREDIT.copy(record)));
    })?;
    must(found, keys::CUSTOMER, &key)?;
    Ok(discount)
}

/// Takes a line's quantity from the stock. Returns the district's text, and whether the stock is
/// original.
fn take_from_stock(
    line: &Line,
    district: DistrictKey,
    session: &mut dyn Session,
) -> Result<([u8; DIST_INFO], bool)> {
    use stock::*;
    let key = keys::stock(line.supplier, line.item);
    let quantity = u64::from(line.quantity);
    let remote = line.supplier != district.warehouse;
    let at = usize::from(district.number - 1) * DIST_INFO;
    let (mut info, mut original) = ([0; DIST_INFO], false);
    let found = session.update(keys::STOCK, &key, &mut |record| {
        let left = QUANTITY.get(record);
        // Stock is refilled before it falls below ten.
        let left = if left >= quantity + 10 { left - quantity } else { left + 91 - quantity };
        QUANTITY.set(record, left);
        YTD.add(record, quantity);
        ORDER_CNT.add(record, 1_u8);
        REMOTE_CNT.add(record, remote);
        info.copy_from_slice(&DIST.get(record)[at..at + DIST_INFO]);
        original = is_original(DATA.get(record));
    })?;
    must(found, keys::STOCK, &key)?;
    Ok((info, original))
}

fn order_line_record(line: &Line, amount: i64, info: &[u8]) -> [u8; order_line::BYTES] {
    use order_line::*;
    let mut record = [0; BYTES];
    I_ID.set(&mut record, line.item);
    SUPPLY_W_ID.set(&mut record, line.supplier);
    DELIVERY_D.set(&mut record, NOT_DELIVERED);
    QUANTITY.set(&mut record, line.quantity);
    AMOUNT.set(&mut record, amount);
    DIST_INFO.set(&mut record, info);
    record
}

fn order_record(input: &NewOrder) -> [u8; order::BYTES] {
    use order::*;
    let mut record = [0; BYTES];
    C_ID.set(&mut record, input.customer);
    ENTRY_D.set(&mut record, now());
    OL_CNT.set(&mut record, input.lines().len() as u64);
    let local = input.lines().iter().all(|line| line.supplier == input.district.warehouse);
    ALL_LOCAL.set(&mut record, local);
    record
}
