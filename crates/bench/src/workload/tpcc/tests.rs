//! Loads, runs and checks on Vellum, and on faulty engines.

use std::time::Instant;

use anyhow::Result;
use tempfile::TempDir;
use vellum_testing::patience::PATIENCE;

use super::keys::{self, DistrictKey, STOCK, TABLES};
use super::layout::{customer, history, order, stock};
use super::*;
use crate::engine::{Direction, Pair, Session, Setting, VELLUM};

fn small(warehouses: u32) -> Tpcc {
    Tpcc { warehouses, scale: Scale::off_spec(1_000, 60), seed: 7 }
}

fn open(directory: &TempDir) -> Box<dyn Engine> {
    let mut setting = Setting::new(directory.path(), 16 << 20);
    setting.tables = small(1).tables();
    (VELLUM.open)(&setting).unwrap()
}

fn loaded(tpcc: &Tpcc, directory: &TempDir) -> Box<dyn Engine> {
    let engine = open(directory);
    tpcc.load(&*engine).unwrap();
    engine.settle().unwrap();
    engine
}

fn plan(threads: usize) -> Plan {
    Plan { threads, seconds: 0.5, seed: 5 }
}

fn rows(engine: &dyn Engine, table: usize) -> Vec<Pair> {
    let mut rows = Vec::new();
    let visit = &mut |key: &[u8], value: &[u8]| {
        rows.push((key.to_vec(), value.to_vec()));
        true
    };
    engine.session().unwrap().scan(table, &[], Direction::Forward, visit).unwrap();
    rows
}

