//! The size of a TPC-C database.

use serde::{Deserialize, Serialize};

/// TPC-C of some size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tpcc {
    /// Warehouses; about 80 MB of keys and values each.
    pub warehouses: u32,
    /// The numbers of rows of a warehouse.
    pub scale: Scale,
    /// The seed of the random numbers of the load.
    pub seed: u64,
}

/// The amounts that the specification fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scale {
    pub(super) items: u32,
    pub(super) customers: u32,
}

impl Scale {
    /// 100,000 items; 3,000 customers and orders in a district, 900 of these new.
    pub const SPECIFIED: Scale = Scale { items: 100_000, customers: 3_000 };

    /// Less than the specification says, for tests: at least 10 customers in a district.
    pub fn off_spec(items: u32, customers: u32) -> Scale {
        Scale { items: items.max(1), customers: customers.max(10) }
    }

    /// The first order that is not delivered in the initial database.
    pub(super) fn first_new_order(self) -> u32 {
        self.customers - self.customers * 3 / 10 + 1
    }
}

impl Tpcc {
    /// Warehouses of the specification's size.
    pub fn specified(warehouses: u32) -> Tpcc {
        Tpcc { warehouses, scale: Scale::SPECIFIED, seed: 1 }
    }

    /// The home warehouses of a thread: every n-th of them for n threads, or, if there are more
    /// threads than warehouses, one that it shares.
    pub(super) fn homes(&self, thread: usize, threads: usize) -> Vec<u32> {
        if threads > self.warehouses as usize {
            return vec![(thread % self.warehouses as usize) as u32 + 1];
        }
        (1..=self.warehouses).skip(thread).step_by(threads).collect()
    }
}
