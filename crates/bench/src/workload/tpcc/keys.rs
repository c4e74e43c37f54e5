//! Tables and their keys: big-endian numbers one after the other, so that bytes order as columns.
//!
//! In addition to the nine tables there are two indexes that the transactions need: customers by
//! name, and orders by customer. Like NEW-ORDER, both have all columns in the key, and no value.

/// WAREHOUSE, by [`warehouse`].
pub const WAREHOUSE: usize = 0;
/// DISTRICT, by [`district`].
pub const DISTRICT: usize = 1;
/// CUSTOMER, by [`customer`].
pub const CUSTOMER: usize = 2;
/// Customers by name, by [`customer_name`].
pub const CUSTOMER_NAME: usize = 3;
/// HISTORY, by [`history`].
pub const HISTORY: usize = 4;
/// NEW-ORDER, by [`order`].
pub const NEW_ORDER: usize = 5;
/// ORDER, by [`order`].
pub const ORDER: usize = 6;
/// Orders by customer, by [`customer_order`].
pub const CUSTOMER_ORDER: usize = 7;
/// ORDER-LINE, by [`order_line`].
pub const ORDER_LINE: usize = 8;
/// ITEM, by [`item`].
pub const ITEM: usize = 9;
/// STOCK, by [`stock`].
pub const STOCK: usize = 10;

/// The names of the tables, by their index.
pub const TABLES: [&str; 11] = [
    "warehouse",
    "district",
    "customer",
    "customer_name",
    "history",
    "new_order",
    "order",
    "customer_order",
    "order_line",
    "item",
    "stock",
];

/// A district: warehouse and number, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DistrictKey {
    /// The warehouse.
    pub warehouse: u32,
    /// The district in it, 1 to 10.
    pub number: u8,
}

/// Bytes of the key of a [`DistrictKey`]; the keys of all its rows begin with it.
pub const DISTRICT_KEY_BYTES: usize = 5;

/// Builds keys part by part.
struct Parts<const N: usize> {
    key: [u8; N],
    length: usize,
}

impl<const N: usize> Parts<N> {
    #[inline]
    fn new() -> Self {
        Parts { key: [0; N], length: 0 }
    }

    #[inline]
    fn then(mut self, part: &[u8]) -> Self {
        self.key[self.length..self.length + part.len()].copy_from_slice(part);
        self.length += part.len();
        self
    }

    #[inline]
    fn district(self, district: DistrictKey) -> Self {
        self.then(&district.warehouse.to_be_bytes()).then(&[district.number])
    }

    #[inline]
    fn end(self) -> [u8; N] {
        debug_assert_eq!(self.length, N);
        self.key
    }
}

/// The key of a warehouse.
#[inline]
pub fn warehouse(warehouse: u32) -> [u8; 4] {
    warehouse.to_be_bytes()
}

/// The key of a district.
#[inline]
pub fn district(district: DistrictKey) -> [u8; DISTRICT_KEY_BYTES] {
    Parts::new().district(district).end()
}

/// The key of a customer.
#[inline]
pub fn customer(district: DistrictKey, customer: u32) -> [u8; 9] {
    Parts::new().district(district).then(&customer.to_be_bytes()).end()
}

/// The key of a customer by last name, first name (both filled up with zeros) and number.
#[inline]
pub fn customer_name(
    district: DistrictKey,
    last: &[u8; 16],
    first: &[u8; 16],
    customer: u32,
) -> [u8; 41] {
    Parts::new().district(district).then(last).then(first).then(&customer.to_be_bytes()).end()
}

/// The part of [`customer_name`]'s key that all customers of a name share.
#[inline]
pub fn customer_name_prefix(district: DistrictKey, last: &[u8; 16]) -> [u8; 21] {
    Parts::new().district(district).then(last).end()
}

/// The key of a payment: the terminal that wrote it, and a running number. HISTORY has no key in
/// the specification. Here each terminal appends rows after its own.
#[inline]
pub fn history(terminal: u16, number: u64) -> [u8; 10] {
    Parts::new().then(&terminal.to_be_bytes()).then(&number.to_be_bytes()).end()
}

/// The key of an order, and of a new order.
#[inline]
pub fn order(district: DistrictKey, order: u32) -> [u8; 9] {
    Parts::new().district(district).then(&order.to_be_bytes()).end()
}

