//! The rows of the initial database (TPC-C 5.11, clause 4.3.3.1), each from its key alone.
//!
//! Each row has its own random generator, from the seed, the table and the key. So tables can be
//! loaded one after the other, each in the order of its keys. Rows that share facts (an order, its
//! lines, its customer) agree without any state in memory.

use super::field::Text;
use super::keys::{
    CUSTOMER, CUSTOMER_ORDER, DISTRICT, DistrictKey, HISTORY, ITEM, ORDER, ORDER_LINE, STOCK,
    WAREHOUSE,
};
use super::layout::{
    NOT_DELIVERED, customer, district, history, item, order, order_line, stock, warehouse,
};
use super::random::{
    C_LAST_LOAD, NAMES, a_string, chance, data, last_name, n_string, non_uniform, permutation,
    uniform, zip,
};
use super::size::Scale;
use crate::workload::values::{Random, mix};

/// The date of all loaded rows: 2026-01-01, in microseconds.
const DATE: u64 = 1_767_225_600_000_000;

/// The payment of each customer in the initial database, in cents.
const PAID: i64 = 1_000;

/// The initial database.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Its size.
    pub scale: Scale,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// An address: the streets and the city, the state, and the zip code.
fn address(
    random: &mut Random,
    record: &mut [u8],
    streets_and_city: [Text<20>; 3],
    state: Text<2>,
    zip_code: Text<9>,
) {
    for field in streets_and_city {
        a_string(random, field.get_mut(record), 10, 20);
    }
    a_string(random, state.get_mut(record), 2, 2);
    zip(random, zip_code.get_mut(record));
}

impl Rows {
    fn random(&self, table: usize, high: u32, low: u64) -> Random {
        let table = mix(self.seed ^ ((table as u64) << 56));
        Random::new(mix(table ^ u64::from(high)) ^ low)
    }

    fn random_in(&self, table: usize, district: DistrictKey, number: u32) -> Random {
        self.random(table, district.warehouse, u64::from(district.number) << 32 | u64::from(number))
    }

    /// A warehouse.
    pub fn warehouse(&self, number: u32) -> Vec<u8> {
        use warehouse::*;
        let mut random = self.random(WAREHOUSE, number, 0);
        let mut record = vec![0; BYTES];
        a_string(&mut random, NAME.get_mut(&mut record), 6, 10);
        address(&mut random, &mut record, [STREET_1, STREET_2, CITY], STATE, ZIP);
        TAX.set(&mut record, uniform(&mut random, 0, 2000));
        YTD.set(&mut record, 10 * i64::from(self.scale.customers) * PAID);
        record
    }

    /// A district.
    pub fn district(&self, district: DistrictKey) -> Vec<u8> {
        use district::*;
        let mut random = self.random_in(DISTRICT, district, 0);
        let mut record = vec![0; BYTES];
        a_string(&mut random, NAME.get_mut(&mut record), 6, 10);
        address(&mut random, &mut record, [STREET_1, STREET_2, CITY], STATE, ZIP);
        TAX.set(&mut record, uniform(&mut random, 0, 2000));
        YTD.set(&mut record, i64::from(self.scale.customers) * PAID);
        NEXT_O_ID.set(&mut record, self.scale.customers + 1);
        record
    }

    /// The last and the first name of a customer, and the generator of the rest of the row.
    fn name(&self, district: DistrictKey, number: u32) -> ([u8; 16], [u8; 16], Random) {
        let mut random = self.random_in(CUSTOMER, district, number);
        // The first thousand customers have each name once.
        let name = match number - 1 {
            number if number < NAMES => number,
            _ => non_uniform(&mut random, 255, C_LAST_LOAD, 0, u64::from(NAMES) - 1) as u32,
        };
        let mut first = [0; 16];
        a_string(&mut random, &mut first, 8, 16);
        (last_name(name), first, random)
    }

    /// The names of a district's customers with their numbers, in order.
    pub fn customer_names(&self, district: DistrictKey) -> Vec<([u8; 16], [u8; 16], u32)> {
        let mut names: Vec<_> = (1..=self.scale.customers)
            .map(|number| {
                let (last, first, _) = self.name(district, number);
                (last, first, number)
            })
            .collect();
        names.sort_unstable();
        names
    }

