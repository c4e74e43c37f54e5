//! Loading: each table in the order of its keys, row by row, so that it takes little memory.

use anyhow::{Context as _, Result};

use super::keys::{self, DistrictKey, TABLES};
use super::rows::Rows;
use super::size::Tpcc;
use crate::engine::{Engine, Pair};

/// The terminal of the loaded history rows.
pub const LOADER: u16 = 0;

/// Rows of a table, in the order of their keys.
pub type Stream<'a> = Box<dyn Iterator<Item = Pair> + 'a>;

/// Fills the tables of an empty engine.
///
/// # Errors
/// Errors of the engine.
pub fn load(tpcc: &Tpcc, engine: &dyn Engine) -> Result<()> {
    for (table, name) in TABLES.into_iter().enumerate() {
        let loading = || format!("loading table {name}");
        engine.load(table, &mut stream(tpcc, table)).with_context(loading)?;
    }
    Ok(())
}

/// The rows of a table.
pub fn stream(tpcc: &Tpcc, table: usize) -> Stream<'static> {
    let rows = Rows { scale: tpcc.scale, seed: tpcc.seed };
    let (warehouses, districts) = (1..=tpcc.warehouses, districts(tpcc.warehouses));
    let orders = tpcc.scale.customers;
    match table {
        keys::WAREHOUSE => Box::new(
            warehouses.map(move |number| pair(&keys::warehouse(number), rows.warehouse(number))),
        ),
        keys::DISTRICT => Box::new(
            districts.map(move |district| pair(&keys::district(district), rows.district(district))),
        ),
        keys::CUSTOMER => {
            Box::new(numbered(districts, 1, orders).map(move |(district, number)| {
                pair(&keys::customer(district, number), rows.customer(district, number))
            }))
        }
        keys::CUSTOMER_NAME => Box::new(districts.flat_map(move |district| names(rows, district))),
        keys::HISTORY => {
            let payments = (0..).zip(numbered(districts, 1, orders));
            Box::new(payments.map(move |(row, (district, customer))| {
                pair(&keys::history(LOADER, row), rows.history(district, customer))
            }))
        }
        keys::NEW_ORDER => {
            let first = rows.scale.first_new_order();
            let new_orders = numbered(districts, first, orders);
            Box::new(
                new_orders.map(|(district, number)| pair(&keys::order(district, number), vec![])),
            )
        }
        keys::ORDER => Box::new(districts.flat_map(move |district| orders_of(rows, district))),
        keys::CUSTOMER_ORDER => {
            Box::new(districts.flat_map(move |district| orders_by_customer(rows, district)))
        }
        keys::ORDER_LINE => Box::new(
            numbered(districts, 1, orders)
                .flat_map(move |(district, order)| lines(rows, district, order)),
        ),
        keys::ITEM => Box::new(
            (1..=tpcc.scale.items).map(move |number| pair(&keys::item(number), rows.item(number))),
        ),
        _ => {
            let items = tpcc.scale.items;
            let stock = warehouses.flat_map(move |w| (1..=items).map(move |item| (w, item)));
            Box::new(stock.map(move |(warehouse, item)| {
                pair(&keys::stock(warehouse, item), rows.stock(warehouse, item))
            }))
        }
    }
}

/// All districts, in order.
pub fn districts(warehouses: u32) -> impl Iterator<Item = DistrictKey> + Clone {
    let districts = |warehouse| (1..=10).map(move |number| DistrictKey { warehouse, number });
    (1..=warehouses).flat_map(districts)
}

fn numbered(
    districts: impl Iterator<Item = DistrictKey>,
    first: u32,
    last: u32,
) -> impl Iterator<Item = (DistrictKey, u32)> {
    districts.flat_map(move |district| (first..=last).map(move |number| (district, number)))
}

fn pair(key: &[u8], record: Vec<u8>) -> Pair {
    (key.to_vec(), record)
}

fn names(rows: Rows, district: DistrictKey) -> impl Iterator<Item = Pair> {
    let names = rows.customer_names(district).into_iter();
    names.map(move |(last, first, number)| {
        pair(&keys::customer_name(district, &last, &first, number), vec![])
    })
}

