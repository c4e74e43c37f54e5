//! Payment (clause 2.5): a customer pays; warehouse and district add it up.

use std::hint::black_box;
use std::io::Write as _;

use anyhow::Result;

use super::{Ended, ThreadState, must, now};
use crate::engine::{Access, Session};
use crate::workload::tpcc::input::Payment;
use crate::workload::tpcc::keys;
use crate::workload::tpcc::layout::{customer, district, history, warehouse};

impl ThreadState<'_> {
    /// Runs the transaction.
    ///
    /// # Errors
    /// Errors of the engine, and missing rows.
    pub fn payment(&mut self, input: &Payment, session: &mut dyn Session) -> Result<Ended> {
        session.begin(Access::Write)?;
        let warehouse_name = receive_in_warehouse(input, session)?;
        let district_name = receive_in_district(input, session)?;
        let number = self.customer_id(input.customer_district, &input.customer, session)?;
        credit(input, number, session)?;
        let record = history_record(input, number, &warehouse_name, &district_name);
        session.put(keys::HISTORY, &keys::history(self.number, self.payments), &record)?;
        session.commit()?;
        self.payments += 1;
        Ok(Ended::Committed)
    }
}

fn receive_in_warehouse(input: &Payment, session: &mut dyn Session) -> Result<[u8; 10]> {
    use warehouse::*;
    let key = keys::warehouse(input.district.warehouse);
    let mut name = [0; 10];
    let found = session.update(keys::WAREHOUSE, &key, &mut |record| {
        YTD.add(record, input.amount);
        name = NAME.copy(record);
        black_box((STREET_1.copy(record), STREET_2.copy(record), CITY.copy(record)));
        black_box((STATE.copy(record), ZIP.copy(record)));
    })?;
    must(found, keys::WAREHOUSE, &key)?;
    Ok(name)
}

fn receive_in_district(input: &Payment, session: &mut dyn Session) -> Result<[u8; 10]> {
    use district::*;
    let key = keys::district(input.district);
    let mut name = [0; 10];
    let found = session.update(keys::DISTRICT, &key, &mut |record| {
        YTD.add(record, input.amount);
        name = NAME.copy(record);
        black_box((STREET_1.copy(record), STREET_2.copy(record), CITY.copy(record)));
        black_box((STATE.copy(record), ZIP.copy(record)));
    })?;
    must(found, keys::DISTRICT, &key)?;
    Ok(name)
}

fn credit(input: &Payment, number: u32, session: &mut dyn Session) -> Result<()> {
    use customer::*;
    let key = keys::customer(input.customer_district, number);
    let found = session.update(keys::CUSTOMER, &key, &mut |record| {
        BALANCE.add(record, -input.amount);
        YTD_PAYMENT.add(record, input.amount);
        PAYMENT_CNT.add(record, 1_u8);
        black_box((FIRST.copy(record), MIDDLE.copy(record), LAST.copy(record)));
        black_box((STREET_1.copy(record), STREET_2.copy(record), CITY.copy(record)));
        black_box((STATE.copy(record), ZIP.copy(record), PHONE.copy(record)));
        black_box((SINCE.get(record), CREDIT_LIM.get(record), DISCOUNT.get(record)));
        if CREDIT.get(record) == b"BC" {
            remember(input, number, DATA.get_mut(record));
            black_box(&DATA.get(record)[..200]);
        }
    })?;
    must(found, keys::CUSTOMER, &key)
}

/// Inserts the payment before the data of a customer with bad credit. Data that no longer fits is
/// cut off.
fn remember(input: &Payment, number: u32, data: &mut [u8]) {
    let mut note = [0; 96];
    let (at, of) = (input.district, input.customer_district);
    let mut rest = &mut note[..];
    // A note is never longer than this.
    let _ = write!(
        rest,
        "{number} {} {} {} {} {}.{:02}|",
        of.number,
        of.warehouse,
        at.number,
        at.warehouse,
        input.amount / 100,
        input.amount % 100
    );
    let length = 96 - rest.len();
    data.copy_within(..data.len() - length, length);
    data[..length].copy_from_slice(&note[..length]);
}

fn history_record(
    input: &Payment,
    number: u32,
    warehouse_name: &[u8],
    district_name: &[u8],
) -> [u8; history::BYTES] {
    use history::*;
    let mut record = [0; BYTES];
    C_ID.set(&mut record, number);
    C_D_ID.set(&mut record, input.customer_district.number);
    C_W_ID.set(&mut record, input.customer_district.warehouse);
    D_ID.set(&mut record, input.district.number);
    W_ID.set(&mut record, input.district.warehouse);
    DATE.set(&mut record, now());
    AMOUNT.set(&mut record, input.amount);
    let data = DATA.get_mut(&mut record);
    data[..10].copy_from_slice(warehouse_name);
    data[10..14].fill(b' ');
    data[14..].copy_from_slice(district_name);
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::tpcc::input::Customer;
    use crate::workload::tpcc::keys::DistrictKey;

    #[test]
    fn payments_of_bad_customers_are_remembered() {
        let input = Payment {
            district: DistrictKey { warehouse: 3, number: 4 },
            customer_district: DistrictKey { warehouse: 1, number: 2 },
            customer: Customer::Id(7),
            amount: 12_305,
        };
        let mut data = *b"what was known before, and more";
        remember(&input, 7, &mut data);
        assert_eq!(&data, b"7 2 1 4 3 123.05|what was known");
    }
}