    /// A customer.
    pub fn customer(&self, district: DistrictKey, number: u32) -> Vec<u8> {
        use customer::*;
        let (last, first, mut random) = self.name(district, number);
        let mut record = vec![0; BYTES];
        BALANCE.set(&mut record, -PAID);
        YTD_PAYMENT.set(&mut record, PAID);
        PAYMENT_CNT.set(&mut record, 1_u8);
        CREDIT.set(&mut record, if chance(&mut random, 10) { b"BC" } else { b"GC" });
        CREDIT_LIM.set(&mut record, 5_000_000);
        DISCOUNT.set(&mut record, uniform(&mut random, 0, 5000));
        SINCE.set(&mut record, DATE);
        FIRST.set(&mut record, &first);
        MIDDLE.set(&mut record, b"OE");
        LAST.set(&mut record, &last);
        address(&mut random, &mut record, [STREET_1, STREET_2, CITY], STATE, ZIP);
        n_string(&mut random, PHONE.get_mut(&mut record));
        a_string(&mut random, DATA.get_mut(&mut record), 300, 500);
        record
    }

    /// The payment of a customer.
    pub fn history(&self, district: DistrictKey, number: u32) -> Vec<u8> {
        use history::*;
        let mut random = self.random_in(HISTORY, district, number);
        let mut record = vec![0; BYTES];
        C_ID.set(&mut record, number);
        C_D_ID.set(&mut record, district.number);
        C_W_ID.set(&mut record, district.warehouse);
        D_ID.set(&mut record, district.number);
        W_ID.set(&mut record, district.warehouse);
        DATE.set(&mut record, self::DATE);
        AMOUNT.set(&mut record, PAID);
        a_string(&mut random, DATA.get_mut(&mut record), 12, 24);
        record
    }

    /// The customers of a district's orders, from order 1 on; a permutation.
    pub fn customers_of_orders(&self, district: DistrictKey) -> Vec<u32> {
        permutation(&mut self.random_in(CUSTOMER_ORDER, district, 0), self.scale.customers)
    }

    /// An order and its number of lines.
    fn lines(&self, district: DistrictKey, number: u32) -> u8 {
        uniform(&mut self.random_in(ORDER, district, number), 5, 15) as u8
    }

    /// Whether an order is delivered in the initial database.
    fn is_delivered(&self, number: u32) -> bool {
        number < self.scale.first_new_order()
    }

    /// An order of a customer.
    pub fn order(&self, district: DistrictKey, number: u32, customer: u32) -> Vec<u8> {
        use order::*;
        let mut random = self.random_in(ORDER, district, number);
        let mut record = vec![0; BYTES];
        OL_CNT.set(&mut record, uniform(&mut random, 5, 15));
        C_ID.set(&mut record, customer);
        ENTRY_D.set(&mut record, DATE);
        let carrier = uniform(&mut random, 1, 10);
        CARRIER_ID.set(&mut record, if self.is_delivered(number) { carrier } else { 0 });
        ALL_LOCAL.set(&mut record, 1_u8);
        record
    }

    /// The lines of an order, from line 1 on.
    pub fn order_lines(&self, district: DistrictKey, number: u32) -> Vec<Vec<u8>> {
        use order_line::*;
        let mut random = self.random_in(ORDER_LINE, district, number);
        let delivered = self.is_delivered(number);
        (0..self.lines(district, number))
            .map(|_| {
                let mut record = vec![0; BYTES];
                I_ID.set(&mut record, uniform(&mut random, 1, u64::from(self.scale.items)));
                SUPPLY_W_ID.set(&mut record, district.warehouse);
                DELIVERY_D.set(&mut record, if delivered { DATE } else { NOT_DELIVERED });
                QUANTITY.set(&mut record, 5_u8);
                let amount = uniform(&mut random, 1, 999_999) as i64;
                AMOUNT.set(&mut record, if delivered { 0 } else { amount });
                a_string(&mut random, DIST_INFO.get_mut(&mut record), 24, 24);
                record
            })
            .collect()
    }

    /// An item.
    pub fn item(&self, number: u32) -> Vec<u8> {
        use item::*;
        let mut random = self.random(ITEM, 0, u64::from(number));
        let mut record = vec![0; BYTES];
        IM_ID.set(&mut record, uniform(&mut random, 1, 10_000));
        a_string(&mut random, NAME.get_mut(&mut record), 14, 24);
        PRICE.set(&mut record, uniform(&mut random, 100, 10_000) as i64);
        data(&mut random, DATA.get_mut(&mut record));
        record
    }

    /// An item's stock in a warehouse.
    pub fn stock(&self, warehouse: u32, item: u32) -> Vec<u8> {
        use stock::*;
        let mut random = self.random(STOCK, warehouse, u64::from(item));
        let mut record = vec![0; BYTES];
        QUANTITY.set(&mut record, uniform(&mut random, 10, 100));
        a_string(&mut random, DIST.get_mut(&mut record), 240, 240);
        data(&mut random, DATA.get_mut(&mut record));
        record
    }
}
