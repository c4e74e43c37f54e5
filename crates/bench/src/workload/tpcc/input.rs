//! The input of terminals: the parameters of transactions (TPC-C 5.11, clauses 2.4.1 to 2.8.1).

use super::keys::DistrictKey;
use super::random::{C_ID, C_ITEM, C_LAST_RUN, NAMES, chance, last_name, non_uniform, uniform};
use super::size::{Scale, Tpcc};
use crate::workload::values::Random;

/// The most lines of an order.
pub const LINES: usize = 15;

/// A kind of transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Orders 5 to 15 items.
    NewOrder,
    /// Pays.
    Payment,
    /// Reads a customer's last order.
    OrderStatus,
    /// Delivers the oldest order of every district of a warehouse.
    Delivery,
    /// Counts the items with low stock among those ordered last.
    StockLevel,
}

impl Kind {
    /// A kind out of the standard mix: 45, 43, 4, 4 and 4 of 100 (clause 5.2.3).
    #[inline]
    pub fn choose(random: &mut Random) -> Kind {
        match random.below(100) {
            0..45 => Kind::NewOrder,
            45..88 => Kind::Payment,
            88..92 => Kind::OrderStatus,
            92..96 => Kind::Delivery,
            _ => Kind::StockLevel,
        }
    }
}

/// A line of a new order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    /// The item.
    pub item: u32,
    /// The warehouse that it comes from.
    pub supplier: u32,
    /// How many.
    pub quantity: u8,
}

/// Input of a new order.
#[derive(Clone, Copy, Debug)]
pub struct NewOrder {
    /// The district that takes the order.
    pub district: DistrictKey,
    /// The customer who orders.
    pub customer: u32,
    lines: [Line; LINES],
    count: usize,
}

impl NewOrder {
    /// The input of a terminal of `warehouse`.
    pub fn new(tpcc: &Tpcc, warehouse: u32, random: &mut Random) -> NewOrder {
        let district = random_district(warehouse, random);
        let customer = customer_id(tpcc.scale, random);
        let mut lines = [Line::default(); LINES];
        let count = uniform(random, 5, LINES as u64) as usize;
        for line in &mut lines[..count] {
            let item = non_uniform(random, 8191, C_ITEM, 1, u64::from(tpcc.scale.items)) as u32;
            let remote = tpcc.warehouses > 1 && chance(random, 1);
            let supplier = if remote { other(tpcc, warehouse, random) } else { warehouse };
            *line = Line { item, supplier, quantity: uniform(random, 1, 10) as u8 };
        }
        if chance(random, 1) {
            // An item that does not exist, so that the order is rolled back.
            lines[count - 1].item = tpcc.scale.items + 1;
        }
        // In the order of their stock, so that engines that lock rows cannot deadlock.
        lines[..count].sort_unstable_by_key(|line| (line.supplier, line.item));
        NewOrder { district, customer, lines, count }
    }

    /// The items ordered.
    pub fn lines(&self) -> &[Line] {
        &self.lines[..self.count]
    }
}

/// How a transaction identifies a customer.
#[derive(Clone, Copy, Debug)]
pub enum Customer {
    /// By number.
    Id(u32),
    /// By last name: the middle one of the customers with that name.
    Last([u8; 16]),
}

impl Customer {
    /// Six of ten by last name.
    fn choose(scale: Scale, random: &mut Random) -> Customer {
        if !chance(random, 60) {
            return Customer::Id(customer_id(scale, random));
        }
        let names = NAMES.min(scale.customers);
        let number = non_uniform(random, 255, C_LAST_RUN, 0, u64::from(names) - 1);
        Customer::Last(last_name(number as u32))
    }
}

/// Input of a payment.
#[derive(Clone, Copy, Debug)]
pub struct Payment {
    /// The district that receives it.
    pub district: DistrictKey,
    /// Where the customer belongs.
    pub customer_district: DistrictKey,
    /// The customer.
    pub customer: Customer,
    /// Cents.
    pub amount: i64,
}

impl Payment {
    /// The input of a terminal of `warehouse`.
    pub fn new(tpcc: &Tpcc, warehouse: u32, random: &mut Random) -> Payment {
        let district = random_district(warehouse, random);
        let remote = tpcc.warehouses > 1 && chance(random, 15);
        let customer_district = match remote {
            true => random_district(other(tpcc, warehouse, random), random),
            false => district,
        };
        let customer = Customer::choose(tpcc.scale, random);
        Payment {
            district,
            customer_district,
            customer,
            amount: uniform(random, 100, 500_000) as i64,
        }
    }
}

/// Input of an order status.
#[derive(Clone, Copy, Debug)]
pub struct OrderStatus {
    /// Where the customer belongs.
    pub district: DistrictKey,
    /// The customer.
    pub customer: Customer,
}

