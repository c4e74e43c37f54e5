//! The records of the nine tables (TPC-C 5.11, clause 1.3): every column that is not in the key.
//!
//! Texts have their full size, so that records are as long as the specification's and never change
//! their length. Money is in cents, rates are in ten thousandths, dates in microseconds since 1970.
//! Null is 0: no carrier and no date of delivery are 0.

#![allow(missing_docs)]

use super::field::layout;

/// The null of dates and carriers.
pub(super) const NOT_DELIVERED: u64 = 0;

layout! {
    /// WAREHOUSE.
    warehouse {
        NAME: Text<10>,
        STREET_1: Text<20>,
        STREET_2: Text<20>,
        CITY: Text<20>,
        STATE: Text<2>,
        ZIP: Text<9>,
        TAX: Number<2>,
        YTD: Money<8>,
    }
}

layout! {
    /// DISTRICT.
    district {
        NAME: Text<10>,
        STREET_1: Text<20>,
        STREET_2: Text<20>,
        CITY: Text<20>,
        STATE: Text<2>,
        ZIP: Text<9>,
        TAX: Number<2>,
        YTD: Money<8>,
        NEXT_O_ID: Number<4>,
    }
}

layout! {
    /// CUSTOMER. The fields that change are at the front.
    customer {
        BALANCE: Money<8>,
        YTD_PAYMENT: Money<8>,
        PAYMENT_CNT: Number<4>,
        DELIVERY_CNT: Number<4>,
        CREDIT: Text<2>,
        CREDIT_LIM: Money<8>,
        DISCOUNT: Number<2>,
        SINCE: Number<8>,
        FIRST: Text<16>,
        MIDDLE: Text<2>,
        LAST: Text<16>,
        STREET_1: Text<20>,
        STREET_2: Text<20>,
        CITY: Text<20>,
        STATE: Text<2>,
        ZIP: Text<9>,
        PHONE: Text<16>,
        DATA: Text<500>,
    }
}

layout! {
    /// HISTORY; its key has nothing of the specification.
    history {
        C_ID: Number<4>,
        C_D_ID: Number<1>,
        C_W_ID: Number<4>,
        D_ID: Number<1>,
        W_ID: Number<4>,
        DATE: Number<8>,
        AMOUNT: Money<8>,
        DATA: Text<24>,
    }
}

layout! {
    /// ORDER.
    order {
        C_ID: Number<4>,
        ENTRY_D: Number<8>,
        CARRIER_ID: Number<1>,
        OL_CNT: Number<1>,
        ALL_LOCAL: Number<1>,
    }
}

layout! {
    /// ORDER-LINE.
    order_line {
        I_ID: Number<4>,
        SUPPLY_W_ID: Number<4>,
        DELIVERY_D: Number<8>,
        QUANTITY: Number<1>,
        AMOUNT: Money<8>,
        DIST_INFO: Text<24>,
    }
}

layout! {
    /// ITEM.
    item {
        IM_ID: Number<4>,
        NAME: Text<24>,
        PRICE: Money<8>,
        DATA: Text<50>,
    }
}

layout! {
    /// STOCK; the ten texts of the districts are one field.
    stock {
        QUANTITY: Number<2>,
        YTD: Number<4>,
        ORDER_CNT: Number<4>,
        REMOTE_CNT: Number<4>,
        DIST: Text<240>,
        DATA: Text<50>,
    }
}

/// Bytes of a district's text in a stock record.
pub const DIST_INFO: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_about_as_long_as_the_specification_says() {
        // Clause 4.2.2 counts the key's columns too; they are in the keys here.
        let lengths = [
            (warehouse::BYTES + 4, 89),
            (district::BYTES + 5, 95),
            (customer::BYTES + 9, 655),
            (history::BYTES, 46),
            (order::BYTES + 9, 24),
            (order_line::BYTES + 10, 54),
            (item::BYTES + 4, 82),
            (stock::BYTES + 8, 306),
        ];
        for (here, specified) in lengths {
            let ratio = f64::from(here as u32) / f64::from(specified);
            assert!((0.95..1.2).contains(&ratio), "{here} bytes, not about {specified}");
        }
    }
}