#[test]
fn what_is_loaded_is_there_and_consistent() {
    let (tpcc, directory) = (small(2), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let mut bytes = 0;
    for (table, name) in TABLES.into_iter().enumerate() {
        let rows = rows(&*engine, table);
        assert!(load::stream(&tpcc, table).eq(rows.iter().cloned()), "{name}");
        bytes += rows.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum::<u64>();
    }
    let claimed = tpcc.bytes();
    assert!(bytes.abs_diff(claimed) < claimed / 20, "{bytes} bytes, not {claimed}");
    assert_eq!(tpcc.check(&*engine).unwrap().len(), 6);
}

#[test]
fn conditions_hold_after_runs_of_one_and_of_four_threads() {
    let (tpcc, directory) = (small(2), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let (mut new_orders, mut rolled_back, mut deliveries) = (0, 0, 0);
    // Until it has done some work, even on a busy machine.
    let start = Instant::now();
    while new_orders <= 100 || deliveries <= 5 {
        assert!(start.elapsed() < PATIENCE, "{new_orders}, {deliveries}");
        // Twice, because a run continues where the run before it ended.
        for threads in [1, 1, 4, 4] {
            let measured = tpcc.run(&*engine, &plan(threads)).unwrap();
            tpcc.check(&*engine).unwrap();
            let count = |name: &str| measured.counts[name];
            let kinds = ["new_order", "payment", "order_status", "delivery", "stock_level"];
            let sum: u64 = kinds.into_iter().map(count).sum();
            assert_eq!(sum, measured.operations);
            new_orders += count("new_order");
            rolled_back += count("rolled_back");
            deliveries += count("delivery");
        }
    }
    assert!(rolled_back <= new_orders / 20, "{rolled_back} of {new_orders}");
    // One of a hundred is rolled back, so of a thousand some are.
    assert!(rolled_back > 0 || new_orders < 1_000);
}

#[test]
fn conditions_hold_where_all_threads_share_a_warehouse() {
    let (tpcc, directory) = (small(1), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    tpcc.run(&*engine, &plan(4)).unwrap();
    tpcc.check(&*engine).unwrap();
}

#[test]
fn transactions_leave_what_they_should() {
    let (tpcc, directory) = (small(2), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let before = rows(&*engine, STOCK);
    let measured = tpcc.run(&*engine, &plan(1)).unwrap();
    let orders = 2 * 10 * 60 + measured.counts["new_order"] - measured.counts["rolled_back"];
    assert_eq!(rows(&*engine, keys::ORDER).len() as u64, orders);
    let payments = 2 * 10 * 60 + measured.counts["payment"];
    assert_eq!(rows(&*engine, keys::HISTORY).len() as u64, payments);
    let lines: u64 = rows(&*engine, keys::ORDER)
        .iter()
        .filter(|(key, _)| keys::number_at(key, keys::DISTRICT_KEY_BYTES) > 60)
        .map(|(_, order)| order::OL_CNT.get(order))
        .sum();
    let (mut taken, mut remote) = (0, 0);
    for ((_, before), (_, after)) in before.iter().zip(rows(&*engine, STOCK)) {
        assert_eq!(stock::DATA.get(before), stock::DATA.get(&after));
        assert!((10..=100).contains(&stock::QUANTITY.get(&after)));
        taken += stock::ORDER_CNT.get(&after);
        remote += stock::REMOTE_CNT.get(&after);
    }
    assert_eq!(taken, lines);
    assert!(remote > 0 && remote < taken / 20, "{remote} of {taken} remote");
}

#[test]
fn thousands_of_bad_payments_do_not_break_a_customer() {
    let (tpcc, directory) = (small(1), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    tpcc.run(&*engine, &plan(2)).unwrap();
    let mut noted = 0;
    for (_, record) in rows(&*engine, keys::CUSTOMER) {
        assert_eq!(record.len(), customer::BYTES);
        if customer::CREDIT.get(&record) == b"BC" && customer::PAYMENT_CNT.get(&record) > 1 {
            assert!(customer::DATA.get(&record).contains(&b'|'));
            noted += 1;
        }
    }
    assert!(noted > 10);
    let last = rows(&*engine, keys::HISTORY).pop().unwrap();
    assert_eq!(&history::DATA.get(&last.1)[10..14], b"    ");
}

/// An engine with a fault in one kind of operation.
struct Broken<'a> {
    engine: &'a dyn Engine,
    fault: Fault,
}

#[derive(Clone, Copy)]
enum Fault {
    /// Changes of the table are made on a copy that is dropped.
    UpdatesOf(usize, fn(&[u8], &[u8]) -> bool),
    /// Some rows of the table are lost.
    PutsOf(usize),
    /// Removed rows stay.
    Removals,
}

impl Engine for Broken<'_> {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        self.engine.load(table, entries)
    }

    fn settle(&self) -> Result<()> {
        self.engine.settle()
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        let session = self.engine.session()?;
        Ok(Box::new(BrokenSession { session, fault: self.fault, puts: 0 }))
    }
}

struct BrokenSession<'a> {
    session: Box<dyn Session + 'a>,
    fault: Fault,
    puts: u64,
}

impl Session for BrokenSession<'_> {
    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.session.get(table, key, read)
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        if matches!(self.fault, Fault::PutsOf(broken) if broken == table) {
            self.puts += 1;
            if self.puts.is_multiple_of(10) {
                return Ok(());
            }
        }
        self.session.put(table, key, value)
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        self.session.update(table, key, &mut |record| {
            let before = record.to_vec();
            change(record);
            if let Fault::UpdatesOf(broken, is_lost) = self.fault
                && broken == table
                && is_lost(&before, record)
            {
                record.copy_from_slice(&before);
            }
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        if matches!(self.fault, Fault::Removals) {
            return self.session.get(table, key, &mut |_| {});
        }
        self.session.remove(table, key)
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        self.session.scan(table, from, direction, visit)
    }
}

/// The error of the check after a run on an engine with this fault.
fn caught(fault: Fault) -> String {
    let (tpcc, directory) = (small(1), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let broken = Broken { engine: &*engine, fault };
    let mut operations = 0;
    // Also on a busy machine.
    while operations < 500 {
        operations += tpcc.run(&broken, &Plan { seconds: 0.2, ..plan(1) }).unwrap().operations;
    }
    tpcc.check(&*engine).unwrap_err().to_string()
}

#[test]
fn lost_updates_of_districts_are_caught() {
    use super::layout::district::{NEXT_O_ID, YTD};
    let payments = |before: &[u8], after: &[u8]| YTD.get(before) != YTD.get(after);
    let error = caught(Fault::UpdatesOf(keys::DISTRICT, payments));
    assert!(error.starts_with("condition 9: DistrictKey { warehouse: 1, number:"), "{error}");
    // Then every order has the same number, and their lines and customers are mixed up.
    let orders = |before: &[u8], after: &[u8]| NEXT_O_ID.get(before) != NEXT_O_ID.get(after);
    let error = caught(Fault::UpdatesOf(keys::DISTRICT, orders));
    assert!(error.starts_with("condition 2: DistrictKey { warehouse: 1, number:"), "{error}");
}

#[test]
fn other_faults_are_caught_too() {
    let always = |_: &[u8], _: &[u8]| true;
    let cases = [
        (Fault::UpdatesOf(keys::WAREHOUSE, always), "condition 1:"),
        (Fault::UpdatesOf(keys::ORDER, always), "condition 5:"),
        (Fault::UpdatesOf(keys::ORDER_LINE, always), "condition 7:"),
        (Fault::UpdatesOf(keys::CUSTOMER, always), "condition 10:"),
        (Fault::PutsOf(keys::HISTORY), "condition 9:"),
        (Fault::PutsOf(keys::CUSTOMER_ORDER), "DistrictKey"),
        (Fault::Removals, "condition 5:"),
    ];
    for (fault, expected) in cases {
        let error = caught(fault);
        assert!(error.starts_with(expected), "{expected} {error}");
    }
}

#[test]
fn a_gap_among_new_orders_is_caught() {
    let (tpcc, directory) = (small(1), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let district = DistrictKey { warehouse: 1, number: 4 };
    let mut session = engine.session().unwrap();
    assert!(session.remove(keys::NEW_ORDER, &keys::order(district, 50)).unwrap());
    let error = tpcc.check(&*engine).unwrap_err().to_string();
    assert_eq!(
        error,
        "condition 3: DistrictKey { warehouse: 1, number: 4 } has new orders 43 to 60, but 17 \
         rows of them"
    );
}

#[test]
fn an_order_that_is_still_being_written_is_not_overtaken() {
    let (tpcc, directory) = (small(1), TempDir::new().unwrap());
    let engine = loaded(&tpcc, &directory);
    let district = DistrictKey { warehouse: 1, number: 1 };
    let mut session = engine.session().unwrap();
    let claims = Claims::new(&tpcc, &mut *session).unwrap();
    for order in 43..=60 {
        assert_eq!(claims.claim(district, &mut *session).unwrap(), Some(order));
    }
    // Order 62 has its row; order 61 has its number, but no row yet.
    session.put(keys::NEW_ORDER, &keys::order(district, 62), &[]).unwrap();
    assert_eq!(claims.claim(district, &mut *session).unwrap(), None);
    session.put(keys::NEW_ORDER, &keys::order(district, 61), &[]).unwrap();
    assert_eq!(claims.claim(district, &mut *session).unwrap(), Some(61));
    assert_eq!(claims.claim(district, &mut *session).unwrap(), Some(62));
}

#[test]
fn threads_have_homes() {
    let homes = |warehouses, threads| -> Vec<Vec<u32>> {
        (0..threads).map(|thread| small(warehouses).homes(thread, threads)).collect()
    };
    assert_eq!(homes(5, 2), [vec![1, 3, 5], vec![2, 4]]);
    assert_eq!(homes(2, 3), [[1], [2], [1]]);
}
