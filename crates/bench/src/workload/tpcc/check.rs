//! The consistency conditions (TPC-C 5.11, clause 3.3.2), by reading all tables but stock and item.
//!
//! Conditions 1 to 10 and 12; condition 11 is one of the initial database only. They hold whenever
//! no transaction is running. The check keeps the data of a district until the next one.

use std::ops::ControlFlow;

use anyhow::{Result, bail, ensure};

use super::keys::{self, DistrictKey};
use super::layout::{NOT_DELIVERED, customer, district, history, order, order_line, warehouse};
use super::load;
use super::size::Tpcc;
use crate::engine::{Access, Direction, Session};

/// The names of the checked conditions.
const CHECKED: [&str; 6] = [
    "condition 1: W_YTD is the sum of D_YTD",
    "condition 2: D_NEXT_O_ID - 1 is the largest O_ID and the largest NO_O_ID",
    "condition 3: the numbers of new orders have no gaps",
    "condition 4: the sum of O_OL_CNT is the number of order lines",
    "conditions 5 to 7: new orders, carriers and dates of delivery agree; each order has its lines",
    "conditions 8 to 10 and 12: YTD and balances are the sums of payments and deliveries",
];

/// Checks all, district by district.
///
/// # Errors
/// The condition that does not hold, with the district and the numbers; and errors of the engine.
pub fn check(tpcc: &Tpcc, session: &mut dyn Session) -> Result<Vec<String>> {
    session.begin(Access::Read)?;
    let payments = Payments::read(tpcc, session)?;
    for number in 1..=tpcc.warehouses {
        let mut sum = 0;
        let mut paid = 0;
        for key in (1..=10).map(|district| DistrictKey { warehouse: number, number: district }) {
            let district = District::read(key, session)?;
            district.check_orders()?;
            district.check_money(tpcc, &payments)?;
            sum += district.ytd;
            paid += payments.in_district[index(key)];
        }
        let mut ytd = 0;
        let key = keys::warehouse(number);
        let read = &mut |record: &[u8]| ytd = warehouse::YTD.get(record);
        ensure!(session.get(keys::WAREHOUSE, &key, read)?, "warehouse {number} is missing");
        ensure!(
            ytd == sum,
            "condition 1: warehouse {number} has W_YTD {ytd}, but its districts' D_YTD sum to {sum}"
        );
        ensure!(
            ytd == paid,
            "condition 8: warehouse {number} has W_YTD {ytd}, but its H_AMOUNT sum to {paid}"
        );
    }
    session.commit()?;
    Ok(CHECKED.map(str::to_owned).to_vec())
}

fn index(district: DistrictKey) -> usize {
    (district.warehouse as usize - 1) * 10 + usize::from(district.number) - 1
}

/// Sums of HISTORY.
struct Payments {
    /// Received in each district.
    in_district: Vec<i64>,
    /// Paid by each customer.
    by_customer: Vec<i64>,
}

impl Payments {
    fn read(tpcc: &Tpcc, session: &mut dyn Session) -> Result<Payments> {
        let customers = tpcc.scale.customers as usize;
        let districts = load::districts(tpcc.warehouses).count();
        let mut payments = Payments {
            in_district: vec![0; districts],
            by_customer: vec![0; districts * customers],
        };
        let mut stray = None;
        let first = keys::history(load::LOADER, 0);
        session.scan(keys::HISTORY, &first, Direction::Forward, &mut |key, record| {
            use history::*;
            let district = |warehouse, number| DistrictKey { warehouse, number };
            let at = district(W_ID.get_u32(record), D_ID.get_u32(record) as u8);
            let of = district(C_W_ID.get_u32(record), C_D_ID.get_u32(record) as u8);
            let buyer = index(of) * customers + C_ID.get_u32(record) as usize - 1;
            let counters =
                (payments.in_district.get_mut(index(at)), payments.by_customer.get_mut(buyer));
            if let (Some(district), Some(customer)) = counters {
                *district += AMOUNT.get(record);
                *customer += AMOUNT.get(record);
                return true;
            }
            stray = Some(key.to_vec());
            false
        })?;
        match stray {
            Some(key) => bail!("history row {key:02x?} is of no district or customer"),
            None => Ok(payments),
        }
    }
}