/// The key of a customer's order.
#[inline]
pub fn customer_order(district: DistrictKey, customer: u32, order: u32) -> [u8; 13] {
    Parts::new().district(district).then(&customer.to_be_bytes()).then(&order.to_be_bytes()).end()
}

/// The key of an order line.
#[inline]
pub fn order_line(district: DistrictKey, order: u32, line: u8) -> [u8; 10] {
    Parts::new().district(district).then(&order.to_be_bytes()).then(&[line]).end()
}

/// The key of an item.
#[inline]
pub fn item(item: u32) -> [u8; 4] {
    item.to_be_bytes()
}

/// The key of an item's stock in a warehouse.
#[inline]
pub fn stock(warehouse: u32, item: u32) -> [u8; 8] {
    Parts::new().then(&warehouse.to_be_bytes()).then(&item.to_be_bytes()).end()
}

/// The number in the four bytes of `key` from `at`; 0 if it is too short.
#[inline]
pub fn number_at(key: &[u8], at: usize) -> u32 {
    let bytes = key.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// The district that a key begins with; zeros if it is too short.
#[inline]
pub fn district_of(key: &[u8]) -> DistrictKey {
    DistrictKey { warehouse: number_at(key, 0), number: key.get(4).copied().unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_district() -> impl Strategy<Value = DistrictKey> {
        (1..600_u32, 1..=10_u8).prop_map(|(warehouse, number)| DistrictKey { warehouse, number })
    }

    /// Names of few letters, so that one is often the beginning of another.
    fn name() -> impl Strategy<Value = [u8; 16]> {
        proptest::collection::vec(b'A'..=b'C', 0..16).prop_map(|text| {
            let mut name = [0; 16];
            name[..text.len()].copy_from_slice(&text);
            name
        })
    }

    type Columns = (DistrictKey, u32, u32, u8, [u8; 16], [u8; 16]);

    fn columns() -> impl Strategy<Value = Columns> {
        let number = || prop_oneof![0..4_u32, any::<u32>()];
        (any_district(), number(), number(), any::<u8>(), name(), name())
    }

    proptest! {
        #[test]
        fn keys_order_as_their_columns(a in columns(), b in columns()) {
            let ((pa, na, ma, la, xa, ya), (pb, nb, mb, lb, xb, yb)) = (a, b);
            prop_assert_eq!(district(pa).cmp(&district(pb)), pa.cmp(&pb));
            prop_assert_eq!(customer(pa, na).cmp(&customer(pb, nb)), (pa, na).cmp(&(pb, nb)));
            prop_assert_eq!(order(pa, na).cmp(&order(pb, nb)), (pa, na).cmp(&(pb, nb)));
            prop_assert_eq!(
                customer_order(pa, na, ma).cmp(&customer_order(pb, nb, mb)),
                (pa, na, ma).cmp(&(pb, nb, mb))
            );
            prop_assert_eq!(
                order_line(pa, na, la).cmp(&order_line(pb, nb, lb)),
                (pa, na, la).cmp(&(pb, nb, lb))
            );
            prop_assert_eq!(
                customer_name(pa, &xa, &ya, na).cmp(&customer_name(pb, &xb, &yb, nb)),
                (pa, xa, ya, na).cmp(&(pb, xb, yb, nb))
            );
            prop_assert_eq!(stock(na, ma).cmp(&stock(nb, mb)), (na, ma).cmp(&(nb, mb)));
            prop_assert_eq!(item(na).cmp(&item(nb)), na.cmp(&nb));
            prop_assert_eq!(warehouse(na).cmp(&warehouse(nb)), na.cmp(&nb));
            let numbers = (u64::from(na), u64::from(nb));
            prop_assert_eq!(
                history(ma as u16, numbers.0).cmp(&history(mb as u16, numbers.1)),
                (ma as u16, numbers.0).cmp(&(mb as u16, numbers.1))
            );
        }

        #[test]
        fn parts_are_found_again((district, number, other, line, last, first) in columns()) {
            let key = customer_name(district, &last, &first, number);
            prop_assert!(key.starts_with(&customer_name_prefix(district, &last)));
            prop_assert_eq!((district_of(&key), number_at(&key, 37)), (district, number));
            let key = order_line(district, number, line);
            prop_assert!(key.starts_with(&order(district, number)));
            prop_assert_eq!(number_at(&customer_order(district, other, number), 9), number);
        }
    }
}