impl OrderStatus {
    /// The input of a terminal of `warehouse`.
    pub fn new(tpcc: &Tpcc, warehouse: u32, random: &mut Random) -> OrderStatus {
        let district = random_district(warehouse, random);
        OrderStatus { district, customer: Customer::choose(tpcc.scale, random) }
    }
}

/// Input of a delivery.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// The warehouse.
    pub warehouse: u32,
    /// The carrier, 1 to 10.
    pub carrier: u8,
}

impl Delivery {
    /// The input of a terminal of `warehouse`.
    pub fn new(warehouse: u32, random: &mut Random) -> Delivery {
        Delivery { warehouse, carrier: uniform(random, 1, 10) as u8 }
    }
}

/// Input of a stock level.
#[derive(Clone, Copy, Debug)]
pub struct StockLevel {
    /// The terminal's district. Here each transaction is one of another terminal.
    pub district: DistrictKey,
    /// Stock below this threshold counts as low.
    pub threshold: u64,
}

impl StockLevel {
    /// The input of a terminal of `warehouse`.
    pub fn new(warehouse: u32, random: &mut Random) -> StockLevel {
        StockLevel {
            district: random_district(warehouse, random),
            threshold: uniform(random, 10, 20),
        }
    }
}

fn random_district(warehouse: u32, random: &mut Random) -> DistrictKey {
    DistrictKey { warehouse, number: uniform(random, 1, 10) as u8 }
}

fn customer_id(scale: Scale, random: &mut Random) -> u32 {
    non_uniform(random, 1023, C_ID, 1, u64::from(scale.customers)) as u32
}

/// A warehouse other than this one; there is more than one.
fn other(tpcc: &Tpcc, warehouse: u32, random: &mut Random) -> u32 {
    let number = uniform(random, 1, u64::from(tpcc.warehouses) - 1) as u32;
    number + u32::from(number >= warehouse)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLES: u32 = 100_000;

    fn share(count: u32, of: u32) -> f64 {
        f64::from(count) / f64::from(of)
    }

    #[test]
    fn the_mix_is_the_standard_one() {
        let mut random = Random::new(1);
        let mut counts = [0; 5];
        for _ in 0..SAMPLES {
            counts[Kind::choose(&mut random) as usize] += 1;
        }
        for (count, expected) in counts.into_iter().zip([0.45, 0.43, 0.04, 0.04, 0.04]) {
            assert!((share(count, SAMPLES) - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn new_orders_are_as_specified() {
        let (tpcc, mut random) = (Tpcc::specified(5), Random::new(2));
        let (mut lines, mut remote, mut unknown) = (0, 0, 0);
        for _ in 0..SAMPLES {
            let input = NewOrder::new(&tpcc, 3, &mut random);
            assert!((1..=10).contains(&input.district.number) && input.district.warehouse == 3);
            assert!((1..=3000).contains(&input.customer));
            assert!((5..=15).contains(&input.lines().len()));
            for line in input.lines() {
                assert!((1..=5).contains(&line.supplier) && (1..=10).contains(&line.quantity));
                assert!((1..=100_001).contains(&line.item));
                remote += u32::from(line.supplier != 3);
                unknown += u32::from(line.item > 100_000);
                lines += 1;
            }
        }
        assert!((share(lines, SAMPLES) - 10.0).abs() < 0.1);
        assert!((share(remote, lines) - 0.01).abs() < 0.002);
        assert!((share(unknown, SAMPLES) - 0.01).abs() < 0.002);
    }

    #[test]
    fn payments_are_as_specified() {
        let (tpcc, mut random) = (Tpcc::specified(2), Random::new(3));
        let (mut remote, mut named) = (0, 0);
        for _ in 0..SAMPLES {
            let input = Payment::new(&tpcc, 1, &mut random);
            assert!((100..=500_000).contains(&input.amount));
            if input.customer_district.warehouse == 1 {
                assert_eq!(input.customer_district, input.district);
            } else {
                assert_eq!(input.customer_district.warehouse, 2);
                remote += 1;
            }
            named += u32::from(matches!(input.customer, Customer::Last(_)));
        }
        assert!((share(remote, SAMPLES) - 0.15).abs() < 0.01);
        assert!((share(named, SAMPLES) - 0.6).abs() < 0.01);
    }

    #[test]
    fn a_single_warehouse_has_no_others() {
        let (tpcc, mut random) = (Tpcc::specified(1), Random::new(4));
        for _ in 0..10_000 {
            let order = NewOrder::new(&tpcc, 1, &mut random);
            assert!(order.lines().iter().all(|line| line.supplier == 1));
            assert_eq!(Payment::new(&tpcc, 1, &mut random).customer_district.warehouse, 1);
        }
    }
}