/// An order, with a summary of its lines.
struct Order {
    number: u32,
    customer: u32,
    carrier: u64,
    /// O_OL_CNT.
    announced: u64,
    lines: u64,
    delivered_lines: u64,
    /// Of lines that were delivered.
    delivered_amount: i64,
}

/// All of a district.
struct District {
    key: DistrictKey,
    ytd: i64,
    next: u32,
    new_orders: Vec<u32>,
    orders: Vec<Order>,
    /// Balance, payments and number.
    customers: Vec<(i64, i64, u32)>,
    /// Entries of the indexes by name and of orders by customer.
    indexed: (usize, usize),
}

impl District {
    fn read(district: DistrictKey, session: &mut dyn Session) -> Result<District> {
        let (mut ytd, mut next) = (0, 0);
        let read = &mut |record: &[u8]| {
            ytd = district::YTD.get(record);
            next = district::NEXT_O_ID.get_u32(record);
        };
        ensure!(
            session.get(keys::DISTRICT, &keys::district(district), read)?,
            "{district:?} is missing"
        );
        let mut new_orders = Vec::new();
        each(session, keys::NEW_ORDER, district, |key, _| {
            new_orders.push(keys::number_at(key, keys::DISTRICT_KEY_BYTES));
            ControlFlow::Continue(())
        })?;
        let orders = read_orders(district, session)?;
        let mut customers = Vec::new();
        each(session, keys::CUSTOMER, district, |key, record| {
            let (balance, paid) =
                (customer::BALANCE.get(record), customer::YTD_PAYMENT.get(record));
            customers.push((balance, paid, keys::number_at(key, keys::DISTRICT_KEY_BYTES)));
            ControlFlow::Continue(())
        })?;
        let indexed = (
            count(session, keys::CUSTOMER_NAME, district)?,
            count(session, keys::CUSTOMER_ORDER, district)?,
        );
        Ok(District { key: district, ytd, next, new_orders, orders, customers, indexed })
    }

    /// Conditions 2 to 7, and the indexes.
    fn check_orders(&self) -> Result<()> {
        let district = self.key;
        let largest = self.orders.last().map_or(0, |order| order.number);
        ensure!(
            self.next == largest + 1,
            "condition 2: {district:?} has D_NEXT_O_ID {}, but the largest O_ID is {largest}",
            self.next
        );
        if let (Some(first), Some(last)) = (self.new_orders.first(), self.new_orders.last()) {
            ensure!(
                *last == largest,
                "condition 2: {district:?} has the largest O_ID {largest}, but NO_O_ID {last}"
            );
            let rows = self.new_orders.len();
            ensure!(
                (last - first + 1) as usize == rows,
                "condition 3: {district:?} has new orders {first} to {last}, but {rows} rows of \
                 them"
            );
        }
        let announced: u64 = self.orders.iter().map(|order| order.announced).sum();
        let lines: u64 = self.orders.iter().map(|order| order.lines).sum();
        ensure!(
            announced == lines,
            "condition 4: {district:?} has O_OL_CNT summing to {announced}, but {lines} order lines"
        );
        let mut new_orders = self.new_orders.iter().copied().peekable();
        for order in &self.orders {
            let is_new = new_orders.next_if_eq(&order.number).is_some();
            order.check(district, is_new)?;
        }
        if let Some(number) = new_orders.next() {
            bail!("condition 5: new order {number} of {district:?} is no order");
        }
        let rows = (self.customers.len(), self.orders.len());
        ensure!(
            self.indexed == rows,
            "{district:?} has (customers, orders) {rows:?}, but their indexes {:?}",
            self.indexed
        );
        Ok(())
    }