fn orders_of(rows: Rows, district: DistrictKey) -> impl Iterator<Item = Pair> {
    (1..).zip(rows.customers_of_orders(district)).map(move |(number, customer)| {
        pair(&keys::order(district, number), rows.order(district, number, customer))
    })
}

fn orders_by_customer(rows: Rows, district: DistrictKey) -> impl Iterator<Item = Pair> {
    let customers = rows.customers_of_orders(district);
    let mut pairs: Vec<(u32, u32)> = customers.into_iter().zip(1..).collect();
    pairs.sort_unstable();
    pairs.into_iter().map(move |(customer, order)| {
        pair(&keys::customer_order(district, customer, order), vec![])
    })
}

fn lines(rows: Rows, district: DistrictKey, order: u32) -> impl Iterator<Item = Pair> {
    (1..)
        .zip(rows.order_lines(district, order))
        .map(move |(line, record)| pair(&keys::order_line(district, order, line), record))
}

#[cfg(test)]
mod tests {
    use super::super::layout::{customer, district, item, order, stock};
    use super::super::size::Scale;
    use super::*;

    fn small() -> Tpcc {
        Tpcc { warehouses: 2, scale: Scale::off_spec(500, 60), seed: 3 }
    }

    #[test]
    fn tables_come_sorted_complete_and_twice_the_same() {
        let tpcc = small();
        for (table, name) in TABLES.into_iter().enumerate() {
            let rows: Vec<Pair> = stream(&tpcc, table).collect();
            assert!(rows.is_sorted_by(|a, b| a.0 < b.0), "{name}");
            let expected = match table {
                keys::WAREHOUSE => 2,
                keys::DISTRICT => 20,
                keys::NEW_ORDER => 20 * 18,
                keys::ITEM => 500,
                keys::STOCK => 1000,
                keys::ORDER_LINE => rows.len(),
                _ => 20 * 60,
            };
            assert_eq!(rows.len(), expected, "{name}");
            assert!(stream(&tpcc, table).eq(rows.iter().cloned()), "{name}");
            let other = Tpcc { seed: 4, ..tpcc.clone() };
            if !matches!(table, keys::NEW_ORDER) {
                assert!(!stream(&other, table).eq(rows), "{name}");
            }
        }
    }

    #[test]
    fn orders_and_their_lines_agree() {
        let tpcc = small();
        let counts: u64 = stream(&tpcc, keys::ORDER).map(|row| order::OL_CNT.get(&row.1)).sum();
        let lines = stream(&tpcc, keys::ORDER_LINE).count();
        assert_eq!(counts, lines as u64);
        let orders = f64::from(20 * 60);
        assert!((9.5..10.5).contains(&(lines as f64 / orders)));
    }

    #[test]
    fn the_specified_size_is_specified() {
        let tpcc = Tpcc { warehouses: 1, ..Tpcc::specified(1) };
        assert_eq!(stream(&tpcc, keys::STOCK).count(), 100_000);
        assert_eq!(stream(&tpcc, keys::NEW_ORDER).count(), 9_000);
        let first = stream(&tpcc, keys::NEW_ORDER).next().unwrap();
        assert_eq!(keys::number_at(&first.0, 5), 2101);
        let first = stream(&tpcc, keys::DISTRICT).next().unwrap();
        assert_eq!(district::YTD.get(&first.1), 3_000_000);
        assert_eq!(district::NEXT_O_ID.get(&first.1), 3001);
        let mut bad = 0;
        for (_, row) in stream(&tpcc, keys::CUSTOMER) {
            bad += u32::from(customer::CREDIT.get(&row) == b"BC");
            assert!((300..=500).contains(&customer::DATA.text(&row).len()));
        }
        assert!((2_700..3_300).contains(&bad), "{bad} of 30,000 with bad credit");
        for (_, row) in stream(&tpcc, keys::ITEM) {
            assert!((100..=10_000).contains(&item::PRICE.get(&row)));
        }
        let quantities = stream(&tpcc, keys::STOCK).map(|row| stock::QUANTITY.get(&row.1));
        assert!(quantities.into_iter().all(|quantity| (10..=100).contains(&quantity)));
    }
}