    /// Conditions 9, 10 and 12.
    fn check_money(&self, tpcc: &Tpcc, payments: &Payments) -> Result<()> {
        let district = self.key;
        let received = payments.in_district[index(district)];
        ensure!(
            self.ytd == received,
            "condition 9: {district:?} has D_YTD {}, but its H_AMOUNT sum to {received}",
            self.ytd
        );
        let customers = tpcc.scale.customers as usize;
        let mut delivered = vec![0; customers];
        for order in &self.orders {
            match delivered.get_mut(order.customer as usize - 1) {
                Some(sum) => *sum += order.delivered_amount,
                None => bail!("order {} of {district:?} is of no customer", order.number),
            }
        }
        ensure!(self.customers.len() == customers, "{district:?} has lost customers");
        for (position, (balance, ytd, number)) in self.customers.iter().enumerate() {
            let owed = delivered[position];
            let paid = payments.by_customer[index(district) * customers + position];
            ensure!(
                *balance == owed - paid,
                "condition 10: customer {number} of {district:?} has C_BALANCE {balance}, but \
                 {owed} delivered and {paid} paid"
            );
            ensure!(
                balance + ytd == owed,
                "condition 12: customer {number} of {district:?} has C_BALANCE {balance} and \
                 C_YTD_PAYMENT {ytd}, but {owed} delivered"
            );
        }
        Ok(())
    }
}

impl Order {
    /// Conditions 5 to 7.
    fn check(&self, district: DistrictKey, is_new: bool) -> Result<()> {
        let number = self.number;
        ensure!(
            (self.carrier == NOT_DELIVERED) == is_new,
            "condition 5: order {number} of {district:?} has carrier {} and is {} new order",
            self.carrier,
            if is_new { "a" } else { "no" }
        );
        ensure!(
            self.announced == self.lines,
            "condition 6: order {number} of {district:?} has O_OL_CNT {}, but {} lines",
            self.announced,
            self.lines
        );
        let expected = if is_new { 0 } else { self.lines };
        ensure!(
            self.delivered_lines == expected,
            "condition 7: order {number} of {district:?} has {} delivered lines, not {expected}",
            self.delivered_lines
        );
        Ok(())
    }
}

/// The orders of a district, each with its lines.
fn read_orders(district: DistrictKey, session: &mut dyn Session) -> Result<Vec<Order>> {
    let mut orders: Vec<Order> = Vec::new();
    each(session, keys::ORDER, district, |key, record| {
        orders.push(Order {
            number: keys::number_at(key, keys::DISTRICT_KEY_BYTES),
            customer: order::C_ID.get_u32(record),
            carrier: order::CARRIER_ID.get(record),
            announced: order::OL_CNT.get(record),
            lines: 0,
            delivered_lines: 0,
            delivered_amount: 0,
        });
        ControlFlow::Continue(())
    })?;
    let (mut at, mut stray) = (0, None);
    each(session, keys::ORDER_LINE, district, |key, record| {
        let number = keys::number_at(key, keys::DISTRICT_KEY_BYTES);
        while orders.get(at).is_some_and(|order| order.number < number) {
            at += 1;
        }
        let Some(order) = orders.get_mut(at).filter(|order| order.number == number) else {
            stray = Some(number);
            return ControlFlow::Break(());
        };
        order.lines += 1;
        if order_line::DELIVERY_D.get(record) != NOT_DELIVERED {
            order.delivered_lines += 1;
            order.delivered_amount += order_line::AMOUNT.get(record);
        }
        ControlFlow::Continue(())
    })?;
    match stray {
        Some(number) => bail!("condition 4: {district:?} has lines of order {number}, but not it"),
        None => Ok(orders),
    }
}

/// Visits the rows of a table that belong to a district.
fn each(
    session: &mut dyn Session,
    table: usize,
    district: DistrictKey,
    mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
) -> Result<()> {
    let prefix = keys::district(district);
    session.scan(table, &prefix, Direction::Forward, &mut |key, record| {
        key.starts_with(&prefix) && visit(key, record).is_continue()
    })
}

fn count(session: &mut dyn Session, table: usize, district: DistrictKey) -> Result<usize> {
    let mut count = 0;
    each(session, table, district, |_, _| {
        count += 1;
        ControlFlow::Continue(())
    })?;
    Ok(count)
}
